"""Mixture of experts over ranks: sends tokens to their experts' ranks, runs the experts, and sends results back."""
