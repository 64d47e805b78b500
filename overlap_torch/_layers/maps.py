"""The two differentiable maps of tensor parallelism: the weights of a `Column` cut N over the ranks, the weight of a `Row` cuts K.

A policy says how a call computes: `Plain` in the operands' own dtype, `fp8.Fp8` with casts. The layers of nn, the styles, fp8
and the integrations differ in its flags alone:

- tokens are cut (``sequence``); else the input of a column and the output of a row are replicated;
- the gathered input is kept for backward (``keeps``), or backward gathers it again; it may also be a result (``returns``);
- operands are cast (``recipe``); a second derivative then raises;
- the gradient of a row's bias is the sum over all ranks' rows (``sums_bias``), or over this rank's own.

Gradients that may be differentiated again take the same lines, with `_collective`, which records, in place of the plain
collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn import functional

from overlap_torch._layers.sharding import pad_end
from overlap_torch._ops import allgather_gemm, gemm_allreduce, gemm_reducescatter
from overlap_torch._ops.collectives import (
    start_all_gather,
    start_reduce_scatter,
    wait,
    wait_for_gather,
)
from overlap_torch._ops.gradients import (
    Gradient,
    TransformedFunction,
    in_parts,
    kept,
    recorded,
    rows,
    side_by_side,
    weight_gradient,
)
from overlap_torch._ops.group import world_size

Gradients = tuple[Gradient, ...]
Saved = Sequence[torch.Tensor]


class Plain(NamedTuple):
    """The policy of a call in the operands' own dtype.

    Its methods say *read* for an input or an output's gradient in the form in which the weight's gradient reads it.
    """

    group: str
    sequence: bool  # tokens are cut
    dim: int = 0  # of the tokens
    keeps: bool = False  # a column's gathered input, for backward
    returns: bool = False  # the gathered input, which is kept, is a result
    reduces: bool = True  # the gradient of a column's replicated input is summed over the ranks
    sums_bias: bool = False  # the gradient of a row's bias is summed over the ranks
    paddings: Sequence[int] = ()  # how much shorter each weight's N is than the largest rank's
    weight_gradient: Callable[..., Gradient] = weight_gradient
    recipe: Any = None  # of fp8
    dtype: torch.dtype | None = None  # of fp8's results

    def column(
        self, input: torch.Tensor, weights: Saved, biases: Sequence[Gradient]
    ) -> tuple[Sequence[torch.Tensor], Saved]:
        """The outputs, and the tensors to keep for the weights' gradients."""
        if not self.sequence:
            pairs = zip(weights, biases, strict=True)
            return [functional.linear(input, weight, bias) for weight, bias in pairs], (input,)
        outputs, whole = allgather_gemm(input, weights, biases, dim=self.dim, group=self.group)
        return outputs, (input, whole) if self.keeps else (input,)

    def result(self, saved: Saved) -> torch.Tensor:
        """The gathered input."""
        return saved[1]

    def row(
        self, input: torch.Tensor, weight: torch.Tensor, bias: Gradient
    ) -> tuple[torch.Tensor, Saved]:
        """The output, and the tensors to keep for the weight's gradient."""
        if self.sequence:
            output = gemm_reducescatter(input, weight, bias, dim=self.dim, group=self.group)
        else:
            output = gemm_allreduce(input, weight, bias, group=self.group)
        return output, (input,)

    def column_input(self, saved: Saved, again: bool) -> Callable[[], Any]:
        """Begins to gather a column's input if it was not kept. The function that it returns waits."""
        if not self.sequence:
            # The derivative of this rank's gradient by the replicated input is a part of a sum.
            input = self.collective(saved[0], "copy") if again else saved[0]
            return lambda: input
        if self.keeps and not again:
            return lambda: saved[1]
        return self.gathered(saved[0], again)

    def row_input(self, saved: Saved) -> Any:
        return saved[0]

    def column_gradient(
        self, grad: torch.Tensor, weight: torch.Tensor, reduces: bool, padding: int
    ) -> tuple[torch.Tensor, Any]:
        """The gradient of the input, or this rank's part of it unless it ``reduces``; and the output's as it is read."""
        if not reduces:
            return grad @ weight, grad
        if self.sequence:
            return gemm_reducescatter(grad, weight.t(), dim=self.dim, group=self.group), grad
        whole = pad_end(weight.t(), -1, padding)
        return gemm_allreduce(pad_end(grad, -1, padding), whole, group=self.group), grad

    def row_gradient(
        self, grad: torch.Tensor, weight: torch.Tensor, needs_input: bool, again: bool
    ) -> tuple[Gradient, Any]:
        """The gradient of the input if it is needed; and the output's as it is read: gathered if tokens are cut."""
        if self.sequence and needs_input:
            return allgather_gemm(grad, weight.t(), dim=self.dim, group=self.group)
        if self.sequence:
            return None, self.gathered(grad, again)()
        # The gradient is replicated, but this rank's use of it is a part of a sum.
        grad = self.collective(grad, "copy") if again else grad
        return grad @ weight if needs_input else None, grad

    def gathered(self, shard: torch.Tensor, again: bool) -> Callable[[], torch.Tensor]:
        """Begins a gather of the tokens. The function that it returns waits."""
        if again:
            whole = self.collective(shard, "gather")
            return lambda: whole
        begun = start_all_gather(shard, self.group)
        if self.dim == 0:
            return partial(wait, begun)
        return partial(wait_for_gather, begun, world_size(self.group), self.dim)

    def scattered(self, whole: torch.Tensor, again: bool) -> Callable[[], torch.Tensor]:
        """Begins to sum and cut the tokens. The function that it returns waits."""
        if again:
            shard = self.collective(whole, "scatter")
            return lambda: shard
        return partial(wait, start_reduce_scatter(whole, self.group, self.dim))

    def collective(self, tensor: torch.Tensor, kind: str) -> torch.Tensor:
        """A linear map between the ranks' tensors that can be differentiated."""
        return torch.ops.overlap._collective(tensor, kind, self.dim, [], [], self.group)


