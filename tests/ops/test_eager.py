"""The short way in: what it takes is right, what it leaves to torch.ops gets there, and nobody notices which it was."""

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad

import overlap_torch
import scaled
from checks import Failures, message_of
from modes import SeesDispatches, SeesFunctions
from operands import Case, place, rank_device, world_name
from ops import OPS, every_op, map_tensors, tensors_of
from overlap_torch._ops import eager

CASES = [
    Case((6,), 5, 7), Case((), 9, 4), Case((2, 3), 4, 8, weight_layout="n_contiguous"), Case((0,), 4, 5),
    Case((3,), 4, 0), Case((9,), 8, 16, input_layout="transposed"),
]  # fmt: skip

SCALED_CASES = [
    scaled.Case((6,), 5, 7), scaled.Case((2, 3), 4, 8, "tensor", shared=True), scaled.Case((6,), 16, 200, "block"),
    scaled.Case((0,), 4, 5, "tensor"), scaled.Case((3,), 4, 6, pair=scaled.PAIRS[1], bias=True, named=False),
    scaled.Case((6,), 16, 32, output=torch.float32, bias=True, fast=True),
]  # fmt: skip

SCALED = {f"scaled {op}": scaled.Overload(op) for op in scaled.OPS}
FUNCTIONS = {**OPS, **SCALED}

every_function = pytest.mark.parametrize("op", list(FUNCTIONS))


def function_of(op: str) -> Callable[..., Any]:
    """The function of the op's arguments and the group's name; those between them, if there are any, have their defaults."""
    function = eager.short_path(FUNCTIONS[op].operator)
    schema = FUNCTIONS[op].operator._schema.arguments[len(arguments_of(op, small_case(op))) : -1]
    defaults = [one.default_value for one in schema]
    return lambda *given: function((*given[:-1], *defaults), given[-1])


def arguments_of(op: str, case: Case | scaled.Case, seed: int = 0) -> list[Any]:
    return FUNCTIONS[op].arguments(case, *place(), seed)


def cases_of(op: str) -> list[Case] | list[scaled.Case]:
    if op in SCALED:
        return SCALED_CASES
    kinds = ((False, torch.bfloat16), (True, torch.float32))
    return [
        case.with_(dtype=dtype, bias=bias) for case in OPS[op].of(CASES) for bias, dtype in kinds
    ]


def small_case(op: str) -> Case | scaled.Case:
    if op in SCALED:
        return scaled.Case((4,), 3, 4, bias=True)
    return Case((4,), 3, 4, torch.float32, bias=True)


@every_function
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (1, "nccl"), (2, "nccl"))
def test_eager_results_are_right(failures: Failures, op: str) -> None:

    def expect_same(results: Any, right: Any, *labels: Any) -> None:
        left, right = (list(map(scaled.as_comparable, tensors_of(one))) for one in (results, right))
        failures.expect_equal(left, right, *labels)

    for seed, case in enumerate(cases_of(op)):
        arguments = arguments_of(op, case, seed)
        # A parameter that wants a gradient is nobody's business where none is recorded.
        with torch.no_grad():
            parameters = map_tensors(torch.nn.Parameter, arguments)
            outputs = function_of(op)(*parameters, world_name())
        for given in (arguments, map_tensors(torch.Tensor.clone, arguments)):
            again = function_of(op)(*given, world_name())
            failures.equal(type(again), type(outputs), op, case)
            expect_same(outputs, again, "again", op, case)
        expect_same(outputs, FUNCTIONS[op].expected(case, *place(), seed), op, case)


class Subclass(torch.Tensor):
    """A tensor with a meaning of its own."""


def with_tensor(arguments: list[Any], index: int, change: Callable[[Any], Any]) -> list[Any]:
    """The arguments with one of their tensors, by its place among them, changed."""
    places = iter(range(len(tensors_of(arguments))))
    return map_tensors(lambda t: change(t) if next(places) == index else t, arguments)


