"""The checks of every call of an op, whatever the test."""

import io
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
import torch.distributed as dist

import overlap_torch
from operands import Case, difference, from_all_ranks, poison, rank_device, world_name
from ops import OPS, map_tensors, tensors_of
from overlap_torch import plan as plan_module
from overlap_torch.plan import Plan
from overlap_torch.plan._library import plan_of


class Failures:
    """A job's findings: how much it checked, and what was wrong."""

    def __init__(self) -> None:
        self.checks = 0
        self.lines: list[str] = []

    def expect(self, problem: str | None, *where: object) -> None:
        self.checks += 1
        if problem:
            self.lines.append(f"{' '.join(str(part) for part in where)}: {problem}")

    def equal(self, found: object, right: object, *where: object) -> None:
        self.expect(None if found == right else f"{found!r}, not {right!r}", *where)

    def holds(self, part: object, whole: Container[object], *where: object) -> None:
        self.expect(None if part in whole else f"{part!r} is not in {whole!r}", *where)

    def says(self, message: str, parts: Sequence[str], *where: object) -> None:
        """The message must have all these parts."""
        missing = [part for part in parts if part not in message]
        self.expect(f"said {message!r}, without {missing}" if missing else None, *where)

    def raises(self, part: str, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
        """The call must raise an error that says this."""
        self.says(message_of(call, *arguments, **keywords), [part], part)

    def near(
        self, found: torch.Tensor, right: torch.Tensor, *where: object, **tolerances: Any
    ) -> None:
        close = torch.allclose(found, right, **tolerances)
        self.expect(None if close else f"off by {(found - right).abs().max()}", *where)

    def alike(self, value: object, *where: object) -> None:
        """The value must be that of all other ranks of the world; all call this."""
        found = from_all_ranks(value)
        self.equal(found, found[:1] * len(found), *where, "ranks differ")

    def expect_equal(
        self,
        outputs: Sequence[torch.Tensor] | torch.Tensor,
        right: Sequence[torch.Tensor] | torch.Tensor,
        *where: object,
    ) -> None:
        """Each output bit for bit, and as many as are right. A tensor is one output, not its rows."""
        if isinstance(outputs, torch.Tensor):
            outputs, right = [outputs], [right]
        for i, (output, value) in enumerate(zip(outputs, right, strict=True)):
            self.expect(difference(output, value), *where, i)

    def result(self) -> tuple[int, list[str]]:
        return self.checks, self.lines


def message_of(call, *arguments: object, **keywords: object) -> str:
    """The error's message, "" if the call did not raise."""
    try:
        call(*arguments, **keywords)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return str(error)
    return ""


class _Module(torch.nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = call


def export(
    call: Callable[..., Any], *given: object, **options: Any
) -> torch.export.ExportedProgram:
    """The call exported, saved and loaded."""
    file = io.BytesIO()
    torch.export.save(torch.export.export(_Module(call), given, **options), file)
    file.seek(0)
    return torch.export.load(file)


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _same(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """Equal, NaN too (padding around strided operands is NaN)."""
    return torch.equal(tensor.nan_to_num(nan=77.0), copy.nan_to_num(nan=77.0))


def check_call(
    failures: Failures,
    case: Case,
    *where: object,
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
    op: str = "gemm_allreduce",
    call: Callable[..., Any] | None = None,
) -> Any:
    """One call on this rank's operands, checked for all that the contract promises of any call.

    `call` is what is called instead of the operator `op`. Returns what it returned.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    name = world_name() if group is None else group.group_name
    device = rank_device()
    where = (op, *where, case, f"seed {seed}")
    arguments = OPS[op].arguments(case, rank, world, device, seed)
    before = map_tensors(torch.clone, arguments)
    expected = OPS[op].expected(case, rank, world, device, seed)
    poison(device, *(max(1, right.numel()) * right.element_size() for right in expected), 512)
    result = (call or OPS[op].operator)(*arguments, **OPS[op].keywords(case), group=name)

    outputs = tensors_of(result)
    failures.equal(len(outputs), len(expected), *where)
    for i, (output, right) in enumerate(zip(outputs, expected, strict=False)):
        failures.expect(difference(output, right), "result", i, *where)
        strides = None if output.is_contiguous() else f"strides {output.stride()}"
        failures.expect(strides, "result", i, *where)
    for i, (operand, copy) in enumerate(
        zip(tensors_of(arguments), tensors_of(before), strict=True)
    ):
        failures.expect(None if _same(operand, copy) else "was modified", "operand", i, *where)
    filled = [tensor for tensor in outputs + tensors_of(arguments) if tensor.numel() > 0]
    distinct = len({storage(tensor) for tensor in filled}) == len(filled)
    failures.expect(None if distinct else "a result shares memory with another tensor", *where)
    return result


def check_plan(
    failures: Failures,
    case: Case,
    plan: Plan,
    *where: object,
    group: dist.ProcessGroup | None = None,
    op: str = "gemm_allreduce",
) -> None:
    """Calls under the plan, the first of them watched: it must have communicated the plan's chunks, each once."""
    with plan_module.use_plan(plan, group=group):
        failures.equal(plan_of(plan.problem, rank_device(), group), plan, *where, case)
        with overlap_torch.trace() as traced:
            check_call(failures, case, *where, seed=1, group=group, op=op)
        seen = sorted(chunk.index for call in traced.calls for chunk in call.chunks)
        # How many pieces go to how many ranks is not in an all-to-all's plan.
        pieces = len(seen) if op == "gemm_alltoall" else len(plan.chunks)
        expected = list(range(pieces))
        if plan.clique > 0:  # a rank that adds up no rows of a chunk has no messages to other hosts
            expected = [chunk for chunk in expected if chunk in seen]
        if dist.get_world_size(group) > 1:
            failures.equal(seen, expected, *where, case)
        check_call(failures, case, *where, seed=2, group=group, op=op)


def close(actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    """The fault of a float32 result that was summed in another order."""
    try:
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    except AssertionError as error:
        return str(error)
    return None