def _is_differentiated_again() -> bool:
    return torch.is_grad_enabled() and not is_dynamo_compiling()


class Column(torch.autograd.Function):
    """An output for each weight from one input, and the gathered input if the policy says so."""

    @staticmethod
    def forward(
        ctx, by: Plain, input: torch.Tensor, *weights_and_biases: Gradient
    ) -> tuple[torch.Tensor, ...]:
        """``weights_and_biases``: all weights, then a bias or None for each."""
        count = len(weights_and_biases) // 2
        weights = weights_and_biases[:count]
        outputs, saved = by.column(input, weights, weights_and_biases[count:])
        _keep_column(ctx, by, weights, saved)
        ctx.set_materialize_grads(False)  # an unused output costs neither work nor communication
        if not by.returns:
            return tuple(outputs)
        gathered = by.result(saved)
        if not ctx.needs_input_grad[1]:
            ctx.mark_non_differentiable(gathered)
        return (*outputs, gathered)

    @staticmethod
    def backward(ctx, *grads: Gradient) -> Gradients:
        if torch.is_grad_enabled() and is_dynamo_compiling():
            with torch.no_grad():
                return Column.backward(ctx, *grads)
        return None, *column_gradients(ctx.by, grads, ctx.saved_tensors, ctx.needs_input_grad[1:])


class TransformedColumn(Column, TransformedFunction):
    """`Column` of a replicated input in its own dtype; Dynamo and torch.func's transforms take it, too."""

    @staticmethod
    def forward(
        by: Plain, input: torch.Tensor, *weights_and_biases: Gradient
    ) -> tuple[torch.Tensor, ...]:
        count = len(weights_and_biases) // 2
        outputs, _ = by.column(input, weights_and_biases[:count], weights_and_biases[count:])
        return tuple(outputs)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        by, input, *operands = inputs
        _keep_column(ctx, by, operands[: len(output)], (input,))
        # Dynamo refuses the call; it materializes gradients.
        if len(output) > 1 and not is_compiling():
            ctx.set_materialize_grads(False)


def _keep_column(ctx, by: Plain, weights: Saved, saved: Saved) -> None:
    _, needs_input, *needs = ctx.needs_input_grad
    count = len(weights)
    ctx.by = by
    ctx.save_for_backward(
        *(weights if needs_input else [None] * count),
        *(saved if any(needs[:count]) else ()),
    )


def column_gradients(
    by: Plain, grads: Sequence[Gradient], saved: Saved, needs: Sequence[bool]
) -> Gradients:
    """The needed gradients of a column's input, weights and biases.

    ``grads``: of each output, None for an unused one, and of the gathered input if it is a result. ``saved``: the weights
    and the policy's tensors.
    """
    again = _is_differentiated_again()
    *grads, gathered_grad = grads if by.returns else (*grads, None)
    count, (needs_input, *needs) = len(grads), needs
    used = [i for i in range(count) if grads[i] is not None]
    wanted = [i for i in used if needs[i]]
    input = by.column_input(saved[count:], again) if wanted else None
    apart = by.sequence and by.recipe is None  # a product for each weight's gradient
    read = grad_input = scattered = None
    if used and (needs_input or not apart):
        read = side_by_side([grads[i] for i in used])
    if used and needs_input:
        weight = saved[used[0]] if len(used) == 1 else torch.cat([saved[i] for i in used])
        reduces = by.reduces and gathered_grad is None
        padding = sum(by.paddings[i] for i in used) if by.paddings else 0
        grad_input, read = by.column_gradient(read, weight, reduces, padding)
    if gathered_grad is not None and needs_input:
        part = gathered_grad if grad_input is None else gathered_grad + grad_input
        scattered = by.scattered(part, again)
    grad_weights: Sequence[Gradient] = [None] * count
    if wanted and apart:
        whole = input()
        grad_weights = [
            by.weight_gradient(grads[i], whole) if i in wanted else None for i in range(count)
        ]
    elif wanted:
        grad_weights = in_parts(by.weight_gradient(read, input()), grads, needs[:count])
    grad_biases = [
        rows(grads[i]).sum(0) if needs[count + i] and i in used else None for i in range(count)
    ]
    return grad_input if scattered is None else scattered(), *grad_weights, *grad_biases


