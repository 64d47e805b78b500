"""The ops in the place of PyTorch's own fused ones, ``torch.ops.symm_mem.fused_*``."""
