"""The short way in: what it takes is right, what it leaves to torch.ops gets there, and nobody notices which it was."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad

from checks import Failures
from modes import SeesDispatches, SeesFunctions
from operands import Case, rank_device, world_name
from ops import OPS, map_tensors, tensors_of
from overlap_torch import _eager
from overlap_torch._ops import eager

CASES = [
    Case((6,), 5, 7), Case((), 9, 4), Case((2, 3), 4, 8, weight_layout="n_contiguous"), Case((0,), 4, 5),
    Case((3,), 4, 0), Case((9,), 8, 16, input_layout="transposed"),
]  # fmt: skip

every_op = pytest.mark.parametrize("op", list(OPS))


def function_of(op: str) -> Callable[..., Any]:
    return getattr(_eager, op.replace(".", "_"))


def arguments_of(op: str, case: Case, seed: int = 0) -> list[Any]:
    return OPS[op].arguments(case, dist.get_rank(), dist.get_world_size(), rank_device(), seed)


def check_results(op: str) -> tuple[int, list[str]]:
    failures = Failures()
    rank, world, device = dist.get_rank(), dist.get_world_size(), rank_device()
    for seed, case in enumerate(OPS[op].of(CASES)):
        for bias, dtype in ((False, torch.bfloat16), (True, torch.float32)):
            case = case.with_(dtype=dtype, bias=bias)
            arguments = arguments_of(op, case, seed)
            expected = OPS[op].expected(case, rank, world, device, seed)
            # A parameter that wants a gradient is nobody's business where none is recorded.
            with torch.no_grad():
                parameters = map_tensors(torch.nn.Parameter, arguments)
                outputs = function_of(op)(*parameters, world_name())
            for given in (arguments, map_tensors(torch.Tensor.clone, arguments)):
                again = function_of(op)(*given, world_name())
                failures.expect(None if type(again) is type(outputs) else "another type", op, case)
                failures.expect_equal(tensors_of(outputs), tensors_of(again), "again", op, case)
            failures.expect_equal(tensors_of(outputs), expected, op, case)
    return failures.result()


@every_op
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (1, "nccl"), (2, "nccl"))
def test_eager_results_are_right(ranks, op):
    ranks.expect_no_failures(check_results, op)


class Subclass(torch.Tensor):
    """A tensor with a meaning of its own."""


def with_tensor(arguments: list[Any], index: int, change: Callable[[Any], Any]) -> list[Any]:
    """The arguments with one of their tensors, by its place among them, changed."""
    places = iter(range(len(tensors_of(arguments))))
    return map_tensors(lambda t: change(t) if next(places) == index else t, arguments)


def calls_declined(op: str) -> list[str]:
    """Calls that the short way must not take; those that it took. One rank alone makes them: none communicates."""
    if dist.get_rank() > 0:
        return []
    taken: list[str] = []
    group = world_name()
    arguments = arguments_of(op, Case((4,), 3, 4, torch.float32, bias=True))

    def expect_declined(what: str, given: list[Any], name: Any = group) -> None:
        if function_of(op)(*given, name) is not None:
            taken.append(what)

    for i in range(len(tensors_of(arguments))):
        changes = {
            "wants a gradient": lambda t: t.detach().requires_grad_(),
            "has a meaning of its own": lambda t: t.as_subclass(Subclass),
            "is a number": lambda t: 3,
            "is a NumPy array": lambda t: t.cpu().numpy(),
        }
        for what, change in changes.items():
            expect_declined(f"tensor {i} {what}", with_tensor(arguments, i, change))
        with forward_ad.dual_level():
            dual = lambda t: forward_ad.make_dual(t, torch.ones_like(t))  # noqa: E731
            expect_declined(f"tensor {i} has a tangent", with_tensor(arguments, i, dual))
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
    if op == "gemm_alltoall":
        input, weight, send, recv, bias = arguments
        for counts in (5, "12", [1.0] * len(send), [2**70] * len(send), {1, 2}, None):
            expect_declined(f"send_rows {counts}", [input, weight, counts, recv, bias])
            expect_declined(f"recv_rows {counts}", [input, weight, send, counts, bias])
    return taken


@every_op
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (2, "nccl"))
def test_eager_leaves_the_rest_to_torch(ranks, op):
    for taken in ranks.run(calls_declined, op):
        assert taken == []


def observers(op: str) -> list[list[bool]]:
    """Whether modes, a subclass and a tracer see a call of the wrapper."""
    arguments = arguments_of(op, Case((4,), 3, 4, torch.float32))
    operator = OPS[op].operator
    group = world_name()
    seen = []
    for mode in (SeesFunctions(), SeesDispatches()):
        with mode:
            OPS[op].wrapper(*arguments, group=group)
        seen.append(operator in mode.seen)
    outputs = OPS[op].wrapper(
        *with_tensor(arguments, 0, lambda t: t.as_subclass(Subclass)), group=group
    )
    seen.append(type(tensors_of(outputs)[0]) is Subclass)
    if op == "allgather_gemm.weights":
        return seen  # torch.jit.trace takes no list of optional tensors

    def traced(input: torch.Tensor) -> torch.Tensor:
        given = with_tensor(arguments, 0, lambda _: input)
        return tensors_of(OPS[op].wrapper(*given, group=group))[0]

    trace = torch.jit.trace(traced, (arguments[0],), check_trace=False)
    seen.append(f"overlap::{op}" in str(trace.graph))
    return seen


@every_op
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_eager_hides_no_call(ranks, op):
    for seen in ranks.run(observers, op):
        assert seen and all(seen)


def results_without_module(op: str) -> tuple[int, list[str]]:
    """As where the module is built for another Python."""
    failures = Failures()
    case = Case((6,), 5, 7, torch.float32, bias=True)
    arguments = arguments_of(op, case)
    expected = OPS[op].expected(case, dist.get_rank(), dist.get_world_size(), rank_device())
    names = eager.__all__
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "overlap_torch._eager", None)
        spec = importlib.util.spec_from_file_location("eager_of_another_python", eager.__file__)
        other = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(other)
        for name in names:
            failures.expect(None if getattr(other, name)(1, 2) is None else "takes a call", name)
            patch.setattr(eager, name, getattr(other, name))
        outputs = tensors_of(OPS[op].wrapper(*arguments, group=world_name()))
    failures.expect_equal(outputs, expected, op)
    return failures.result()


@every_op
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_eager_module_may_be_missing(ranks, op):
    ranks.expect_no_failures(results_without_module, op)
