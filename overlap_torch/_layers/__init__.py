"""The linear maps of tensor parallelism, plain and in fp8, and where their parameters and activations lie."""
