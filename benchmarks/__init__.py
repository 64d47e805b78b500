"""Benchmarks of the ops against the sequence of a GEMM and a collective: ``python -m overlap_torch bench --help``."""
