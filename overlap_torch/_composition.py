"""The unfused composition: what each op means. Tests hold the ops to these lines."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group


def gemm_allreduce(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group_name: str
) -> torch.Tensor:
    """``all_reduce(input @ weight.T) + bias``: a GEMM, then a collective, one after the other.

    ``input`` is [..., K], ``weight`` [N, K] as in ``torch.nn.Linear``, ``bias`` [N] or None; the result is [..., N].
    """
    output = torch.matmul(input, weight.t())
    if output.numel() > 0:
        dist.all_reduce(output, group=_resolve_process_group(group_name))
    return output if bias is None else output + bias
