"""Gradients of gradients, against the global function's in one process, and torch.func's transforms.

The global function is plain PyTorch in float64 on all ranks' operands, where what is replicated stands once. All values are
small integers, and everything here is a polynomial of them, so that each derivative has one right value, bit for bit.
"""

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import overlap_torch
from checks import Failures, message_of
from layers import integer_linear, integers
from meshes import cut, local_part, mesh, whole_of
from modes import SeesDispatches
from operands import Case, difference, place, rank_device, world_name
from operands import integers as keyed_integers
from ops import OPS, Arguments, every_op, map_tensors, tensors_of
from overlap_torch._layers.dtensor import wrap
from overlap_torch.nn import ColumnParallelLinear, RowParallelLinear
from overlap_torch.parallel import OverlapColwiseParallel, OverlapRowwiseParallel
from parallel_layers import SEVERAL, Form, all_outputs, every_kind, integer_linears, sequence_or_not

some_ranks = pytest.mark.ranks((2, "gloo"), (3, "gloo"), (2, "nccl"))

CASES = [Case((3,), 5, 4, torch.float64), Case((2, 3), 3, 2, torch.float64)]
CASES.append(Case((), 4, 3, torch.float64))

Gradients = list[torch.Tensor | None]


def given(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def gradients(
    outputs: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    vectors: Sequence[torch.Tensor],
    again: bool = True,
) -> Gradients:
    """The gradients of leaves that ask for one; None for others, and where no output depends on a leaf that does."""
    pairs = [pair for pair in zip(outputs, vectors, strict=True) if pair[0].requires_grad]
    asking = [leaf for leaf in leaves if leaf.requires_grad]
    found = iter([None] * len(asking))
    if pairs:
        outputs, vectors = zip(*pairs, strict=True)
        found = iter(
            torch.autograd.grad(outputs, asking, vectors, create_graph=again, allow_unused=True)
        )
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


def expect_gradients(failures: Failures, got: Gradients, right: Gradients, *where: object) -> None:
    """A gradient that there is none of may be zeros."""
    for i, (gradient, value) in enumerate(zip(got, right, strict=True)):
        if gradient is not None and value is not None:
            failures.expect(difference(gradient, value), "by", i, *where)
        else:
            rest = given([gradient, value])
            nothing = not any(bool(tensor.any()) for tensor in rest)
            failures.expect(None if nothing else f"{gradient}, not {value}", "by", i, *where)


# ---------------------------------------------------------------------------------------------------------------- the ops


def vectors_for(
    op: str, name: str, tensors: Sequence[torch.Tensor], rank: int
) -> list[torch.Tensor]:
    """The factors of outputs or gradients: the same on every rank where they are."""
    replicated = [
        OPS[op].replicated and (name == "outputs" or tensor.dim() == 1) for tensor in tensors
    ]
    keys = ["replicated" if same else rank for same in replicated]
    return [
        keyed_integers(tuple(tensor.shape), tensor.device, name, i, key).double()
        for i, (tensor, key) in enumerate(zip(tensors, keys, strict=True))
    ]


def derivatives(
    outputs: Sequence[torch.Tensor],
    factors: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    vectors: Sequence[torch.Tensor],
    used: Sequence[int],
    square: bool,
    order: int,
) -> Gradients:
    """The gradients of sum(outputs * factors), or of their squares, by leaves and factors.

    In each order but the last the leaves' derivatives `used` are multiplied by their vectors, and added up.
    """
    values = [output.square() if square else output for output in outputs]
    by: Gradients = gradients(values, leaves, factors)
    for step in range(2, order + 1):
        chosen = [i for i in used if by[i] is not None]
        by = gradients(
            [by[i] for i in chosen],
            [*leaves, *factors],
            [vectors[i] for i in chosen],
            again=step < order,
        )
    return by


def right_derivatives(
    op: str,
    everybody: Sequence[Arguments],
    needs: Sequence[bool],
    needs_factors: bool,
    used: Sequence[int],
    square: bool,
    order: int,
    kept: Sequence[int] | None = None,
) -> Gradients:
    """The gradients of this rank's operands and factors, from all ranks' arguments, by the outputs `kept`."""
    me = dist.get_rank()
    everybody = [map_tensors(lambda t: t.detach().clone(), arguments) for arguments in everybody]
    leaves, vectors, chosen = [], [], []
    for rank, arguments in enumerate(everybody):
        own = tensors_of(arguments)
        for leaf, need in zip(own, needs, strict=True):
            leaf.requires_grad_(need)
        chosen += [len(leaves) + i for i in used]
        leaves += own
        vectors += vectors_for(op, "leaves", own, rank)
    results = OPS[op].meaning(everybody, math.inf)
    kept = range(len(results[me])) if kept is None else kept
    counted = [me] if OPS[op].replicated else range(len(everybody))
    outputs = [results[rank][i] for rank in counted for i in kept]
    factors = [
        vectors_for(op, "outputs", results[rank], rank)[i].requires_grad_(needs_factors)
        for rank in counted
        for i in kept
    ]
    by = derivatives(outputs, factors, leaves, vectors, chosen, square, order)
    own, count = len(needs), len(kept)
    first = me * own
    factors_of_me = len(leaves) + (0 if OPS[op].replicated else me * count)
    return by[first : first + own] + by[factors_of_me : factors_of_me + count]


@every_op
@some_ranks
def test_second_order_of_ops_is_the_global_functions(failures: Failures, op: str) -> None:
    device, rank, world = rank_device(), dist.get_rank(), dist.get_world_size()
    seeds = itertools.count()
    for case, bias in itertools.product(OPS[op].of(CASES), (False, True)):
        case = case.with_(bias=bias)
        count = len(tensors_of(OPS[op].arguments(case, *place())))
        everything = tuple(range(count))
        # Each operand's gradient alone, all but one, all; and the same of the gradients that are used.
        subsets = [everything, *((i,) for i in everything)]
        subsets += [tuple(j for j in everything if j != i) for i in everything]
        patterns = [(asking, everything) for asking in subsets]
        patterns += [(everything, used) for used in subsets[1:]]
        for asking, used in patterns:
            seed = next(seeds)
            square, needs_factors = seed % 2 == 0, seed % 3 > 0
            order = 3 if (asking, used) == (everything, everything) else 2
            everybody = [OPS[op].arguments(case, r, world, device, seed) for r in range(world)]
            needs = [i in asking for i in everything]
            leaves = tensors_of(everybody[rank])
            for leaf, need in zip(leaves, needs, strict=True):
                leaf.requires_grad_(need)
            results = tensors_of(OPS[op].wrapper(*everybody[rank], group=world_name()))
            # All outputs, and of several each alone.
            several = range(len(results) if len(results) > 1 else 0)
            kept = [range(len(results)), *((i,) for i in several)][seed % (1 + len(several))]
            given = (needs, needs_factors, used, square, order, kept)
            right = right_derivatives(op, everybody, *given)
            outputs = [results[i] for i in kept]
            factors = [
                vectors_for(op, "outputs", results, rank)[i].requires_grad_(needs_factors)
                for i in kept
            ]
            vectors = vectors_for(op, "leaves", leaves, rank)
            got = derivatives(outputs, factors, leaves, vectors, used, square, order)
            where = (op, case, "asking", asking, "of", kept, *given[2:5])
            expect_gradients(failures, got, right, *where)


@every_op
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_second_order_costs_the_first_no_communication(failures: Failures, op: str) -> None:
    """A backward's calls of this package's ops and PyTorch's collectives; an op stands for those that may be differentiated."""
    wait = "_c10d_functional::wait_tensor"
    gather = "_c10d_functional::all_to_all_single"
    if dist.get_backend() == "nccl":
        gather = "_c10d_functional::all_gather_into_tensor"
    scatter = "_c10d_functional::reduce_scatter_tensor"
    one, gather_gemm, gemm_scatter = (
        f"overlap::{name}" for name in ("_collective", "allgather_gemm", "gemm_reducescatter")
    )
    # Once, and so that it may be differentiated.
    right = {
        "gemm_allreduce": ([], [one]),  # a copy: its derivative is a sum
        "gemm_reducescatter": ([gather_gemm], [gather_gemm]),
        "allgather_gemm": ([gather, scatter, gemm_scatter, wait, wait], [one, one, gemm_scatter]),
        "gemm_alltoall": (["_c10d_functional::all_to_all_single", wait], [one]),
    }[op.partition(".")[0]]
    for create_graph, expected in zip((False, True), right, strict=True):
        arguments = OPS[op].arguments(Case((3,), 5, 4, bias=True), *place())
        leaves = [leaf.requires_grad_() for leaf in tensors_of(arguments)]
        outputs = tensors_of(OPS[op].wrapper(*arguments, group=world_name()))
        total = sum(output.sum() for output in outputs)
        with SeesDispatches() as mode:
            torch.autograd.grad(total, leaves, create_graph=create_graph)
        names = [function.name() for function in mode.seen]
        names = [name for name in names if name.startswith(("overlap::", "_c10d_functional::"))]
        failures.equal(names, expected, op, create_graph)


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_second_order_by_operands_of_allreduce_does_not_communicate(failures: Failures) -> None:
    """Without the output's gradient, as where the first derivative is taken of something linear."""
    device, rank, world = rank_device(), dist.get_rank(), dist.get_world_size()
    input, weight, bias = OPS["gemm_allreduce"].arguments(
        Case((3,), 5, 4, torch.float64, bias=True), rank, world, device
    )
    leaves = [input.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    output = overlap_torch.gemm_allreduce(*leaves)
    if rank == 0:  # nobody else differentiates anything
        factor = keyed_integers((3, 5), device, "factor").double()
        first = torch.autograd.grad(output, leaves[:2], factor, create_graph=True)
        got = torch.autograd.grad([gradient.square().sum() for gradient in first], leaves[:2])
        right = 2 * factor @ (factor.t() @ input), 2 * factor.t() @ (factor @ weight)
        for value, exact in zip(got, right, strict=True):
            failures.expect(difference(value, exact))
    failures.expect(None)


# ----------------------------------------------------------------------------------------------------------------- layers


def hessian_products(
    outputs: Sequence[torch.Tensor],
    factors: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    vectors: Sequence[torch.Tensor],
) -> Gradients:
    """The gradients of sum(factors * outputs ** 2), by leaves and factors.

    First the Hessian, times the leaves' vectors; then the derivative of that, times the same vectors and the factors.
    """
    squares = [output.square() for output in outputs]
    first = torch.autograd.grad(squares, leaves, factors, create_graph=True)
    by = [*leaves, *factors]
    second = torch.autograd.grad(first, by, vectors, create_graph=True)
    again = [*vectors, *(factor.detach() for factor in factors)]
    return [*second, *torch.autograd.grad(second, by, again)]


def whole_layers(
    linears: torch.nn.ModuleList, shape: Sequence[int]
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor], Gradients]:
    """Input, factors, vectors of input and parameters, and the right products by input, parameters and factors."""
    input = integers(*shape, linears[0].in_features, seed=3, dtype=torch.float64).requires_grad_()
    sizes = [linear.out_features for linear in linears]
    factors = [
        integers(*shape, size, seed=30 + i, dtype=torch.float64).requires_grad_()
        for i, size in enumerate(sizes)
    ]
    leaves = [input, *linears.parameters()]
    vectors = [
        integers(*leaf.shape, seed=5 + i, dtype=torch.float64) for i, leaf in enumerate(leaves)
    ]
    right = hessian_products(all_outputs(linears, input), factors, leaves, vectors)
    return input.detach(), [factor.detach() for factor in factors], vectors, right


@pytest.mark.parametrize("whole", [False, True], ids=["parts", "whole"])
@sequence_or_not
@every_kind
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (3, "gloo"), (2, "nccl"))
def test_second_order_of_nn_layers(
    failures: Failures, kind: str, sequence: bool, whole: bool
) -> None:
    form = Form(kind, sequence, whole)
    one = [
        (*size, (bias,)) for size in ((6, (12,)), (7, (5,)), (2, (3,))) for bias in (True, False)
    ]
    for sizes, tokens in itertools.product(
        SEVERAL if kind == "columns" else one, (6, 7) if sequence else (3,)
    ):
        linears = integer_linears(*sizes, torch.float64)
        names = [form.own_name(name) for name, _ in linears.named_parameters()]
        *operands, vectors, right = whole_layers(linears, (tokens, 2))
        layer = form.layer(linears)
        cuts = [form.cut_input, *(partial(form.cut_parameter, name) for name in names)]
        cuts += [form.cut_output] * len(linears)
        input = form.cut_input(operands[0]).clone().requires_grad_()
        factors = [form.cut_output(one).clone().requires_grad_() for one in operands[1]]
        leaves = [input, *(layer.get_parameter(name) for name in names)]
        parts = [
            wrap(cut(vector), leaf.device_mesh, leaf.placements, leaf.shape)
            if isinstance(leaf, DTensor)
            else cut(vector)
            for leaf, cut, vector in zip(leaves, cuts, vectors, strict=False)
        ]
        got = hessian_products(form.call(layer, input, tokens), factors, leaves, parts)
        for value, leaf in zip(got, [*leaves, *factors] * 2, strict=True):
            if isinstance(leaf, DTensor):
                found, right_kind = ((one.shape, one.placements) for one in (value, leaf))
                failures.equal(found, right_kind, *sizes, tokens)
        got = [local_part(value) for value in got]
        right = [cut(value) for cut, value in zip(cuts * 2, right, strict=True)]
        expect_gradients(failures, got, right, *sizes, tokens)


