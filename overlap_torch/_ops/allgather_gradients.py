"""Gradients of ``allgather_gemm``, of any order, and the recording of its calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from overlap_torch._ops import (  # noqa: F401  (the library holds the op)
    eager,
    fakes,
    library,
    scaled,
)
from overlap_torch._ops.collectives import (
    start_all_gather,
    start_reduce_scatter,
    wait,
    wait_for_gather,
)
from overlap_torch._ops.gradients import (
    Gradient,
    TransformedFunction,
    needs_recording,
    of_each,
    one_after_the_other,
    record,
    recorded,
    rows,
    side_by_side,
    weight_gradient,
)
from overlap_torch._ops.group import world_size
from overlap_torch._torch_versions import SingleLevelFunction

_op_weights = torch.ops.overlap.allgather_gemm.weights
_scatter_op = torch.ops.overlap.gemm_reducescatter.default
Biases = Sequence[torch.Tensor | None]

# The op: takes an input, its weights and a bias or None for each; returns the op's results.
_Run = Callable[..., tuple[list[torch.Tensor], torch.Tensor]]


class Call:
    """A call's group and cut dim, how it runs below autograd, and which of the weights have a bias."""

    def __init__(self, group: str, dim: int, run: _Run, biases: Biases) -> None:
        self.group, self.dim, self.run = group, dim, run
        self.with_bias = [bias is not None for bias in biases]


class AllGatherGemm(SingleLevelFunction):
    """Both overloads, between the autograd keys and those below.

    The shard is saved and gathered again in backward, so that the gathered input need not be kept. Backward communicates or
    not depending on requires_grad and on which outputs were used, which all ranks share.
    """

    # Compiled autograd asks for it; only torch.autograd.Function has one.
    _compiled_autograd_key = staticmethod(torch.autograd.Function._compiled_autograd_key)

    @staticmethod
    def forward(
        ctx, call: Call, input: torch.Tensor, *weights_and_biases: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """``weights_and_biases``: all weights, then the biases of those weights that have one."""
        count = len(call.with_bias)
        weights, biases = of_each(call.with_bias, weights_and_biases)
        outputs, gathered = call.run(input, weights, biases)
        needs_input, *needs_weights = ctx.needs_input_grad[1 : 2 + count]
        ctx.call = call
        ctx.set_materialize_grads(False)  # an unused output costs no communication
        if not needs_input:
            ctx.mark_non_differentiable(gathered)
        ctx.save_for_backward(
            input if any(needs_weights) else None, *(weights if needs_input else [None] * count)
        )
        return (*outputs, gathered)

    @staticmethod
    def backward(ctx, *grads: Gradient) -> tuple[Gradient, ...]:
        *output_grads, gathered_grad = grads
        shard, *weights = ctx.saved_tensors
        with_bias = ctx.call.with_bias
        _, needs_input, *needs = ctx.needs_input_grad
        needs_weights, needs_biases = of_each(with_bias, needs)
        if not needs_input:  # by this backward
            gathered_grad, weights = None, [None] * len(with_bias)
        call = ctx.call
        wanted = _Wanted(call.group, call.dim, output_grads, needs_weights, needs_biases)
        grad_input, grad_weights, grad_biases = _gradients(
            wanted, gathered_grad, shard, output_grads, weights
        )
        given = [grad for grad, has_one in zip(grad_biases, with_bias, strict=True) if has_one]
        return None, grad_input, *grad_weights, *given


class _Wanted:
    """The weights and biases that want gradients and can have them, their group, and the cut dim."""

    def __init__(
        self,
        group: str,
        dim: int,
        grads: Sequence[Gradient],
        weights: Sequence[bool],
        biases: Sequence[bool],
    ) -> None:
        self.group, self.dim = group, dim
        self.weights = [
            need and grad is not None for need, grad in zip(weights, grads, strict=True)
        ]
        self.biases = [need and grad is not None for need, grad in zip(biases, grads, strict=True)]


def _gradients(
    wanted: _Wanted,
    gathered_grad: Gradient,
    shard: Gradient,
    grads: Sequence[Gradient],
    weights: Sequence[Gradient],
) -> tuple[Gradient, Sequence[Gradient], Sequence[Gradient]]:
    """The gradients of the input, of each weight and of each bias; recorded if they may be differentiated."""
    count = len(grads)
    grad_input, *others = _AllGatherGemmGradients.apply_in_backward(
        wanted, gathered_grad, shard, *grads, *weights
    )
    return grad_input, others[:count], others[count:]


class _AllGatherGemmGradients(TransformedFunction):
    """The gradients, which can be differentiated: every tensor is this rank's own."""

    @staticmethod
    def forward(
        wanted: _Wanted, gathered_grad: Gradient, shard: Gradient, *grads_and_weights: Gradient
    ) -> tuple[Gradient, ...]:
        """``grads_and_weights``: all outputs' gradients, then all weights, None where the input's gradient needs none."""
        count = len(wanted.weights)
        grads, weights = grads_and_weights[:count], grads_and_weights[count:]
        gathered, ranks = None, world_size(wanted.group)
        if any(wanted.weights):
            gathered = start_all_gather(shard, wanted.group, ranks)
        grad_input = _input_gradient(grads, weights, gathered_grad, wanted)
        if gathered is not None:
            gathered = wait_for_gather(gathered, ranks, wanted.dim % shard.dim())
        return (
            grad_input,
            *(
                weight_gradient(grad, gathered) if need else None
                for grad, need in zip(grads, wanted.weights, strict=True)
            ),
            *(
                rows(grad).sum(0) if need else None
                for grad, need in zip(grads, wanted.biases, strict=True)
            ),
        )

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.wanted, gathered_grad, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)  # a gradient that nobody used costs no communication

    @staticmethod
    def backward(ctx, v_input: Gradient, *v_others: Gradient) -> tuple[Gradient, ...]:
        group, dim, count = ctx.wanted.group, ctx.wanted.dim, len(ctx.wanted.weights)
        v_weights, v_biases = v_others[:count], v_others[count:]
        shard, *others = ctx.saved_tensors
        grads, weights = others[:count], others[count:]
        _, needs_gathered, needs_shard, *needs = ctx.needs_input_grad
        pairs = []  # of an input and each output's weight; side by side along K
        if v_input is not None:
            pairs.append((v_input, weights))
        if any(v_weight is not None for v_weight in v_weights):
            pairs.append((shard, v_weights))
        reached = [i for i in range(count) if needs[i] and (pairs or v_biases[i] is not None)]
        needs_gathered = needs_gathered and v_input is not None
        grad_gathered = None
        grad_grads = [None] * count
        if reached or needs_gathered:
            if not pairs:  # K = 0: biases alone
                grad = grads[reached[0]]
                part = grad.shape[dim] // world_size(group)
                leading = fakes.with_size(grad.shape[:-1], dim % grad.dim(), part)
                pairs.append((grad.new_empty((*leading, 0)), v_weights))
            input = side_by_side([left for left, _ in pairs])
            outputs, gathered = _call_weights(
                input,
                [
                    side_by_side([_or_zeros(right[i], grads[i], left) for left, right in pairs])
                    for i in reached
                ]
                or [input.new_empty((0, input.shape[-1]))],
                [v_biases[i] for i in reached],
                dim,
                group,
            )
            for i, output in zip(reached, outputs, strict=False):
                grad_grads[i] = output
            if needs_gathered:
                grad_gathered = gathered[..., : v_input.shape[-1]]
        wanted = _Wanted(
            group,
            dim,
            grads,
            [need and v_input is not None for need in needs[count:]],
            [False] * count,
        )
        grad_shard, grad_weights, _ = _gradients(
            wanted,
            None,
            v_input if any(wanted.weights) else None,
            grads,
            v_weights if needs_shard else [None] * count,
        )
        return None, grad_gathered, grad_shard, *grad_grads, *grad_weights