@every_function
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (2, "nccl"))
def test_eager_leaves_the_rest_to_torch(failures: Failures, op: str) -> None:
    """Calls that the short way must not take. One rank alone makes them: none communicates."""
    failures.expect(None)
    if dist.get_rank() > 0:
        return
    group = world_name()
    arguments = arguments_of(op, small_case(op))

    def expect_declined(what: str, given: list[Any], name: Any = group) -> None:
        failures.expect("taken" if function_of(op)(*given, name) is not None else None, what)

    for i in range(len(tensors_of(arguments))):
        changes = {
            "has a meaning of its own": lambda t: t.as_subclass(Subclass),
            "is a number": lambda t: 3,
            "is a NumPy array": lambda t: t.float().cpu().numpy(),
        }
        for what, change in changes.items():
            expect_declined(f"tensor {i} {what}", with_tensor(arguments, i, change))
        with forward_ad.dual_level():
            dual = lambda t: forward_ad.make_dual(t, torch.ones_like(t))  # noqa: E731
            expect_declined(f"tensor {i} has a tangent", with_tensor(arguments, i, dual))
            dual = lambda t: forward_ad.make_dual(t, torch.ones_like(t)).requires_grad_()  # noqa: E731
            expect_declined(f"tensor {i} has both", with_tensor(arguments, i, dual))
    with SeesFunctions():
        expect_declined("a mode sees functions", arguments)
    with SeesDispatches():
        expect_declined("a mode sees operators", arguments)

    def transformed(number: torch.Tensor) -> torch.Tensor:
        expect_declined("a function transform", arguments)
        return number

    torch.func.grad(transformed)(torch.zeros(()))
    expect_declined("no group's name", arguments, None)
    expect_declined("a name that is no UTF-8", arguments, "\ud800")
    expect_declined("an argument too many", [*arguments, None])
    expect_declined("an argument too few", arguments[:-1])
    for parameter, values in wrong_values().items():
        for position in places_of(op, parameter):
            for value in values:
                given = [*arguments[:position], value, *arguments[position + 1 :]]
                expect_declined(f"{parameter} {value}", given)


class Refuses:
    """In the place of an operator."""

    def __call__(self, *arguments: Any, **keywords: Any) -> None:
        raise AssertionError("the call went through torch.ops")


def differentiate(run: Callable[..., Any], arguments: list[Any], which: Sequence[int]) -> list[Any]:
    """Outputs and gradients of the call, where some of the arguments' tensors, by their places, require grad."""
    leaves = tensors_of(arguments)
    given = list(arguments)
    for i in which:
        given = with_tensor(given, i, lambda t: t.detach().clone().requires_grad_())
    wanted = [each for each in tensors_of(given) if each.requires_grad]
    assert len(leaves) == len(tensors_of(given)) and len(wanted) == len(which)
    outputs = tensors_of(run(*given, group=world_name()))
    recorded = [each for each in outputs if each.requires_grad]
    seeds = [integers_like(each) for each in recorded]
    gradients = torch.autograd.grad(recorded, wanted, seeds)
    return [*(each.detach() for each in outputs), *gradients]


def integers_like(tensor: torch.Tensor) -> torch.Tensor:
    """Small numbers, which differ along every dim."""
    numbers = torch.arange(tensor.numel(), device=tensor.device) % 5 - 2
    return numbers.to(tensor.dtype).view(tensor.shape)


@every_op
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (2, "nccl"))
def test_eager_records_gradients(failures: Failures, op: str) -> None:
    """A call that records takes the short way, and is what torch.ops makes of it: outputs and gradients, bit for bit."""
    module = sys.modules[FUNCTIONS[op].wrapper.__module__]
    path = module._op_weights if op.endswith(".weights") else module._op
    for seed, case in enumerate(cases_of(op)):
        arguments = arguments_of(op, case, seed)
        count = len(tensors_of(arguments))
        for which in (range(count), *((i,) for i in range(count))):
            for casts in (False, True):
                with torch.autocast(rank_device().type, torch.float16, enabled=casts):
                    right = differentiate(FUNCTIONS[op].operator, arguments, which)
                    with pytest.MonkeyPatch.context() as patch:
                        patch.setattr(path, "overload", Refuses())
                        results = differentiate(FUNCTIONS[op].wrapper, arguments, which)
                failures.expect_equal(results, right, op, case, which, casts)


