"""The parallel layers: `torch.nn.Linear`s over a group, bit for bit on integer data."""

import copy
import itertools
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from checks import Failures, message_of
from layers import OPS_OF_LAYERS, integers, my_part, my_tokens, ops_of_a_step
from modes import SeesDispatches
from operands import difference, rank_device, subgroup, world_name
from overlap_torch.nn import ColumnParallelLinear, RowParallelLinear, token_slice
from parallel_layers import (
    SEVERAL,
    TOKENS,
    Form,
    all_outputs,
    check_beside_linears,
    every_kind,
    integer_linears,
    sequence_or_not,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("whole", [False, True], ids=["parts", "whole"])
@sequence_or_not
@every_kind
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (3, "gloo"), (1, "nccl"), (2, "nccl"))
def test_nn_layers_are_linears(
    failures: Failures, kind: str, sequence: bool, whole: bool, dtype: torch.dtype
) -> None:
    """Outputs and gradients beside the whole layers', of several outputs also where only some are used."""
    form = Form(kind, sequence, whole)
    for sizes, tokens in itertools.product(form.sizes, TOKENS if sequence else TOKENS[:1]):
        linears = integer_linears(*sizes, dtype)
        layer = form.layer(linears)
        where = (*sizes, "tokens", tokens)
        if form.is_column:
            parts = tuple(len(my_part(torch.empty(size), 0)) for size in sizes[1])
            right = parts if kind == "columns" else parts[0]
            failures.equal(layer.local_out_features, right, *where)
        every = range(len(linears))
        for used in (every, every[1:], every[:1]) if len(every) > 1 else (every,):
            given = (layer, layer, linears, tokens, used, *where, "used", used)
            check_beside_linears(failures, form, *given)


@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (3, "gloo"))
def test_nn_token_slice_is_the_cut_of_any_number(failures: Failures) -> None:
    for tokens in (0, 1, 2, 3, 7, 12):
        rows = torch.arange(tokens)
        failures.expect(difference(rows[token_slice(tokens)], my_tokens(rows)), tokens)


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_nn_layers_run_the_ops(failures: Failures) -> None:
    """The ops that run, forward and backward: results alone would not show that nothing overlaps."""
    for kind, sequence, forward, backward in OPS_OF_LAYERS:
        form = Form(kind, sequence)
        layer = form.layer(integer_linears(6, (12,), (True,)))
        input = form.cut_input(integers(6, 6, seed=3)).clone().requires_grad_()
        _, *called = ops_of_a_step(lambda: form.call(layer, input, 6))  # noqa: B023, called at once
        failures.equal(called, [forward, backward], form)


def communicated(job: Callable[[], object]) -> Counter[str]:
    """The collectives and this package's ops that a job calls, a gather by all-to-all as the gather that it is."""
    with SeesDispatches() as mode:
        job()
    calls: Counter[str] = Counter()
    for function in mode.seen:
        namespace, _, name = function.name().partition("::")
        if namespace == "overlap" or ("c10d" in namespace and name != "wait_tensor"):
            gathers = name in ("all_to_all_single", "all_gather_into_tensor")
            calls["all_gather" if gathers else name] += 1
    return calls


@pytest.mark.ranks((2, "gloo"), (3, "gloo"), (2, "nccl"))
def test_nn_several_outputs_communicate_once(failures: Failures) -> None:
    for sizes, sequence, gather in itertools.product(SEVERAL, (False, True), (False, True)):
        layer = Form("columns", sequence, gather).layer(integer_linears(*sizes))
        input = integers(4 if sequence else 4 * dist.get_world_size(), sizes[0], seed=3)
        where = (*sizes, sequence, gather)
        op = "allgather_gemm.weights" if len(sizes[1]) > 1 else "allgather_gemm"
        forward = {op: 1} if sequence else {}
        forward |= {"all_gather": 1} if gather else {}
        of_weights = {"all_gather": 1} if sequence else {}  # of the input
        of_input = {"gemm_reducescatter" if sequence else "gemm_allreduce": 1}
        for trains, needed in ((True, True), (True, False), (False, True)):
            layer.requires_grad_(trains)
            given = input.clone().requires_grad_(needed)
            outputs = []
            calls = communicated(lambda: outputs.extend(layer(given)))  # noqa: B023, called at once
            failures.equal(calls, forward, "forward", *where)
            calls = communicated(sum(output.sum() for output in outputs).backward)
            right = (of_weights if trains else {}) | (of_input if needed else {})
            where = (*where, trains, needed)
            failures.equal(calls, right, "backward", *where)


@every_kind
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (2, "nccl"))
def test_nn_layers_give_gradients_to_those_that_ask(failures: Failures, kind: str) -> None:
    """Gradients come out for those that ask, whoever else asks."""
    sizes = (6, (5, 3), (True, True)) if kind == "columns" else (6, (8,), (True,))
    count = 1 + 2 * len(sizes[1])
    for sequence, needs in itertools.product(
        (False, True), itertools.product((False, True), repeat=count)
    ):
        form = Form(kind, sequence)
        layer = form.layer(integer_linears(*sizes))
        mine = form.cut_input(integers(6, 6, seed=3)).detach().clone()
        tensors = (mine, *layer.parameters())
        for tensor, needed in zip(tensors, needs, strict=True):
            tensor.requires_grad_(needed)
        outputs = form.call(layer, mine, 6)
        if any(needs):
            sum(output.sum() for output in outputs).backward()
        failures.equal(tuple(tensor.grad is not None for tensor in tensors), needs, sequence, needs)


