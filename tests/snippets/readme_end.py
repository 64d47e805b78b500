# ruff: noqa: F821  (names of the page)
"""README's layers, in use: what they call is in the report."""

import torch
import torch.distributed as dist

import overlap_torch

block["mlp"](torch.ones(1, 4 // dist.get_world_size(), 16)).sum().backward()
assert {row["layer"] for row in overlap_torch.report(block)} >= {"mlp.down"}
dist.destroy_process_group()
