"""The ops under PyTorch's compiler: schemas, fake kernels and autograd registrations, and whole graphs."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx

import overlap_torch
import rank_pool
from checks import Failures, close, export
from layers import fill_with_integers, integers
from operands import Case, difference, place, rank_device, world_name
from ops import OPS, Arguments, every_op, map_tensors, tensors_of
from overlap_torch.nn import ColumnParallelLinear, RowParallelLinear

CASES = [
    Case((6,), 5, 7), Case((), 9, 4), Case((2, 3), 4, 8, weight_layout="n_contiguous"), Case((0,), 4, 5),
    Case((3,), 0, 4), Case((3,), 4, 0), Case((9,), 8, 16, input_layout="transposed"),
    Case((2, 3), 4, 8, dim=1), Case((1, 2, 3), 4, 8, input_layout="transposed", dim=-2),
]  # fmt: skip


@every_op
@pytest.mark.ranks((1, "nccl"), (2, "nccl"), long=[(2, "gloo")], whole=[(1, "gloo")])
def test_compile_passes_opcheck(failures: Failures, op: str) -> None:
    """All of opcheck's tests, on every rank in step: each of them calls the op."""
    for seed, case in enumerate(OPS[op].of(CASES)):
        dtype = (torch.float32, torch.bfloat16)[seed % 2]
        for bias, needs_gradient in itertools.product((False, True), repeat=2):
            if (seed // 2 + bias + needs_gradient) % 2 and not rank_pool.whole_grids():
                continue  # each two values meet
            case = case.with_(dtype=dtype, bias=bias)
            arguments = OPS[op].arguments(case, *place(), seed)
            if arguments[-1] is None:
                arguments = arguments[:-1]  # defaults are dropped by the dispatcher
            for tensor in tensors_of(arguments):
                tensor.requires_grad_(needs_gradient)
            keywords = {**OPS[op].keywords(case), "group": world_name()}
            found = torch.library.opcheck(
                OPS[op].operator, tuple(arguments), keywords, raise_exception=False
            )
            for test, result in found.items():
                problem = None if result == "SUCCESS" else str(result)
                failures.expect(problem, test, op, case, "gradient", needs_gradient)


@every_op
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_compile_fake_kernel_says_what_the_op_returns(failures: Failures, op: str) -> None:
    """The fake kernel's metadata against the real result's; nothing is communicated for a fake tensor."""
    rank = dist.get_rank()
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    for (seed, case), dtype in itertools.product(enumerate(OPS[op].of(CASES)), dtypes):
        case = case.with_(dtype=dtype, bias=seed % 2 == 0)
        arguments = OPS[op].arguments(case, *place(), seed)
        keywords = {**OPS[op].keywords(case), "group": world_name()}
        outputs = tensors_of(OPS[op].operator(*arguments, **keywords))
        if rank == 0:  # alone: a fake call that communicated would hang here
            with FakeTensorMode() as mode:
                fakes = map_tensors(mode.from_tensor, arguments)
                found = tensors_of(OPS[op].operator(*fakes, **keywords))
            for fake, output in zip(found, outputs, strict=True):
                for field in ("shape", "dtype", "device"):
                    got, right = getattr(fake, field), getattr(output, field)
                    problem = None if got == right else f"{got}, not {right}"
                    failures.expect(problem, field, op, case)
                got, right = fake.stride(), output.stride()
                failures.equal(got, right, "stride", case)
        meta = map_tensors(lambda tensor: torch.empty_like(tensor, device="meta"), arguments)
        found = tensors_of(OPS[op].operator(*meta, **keywords))
        for shape, output in zip([result.shape for result in found], outputs, strict=True):
            failures.equal(shape, output.shape, "meta", op, case)


def block(op, arguments, name):
    """A whole graph with the op in the middle; exact on integers."""
    input, *others = arguments
    results = OPS[op].wrapper(torch.relu(input) * 2, *others, group=name)
    return [tensor.abs() - 1 for tensor in flat(results)]


def flat(results) -> list[torch.Tensor]:
    """As `tensors_of`, for what is to be compiled."""
    if isinstance(results, torch.Tensor):
        return [results]
    return [tensor for result in results for tensor in flat(result)]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@every_op
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_compile_takes_the_op_in_one_graph(failures: Failures, op: str, backend: str) -> None:
    cases = [Case((12,), 9, 10, bias=True), Case((2, 3), 8, 6), Case((5,), 0, 3)]
    # Inductor's C++ compiler takes its time.
    cases = cases[:1] if backend == "inductor" else cases
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    for seed, case in enumerate(cases):
        gradients = []
        results = []
        for function in (block, compiled):
            arguments = OPS[op].arguments(case, *place(), seed)
            leaves = tensors_of(arguments)
            for leaf in leaves:
                leaf.requires_grad_()
            outputs = function(op, arguments, world_name())
            # Only some of several outputs are used.
            sum(output.sum() for output in outputs[:2]).backward()
            results.append([output.detach() for output in outputs])
            gradients.append([leaf.grad for leaf in leaves])
        failures.expect_equal(results[1], results[0], op, backend, case)
        for i, (right, gradient) in enumerate(zip(*gradients, strict=True)):
            where = ("gradient", i, op, backend, case)
            if right is None or gradient is None:
                # The compiler may make zeros of a gradient that there is none of.
                nothing = right is None and (gradient is None or not gradient.any())
                failures.expect(None if nothing else "there is none", *where)
            else:
                failures.expect(difference(gradient, right), *where)


@every_op
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_compile_takes_dynamic_shapes(failures: Failures, op: str) -> None:
    """One graph for every number of rows, and its result against the right one."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def function(*arguments):
        return OPS[op].operator(*arguments, group=world_name())

    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=True)
    for rows in (6, 9, 5, 130):
        case = Case((rows,), 11, 7)
        arguments = OPS[op].arguments(case, *place(), rows)
        torch._dynamo.mark_dynamic(arguments[0], 0)
        outputs = tensors_of(compiled(*arguments))
        expected = OPS[op].expected(case, *place(), rows)
        failures.expect_equal(outputs, expected, op, case)
    # Counts of 0 and 1 are graphs of their own.
    most = 4 if op == "gemm_alltoall" else 1
    frames = counter.frame_count
    failures.expect(None if frames <= most else f"compiled {frames} times", op, "dynamic rows")


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_compile_takes_counts_from_data(failures: Failures) -> None:
    """Numbers of rows that are read from a tensor inside the graph, as a router's are."""
    torch._dynamo.reset()
    op = OPS["gemm_alltoall"]

    @torch._dynamo.config.patch(capture_scalar_outputs=True)
    def run(*arguments):
        return torch.compile(function, fullgraph=True, backend="aot_eager")(*arguments)

    def function(input, weight, send, recv):
        return op.operator(input, weight, send.tolist(), recv.tolist(), group=world_name())

    for seed in range(4):
        case = Case((9,), 11, 7)
        input, weight, send, recv, _ = op.arguments(case, *place(), seed)
        output = run(input, weight, torch.tensor(send), torch.tensor(recv))
        failures.expect(difference(output, op.expected(case, *place(), seed)[0]), case)


def of_tensors(op: Callable[..., Any], arguments: Arguments) -> Callable[..., Any]:
    """A call of an op, of which the tensors are the inputs."""
    group = world_name()

    def call(*tensors):
        given = iter(tensors)
        return op(*map_tensors(lambda _: next(given), arguments), group=group)

    return call


@every_op
@pytest.mark.ranks((1, "gloo"))
def test_compile_keeps_the_op_whole(failures: Failures, op: str) -> None:
    """Operators in the traced graph of a call that needs no gradient."""
    arguments = OPS[op].arguments(Case((4,), 5, 4), 0, 1, rank_device())
    call = of_tensors(OPS[op].operator, arguments)
    graph = make_fx(call, tracing_mode="fake")(*tensors_of(arguments)).graph
    targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    found = [target for target in targets if "getitem" not in target]
    failures.equal(found, [str(OPS[op].operator)], op)


@every_op
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_compile_exports_the_op(failures: Failures, op: str) -> None:
    """Exported with any number of rows (an all-to-all's are no tensor's), saved, loaded and called with others."""
    case = Case((6,), 11, 7, bias=True)
    arguments = OPS[op].arguments(case, *place())
    tensors = tensors_of(arguments)
    rows = None if op == "gemm_alltoall" else {0: torch.export.Dim.AUTO}
    shapes = {"tensors": (rows, *[None] * (len(tensors) - 1))}
    call = of_tensors(OPS[op].wrapper, arguments)
    exported = export(call, *tensors, dynamic_shapes=shapes)
    calls = [str(node.target) for node in exported.graph.nodes if "overlap" in str(node.target)]
    failures.equal(calls, [str(OPS[op].operator)], op)
    module = exported.module()
    for leading in ((6,),) if op == "gemm_alltoall" else ((6,), (10,), (132,)):
        other = case.with_(leading=leading)
        outputs = tensors_of(module(*tensors_of(OPS[op].arguments(other, *place()))))
        expected = OPS[op].expected(other, *place())
        failures.expect_equal(outputs, expected, op, other)


@every_op
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_compile_takes_autocast(failures: Failures, op: str) -> None:
    torch._dynamo.reset()
    device = rank_device()

    def function(*arguments):
        with torch.autocast(device.type, torch.bfloat16):
            return OPS[op].wrapper(*arguments, group=world_name())

    case = Case((8,), 6, 10, torch.bfloat16, bias=True)
    arguments = map_tensors(torch.Tensor.float, OPS[op].arguments(case, *place()))
    outputs = tensors_of(torch.compile(function, fullgraph=True, backend="aot_eager")(*arguments))
    expected = OPS[op].expected(case, *place())
    failures.expect_equal(outputs, expected, op, case)


@pytest.mark.parametrize("op", [name for name in OPS if "." not in name])
@pytest.mark.ranks((1, "gloo"), (2, "nccl"), long=[(2, "gloo")])
def test_compile_writes_calls_in_cpp(failures: Failures, op: str) -> None:
    """Inductor's C++ wrapper, which takes fewer types of arguments than Python's. A list as a result it does not take."""
    case = Case((6,), 5, 7, bias=True)
    arguments = OPS[op].arguments(case, *place(), 0)
    keywords = {**OPS[op].keywords(case), "group": world_name()}
    function = of_tensors(partial(OPS[op].operator, **keywords), arguments)
    expected = flat(function(*tensors_of(arguments)))
    with torch._inductor.config.patch(cpp_wrapper=True, force_disable_caches=True), torch.no_grad():
        found = flat(torch.compile(function)(*tensors_of(arguments)))
    for mine, right in zip(found, expected, strict=True):
        failures.equal(difference(mine, right), None, op)


class Unlike(torch.nn.Module):
    """Layers that do not wait for each other, with parts of another size on each rank; the last rank has none of ``last``."""

    def __init__(self, *features: int) -> None:
        super().__init__()
        reads = torch.nn.ModuleList(torch.nn.Linear(6, n, dtype=torch.float64) for n in features)
        writes = torch.nn.ModuleList(torch.nn.Linear(n, 6, dtype=torch.float64) for n in features)
        for linears, kind in ((reads, ColumnParallelLinear), (writes, RowParallelLinear)):
            fill_with_integers(linears.to(rank_device()))
            cut = [kind.from_linear(linear, sequence_parallel=True) for linear in linears]
            self.add_module(kind.__name__, torch.nn.ModuleList(cut))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        reads, writes = self.children()
        one, two, three = [
            write(read(input).relu()) for read, write in zip(reads, writes, strict=True)
        ]
        return one + two * three


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_compile_calls_in_one_order_on_all_ranks(failures: Failures) -> None:
    """Forward and backward, of independent calls. Without an order the ranks' graphs are found to make other calls."""
    torch.manual_seed(0)
    blocks = Unlike(3, 17, 1)
    input = integers(3, 6, seed=dist.get_rank(), dtype=torch.float64).to(rank_device())
    with torch._inductor.config.patch(force_disable_caches=True):
        runs = blocks, torch.compile(blocks, fullgraph=True)
        right, found = (results(run, blocks, input) for run in runs)
    for number, pair in enumerate(zip(found, right, strict=True)):
        failures.expect(difference(*pair), number)


class Experts(torch.nn.Module):
    """Two mixtures of experts that do not wait for each other."""

    def __init__(self) -> None:
        super().__init__()
        experts = 4 // dist.get_world_size()
        shapes = {"gate_up": (2, experts, 16, 8), "down": (2, experts, 8, 8), "router": (4, 8)}
        for name, shape in shapes.items():
            drawn = torch.randn(shape, device=rank_device()) / 3
            self.register_parameter(name, torch.nn.Parameter(drawn))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weights, ids = (input @ self.router.t()).softmax(-1).topk(2)
        pairs = zip((input, input.sin()), self.gate_up, self.down, strict=True)
        first, second = [overlap_torch.moe(x, ids, weights, *pair) for x, *pair in pairs]
        return input + first + second


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_compile_experts_of_unlike_tokens(failures: Failures) -> None:
    """A partitioner may move what needs no gradient to forward: no collective of backward, whatever its size here."""
    torch.manual_seed(0)
    model = Experts()
    input = torch.randn((5, 3)[dist.get_rank()], 8, device=rank_device())
    compiled = torch.compile(model, backend="aot_eager_decomp_partition")
    right, found = (results(run, model, input) for run in (model, compiled))
    for number, pair in enumerate(zip(found, right, strict=True)):
        failures.expect(close(*pair), number)


def results(run: Callable, module: torch.nn.Module, input: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of the input and of this rank's parts."""
    module.zero_grad()
    input = input.clone().requires_grad_()
    output = run(input)
    output.sum().backward()
    grads = [parameter.grad for parameter in module.parameters()]
    own = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    return [output.detach(), input.grad, *own]
