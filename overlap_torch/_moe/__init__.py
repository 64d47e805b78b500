"""Mixture of experts over ranks: tokens to the ranks of their experts, the experts, and results home."""