MANNERS = [
    (5, (6, 12), (True, True)),  # parts of one size on 2 and 3 ranks
    (7, (5, 3, 1), (True, False, True)),
]


@every_kind
@sequence_or_not
@pytest.mark.ranks((2, "gloo"), (2, "nccl"), long=[(3, "gloo")])
def test_nn_layers_in_other_manners(failures: Failures, kind: str, sequence: bool) -> None:
    """Compiled with several numbers of tokens, checkpointed, under autocast, in eval, in float64, and over other groups."""
    second = subgroup(tuple(range(dist.get_world_size())), "second")
    for number, (in_features, out_features, bias) in enumerate(MANNERS):
        count = len(out_features) if kind == "columns" else 1
        sizes = (in_features, out_features[:count], bias[:count])
        form, linears = Form(kind, sequence, number == sequence), integer_linears(*sizes)
        layer, every = form.layer(linears), range(count)

        def beside(run, tokens, used, *where, linears=linears, layer=layer, form=form):
            check_beside_linears(failures, form, run, layer, linears, tokens, used, form, *where)

        def checkpointed(*arguments, layer=layer):
            return checkpoint(layer, *arguments, use_reentrant=False)

        beside(checkpointed, 5, every, "checkpointed")
        beside(layer.eval(), 5, every, "eval")
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        for tokens in (12, 7):
            beside(compiled, tokens, every, "compiled")
        beside(compiled, 7, every[:1], "compiled, one used")

        # Small integers are exact in bfloat16 too.
        halves, whole = copy.deepcopy(linears).bfloat16(), integers(4, in_features, seed=3)
        mine = form.cut_input(whole).clone().requires_grad_()
        layer.zero_grad()
        for run in (layer, compiled):
            with torch.autocast(rank_device().type, torch.bfloat16):
                outputs = form.call(run, mine, 4)
            for output, right in zip(outputs, all_outputs(halves, whole.bfloat16()), strict=True):
                right = form.cut_output(right.detach())
                failures.expect(difference(output, right), "autocast", form)
            sum(output.sum() for output in outputs).backward()
        dtypes = {mine.grad.dtype, *(parameter.grad.dtype for parameter in layer.parameters())}
        failures.equal(dtypes, {torch.float32}, "autocast", form)

        for group in (None, world_name(), second):
            outputs = form.call(form.layer(linears, group=group), mine, 4)
            right = [form.cut_output(output.detach()) for output in all_outputs(linears, whole)]
            failures.expect_equal(outputs, right, "group", group)
        doubles = copy.deepcopy(linears).double()
        beside(layer.double(), 5, every, "double", linears=doubles)


def bad_calls() -> list[tuple[Callable[[], object], tuple[str, ...]]]:
    """Calls, and the parts of their messages."""
    device, rank, column, row = (
        rank_device(), dist.get_rank(), ColumnParallelLinear, RowParallelLinear,
    )  # fmt: skip
    ones = torch.ones
    linears = [torch.nn.Linear(size, 4, device="meta") for size in (6, 8)]
    normed = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(6, 4))
    one, cut = (column(12, 7, sequence_parallel=cut, device=device) for cut in (False, True))
    several, rows = column(6, (4, 2), device=device), row(12, 7, device=device)
    other_shape = {**several.state_dict(), "weights.1": torch.zeros(5, 7)}
    return [
        (lambda: rows(ones(3, 5, device=device)), ("(3, 5)", " 6 ")),
        (lambda: rows(ones(3, 12, device=device)), ("(3, 12)", " 6 ")),
        (lambda: one(ones(3, 6, device=device)), ("(3, 6)", " 12 ")),
        (lambda: one(ones(3, 12, device=device), 6), ("sequence_parallel",)),
        (lambda: cut(ones(3, 12, device=device), 17), ("17", f"holds {9 - rank}")),
        (lambda: cut(ones(12, device=device)), ("tokens",)),
        (lambda: column(6, []), ("one number or more", "[]")),
        (lambda: column.from_linear([]), ("one number or more", "[]")),
        (lambda: column(6, (4, 0)), ("positive", "(4, 0)")),
        (lambda: column(6, [4, -2]), ("positive", "[4, -2]")),
        (lambda: column(6, ("q", 4)), ("sequence of ints", "'q'")),
        (lambda: column(6, (4, 2), (True,)), ("(True,)", "(4, 2)")),
        (lambda: column(6, 4, (True, False)), ("out_features=4",)),
        (lambda: column.from_linear(linears), ("[6, 8]",)),
        (lambda: column.from_linear(normed), ("parametrizations.weight.original0",)),
        (lambda: row.from_linear(normed), ("parametrized",)),
        (lambda: row(6, (4, 2)), ("integer",)),
        (lambda: several(ones(3, 5, device=device)), ("(3, 5)",)),
        (lambda: several(ones(3, 6, device=device), 3), ("sequence_parallel",)),
        (lambda: several.load_state_dict(other_shape), ("size mismatch for weights.1",)),
    ]


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_nn_layers_name_what_is_wrong(failures: Failures) -> None:
    for call, parts in bad_calls():
        failures.says(message_of(call), parts, parts)
