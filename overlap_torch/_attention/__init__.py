"""Attention whose tokens are cut over the ranks of a group."""