STYLES = (OverlapColwiseParallel, OverlapRowwiseParallel)
LAYOUTS = (Replicate(), Shard(0), Shard(1), Shard(-1))


@pytest.mark.parametrize("shape", [(12, 6, 6, 12), (7, 5, 5, 7)], ids=str)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.ranks((2, "gloo"), (2, "nccl"), long=[(3, "gloo")])
def test_second_order_of_styles(
    failures: Failures, style: type, shape: tuple[int, int, int, int]
) -> None:
    in_features, out_features, *leading = shape
    world = dist.get_world_size()
    linears = torch.nn.ModuleList([integer_linear(in_features, out_features, True, torch.float64)])
    whole, (whole_factor,), vectors, right = whole_layers(linears, leading)

    placed = [Shard(0), Shard(0)] if style is OverlapColwiseParallel else [Shard(1), Replicate()]
    sizes = (*leading, in_features)
    for accepts, returns, distributed, local in itertools.product(
        LAYOUTS, LAYOUTS, (False, True), (False, True)
    ):
        if not distributed and accepts.is_shard() and sizes[accepts.dim] % world != 0:
            continue  # a tensor's sharded dim must be the same on every rank
        where = (style.__name__, shape, accepts, "to", returns, distributed, local)
        layer = parallelize_module(
            copy.deepcopy(linears[0]),
            mesh(),
            style(input_layouts=accepts, output_layouts=returns, use_local_output=local),
        )
        input = cut(whole, accepts, distributed).clone().requires_grad_()
        factor = cut(whole_factor, returns, not local).clone().requires_grad_()
        got = hessian_products(
            [layer(input)],
            [factor],
            [input, *layer.parameters()],
            [
                cut(vector, placement, together)
                for vector, placement, together in zip(
                    vectors, [accepts, *placed], [distributed, True, True], strict=True
                )
            ],
        )
        for i, (value, exact, placement) in enumerate(
            zip(got, right, [accepts, *placed, returns] * 2, strict=True)
        ):
            exact = exact if isinstance(value, DTensor) else cut(exact, placement)
            failures.expect(difference(whole_of(value), exact), "by", i, *where)


