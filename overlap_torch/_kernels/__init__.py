"""Kernels of the caller's: ``produce`` and ``consume``, their plans, tile orders and resources."""