@every_op
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_eager_backward_may_be_compiled(failures: Failures, op: str) -> None:
    """Compiled autograd takes what calls have recorded: the gradients are those without it."""
    from torch._dynamo import compiled_autograd

    case = small_case(op).with_(bias=False)
    arguments = arguments_of(op, case)

    def gradients(context: Any) -> list[Any]:
        given = map_tensors(lambda t: t.detach().clone().requires_grad_(), arguments)
        outputs = tensors_of(FUNCTIONS[op].wrapper(*given, group=world_name()))
        loss = sum((each * integers_like(each)).sum() for each in outputs)
        with context:
            loss.backward()
        return [each.grad for each in tensors_of(given)]

    torch._dynamo.reset()
    enabled = compiled_autograd._enable(torch.compile(backend="eager"))
    failures.expect_equal(gradients(enabled), gradients(contextlib.nullcontext()), op)


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_eager_keeps_counts(failures: Failures) -> None:
    """Backward goes by the counts of the call, whatever became of the lists since."""
    device, world = rank_device(), dist.get_world_size()
    input = torch.ones(2 * world, 4, device=device, requires_grad=True)
    weight = torch.ones(3, 4, device=device)
    send_rows, recv_rows = [2] * world, [2] * world
    output = overlap_torch.gemm_alltoall(input, weight, send_rows, recv_rows, group=world_name())
    send_rows[0] = recv_rows[0] = 1
    output.sum().backward()
    failures.expect_equal([input.grad], [torch.full_like(input, 3)])


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_eager_wrong_number_of_biases_is_an_error(failures: Failures) -> None:
    """For two weights: the same message whether a gradient would be recorded or not, and whichever way in."""
    device, group = rank_device(), world_name()
    weights = [torch.ones(size, 4, device=device) for size in (3, 5)]
    bias = torch.ones(3, device=device)
    for biases in ([None], [bias], [bias, None, None]):
        for needs_grad in (False, True):
            input = torch.ones(2, 4, device=device, requires_grad=needs_grad)
            for call in (overlap_torch.allgather_gemm, OPS["allgather_gemm.weights"].operator):
                message = message_of(call, input, weights, biases, group=group)
                right = (
                    f"biases must be empty or 2, one for each weight, but there are {len(biases)}"
                )
                failures.holds(right, message, len(biases), needs_grad)


def wrong_values() -> dict[str, list[Any]]:
    """Values that no parameter of that name takes."""
    world = dist.get_world_size()
    counts = [5, "12", [1.0] * world, [2**70] * world, [torch.float32] * world, {1, 2}, None]
    recipes = ["RowWise", 1.0, 2**70, torch.nn.functional.ScalingType.RowWise]
    flags = [0, 1, None, "True"]
    return {
        "send_rows": counts, "recv_rows": counts, "recipe_input": recipes, "recipe_weight": recipes,
        "output_dtype": ["bfloat16", float], "use_fast_accum": flags, "shared_scale_input": flags,
    }  # fmt: skip


def places_of(op: str, parameter: str) -> list[int]:
    """Where the op has a parameter of that name."""
    names = [argument.name for argument in FUNCTIONS[op].operator._schema.arguments]
    return [place for place, name in enumerate(names) if name == parameter]


@every_function
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_eager_hides_no_call(failures: Failures, op: str) -> None:
    """Modes, a subclass and a tracer see a call of the wrapper."""
    arguments = arguments_of(op, small_case(op))
    operator = FUNCTIONS[op].operator
    group = world_name()
    for mode in (SeesFunctions(), SeesDispatches()):
        with mode:
            FUNCTIONS[op].wrapper(*arguments, group=group)
        failures.holds(operator, mode.seen, mode)
    outputs = FUNCTIONS[op].wrapper(
        *with_tensor(arguments, 0, lambda t: t.as_subclass(Subclass)), group=group
    )
    kind = type(tensors_of(outputs)[0])
    failures.expect(None if kind is Subclass else f"returns a {kind}", "subclass")
    if op.endswith("weights"):
        return  # torch.jit.trace takes no list of optional tensors

    def traced(input: torch.Tensor) -> torch.Tensor:
        given = with_tensor(arguments, 0, lambda _: input)
        return tensors_of(FUNCTIONS[op].wrapper(*given, group=group))[0]

    trace = torch.jit.trace(traced, (arguments[0],), check_trace=False)
    failures.holds(operator._schema.name, str(trace.graph), "traced")


@every_function
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_eager_module_may_be_missing(failures: Failures, op: str) -> None:
    """As where the module is built for another Python."""
    case = small_case(op)
    arguments = arguments_of(op, case)
    expected = FUNCTIONS[op].expected(case, *place())
    module = sys.modules[FUNCTIONS[op].wrapper.__module__]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "overlap_torch._eager", None)
        spec = importlib.util.spec_from_file_location("eager_of_another_python", eager.__file__)
        other = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(other)
        untouched = other.recorded(1, False) == 1  # outputs as they are
        failures.expect(None if untouched else "changes outputs", "recorded")
        short = other.short_path(FUNCTIONS[op].operator)
        failures.expect(None if short(1, 2) is None else "takes a call", "short path")
        for path in [one for one in vars(module).values() if isinstance(one, eager.Op)]:
            patch.setattr(path, "short", short)
        outputs = tensors_of(FUNCTIONS[op].wrapper(*arguments, group=world_name()))
    failures.expect_equal(
        *(list(map(scaled.as_comparable, one)) for one in (outputs, expected)), op
    )
