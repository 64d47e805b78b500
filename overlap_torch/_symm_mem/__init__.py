"""The ops as replacements of PyTorch's own fused ones, ``torch.ops.symm_mem.fused_*``."""
