"""Backward of a framework's own linear layers of tensor and sequence parallelism: one gather serves both gradients.

``group``: its name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overlap_torch._ops import allgather_gemm, gemm_reducescatter
from overlap_torch._ops.collectives import start_all_gather, wait
from overlap_torch._ops.gradients import Gradient, one_after_the_other


def of_gathered_input(
    grads: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    shard: torch.Tensor,
    group: str,
    *,
    needs_input: bool,
    needs_weights: bool,
) -> tuple[Gradient, Gradient]:
    """Backward of ``linear(all_gather(shard, dim 0), weight)`` for each weight: the shard's gradient, and the gathered
    input.

    ``grads``: of the outputs, [tokens, ..., N part]; ``weights``: [N part, K]; ``shard``: [tokens part, ..., K]. The input
    [tokens, ..., K] is gathered beside the ``gemm_reducescatter`` that makes the shard's gradient. A gradient that is
    not needed is None.
    """
    gathered = start_all_gather(shard, group) if needs_weights else None
    grad_shard = None
    if needs_input:
        grad, weight = one_after_the_other(grads, weights)
        grad_shard = gemm_reducescatter(grad, weight.t(), group=group)
    return grad_shard, None if gathered is None else wait(gathered)


def of_scattered_output(
    grad: torch.Tensor, weight: torch.Tensor, group: str, *, needs_input: bool, needs_weight: bool
) -> tuple[Gradient, Gradient]:
    """Backward of ``reduce_scatter(linear(input, weight), dim 0)``: the input's gradient, and the gathered gradient of the
    output.

    ``grad``: [tokens part, ..., N]; ``weight``: [N, K part]. The gradient [tokens, ..., N] is gathered once. A
    gradient that is not needed is None.
    """
    if needs_input:
        return allgather_gemm(grad, weight.t(), group=group)
    if needs_weight:
        return None, wait(start_all_gather(grad, group))
    return None, None
