"""The op under PyTorch's compiler: schema, fake kernel and autograd registrations, and whole graphs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import overlap_torch
from checks import Failures
from operands import Case, difference, expected_output, make_operands, rank_device, world_name

CASES = [
    Case((6,), 5, 7), Case((), 9, 4), Case((2, 3), 4, 8, weight_layout="n_contiguous"), Case((0,), 4, 5),
    Case((3,), 0, 4), Case((3,), 4, 0), Case((9,), 8, 16, input_layout="transposed"),
]  # fmt: skip


def run_opcheck() -> tuple[int, list[str]]:
    """All of opcheck's tests, on every rank in step: each of them calls the op."""
    failures = Failures()
    device, rank, world = rank_device(), dist.get_rank(), dist.get_world_size()
    for seed, case in enumerate(CASES):
        dtype = (torch.float32, torch.bfloat16)[seed % 2]
        for bias, needs_gradient in ((False, False), (True, False), (False, True), (True, True)):
            operands = make_operands(case.with_(dtype=dtype, bias=bias), rank, world, device, seed)
            arguments = [operands.input, operands.weight] + ([operands.bias] if bias else [])
            if needs_gradient:
                for argument in arguments:
                    argument.requires_grad_()
            found = torch.library.opcheck(
                torch.ops.overlap.gemm_allreduce.default,
                tuple(arguments),
                {"group": world_name()},
                raise_exception=False,
            )
            for test, result in found.items():
                problem = None if result == "SUCCESS" else str(result)
                failures.expect(problem, test, case, "bias", bias, "gradient", needs_gradient)
    return failures.result()


@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (1, "nccl"), (2, "nccl"))
def test_compile_passes_opcheck(ranks):
    ranks.expect_no_failures(run_opcheck, timeout_s=300)


def check_fake_results() -> tuple[int, list[str]]:
    """The fake kernel's metadata against the real result's; nothing is communicated for a fake tensor."""
    failures = Failures()
    device, rank, world = rank_device(), dist.get_rank(), dist.get_world_size()
    for seed, case in enumerate(CASES):
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            case = case.with_(dtype=dtype, bias=seed % 2 == 0)
            real = make_operands(case, rank, world, device, seed)
            output = torch.ops.overlap.gemm_allreduce(
                real.input, real.weight, real.bias, group=world_name()
            )
            if rank == 0:  # alone: a fake call that communicated would hang here
                with FakeTensorMode() as mode:
                    arguments = [
                        None if tensor is None else mode.from_tensor(tensor)
                        for tensor in (real.input, real.weight, real.bias)
                    ]
                    fake = torch.ops.overlap.gemm_allreduce(*arguments, group=world_name())
                for field in ("shape", "dtype", "device"):
                    got, right = getattr(fake, field), getattr(output, field)
                    failures.expect(None if got == right else f"{got}, not {right}", field, case)
                got, right = fake.stride(), output.stride()
                failures.expect(None if got == right else f"{got}, not {right}", "stride", case)
            meta = [
                None if tensor is None else torch.empty_like(tensor, device="meta")
                for tensor in (real.input, real.weight, real.bias)
            ]
            shape = torch.ops.overlap.gemm_allreduce(*meta, group=world_name()).shape
            failures.expect(None if shape == output.shape else f"{shape}", "meta", case)
    return failures.result()


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_compile_fake_kernel_says_what_the_op_returns(ranks):
    ranks.expect_no_failures(check_fake_results)


def fake_errors() -> list[str]:
    """Messages of the fake kernel for operands that do not fit."""
    x, w = torch.empty(4, 13), torch.empty(6, 13)
    bad = [
        (torch.empty(4, 17), w, None),
        (torch.empty(()), w, None),
        (x, torch.empty(2, 6, 13), None),
        (x.bfloat16(), w, None),
        (x, w, torch.empty(7)),
        (x, w, torch.empty(6, dtype=torch.float16)),
    ]
    messages = []
    for arguments in bad:
        try:
            with FakeTensorMode() as mode:
                fakes = [
                    None if tensor is None else mode.from_tensor(tensor) for tensor in arguments
                ]
                torch.ops.overlap.gemm_allreduce(*fakes, group=world_name())
            messages.append("")
        except (RuntimeError, TypeError, ValueError) as error:
            messages.append(str(error))
    return messages


