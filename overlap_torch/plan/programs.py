"""Programs: plans with transfers that are written by hand, made by a template, or read from a file of MSCCL or MSCCL++."""

from __future__ import annotations

from overlap_torch._plan import Program, Rectangle, Region, Transfer
from overlap_torch.plan._editor import Area, Editor
from overlap_torch.plan._imports.msccl import from_msccl
from overlap_torch.plan._imports.mscclpp import from_mscclpp
from overlap_torch.plan._program_templates import double_ring, one_shot, ring, two_shot

__all__ = [
    "Area", "Editor", "Program", "Rectangle", "Region", "Transfer", "double_ring", "edit",
    "from_msccl", "from_mscclpp", "one_shot", "ring", "two_shot",
]  # fmt: skip

edit = Editor
