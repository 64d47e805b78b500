"""``g = all_gather(input, dim 0)``; ``(g @ weight.T + bias, g)``, for one weight or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

import torch

from overlap_torch._ops import (  # noqa: F401  (the library holds the op)
    eager,
    fakes,
    library,
    reducescatter,
)
from overlap_torch._ops.gradients import (
    autograd_kernels,
    first_order,
    rows,
    start_all_gather,
    start_reduce_scatter,
    wait,
    weight_gradient,
)
from overlap_torch._ops.group import Group, world_size

_op = torch.ops.overlap.allgather_gemm.default
_op_weights = torch.ops.overlap.allgather_gemm.weights

Biases = Sequence[torch.Tensor | None]


@torch.library.register_fake("overlap::allgather_gemm.weights")
def _fake_weights(
    input: torch.Tensor, weights: Sequence[torch.Tensor], biases: Biases, *, group: str
) -> tuple[list[torch.Tensor], torch.Tensor]:
    fakes.check_row_dim("allgather_gemm", input)
    torch._check_value(
        len(weights) > 0, lambda: "allgather_gemm: weights must hold one tensor or more"
    )
    torch._check_value(
        len(biases) in (0, len(weights)),
        lambda: (
            f"allgather_gemm: biases must be empty or {len(weights)}, one for each weight, "
            f"but there are {len(biases)}"
        ),
    )
    for weight, bias in zip(weights, biases or [None] * len(weights), strict=True):
        fakes.check_operands("allgather_gemm", input, weight, bias)
    leading = (input.shape[0] * world_size(group), *input.shape[1:-1])
    outputs = [input.new_empty((*leading, weight.shape[0])) for weight in weights]
    return outputs, input.new_empty((*leading, input.shape[-1]))


@torch.library.register_fake("overlap::allgather_gemm")
def _fake(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    (output,), gathered = _fake_weights(input, [weight], [bias], group=group)
    return output, gathered


class _AllGatherGemm(torch.autograd.Function):
    """Both overloads' gradients.

    The shard is saved and gathered again in backward, so that the whole need not be kept. Whether backward communicates
    depends on requires_grad and on which outputs were used, which all ranks share.
    """

    @staticmethod
    def forward(
        ctx,
        run: Callable[..., tuple[list[torch.Tensor], torch.Tensor]],
        group: str,
        with_bias: Sequence[bool],
        input: torch.Tensor,
        *weights_and_biases: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """``weights_and_biases``: all weights, then the biases of those weights that have one."""
        weights = list(weights_and_biases[: len(with_bias)])
        given = iter(weights_and_biases[len(with_bias) :])
        biases = [next(given) if has_one else None for has_one in with_bias]
        outputs, gathered = run(input, weights, biases)
        needs_input, *needs_weights = ctx.needs_input_grad[3 : 4 + len(weights)]
        ctx.group, ctx.with_bias = group, with_bias
        ctx.set_materialize_grads(False)  # an unused output costs no communication
        if not needs_input:
            ctx.mark_non_differentiable(gathered)
        ctx.save_for_backward(
            input if any(needs_weights) else None, *(weights if needs_input else [])
        )
        return (*outputs, gathered)

    @staticmethod
    def backward(ctx, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        *output_grads, gathered_grad = grads
        count = len(output_grads)
        shard, *weights = ctx.saved_tensors
        needs = ctx.needs_input_grad[3:]
        grad_input = None
        with torch.no_grad():
            needed = [
                grad is not None and needs[1 + i] for i, grad in enumerate(output_grads)
            ]  # by the weights
            gathered = start_all_gather(shard, ctx.group) if any(needed) else None
            if needs[0]:
                grad_input = _input_gradient(output_grads, weights, gathered_grad, ctx.group)
            if gathered is not None:
                gathered = wait(gathered)
            grad_weights = [
                weight_gradient(grad, gathered) if need else None
                for grad, need in zip(output_grads, needed, strict=True)
            ]
            biased = [
                grad for grad, has_one in zip(output_grads, ctx.with_bias, strict=True) if has_one
            ]
            grad_biases = [
                rows(grad).sum(0) if grad is not None and need else None
                for grad, need in zip(biased, needs[1 + count :], strict=True)
            ]
        return (
            *(None, None, None),
            *first_order("allgather_gemm", (grad_input, *grad_weights, *grad_biases)),
        )


def _input_gradient(
    output_grads: Sequence[torch.Tensor | None],
    weights: Sequence[torch.Tensor],
    gathered_grad: torch.Tensor | None,
    group: str,
) -> torch.Tensor | None:
    """The outputs' part by one reduce-scatter over all weights, and what reached the gathered input."""
    scattered = None if gathered_grad is None else start_reduce_scatter(gathered_grad, group)
    parts = [
        (grad, weight)
        for grad, weight in zip(output_grads, weights, strict=True)
        if grad is not None
    ]
    if not parts:
        return None if scattered is None else wait(scattered)
    if len(parts) == 1:
        grad, weight = parts[0]
    else:
        grad = torch.cat([grad for grad, _ in parts], dim=-1)
        weight = torch.cat([weight for _, weight in parts])
    grad_input = reducescatter.gemm_reducescatter(grad, weight.t(), group=group)
    return grad_input if scattered is None else grad_input + wait(scattered)