@pytest.mark.ranks((1, "gloo"))
def test_compile_fake_kernel_refuses_what_the_op_refuses(ranks):
    (messages,) = ranks.run(fake_errors)
    named = [
        ("17", "13"),
        ("()",),
        ("2, 6, 13",),
        ("bfloat16", "float32"),
        ("7", "6"),
        ("float16", "float32"),
    ]
    for message, parts in zip(messages, named, strict=True):
        for part in parts:
            assert part in message, f"{message!r} does not name {part}"


def block(input, weight, bias, name):
    """A whole graph with the op in the middle; exact on integers."""
    hidden = overlap_torch.gemm_allreduce(torch.relu(input) * 2, weight, bias, group=name)
    return hidden.abs() - 1


def check_compiled(backend: str, cases: list[Case]) -> tuple[int, list[str]]:
    failures = Failures()
    torch._dynamo.reset()
    device, rank, world = rank_device(), dist.get_rank(), dist.get_world_size()
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    for seed, case in enumerate(cases):
        eager, traced = (make_operands(case, rank, world, device, seed) for _ in range(2))
        gradients = []
        results = []
        for function, operands in ((block, eager), (compiled, traced)):
            leaves = [t for t in (operands.input, operands.weight, operands.bias) if t is not None]
            for leaf in leaves:
                leaf.requires_grad_()
            output = function(operands.input, operands.weight, operands.bias, world_name())
            output.sum().backward()
            results.append(output.detach())
            gradients.append([leaf.grad for leaf in leaves])
        failures.expect(difference(results[1], results[0]), backend, case)
        for index, (eager_gradient, gradient) in enumerate(zip(*gradients, strict=True)):
            failures.expect(difference(gradient, eager_gradient), backend, "gradient", index, case)
    return failures.result()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_compile_takes_the_op_in_one_graph(ranks, backend):
    cases = [Case((12,), 9, 10, bias=True), Case((2, 3), 8, 6), Case((5,), 0, 3)]
    # Inductor's C++ compiler takes its time.
    cases = cases[:1] if backend == "inductor" else cases
    ranks.expect_no_failures(check_compiled, backend, cases, timeout_s=300)


def check_dynamic_shapes() -> tuple[int, list[str]]:
    """One graph for every number of rows, and its result against the right one."""
    failures = Failures()
    torch._dynamo.reset()
    device, rank, world = rank_device(), dist.get_rank(), dist.get_world_size()
    counter = CompileCounterWithBackend("aot_eager")

    def function(input, weight):
        return torch.ops.overlap.gemm_allreduce(input, weight, group=world_name())

    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=True)
    for rows in (6, 9, 2, 130):
        case = Case((rows,), 11, 7)
        operands = make_operands(case, rank, world, device, rows)
        torch._dynamo.mark_dynamic(operands.input, 0)
        output = compiled(operands.input, operands.weight)
        failures.expect(difference(output, expected_output(case, world, device, rows)), case)
    frames = counter.frame_count
    failures.expect(None if frames == 1 else f"compiled {frames} times", "dynamic rows")
    return failures.result()


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_compile_takes_dynamic_shapes(ranks):
    ranks.expect_no_failures(check_dynamic_shapes)


def traced_targets() -> list[str]:
    """Operators in the traced graph of a call that needs no gradient."""
    input, weight = torch.ones(3, 4, device=rank_device()), torch.ones(5, 4, device=rank_device())

    def function(input, weight):
        return torch.ops.overlap.gemm_allreduce(input, weight, group=world_name())

    graph = make_fx(function, tracing_mode="fake")(input, weight).graph
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


@pytest.mark.ranks((1, "gloo"))
def test_compile_keeps_the_op_whole(ranks):
    assert ranks.run(traced_targets) == [["overlap.gemm_allreduce.default"]]


def check_autocast_compiled() -> tuple[int, list[str]]:
    failures = Failures()
    torch._dynamo.reset()
    device, rank, world = rank_device(), dist.get_rank(), dist.get_world_size()

    def function(input, weight):
        with torch.autocast(device.type, torch.bfloat16):
            return overlap_torch.gemm_allreduce(input, weight, group=world_name())

    case = Case((8,), 6, 10, torch.bfloat16)
    operands = make_operands(case, rank, world, device)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    output = compiled(operands.input.float(), operands.weight.float())
    failures.expect(difference(output, expected_output(case, world, device)), case)
    return failures.result()


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_compile_takes_autocast(ranks):
    ranks.expect_no_failures(check_autocast_compiled)