class Row(torch.autograd.Function):
    """The sum of the ranks' products, scattered if tokens are cut, plus a bias."""

    @staticmethod
    def forward(
        ctx, by: Plain, input: torch.Tensor, weight: torch.Tensor, bias: Gradient
    ) -> torch.Tensor:
        _, _, needs_weight, needs_bias = ctx.needs_input_grad
        output, saved = by.row(input, weight, bias)
        ctx.by, ctx.kept = by, None
        ctx.reads_gradient = needs_weight or (needs_bias and by.sums_bias)
        ctx.save_for_backward(weight, *(saved if needs_weight else ()))
        return output

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> Gradients:
        if torch.is_grad_enabled() and is_dynamo_compiling():
            with torch.no_grad():
                return Row.backward(ctx, grad)
        by, needs = ctx.by, ctx.needs_input_grad[1:]
        read = kept(ctx, grad)
        found, read = row_gradients(by, grad, ctx.saved_tensors, needs, read)
        needs_input, needs_weight, needs_bias = needs
        if by.sequence and needs_input and ctx.reads_gradient and not (needs_weight or needs_bias):
            ctx.kept = grad, read  # a later backward wants the weight's gradient
        return None, *found


def row_gradients(
    by: Plain, grad: torch.Tensor, saved: Saved, needs: Sequence[bool], read: Any = None
) -> tuple[Gradients, Any]:
    """The needed gradients of a row's input, weight and bias; and the output's as it is read.

    ``saved``: the weight and the policy's tensors. ``read``: the result of an earlier call with the same gradient.
    """
    again = _is_differentiated_again()
    needs_input, needs_weight, needs_bias = needs
    sums = needs_bias and by.sums_bias and not again
    weight, *saved = saved
    read = None if again else read
    grad_input = grad_weight = grad_bias = None
    if needs_input or (read is None and (needs_weight or sums)):
        grad_input, read = by.row_gradient(grad, weight, needs_input, again)
    if needs_weight:
        grad_weight = by.weight_gradient(read, by.row_input(saved))
    if needs_bias:
        grad_bias = rows(read if sums else grad).sum(0)
        if by.sums_bias and again:  # every rank's gradient of it counts once
            grad_bias = by.collective(grad_bias, "sum")
    return (grad_input, grad_weight, grad_bias), read


class FirstOrderColumn(Column):
    """`Column` with casts, which have no derivative."""

    backward = staticmethod(once_differentiable(Column.backward))


class FirstOrderRow(Row):
    """`Row` with casts, which have no derivative."""

    backward = staticmethod(once_differentiable(Row.backward))


def column(
    by: Plain,
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor, ...]:
    """An output for each weight, and the gathered input if the policy says so."""
    kind = Column if by.recipe is None else FirstOrderColumn
    return recorded(kind.apply(by, input, *weights, *biases))


def row(
    by: Plain, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    kind = Row if by.recipe is None else FirstOrderRow
    return recorded(kind.apply(by, input, weight, bias), keeps_gradients=by.sequence)


# If Dynamo traced the next two, every output would have a gradient in its backward.
def gather_linears(
    group: str, dim: int, returns: bool, *operands: Gradient
) -> tuple[torch.Tensor, ...]:
    """A `Column` that keeps the gathered input. Its operands are the input, all weights, and a bias or None for each."""
    by = Plain(group, True, dim, keeps=True, returns=returns)
    return recorded(Column.apply(by, *operands))


def scatter_linear(group: str, dim: int, *operands: torch.Tensor) -> torch.Tensor:
    """A style's `Row`, whose operands are input, weight and bias."""
    by = Plain(group, True, dim, sums_bias=True)
    return recorded(Row.apply(by, *operands), keeps_gradients=True)


def let_compile() -> None:
    """Called once before anything is compiled. It imports torch._dynamo, which takes seconds; making a DTensor also does."""
    torch.compiler.allow_in_graph(gather_linears)
    torch.compiler.allow_in_graph(scatter_linear)
