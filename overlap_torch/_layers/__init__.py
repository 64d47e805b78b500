"""The linear maps of tensor parallelism, plain and in fp8, and the placements of their parameters and activations."""
