"""``g = all_gather(input, dim 0)``; ``(g @ weight.T + bias, g)``, for one weight or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import overload

import torch
from torch.nn.functional import ScalingType

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
    autograd_kernels,
    below_autograd,
    needs_recording,
    record,
    recorded,
    register_vmap,
    rows,
    side_by_side,
    weight_gradient,
)
from overlap_torch._ops.group import Group, world_size
from overlap_torch._torch_versions import SingleLevelFunction

_op = torch.ops.overlap.allgather_gemm.default
_op_weights = torch.ops.overlap.allgather_gemm.weights
_op_scaled = torch.ops.overlap.allgather_gemm.scaled
_op_scaled_weights = torch.ops.overlap.allgather_gemm.scaled_weights
_scatter_op = torch.ops.overlap.gemm_reducescatter.default

Biases = Sequence[torch.Tensor | None]


@torch.library.register_fake("overlap::allgather_gemm.weights")
def _fake_weights(
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Biases,
    *,
    dim: int = 0,
    group: str,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    dim = fakes.row_dim("allgather_gemm", input, dim)
    fakes.check_number_of_biases("allgather_gemm", weights, biases)
    for weight, bias in zip(weights, biases or [None] * len(weights), strict=True):
        fakes.check_operands("allgather_gemm", input, weight, bias)
    leading = fakes.with_size(input.shape[:-1], dim, input.shape[dim] * world_size(group))
    outputs = [input.new_empty((*leading, weight.shape[0])) for weight in weights]
    return outputs, input.new_empty((*leading, input.shape[-1]))


@torch.library.register_fake("overlap::allgather_gemm")
def _fake(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    dim: int = 0,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    (output,), gathered = _fake_weights(input, [weight], [bias], dim=dim, group=group)
    return output, gathered


# The op, of an input, its weights and a bias or None for each; what it returns.
_Run = Callable[..., tuple[list[torch.Tensor], torch.Tensor]]


class _Call:
    """A call's group and cut dim, how it runs below autograd, and which of the weights have a bias."""

    def __init__(self, group: str, dim: int, run: _Run, biases: Biases) -> None:
        self.group, self.dim, self.run = group, dim, run
        self.with_bias = [bias is not None for bias in biases]


