"""What the ops' gradients have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives
from torch.autograd import forward_ad

from overlap_torch._ops import dtensor
from overlap_torch._ops.group import world_size

_collectives = torch.ops._c10d_functional


class _ReverseModeOnly(torch.library.Library):
    """Autograd kernels that refuse tangents, which ``register_autograd``'s drop where nothing requires a gradient."""

    def impl(
        self, op_name: str, fn: Callable[..., Any], dispatch_key: str = "", **options: Any
    ) -> None:
        @functools.wraps(fn)
        def kernel(keyset, *args, **kwargs):
            dtensor.make_ops_known()
            _refuse_tangents(op_name, args)
            return fn(keyset, *args, **kwargs)

        super().impl(op_name, kernel, dispatch_key, **options)


def _refuse_tangents(op: str, args: Sequence[Any]) -> None:
    for arg in args:
        if isinstance(arg, list):
            _refuse_tangents(op, arg)
        elif isinstance(arg, torch.Tensor) and forward_ad.unpack_dual(arg).tangent is not None:
            raise NotImplementedError(
                f"{op.partition('.')[0]} has reverse-mode gradients only, but an operand has a tangent (forward_ad, "
                "torch.func.jvp): differentiate with backward() or torch.autograd.grad, or detach the operand"
            )


# All ops register here; their kernels take the keyset.
autograd_kernels = _ReverseModeOnly("overlap", "IMPL")


class _FirstOrder(torch.autograd.Function):
    """A gradient that must not be differentiated again: doing so raises instead of leaving out a part."""

    @staticmethod
    def forward(ctx, grad: torch.Tensor, op: str) -> torch.Tensor:
        ctx.op = op
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[None, None]:
        raise RuntimeError(
            f"{ctx.op} has first-order gradients only: their derivative would need communication. "
            "Where second derivatives are needed, use torch.nn.functional.linear and a collective instead"
        )


def first_order(op: str, grads: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """``grads``, guarded against a second derivative where one might be taken (``create_graph=True``)."""
    if not torch.is_grad_enabled():
        return tuple(grads)
    return tuple(
        grad if grad is None else _FirstOrder.apply(grad.requires_grad_(), op) for grad in grads
    )


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """[..., C] -> [rows, C]."""
    return tensor.unsqueeze(0) if tensor.dim() == 1 else tensor.flatten(0, -2)


def weight_gradient(grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """[..., N], [..., K] -> [N, K], summed over the rows."""
    return rows(grad).t() @ rows(input)


def start_all_gather(shard: torch.Tensor, group: str) -> torch.Tensor:
    """Begins to gather ``shard`` along dim 0; the result may be used after :func:`wait`."""
    ranks = world_size(group)
    if shard.device.type == "cpu":
        # Gloo's two worker threads write the name of what they have just done into one string of the group, without a
        # lock (ProcessGroupGloo::runLoop, PyTorch 2.11). The names of the other collectives here fit into the string
        # itself; that of this functional op, ALLGATHER_COALESCED, is on the heap, where two writers at a time free it
        # twice or write into what has been freed.
        counts = [shard.shape[0]] * ranks
        return _collectives.all_to_all_single(torch.cat([shard] * ranks), counts, counts, group)
    return _collectives.all_gather_into_tensor(shard.contiguous(), ranks, group)


def start_reduce_scatter(whole: torch.Tensor, group: str) -> torch.Tensor:
    """Begins to sum ``whole`` and cut it along dim 0; the result may be used after :func:`wait`."""
    return _collectives.reduce_scatter_tensor(whole.contiguous(), "sum", world_size(group), group)


def exchange(
    whole: torch.Tensor, send_rows: Sequence[int], recv_rows: Sequence[int], group: str
) -> torch.Tensor:
    """The first send_rows[0] rows of ``whole`` to rank 0, and so on; what is received, in rank order."""
    return wait(_collectives.all_to_all_single(whole.contiguous(), recv_rows, send_rows, group))


def wait(tensor: torch.Tensor) -> torch.Tensor:
    return _collectives.wait_tensor(tensor)