def _or_zeros(weight: Gradient, grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """``weight``, or zeros instead, with which ``input`` gives zeros in the shape of the output's gradient."""
    return grad.new_zeros((grad.shape[-1], input.shape[-1])) if weight is None else weight


def _input_gradient(
    grads: Sequence[Gradient], weights: Sequence[Gradient], gathered_grad: Gradient, wanted: _Wanted
) -> Gradient:
    """The input's gradient: the outputs' part by one reduce-scatter over all weights, plus the gradient of the gathered
    input."""
    group, dim, scattered = wanted.group, wanted.dim, None
    if gathered_grad is not None:
        scattered = start_reduce_scatter(gathered_grad, group, dim % gathered_grad.dim())
    parts = [
        (grad, weight)
        for grad, weight in zip(grads, weights, strict=True)
        if grad is not None and weight is not None
    ]
    if not parts:
        return None if scattered is None else wait(scattered)
    grad, weight = one_after_the_other(*zip(*parts, strict=True))
    grad_input = eager.call(
        eager.gemm_reducescatter,
        _scatter_op,
        group,
        grad,
        weight.t(),
        None,
        dim=dim,
        invariance=None,
    )
    return grad_input if scattered is None else grad_input + wait(scattered)


def run_kernel(
    call: Call, input: torch.Tensor, weights: Sequence[torch.Tensor], biases: Biases
) -> tuple[list[torch.Tensor], torch.Tensor]:
    given = [bias for bias in biases if bias is not None]
    if not needs_recording("allgather_gemm", input, *weights, *given):
        return call.run(input, weights, biases)
    *outputs, gathered = recorded(record(AllGatherGemm, call, input, *weights, *given))
    return outputs, gathered


def one_for_each(weights: Sequence[torch.Tensor], biases: Biases) -> Sequence[torch.Tensor | None]:
    """A bias or None for each weight, so that the Function's number of arguments is known."""
    fakes.check_number_of_biases("allgather_gemm", weights, biases)
    return list(biases) or [None] * len(weights)


def record_weights(
    group: str, input: torch.Tensor, weights: Sequence[torch.Tensor], biases: Biases, *, dim: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The op of several weights for a call that only has a gradient to record: see `eager`."""

    def run(input, weights, biases):
        return eager.allgather_gemm_weights(input, weights, biases, dim, group)

    biases = one_for_each(weights, biases)
    given = [bias for bias in biases if bias is not None]
    call = Call(group, dim, run, biases)
    *outputs, gathered = recorded(AllGatherGemm.apply(call, input, *weights, *given))
    return outputs, gathered


def _call_weights(
    input: torch.Tensor, weights: Sequence[torch.Tensor], biases: Biases, dim: int, group: str
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The op of several weights, recorded if it may be differentiated."""
    return eager.call(
        eager.allgather_gemm_weights,
        _op_weights,
        group,
        input,
        weights,
        biases,
        record=record_weights,
        dim=dim,
    )