# ------------------------------------------------------------------------------------------------- transforms and modes


def equal_arguments(op: str, rank: int, world: int) -> Arguments:
    """Every rank's outputs have one shape: a Jacobian's rows are taken on all of them at the same time."""
    arguments = OPS[op].arguments(
        Case((2,), 3, 2, torch.float64, bias=True), rank, world, rank_device()
    )
    if op == "gemm_alltoall":
        rows = keyed_integers((world, 2), rank_device(), "rows", rank).double()
        arguments[0], arguments[2], arguments[3] = rows, [1] * world, [1] * world
    return arguments


def jacobian(output: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """By PyTorch's autograd, element by element."""
    by = [
        torch.autograd.grad(element, leaf, retain_graph=True, allow_unused=True)[0]
        for element in output.flatten()
    ]
    by = [torch.zeros_like(leaf) if row is None else row for row in by]
    return torch.stack(by).view(*output.shape, *leaf.shape)


@every_op
@some_ranks
def test_transforms_of_ops(failures: Failures, op: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    everybody = [equal_arguments(op, r, world) for r in range(world)]
    mine = tensors_of(everybody[rank])
    asking = [map_tensors(lambda t: t.clone().requires_grad_(), own) for own in everybody]
    leaves = tensors_of(asking[rank])
    results = OPS[op].meaning(asking, math.inf)
    # Where it is replicated, this rank's copy, with its bias.
    counted = results[rank : rank + 1] if OPS[op].replicated else results

    def first_output(call: Callable[..., Any], *tensors: torch.Tensor) -> torch.Tensor:
        given = iter(tensors)
        arguments = map_tensors(lambda _: next(given), everybody[rank])
        return tensors_of(call(*arguments, group=world_name()))[0]

    function = partial(first_output, OPS[op].wrapper)

    places = tuple(range(len(leaves)))
    total = sum(of_one[0].square().sum() for of_one in counted)
    right = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
    right = [
        torch.zeros_like(leaf) if g is None else g for g, leaf in zip(right, leaves, strict=True)
    ]
    for way, call in (("function", function), ("op", partial(first_output, OPS[op].operator))):
        got = torch.func.grad(lambda *t: call(*t).square().sum(), places)(*mine)  # noqa: B023
        expect_gradients(failures, list(got), right, op, "grad", way)
        output, backward = torch.func.vjp(call, *mine)
        failures.expect(difference(output, results[rank][0]), op, "vjp's output")
        got = backward(2 * output)
        expect_gradients(failures, list(got), right, op, "vjp", way)

    rows = torch.stack([of_one[0] for of_one in counted]).sum(0)
    got = torch.func.jacrev(function, places)(*mine)
    for i, (value, leaf) in enumerate(zip(got, leaves, strict=True)):
        failures.expect(difference(value, jacobian(rows, leaf)), op, "jacrev by", i)
    # By the input: the gradient's Jacobian, and the derivative that plain autograd takes of a transform's gradient.
    everywhere = [tensors_of(own)[0] for own in asking]
    firsts = torch.autograd.grad(total, everywhere, create_graph=True)
    exact = jacobian(torch.stack(firsts).sum(0), leaves[0])
    by_input = torch.func.grad(lambda *t: function(*t).square().sum())
    got = torch.func.jacrev(by_input)(*mine)
    failures.expect(difference(got, exact), op, "jacrev of grad")
    outer = mine[0].clone().requires_grad_()
    (got,) = torch.autograd.grad(by_input(outer, *mine[1:]).square().sum(), outer)
    (exact,) = torch.autograd.grad(
        sum(first.square().sum() for first in firsts), leaves[0], retain_graph=True
    )
    failures.expect(difference(got, exact), op, "autograd of grad")
    got = torch.func.grad(lambda *t: by_input(*t).square().sum())(*mine)
    failures.expect(difference(got, exact), op, "grad of grad")

    for i in places:
        batch = torch.stack([mine[i], 2 * mine[i], 0 * mine[i]], -1)
        in_dims = tuple(-1 if place == i else None for place in places)
        got = torch.func.vmap(function, in_dims)(*mine[:i], batch, *mine[i + 1 :])
        for j, value in enumerate(got):
            exact = function(*mine[:i], batch[..., j], *mine[i + 1 :])
            failures.expect(difference(value, exact), op, "vmap of", i, "element", j)


@some_ranks
def test_transforms_of_layers(failures: Failures) -> None:
    """By parameters and input of a column and a row layer, one after the other."""
    (first,), (second,) = (
        integer_linears(*sizes, (True,), torch.float64) for sizes in ((2, (7,)), (7, (5,)))
    )
    for kind, (sequence, gather) in itertools.product(
        ("column", "columns"), ((False, False), (True, False), (False, True))
    ):
        form = Form(kind, sequence, gather)
        up = form.layer(torch.nn.ModuleList([first]))
        down = Form("row", sequence, gather).layer(torch.nn.ModuleList([second]))
        model = torch.nn.Sequential(up, down)
        cut = form.cut_input
        whole = integers(6, 2, seed=3, dtype=torch.float64).requires_grad_()
        output = second(first(whole).square())
        by_input, by_bias = torch.autograd.grad(
            output.square().sum(), (whole, second.bias), create_graph=True
        )
        (twice,) = torch.autograd.grad(by_input.square().sum(), whole, retain_graph=True)
        where = (kind, "sequence", sequence, "gathered", gather)

        def hidden(input: torch.Tensor, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
            result = torch.func.functional_call(model[0], parameters["0"], (input,))  # noqa: B023
            return result[0] if isinstance(result, tuple) else result

        def loss(input: torch.Tensor, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
            given = (hidden(input, parameters).square(),)
            result = torch.func.functional_call(model[1], parameters["1"], given)  # noqa: B023
            return result.square().sum()

        parameters = {
            name: {key: local_part(value.detach()) for key, value in layer.named_parameters()}
            for name, layer in model.named_children()
        }
        input = cut(whole.detach())
        got, by_parameters = torch.func.grad(loss, (0, 1))(input, parameters)
        failures.expect(difference(got, cut(by_input.detach())), "grad by input", *where)
        got = by_parameters["1"]["bias"]
        failures.expect(difference(got, by_bias), "grad by bias", *where)

        def gradient(input: torch.Tensor) -> torch.Tensor:
            return torch.func.grad(loss)(input, parameters)  # noqa: B023

        got = torch.func.grad(lambda t: gradient(t).square().sum())(input)
        failures.expect(difference(got, cut(twice)), "grad of grad", *where)
        # Every rank's first element at the same time, and so on.
        got = torch.func.jacrev(gradient)(input)
        parts = by_input.chunk(dist.get_world_size()) if sequence else [by_input]
        right = jacobian(torch.stack(list(parts)).sum(0), whole)
        right = torch.stack([cut(row) for row in right.flatten(0, 1)]).view_as(got)
        failures.expect(difference(got, right), "jacrev of grad", *where)
        both = torch.func.vmap(hidden, (-1, None))(torch.stack([input, 2 * input], -1), parameters)
        for i, value in enumerate(both):
            right = hidden((i + 1) * input, parameters)
            failures.expect(difference(value, right), "vmap", i, *where)


@every_op
@some_ranks
def test_second_order_in_modes(failures: Failures, op: str) -> None:
    """Second derivatives through a checkpoint and under autocast."""
    device, rank, world = rank_device(), dist.get_rank(), dist.get_world_size()
    case = Case((2,), 2, 2, torch.float64, bias=True)  # exact in bfloat16 too
    everybody = [OPS[op].arguments(case, r, world, device) for r in range(world)]
    count = len(tensors_of(everybody[rank]))
    right = right_derivatives(op, everybody, [True] * count, True, range(count), False, 2)

    def through_checkpoint(*arguments):
        return checkpoint(OPS[op].wrapper, *arguments, group=world_name(), use_reentrant=False)

    def under_autocast(*arguments):
        with torch.autocast(device.type, torch.bfloat16):
            return OPS[op].wrapper(*arguments, group=world_name())

    for call, dtype, wide in (
        (through_checkpoint, torch.float64, torch.float64),
        (under_autocast, torch.float32, torch.bfloat16),
    ):
        arguments = map_tensors(lambda t, d=dtype: t.to(d).requires_grad_(), everybody[rank])
        leaves = tensors_of(arguments)
        outputs = tensors_of(call(*arguments))
        factors = [
            factor.to(wide).requires_grad_() for factor in vectors_for(op, "outputs", outputs, rank)
        ]
        vectors = [vector.to(dtype) for vector in vectors_for(op, "leaves", leaves, rank)]
        got = derivatives(outputs, factors, leaves, vectors, range(count), False, 2)
        got = [None if value is None else value.double() for value in got]
        expect_gradients(failures, got, right, op, call.__name__)


def second_of_compiled(function: Callable[..., torch.Tensor], leaves: list[torch.Tensor]) -> str:
    """The message of a second derivative of a compiled function."""
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")

    def differentiate() -> None:
        first = torch.autograd.grad(compiled().square().sum(), leaves, create_graph=True)
        torch.autograd.grad(first, leaves, [torch.ones_like(by) for by in first])

    return message_of(differentiate)


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_second_order_of_compiled_raises(failures: Failures) -> None:
    def of_op(op: str) -> str:
        arguments = OPS[op].arguments(Case((3,), 5, 4), *place())
        leaves = [leaf.requires_grad_() for leaf in tensors_of(arguments)]
        call = OPS[op].wrapper
        return second_of_compiled(
            lambda: tensors_of(call(*arguments, group=world_name()))[0], leaves
        )

    def of_layer(layer: torch.nn.Module) -> str:
        input = torch.ones(3, 6, device=rank_device(), requires_grad=True)
        return second_of_compiled(lambda: layer(input), [input, *layer.parameters()])

    linear = integer_linear(6, 4, True)
    for i, said in enumerate(
        (
            of_op("gemm_allreduce"),
            of_op("gemm_alltoall"),
            of_layer(ColumnParallelLinear.from_linear(linear, gather_output=True)),
            of_layer(RowParallelLinear.from_linear(linear, input_is_parallel=False)),
        )
    ):
        failures.holds("does not currently support double backward", said, i)
