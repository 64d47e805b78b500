"""The maps of columns and rows by every policy, beside the ops and their gradients; second derivatives, too."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

import overlap_torch
from checks import Failures
from layers import integers
from operands import difference, world_name
from overlap_torch._layers import maps
from overlap_torch._layers.fp8 import RECIPES, Fp8
from overlap_torch._layers.maps import Plain
from overlap_torch._layers.sharding import SumGradient

OUT, IN, ROWS = (3, 4), 5, 4  # of two weights
Tensors = Sequence[torch.Tensor]
some_ranks = pytest.mark.ranks((1, "gloo"), (2, "gloo"), (3, "gloo"), (2, "nccl"))


def derivatives(call: Callable[..., Tensors], leaves: Tensors, index: int) -> list[torch.Tensor]:
    """One output, or all for an index of -1; their gradients, and the gradients of these."""
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    outputs = list(call(*leaves))
    outputs = outputs if index < 0 else [outputs[index]]
    how = {"create_graph": True, "materialize_grads": True, "allow_unused": True}
    firsts = torch.autograd.grad(sum(one.square().sum() for one in outputs), leaves, **how)
    seconds = torch.autograd.grad(sum(one.square().sum() for one in firsts), leaves, **how)
    return [one.detach() for one in (*outputs, *firsts, *seconds)]


def expect_equal(failures: Failures, calls: Sequence[Callable], leaves: Tensors, *where) -> None:
    for index in (-1, 0, 1):
        got, right = (derivatives(call, leaves, index) for call in calls)
        for number, pair in enumerate(zip(got, right, strict=True)):
            failures.expect(difference(*pair), number, "of outputs", index, *where)


def operands() -> tuple[torch.Tensor, ...]:
    """This rank's input, two weights and their biases, in float64."""
    shapes = ((ROWS * dist.get_world_size(), 2, IN), *((n, IN) for n in OUT), *((n,) for n in OUT))
    seed = 10 * dist.get_rank()
    return tuple(integers(*shape, seed=seed + i).double() for i, shape in enumerate(shapes))


@some_ranks
def test_maps_of_columns(failures: Failures) -> None:
    group, (input, *others) = world_name(), operands()
    same = integers(6, IN, seed=3).double()

    def mapped(by: Plain) -> Callable[..., Tensors]:
        return lambda x, v, w, b, c: maps.column(by, x, [v, w], [b, c])

    def gathered(x, v, w, b, c) -> Tensors:
        outputs, rows = overlap_torch.allgather_gemm(x, [v, w], [b, c], dim=dim, group=group)
        return [*outputs, rows]

    def replicated(x, v, w, b, c) -> Tensors:
        x = SumGradient.apply(x, group)
        return functional.linear(x, v, b), functional.linear(x, w, c)

    for dim in (0, 1):
        returns = mapped(Plain(group, True, dim, keeps=True, returns=True))
        expect_equal(failures, (returns, gathered), (input, *others), "returned", dim)
        for keeps in (True, False):
            own = (
                mapped(Plain(group, True, dim, keeps=keeps)),
                lambda *given: gathered(*given)[:2],
            )
            expect_equal(failures, own, (input, *others), "keeps", keeps, dim)
    own = (mapped(Plain(group, False)), replicated)
    expect_equal(failures, own, (same, *others), "replicated")


@some_ranks
def test_maps_of_rows(failures: Failures) -> None:
    group, (input, weight, _, _, _) = world_name(), operands()
    bias = integers(OUT[0], seed=4).double()

    def mapped(by: Plain) -> Callable[..., Tensors]:
        return lambda *given: [maps.row(by, *given)] * 2

    def scattered(x, w, b) -> Tensors:
        b = SumGradient.apply(b, group) if sums else b
        return [overlap_torch.gemm_reducescatter(x, w, b, group=group)] * 2

    def reduced(*given: torch.Tensor) -> Tensors:
        return [overlap_torch.gemm_allreduce(*given, group=group)] * 2

    for sums in (False, True):
        own = (mapped(Plain(group, True, sums_bias=sums)), scattered)
        expect_equal(failures, own, (input, weight, bias), "scattered", sums)
    expect_equal(failures, (mapped(Plain(group, False)), reduced), (input, weight, bias), "reduced")


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_maps_with_casts_are_differentiated_once(failures: Failures) -> None:
    input, weight, *_ = operands()
    input, weight = input.float().requires_grad_(), weight.float()
    for sequence in (False, True):
        how = {"recipe": RECIPES["tensorwise"], "dtype": torch.float32}
        by = Fp8(world_name(), sequence, **how)
        for output in (
            maps.column(by, input, [weight], [None])[0],
            maps.row(by, input, weight, None),
        ):
            total = output.square().sum()
            (first,) = torch.autograd.grad(total, input, create_graph=True)
            failures.raises("once_differentiable", first.sum().backward)
