"""Loads the op library and registers what belongs beside its operators: fake kernels, autograd, Python wrappers."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh

# The default group, a group's name, a group, or a one-dimensional mesh.
Group = str | dist.ProcessGroup | DeviceMesh | None

_LIBRARY = Path(__file__).with_name("_C.so")


def _load_library() -> None:
    if not _LIBRARY.exists():
        raise ImportError(
            f"overlap_torch is not built: {_LIBRARY} does not exist. Build it with "
            "`pip install --no-build-isolation .` in the project's folder, or with `make build` in a checkout."
        )
    try:
        torch.ops.load_library(_LIBRARY)
    except OSError as error:
        raise ImportError(
            f"cannot load {_LIBRARY} with torch {torch.__version__}: {error.__cause__ or error}. "
            "The library has to be built against the torch that loads it; rebuild it with "
            "`pip install --no-build-isolation .` (`make build` in a checkout)."
        ) from error


_load_library()

_gemm_allreduce = torch.ops.overlap.gemm_allreduce.default
_check = torch.ops.overlap.check.default


def group_name(group: Group = None) -> str:
    """The name by which the operators know a process group.

    ``group`` is None (the default group), a name, a ``ProcessGroup`` or a one-dimensional ``DeviceMesh``.
    """
    if isinstance(group, str):
        return group
    if group is None:
        group = dist.group.WORLD
        if group is None:
            raise RuntimeError(
                "no process group: call torch.distributed.init_process_group() first, or give group= a process group"
            )
    if isinstance(group, dist.ProcessGroup):
        return group.group_name
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group= takes a one-dimensional DeviceMesh, but got one of {group.ndim} dimensions; "
                'name the dimension, as in mesh["tp"]'
            )
        return group.get_group().group_name
    raise TypeError(
        f"group= takes None, a group's name, a ProcessGroup or a one-dimensional DeviceMesh, not {type(group).__name__}"
    )


@torch.library.register_fake("overlap::gemm_allreduce")
def _gemm_allreduce_fake(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, group: str
) -> torch.Tensor:
    torch._check(
        input.dim() >= 1 and weight.dim() == 2,
        lambda: (
            "gemm_allreduce: input must be [..., K] and weight [N, K], "
            f"but got shapes {tuple(input.shape)} and {tuple(weight.shape)}"
        ),
    )
    torch._check(
        input.shape[-1] == weight.shape[1],
        lambda: (
            "gemm_allreduce: the last dims of input and weight must be equal, "
            f"but got shapes {tuple(input.shape)} and {tuple(weight.shape)}"
        ),
    )
    torch._check(
        input.dtype == weight.dtype and (bias is None or bias.dtype == input.dtype),
        lambda: (
            "gemm_allreduce: input, weight and bias must have one dtype, but got "
            f"{input.dtype}, {weight.dtype} and {None if bias is None else bias.dtype}"
        ),
    )
    if bias is not None:
        torch._check(
            bias.dim() == 1 and bias.shape[0] == weight.shape[0],
            lambda: (
                "gemm_allreduce: bias must be [N] for a weight [N, K], "
                f"but got shapes {tuple(bias.shape)} and {tuple(weight.shape)}"
            ),
        )
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


def _gemm_allreduce_setup_context(ctx, inputs, keyword_only_inputs, output) -> None:
    input, weight, _ = inputs
    needs_input, needs_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(input if needs_weight else None, weight if needs_input else None)


class _FirstOrder(torch.autograd.Function):
    """A gradient that must not be differentiated again: doing so raises instead of leaving out a part."""

    @staticmethod
    def forward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(
            "gemm_allreduce has first-order gradients only: their derivative would need communication. "
            "Where second derivatives are needed, use torch.nn.functional.linear and a collective instead"
        )


# The output is replicated, and so is its gradient: each rank's gradients follow from its own operands, without any
# communication (as in Megatron's row-parallel layer, arXiv 1909.08053).
def _gemm_allreduce_backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    input, weight = ctx.saved_tensors
    grad_input = grad_weight = grad_bias = None
    with torch.no_grad():
        rows = grad.unsqueeze(0) if grad.dim() == 1 else grad.flatten(0, -2)
        if weight is not None:
            grad_input = grad @ weight
        if input is not None:
            grad_weight = rows.t() @ (
                input.unsqueeze(0) if input.dim() == 1 else input.flatten(0, -2)
            )
        if any(ctx.needs_input_grad[2:]):  # empty where the dispatcher dropped a bias that was None
            grad_bias = rows.sum(0)
    grads = (grad_input, grad_weight, grad_bias)[: len(ctx.needs_input_grad)]
    if not torch.is_grad_enabled():
        return grads
    return tuple(
        grad if grad is None else _FirstOrder.apply(grad.requires_grad_()) for grad in grads
    )


torch.library.register_autograd(
    "overlap::gemm_allreduce", _gemm_allreduce_backward, setup_context=_gemm_allreduce_setup_context
)


def gemm_allreduce(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: Group = None,
) -> torch.Tensor:
    """``all_reduce(input @ weight.T) + bias``, with the communication of finished tiles beside the GEMM.

    The result is that of the unfused composition::

        output = torch.matmul(input, weight.t())
        torch.distributed.all_reduce(output, group=group)
        output if bias is None else output + bias

    Every rank of the group calls it with the same M, N, K, dtype and order of calls; strides may differ. What the fast
    path cannot take runs the composition.

    Args:
        input: [..., K], this rank's part of the features; M is the product of the leading dims, which may be none.
        weight: [N, K], this rank's part, as in ``torch.nn.Linear``; contiguous along either dim for speed.
        bias: [N] or None, the same on every rank; added once, after the reduction.
        group: None (the default group), a process group's name, a ``ProcessGroup`` or a one-dimensional ``DeviceMesh``.

    Returns:
        A fresh, contiguous tensor [..., N], equal on all ranks, of the operands' dtype: bfloat16, float16 or float32
        (float64 runs the composition). Sums within a rank accumulate in float32, TF32 only where PyTorch's own setting
        allows it. Under autocast the operands are cast as those of ``torch.nn.functional.linear``.

    Gradients are first order and local: ``grad @ weight``, ``grad.T @ input``, ``grad.sum(rows)``. The gradient of the
    output is the same on every rank, so backward does not communicate.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit, an unknown group, a first call inside a CUDA graph
            capture, or an earlier op that failed after it had returned (see :func:`check`).
        TypeError, ValueError: a ``group`` that is none of the above.

    The technique: GEMM tiles signal counters that communication waits for, FlashOverlap (arXiv 2504.19519) and Flux
    (arXiv 2406.06858).
    """
    name = group if type(group) is str else group_name(group)
    if (
        torch.compiler.is_compiling()
        or forward_ad._current_level >= 0
        or torch.is_grad_enabled()
        and (
            input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
        )
    ):
        return _gemm_allreduce(input, weight, bias, group=name)
    # Without gradients the Python autograd kernel has nothing to do; leaving it out halves the call's host time.
    with torch._C._AutoDispatchBelowAutograd():
        return _gemm_allreduce(input, weight, bias, group=name)


def check() -> None:
    """Raises what went wrong in ops that had already returned, and returns at once if nothing did.

    Ops are asynchronous: a deadline that passed (a rank that never called the op), an error of NCCL or a peer that died
    shows later. The error names the rank and the chunk that waited; results since then are undefined. It does not
    synchronise: to know that earlier ops went well, synchronise the device first.
    """
    _check()