# register_autograd would lose the gradients of a list of biases of which some are None.
def _with_autograd(
    run: Callable[..., tuple[list[torch.Tensor], torch.Tensor]],
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Biases,
    group: str,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    biases = list(biases) or [None] * len(weights)
    given = [bias for bias in biases if bias is not None]
    if not (torch.is_grad_enabled() and torch._C._any_requires_grad(input, *weights, *given)):
        return run(input, weights, biases)
    with_bias = [bias is not None for bias in biases]
    *outputs, gathered = _AllGatherGemm.apply(run, group, with_bias, input, *weights, *given)
    return outputs, gathered


def _autograd_weights(
    keyset, input: torch.Tensor, weights: Sequence[torch.Tensor], biases: Biases, *, group: str
) -> tuple[list[torch.Tensor], torch.Tensor]:
    def run(input, weights, biases):
        with torch._C._AutoDispatchBelowAutograd():
            below = keyset & torch._C._after_autograd_keyset
            return _op_weights.redispatch(below, input, weights, biases, group=group)

    return _with_autograd(run, input, weights, biases, group)


def _autograd(
    keyset,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    def run(input, weights, biases):
        with torch._C._AutoDispatchBelowAutograd():
            below = keyset & torch._C._after_autograd_keyset
            output, gathered = _op.redispatch(below, input, weights[0], biases[0], group=group)
        return [output], gathered

    (output,), gathered = _with_autograd(run, input, [weight], [bias], group)
    return output, gathered


autograd_kernels.impl("allgather_gemm", _autograd, "Autograd", with_keyset=True)
autograd_kernels.impl("allgather_gemm.weights", _autograd_weights, "Autograd", with_keyset=True)


@overload
def allgather_gemm(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: Group = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def allgather_gemm(
    input: torch.Tensor,
    weight: Sequence[torch.Tensor],
    bias: Biases | None = None,
    *,
    group: Group = None,
) -> tuple[list[torch.Tensor], torch.Tensor]: ...


def allgather_gemm(input, weight, bias=None, *, group=None):
    """``g = all_gather(input, dim 0)``; ``(g @ weight.T + bias, g)``, with the GEMM of gathered rows beside the gather.

    The result is that of the unfused composition::

        gathered = input.new_empty(input.shape[0] * world_size, *input.shape[1:])
        torch.distributed.all_gather_into_tensor(gathered, input.contiguous(), group=group)
        torch.nn.functional.linear(gathered, weight, bias), gathered

    Every rank of the group calls it with the same shapes and dtype, in the same order of calls; strides may differ.
    What the fast path cannot take runs the composition.

    Args:
        input: [D0, ..., K], this rank's rows.
        weight: [N, K], this rank's part, as in ``torch.nn.Linear``, contiguous along either dim for speed; or a
            sequence of weights [N_i, K] (q, k, v; gate, up), for which the rows are gathered once.
        bias: [N] or None, this rank's part; for several weights None, or a sequence with one of these for each.
        group: None (the default group), a process group's name, a ``ProcessGroup`` or a one-dimensional ``DeviceMesh``.

    Returns:
        ``(output, g)``: fresh, contiguous tensors [world size * D0, ..., N] and [world size * D0, ..., K], of the
        operands' dtype; for a sequence of weights ``output`` is a list. Dtypes, accumulation and autocast are as in
        :func:`overlap_torch.gemm_allreduce`.

    Gradients are first order, in reverse mode. Backward keeps ``input`` and gathers it again, beside the
    :func:`overlap_torch.gemm_reducescatter` that makes its gradient; every rank has to run it. A gradient that reaches
    ``g`` is reduce-scattered and added. Gradients of weights and biases are those of this rank's parts.

    Raises:
        ValueError: shapes or devices that do not fit, not one bias for each of several weights, or an unknown group.
        TypeError: dtypes that do not fit, or a ``group`` that is none of the above.
        NotImplementedError: an operand has a tangent (forward mode).
        RuntimeError: a first call inside a CUDA graph capture, or an earlier op that failed after it had returned (see
            :func:`overlap_torch.check`).

    The technique: GEMM tiles wait for the arrival of their rows, Flux (arXiv 2406.06858).
    """
    if isinstance(weight, torch.Tensor):
        return eager.call(eager.allgather_gemm, _op, group, input, weight, bias)
    weights, biases = list(weight), list(bias or [])
    return eager.call(eager.allgather_gemm_weights, _op_weights, group, input, weights, biases)
