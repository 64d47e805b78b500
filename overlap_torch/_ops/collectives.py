"""The collectives of gradients and layers, as functional ones that a compiler sees; none records a gradient.

On CPU the ranks compare each collective before it begins, as they compare calls of ops. If a rank raised elsewhere and
skipped one, the error names the rank, and no message is left for a later call. A compiled graph's own collectives are not
compared.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives
from torch.compiler import is_dynamo_compiling

from overlap_torch._ops import library  # noqa: F401  (the library holds the comparison)
from overlap_torch._ops.group import world_size

_collectives = torch.ops._c10d_functional


@functools.cache
def compares_all() -> bool:
    """True under OVERLAP_DEBUG=1."""
    return torch.ops.overlap.environment()["OVERLAP_DEBUG"] == "1"


def compares(tensor: torch.Tensor) -> bool:
    """True if ranks compare a call on this tensor; fakes and other subclasses do not communicate, or by their own rules."""
    if is_dynamo_compiling() or type(tensor) is not torch.Tensor:
        return False
    return tensor.device.type == "cpu" or compares_all()


def compare(what: str, tensor: torch.Tensor, sizes: Sequence[int], group: str) -> None:
    """Raises on every rank if the ranks differ."""
    if compares(tensor):
        text = f"{what} of {list(sizes)} {str(tensor.dtype)[6:]}"
        torch.ops.overlap._compare_collective(text, tensor.device, group)


def start_all_gather(shard: torch.Tensor, group: str) -> torch.Tensor:
    """Begins a gather of the ranks' shards along dim 0; the result may be used after :func:`wait`."""
    return torch.ops.overlap._start_all_gather(shard, group)


def start_reduce_scatter(whole: torch.Tensor, group: str, dim: int = 0) -> torch.Tensor:
    """Begins to sum ``whole`` and cut it along ``dim``; the result may be used after :func:`wait`."""
    return torch.ops.overlap._start_reduce_scatter(whole, dim, group)


# The groups' first call checks it, in C++; a compiler sees a constant here.
USUAL_INVARIANCE = os.environ.get("OVERLAP_INVARIANCE", "none")
# Bits are those of any number of ranks, so that one rank's layers run as ops, too.
ANY_WORLD = USUAL_INVARIANCE == "world"


def usual_invariance(op: str) -> str:
    """The invariance of an op's calls that ask for none; other ops add nothing between ranks."""
    return USUAL_INVARIANCE if op in ("gemm_allreduce", "gemm_reducescatter") else "none"


def all_reduce(part: torch.Tensor, group: str, invariance: str | None) -> torch.Tensor:
    """The sum of the ranks' tensors; with an invariance as the ops' kernels add: in float32 and in rank order, or by pairs."""
    invariance = invariance or USUAL_INVARIANCE
    if invariance == "none":
        compare("an all-reduce", part, part.shape, group)
        return wait(_collectives.all_reduce(part.contiguous(), "sum", group))
    ranks = world_size(group)
    begun = start_all_gather(part.reshape(1, -1), group)
    terms = wait_for_gather(begun, ranks, 0).unbind()
    if invariance == "world":
        if ranks not in (1, 2, 4, 8):
            raise ValueError(
                f"an all-reduce with the invariance world is of {ranks} ranks, allowed are 1, 2, 4 and 8: take "
                '"batch", by invariance= or OVERLAP_INVARIANCE'
            )
        while len(terms) > 1:
            terms = tuple(a + b for a, b in zip(terms[::2], terms[1::2], strict=True))
        return terms[0].view(part.shape)
    wide = torch.float64 if part.dtype == torch.float64 else torch.float32
    total = torch.full(
        (part.numel(),), -0.0, dtype=wide, device=part.device
    )  # 0 would turn -0 to 0
    for term in terms:
        total = total + term
    return total.to(part.dtype).view(part.shape)


def start_all_to_all(
    whole: torch.Tensor,
    send_rows: Sequence[int],
    recv_rows: Sequence[int],
    group: str,
    what: str = "an all-to-all of rows",
) -> torch.Tensor:
    """Begins to send the first send_rows[0] rows of ``whole`` to rank 0, and so on; :func:`wait` gives what comes, in rank
    order. ``what`` names the call, and must be the same on every rank."""
    compare(what, whole, whole.shape[1:], group)
    return _collectives.all_to_all_single(whole.contiguous(), recv_rows, send_rows, group)


def all_to_all(*arguments: Any, **keywords: Any) -> torch.Tensor:
    """As :func:`start_all_to_all`, and waits."""
    return wait(start_all_to_all(*arguments, **keywords))


def wait(tensor: torch.Tensor) -> torch.Tensor:
    return _collectives.wait_tensor(tensor)


def wait_for_gather(begun: torch.Tensor, ranks: int, dim: int) -> torch.Tensor:
    """Waits for :func:`start_all_gather`, and puts the shards of ``ranks`` ranks together along ``dim``."""
    gathered = wait(begun)
    return gathered if dim == 0 else torch.cat(gathered.chunk(ranks), dim)