class _AllGatherGemm(SingleLevelFunction):
    """Both overloads, between the autograd keys and those below.

    The shard is saved and gathered again in backward, so that the whole need not be kept. Backward communicates
    or not depending on requires_grad and on which outputs were used, which all ranks share.
    """

    # Compiled autograd asks for it; only torch.autograd.Function has one.
    _compiled_autograd_key = staticmethod(torch.autograd.Function._compiled_autograd_key)

    @staticmethod
    def forward(
        ctx, call: _Call, input: torch.Tensor, *weights_and_biases: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """``weights_and_biases``: all weights, then the biases of those weights that have one."""
        count = len(call.with_bias)
        weights = list(weights_and_biases[:count])
        given = iter(weights_and_biases[count:])
        biases = [next(given) if has_one else None for has_one in call.with_bias]
        outputs, gathered = call.run(input, weights, biases)
        needs_input, *needs_weights = ctx.needs_input_grad[1 : 2 + count]
        ctx.call = call
        ctx.set_materialize_grads(False)  # an unused output costs no communication
        if not needs_input:
            ctx.mark_non_differentiable(gathered)
        ctx.save_for_backward(
            input if any(needs_weights) else None,
            *(weights if needs_input else [None] * count),
        )
        return (*outputs, gathered)

    @staticmethod
    def backward(ctx, *grads: Gradient) -> tuple[Gradient, ...]:
        *output_grads, gathered_grad = grads
        shard, *weights = ctx.saved_tensors
        with_bias = ctx.call.with_bias
        _, needs_input, *needs = ctx.needs_input_grad
        needs_weights = needs[: len(with_bias)]
        needs_given = iter(needs[len(with_bias) :])
        needs_biases = [has_one and next(needs_given) for has_one in with_bias]
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
    """The weights and biases whose gradients are wanted and can be had, their group, and the dim that is cut."""

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
    """The gradients of the input, of each weight and of each bias; recorded where they may be differentiated."""
    count = len(grads)
    grad_input, *others = _AllGatherGemmGradients.apply_in_backward(
        wanted, gathered_grad, shard, *grads, *weights
    )
    return grad_input, others[:count], others[count:]


class _AllGatherGemmGradients(TransformedFunction):
    """The gradients, which can be differentiated: every tensor is this rank's own."""

    @staticmethod
    def forward(
        wanted: _Wanted,
        gathered_grad: Gradient,
        shard: Gradient,
        *grads_and_weights: Gradient,
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
            outputs, gathered = allgather_gemm(
                input,
                [
                    side_by_side([_or_zeros(right[i], grads[i], left) for left, right in pairs])
                    for i in reached
                ]
                or [input.new_empty((0, input.shape[-1]))],
                [v_biases[i] for i in reached],
                dim=dim,
                group=group,
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
    """``weight``, or the zeros in its place that make zeros of ``input``, in the shape of the output's gradient."""
    return grad.new_zeros((grad.shape[-1], input.shape[-1])) if weight is None else weight


def _input_gradient(
    grads: Sequence[Gradient],
    weights: Sequence[Gradient],
    gathered_grad: Gradient,
    wanted: _Wanted,
) -> Gradient:
    """The outputs' part by one reduce-scatter over all weights, and what reached the gathered input."""
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
    if len(parts) == 1:
        grad, weight = parts[0]
    else:
        grad = torch.cat([grad for grad, _ in parts], dim=-1)
        weight = torch.cat([weight for _, weight in parts])
    grad_input = eager.call(
        eager.gemm_reducescatter, _scatter_op, group, grad, weight.t(), None, dim=dim
    )
    return grad_input if scattered is None else grad_input + wait(scattered)


def _run_kernel(
    call: _Call, input: torch.Tensor, weights: Sequence[torch.Tensor], biases: Biases
) -> tuple[list[torch.Tensor], torch.Tensor]:
    given = [bias for bias in biases if bias is not None]
    if not needs_recording("allgather_gemm", input, *weights, *given):
        return call.run(input, weights, biases)
    *outputs, gathered = recorded(record(_AllGatherGemm, call, input, *weights, *given))
    return outputs, gathered


def _one_for_each(weights: Sequence[torch.Tensor], biases: Biases) -> Sequence[torch.Tensor | None]:
    """A bias or None for each weight; the Function's arguments are counted by them."""
    fakes.check_number_of_biases("allgather_gemm", weights, biases)
    return list(biases) or [None] * len(weights)


# Lists of biases may hold None, whose place torch.library.register_autograd would lose.
def _autograd_weights(
    keyset, input, weights, biases, *, dim: int = 0, group: str
) -> tuple[list[torch.Tensor], torch.Tensor]:
    redispatch = partial(_op_weights.redispatch, dim=dim, group=group)
    run = partial(below_autograd, redispatch, keyset)
    biases = _one_for_each(weights, biases)
    return _run_kernel(_Call(group, dim, run, biases), input, weights, biases)


def _autograd(
    keyset, input, weight, bias=None, *, dim: int = 0, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    redispatch = partial(_op.redispatch, dim=dim, group=group)

    def run(input, weights, biases):
        output, gathered = below_autograd(redispatch, keyset, input, weights[0], biases[0])
        return [output], gathered

    (output,), gathered = _run_kernel(_Call(group, dim, run, [bias]), input, [weight], [bias])
    return output, gathered


def _record_weights(
    group: str,
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Biases,
    *,
    dim: int,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The op of several weights that has a gradient to record, and nothing else: see `eager`."""

    def run(input, weights, biases):
        return eager.allgather_gemm_weights(input, weights, biases, dim, group)

    biases = _one_for_each(weights, biases)
    given = [bias for bias in biases if bias is not None]
    call = _Call(group, dim, run, biases)
    *outputs, gathered = recorded(_AllGatherGemm.apply(call, input, *weights, *given))
    return outputs, gathered


def _record(
    group: str,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_record_weights`, of one."""

    def run(input, weights, biases):
        output, gathered = eager.allgather_gemm(input, weights[0], biases[0], dim, group)
        return [output], gathered

    given = () if bias is None else (bias,)
    return recorded(_AllGatherGemm.apply(_Call(group, dim, run, [bias]), input, weight, *given))


autograd_kernels.impl("allgather_gemm", _autograd, "Autograd", with_keyset=True)
autograd_kernels.impl("allgather_gemm.weights", _autograd_weights, "Autograd", with_keyset=True)
register_vmap(_op)
register_vmap(_op_weights)


@overload
def allgather_gemm(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    dim: int = 0,
    group: Group = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def allgather_gemm(
    input: torch.Tensor,
    weight: Sequence[torch.Tensor],
    bias: Biases | None = None,
    *,
    dim: int = 0,
    group: Group = None,
) -> tuple[list[torch.Tensor], torch.Tensor]: ...


@overload
def allgather_gemm(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: Group = None,
    scale_input: torch.Tensor,
    scale_weight: torch.Tensor,
    recipe_input: ScalingType | None = None,
    recipe_weight: ScalingType | None = None,
    output_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    shared_scale_input: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


@overload
def allgather_gemm(
    input: torch.Tensor,
    weight: Sequence[torch.Tensor],
    bias: Biases | None = None,
    *,
    group: Group = None,
    scale_input: torch.Tensor,
    scale_weight: Sequence[torch.Tensor],
    recipe_input: ScalingType | None = None,
    recipe_weight: ScalingType | None = None,
    output_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    shared_scale_input: bool = False,
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]: ...


def allgather_gemm(
    input,
    weight,
    bias=None,
    *,
    dim=0,
    group=None,
    scale_input=None,
    scale_weight=None,
    recipe_input=None,
    recipe_weight=None,
    output_dtype=torch.bfloat16,
    use_fast_accum=False,
    shared_scale_input=False,
):
    """``g = all_gather(input, dim)``; ``(g @ weight.T + bias, g)``, with the GEMM of gathered rows beside the gather.

    The result is that of the unfused composition, here of dim 0::

        gathered = input.new_empty(input.shape[0] * world_size, *input.shape[1:])
        torch.distributed.all_gather_into_tensor(gathered, input.contiguous(), group=group)
        torch.nn.functional.linear(gathered, weight, bias), gathered

    Every rank of the group calls it with the same shapes and dtype, in the same order of calls; strides may differ.
    The composition runs what the fast path cannot take.

    Args:
        input: [D0, ..., K], this rank's rows.
        weight: [N, K], this rank's part, as in ``torch.nn.Linear``, contiguous along either dim for speed; or a
            sequence of weights [N_i, K] (q, k, v; gate, up), for which the rows are gathered once.
        bias: [N] or None, this rank's part; for several weights None, or a sequence with one of these for each.
        dim: the input's dim along which the ranks' parts are put together, any but the last; of scaled operands 0.
        group: None (the default group), a process group's name, a ``ProcessGroup`` or a one-dimensional ``DeviceMesh``.
        scale_input, scale_weight, recipe_input, recipe_weight, output_dtype, use_fast_accum: of fp8 operands, as in
            :func:`overlap_torch.gemm_allreduce`; scales of several weights are a sequence. fp8 and its scales travel, not
            what they stand for.
        shared_scale_input: of TensorWise scales: every rank has the same ``scale_input``, so that it is not gathered.

    Returns:
        ``(output, g)``: fresh, contiguous tensors [world size * D0, ..., N] and [world size * D0, ..., K], or with ``dim``
        so much longer, of the operands' dtype; for a sequence of weights ``output`` is a list. Dtypes, accumulation and autocast are as in
        :func:`overlap_torch.gemm_allreduce`. Scaled operands return ``(output, g, scales)``:
        ``output`` of ``output_dtype``, ``g`` of the input's, and the gathered scales of ``g``:
        ``scale_input`` with dim 0 world size times as long, or, for TensorWise scales, [world
        size], one for each part of the rows, and [1] if they are shared.

    Gradients are in reverse mode, of any order. Backward keeps ``input`` and gathers it again, beside the
    :func:`overlap_torch.gemm_reducescatter` that makes its gradient; every rank has to run it. A gradient that reaches
    ``g`` is reduce-scattered and added. Gradients of weights and biases are those of this rank's parts.
    ``torch.func.grad``, ``vjp``, ``jacrev`` and ``vmap`` take it too; ``vmap`` is one call for each element of the batch, of
    which every rank needs as many.

    Raises:
        ValueError: shapes or devices that do not fit, no such ``dim``, not one bias for each of several weights, or an unknown group.
        TypeError: dtypes that do not fit, fp8 operands without scales, one bias tensor for a sequence of weights, or a ``group`` that is none of the above.
        NotImplementedError: an operand has a tangent (forward mode), or a scaled operand requires grad: the layers of
            :mod:`overlap_torch.nn` train in fp8.
        RuntimeError: a first call inside a CUDA graph capture, or an earlier op that failed after it had returned (see
            :func:`overlap_torch.check`).

    The technique: GEMM tiles wait for the arrival of their rows, Flux (arXiv 2406.06858).
    """
    scales = (scale_input, scale_weight, recipe_input, recipe_weight)
    unscaled = scaled.no_scales("allgather_gemm", dim, *scales)
    if isinstance(weight, torch.Tensor):
        if not (bias is None or isinstance(bias, torch.Tensor)):
            raise TypeError(
                f"allgather_gemm: for one weight bias must be a tensor [N] or None, but it is a {type(bias).__name__}; "
                "give a sequence of weights with a sequence of biases"
            )
        if unscaled:
            return eager.call(
                eager.allgather_gemm, _op, group, input, weight, bias, record=_record, dim=dim
            )
        return scaled.call(
            eager.allgather_gemm_scaled,
            _op_scaled,
            group,
            (input, weight),
            scale_input,
            scale_weight,
            bias,
            recipe_input,
            recipe_weight,
            output_dtype=output_dtype,
            use_fast_accum=use_fast_accum,
            shared_scale_input=shared_scale_input,
        )
    weights = list(weight)
    if isinstance(bias, torch.Tensor):
        raise TypeError(
            f"allgather_gemm: for a sequence of weights (here {len(weights)}) bias must be None or a sequence with a tensor "
            f"[N] or None for each, but it is one tensor of shape {tuple(bias.shape)}; give a list, as bias.split(...) does"
        )
    biases = list(bias or [])
    if unscaled:
        return eager.call(
            eager.allgather_gemm_weights,
            _op_weights,
            group,
            input,
            weights,
            biases,
            record=_record_weights,
            dim=dim,
        )
    if isinstance(scale_weight, torch.Tensor):
        raise TypeError(
            f"allgather_gemm: for a sequence of weights (here {len(weights)}) scale_weight must be a sequence with a tensor "
            f"for each, but it is one tensor of shape {tuple(scale_weight.shape)}; give a list"
        )
    return scaled.call(
        eager.allgather_gemm_scaled_weights,
        _op_scaled_weights,
        group,
        (input, weights),
        scale_input,
        None if scale_weight is None else list(scale_weight),
        biases,
        recipe_input,
        recipe_weight,
        output_dtype=output_dtype,
        use_fast_accum=use_fast_accum,
        shared_scale_input=shared_scale_input,
    )
