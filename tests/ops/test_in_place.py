"""Activations and sums in place on what layers return, as models have them: outputs are no views of an autograd Function's."""

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from checks import Failures, close
from layers import chain, integer_linear, integers, my_features, my_tokens
from meshes import OVERLAP, gathered_tokens, mesh
from operands import difference, rank_device
from overlap_torch.nn import ColumnParallelLinear, RowParallelLinear

Cut = Callable[[torch.Tensor], torch.Tensor]
IN, OUT = 6, 8


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def styled(style: type, **layouts: object) -> Callable[[torch.nn.Linear], torch.nn.Module]:
    return lambda linear: parallelize_module(linear, mesh(), style(**layouts))


def prepared(linear: torch.nn.Linear) -> torch.nn.Module:
    """A module that reads its gathered input by a layer, and returns what that returns."""
    plan = {"": gathered_tokens(use_local_output=True), "linear": COLWISE()}
    return parallelize_module(chain(linear=linear), mesh(), plan)


def first_of_several(**options: object) -> Callable[[torch.nn.Linear], torch.nn.Module]:
    def make(linear: torch.nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
        layer = ColumnParallelLinear.from_linear([linear, linear], **options)
        return lambda input: layer(input)[0]

    return make


def layer(kind: type, **options: object) -> Callable[[torch.nn.Linear], torch.nn.Module]:
    return lambda linear: kind.from_linear(linear, **options)


_, COLWISE, ROWWISE = OVERLAP
# The layer, and which part of the whole input and output is this rank's.
CASES: dict[str, tuple[Callable, Cut, Cut]] = {
    "colwise": (styled(COLWISE), whole, my_features),
    "colwise, tokens": (styled(COLWISE, input_layouts=Shard(0)), my_tokens, my_features),
    "colwise, gathered": (styled(COLWISE, output_layouts=Replicate()), whole, whole),
    "prepared": (prepared, my_tokens, my_features),
    "rowwise": (styled(ROWWISE), my_features, whole),
    "rowwise, whole": (styled(ROWWISE, input_layouts=Replicate()), whole, whole),
    "rowwise, tokens": (styled(ROWWISE, output_layouts=Shard(0)), my_features, my_tokens),
    "rowwise, features": (styled(ROWWISE, output_layouts=Shard(-1)), my_features, my_features),
    "column": (layer(ColumnParallelLinear), whole, my_features),
    "column, gathered": (layer(ColumnParallelLinear, gather_output=True), whole, whole),
    "column, tokens": (layer(ColumnParallelLinear, sequence_parallel=True), my_tokens, my_features),
    "columns": (first_of_several(), whole, my_features),
    "columns, gathered": (first_of_several(gather_output=True), whole, whole),
    "columns, tokens": (first_of_several(sequence_parallel=True), my_tokens, my_features),
    "row": (layer(RowParallelLinear), my_features, whole),
    "row, whole": (layer(RowParallelLinear, input_is_parallel=False), whole, whole),
    "row, tokens": (layer(RowParallelLinear, sequence_parallel=True), my_features, my_tokens),
}
# Numbers of fp8 are near the whole layer's: scales are not exact.
FP8 = {
    "fp8 column": (layer(ColumnParallelLinear, fp8="tensorwise"), whole, my_features),
    "fp8 columns, tokens": (first_of_several(fp8="tensorwise", sequence_parallel=True), my_tokens, my_features),
    "fp8 row": (layer(RowParallelLinear, fp8="tensorwise"), my_features, whole),
    "fp8 row, tokens": (layer(RowParallelLinear, fp8="tensorwise", sequence_parallel=True), my_features, my_tokens),
}  # fmt: skip


def changed(output: torch.Tensor) -> torch.Tensor:
    """By several ops in place, one through a view."""
    output += 1
    output.unsqueeze(0).mul_(2)
    return output.relu_()


# Sums before relu_ are not near zero with them.
def powers_of_two(*shape: int, seed: int) -> torch.Tensor:
    return integers(*shape, seed=seed).sign() * 2


@pytest.mark.parametrize("name", [*CASES, *FP8])
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_outputs_are_changed_in_place(failures: Failures, name: str) -> None:
    make, cut_input, cut_output = (CASES | FP8)[name]
    for leading, needs, frozen in itertools.product(
        [(), (4,), (4, 3)], [True, False], [True, False]
    ):
        tokens = my_tokens in (cut_input, cut_output)
        if not leading and tokens:
            continue
        where = (name, leading, "needs" if needs else "", "frozen" if frozen else "")
        linear = integer_linear(IN, OUT, True)
        if name in FP8:
            with torch.no_grad():
                linear.weight.copy_(powers_of_two(OUT, IN, seed=1))
        linear.requires_grad_(not frozen)
        make_input = powers_of_two if name in FP8 else integers
        given = make_input(*leading, IN, seed=3)
        run = make(copy.deepcopy(linear))
        mine = cut_input(given).detach().clone().requires_grad_(needs)
        own = given.clone().requires_grad_(needs)
        output, right = changed(run(mine)), changed(linear(own))
        compare = close if name in FP8 else difference
        failures.expect(compare(output.detach(), cut_output(right.detach())), *where)
        if not needs and frozen:
            weight = torch.ones((), device=rank_device(), requires_grad=True)
            output *= weight  # what needs a gradient, in place on what does not
            failures.expect(None if output.requires_grad else "needs none", *where)
            continue
        gradient = integers(*leading, OUT, seed=4).sign()
        right.backward(gradient)
        output.backward(cut_output(gradient))
        if needs:
            problem = compare(mine.grad, cut_input(own.grad))
            failures.expect(problem, "input's gradient", *where)
        with torch.no_grad():
            output = changed(run(mine.detach()))
        failures.expect(compare(output, cut_output(right.detach())), "no_grad", *where)
