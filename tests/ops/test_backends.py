"""Every backend that c10d knows: what plans do not run on takes the composition, through the process group itself.

PyTorch's LocalTensorMode, in which one process stands for all ranks over its fake backend, is here, too.
"""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed._local_tensor import LocalIntNode, LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

import overlap_torch
from checks import Failures, close, message_of
from layers import integer_linear, integers, my_features, my_tokens
from operands import Case, difference, rank_device
from ops import OPS, tensors_of
from overlap_torch.nn import ColumnParallelLinear, RowParallelLinear
from overlap_torch.parallel import OverlapColwiseParallel, OverlapRowwiseParallel
from tests.ops.test_autograd import check_gradients, output_gradients, right_gradients

CASES = [Case((6,), 5, 7, bias=True), Case((2, 3), 4, 5), Case((130,), 66, 40, bias=True)]


class Own(dist.ProcessGroup):
    """A user's backend, written in Python: what PyTorch's functional collectives ask for, by way of gloo."""

    def __init__(self, store, rank, size, timeout) -> None:
        super().__init__(rank, size)
        self.inner = dist.ProcessGroupGloo(store, rank, size, timeout)

    @property
    def group_name(self):
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self):
        return "own"

    def allreduce(self, tensors, opts):
        return self.inner.allreduce(tensors, opts)

    def broadcast(self, tensors, opts):
        return self.inner.broadcast(tensors, opts)

    def barrier(self, opts):
        return self.inner.barrier(opts)

    def allgather(self, outputs, inputs, opts):
        return self.inner.allgather(outputs, inputs, opts)

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts):
        (output,), (input,) = outputs, inputs
        return self.inner._allgather_base(output, input, opts)

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts):
        (output,), (input,) = outputs, inputs
        return self.inner._reduce_scatter_base(output, input, opts)

    def alltoall_base(self, output, input, output_splits, input_splits, opts):
        return self.inner.alltoall_base(output, input, output_splits, input_splits, opts)


def group_on(backend: str) -> dist.ProcessGroup:
    if backend == "own" and "own" not in dist.Backend.backend_list:
        dist.Backend.register_backend("own", Own, devices=["cpu"])
    return dist.new_group(backend=backend)


def check_ops(failures: Failures, group: dist.ProcessGroup, device: torch.device) -> None:
    for op, dtype in itertools.product(OPS, (torch.float32, torch.bfloat16)):
        for case in OPS[op].of(CASES):
            check_gradients(failures, op, case.with_(dtype=dtype), device, group)


def check_layers(failures: Failures, group: dist.ProcessGroup, device: torch.device) -> None:
    """A column layer and a row layer, on all tokens and on each rank's."""
    for sequence, bias in itertools.product((False, True), (False, True)):
        first, last = (integer_linear(*sizes, bias).to(device) for sizes in ((6, 8), (8, 4)))
        whole = integers(12, 6, seed=3).to(device).requires_grad_()
        keywords = {"sequence_parallel": sequence, "group": group}
        column = ColumnParallelLinear.from_linear(first, **keywords)
        row = RowParallelLinear.from_linear(last, **keywords)
        cut = my_tokens if sequence else torch.Tensor.detach
        mine = cut(whole).detach().clone().requires_grad_()
        expected, output = last(first(whole)), row(column(mine))
        where = ("layers", "sequence", sequence, "bias", bias)
        failures.expect(difference(output, cut(expected.detach())), *where)
        gradient = integers(12, 4, seed=4).to(device)
        expected.backward(gradient)
        output.backward(cut(gradient))
        failures.expect(difference(mine.grad, cut(whole.grad)), "input's gradient", *where)
        own = column.weight.grad.to_local()
        failures.expect(difference(own, my_features(first.weight.grad.t()).t()), "weight's", *where)


def check_backend(failures: Failures, backend: str, devices: tuple[str, ...]) -> None:
    group = group_on(backend)
    for device in devices:
        device = rank_device() if device == "cuda" else torch.device(device)
        check_ops(failures, group, device)
        check_layers(failures, group, device)
        rows = [row for row in overlap_torch.report() if row["group"] == group.group_name]
        said = all(f"is {backend}, not gloo" in row["why"] for row in rows)
        failures.equal(said, backend == "own", device)


@pytest.mark.parametrize("backend", ["gloo", "own"])
@pytest.mark.ranks((2, "gloo"), (3, "gloo"))
def test_backends_on_cpu_make_what_the_ops_mean(failures: Failures, backend: str) -> None:
    check_backend(failures, backend, ("cpu",))


@pytest.mark.parametrize(
    ("backend", "devices"),
    [("nccl", ("cuda",)), ("cpu:gloo,cuda:nccl", ("cpu", "cuda"))],
    ids=["nccl", "cpu:gloo,cuda:nccl"],
)
@pytest.mark.ranks((2, "nccl"))
def test_backends_on_gpus_make_what_the_ops_mean(
    failures: Failures, backend: str, devices: tuple[str, ...]
) -> None:
    check_backend(failures, backend, devices)


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
@pytest.mark.fresh(environment={"OVERLAP_PLANS": "0"})
def test_backends_run_compositions_without_plans(failures: Failures) -> None:
    """A switch for whoever suspects the package: PyTorch's GEMM, then its collective."""
    device = rank_device()
    check_ops(failures, dist.group.WORLD, device)
    check_layers(failures, dist.group.WORLD, device)
    said = {row["why"] for row in overlap_torch.report()}
    failures.equal(said, {"OVERLAP_PLANS=0: a GEMM, then its collective"})
    failures.equal(torch.ops.overlap.plan_count(dist.group.WORLD.group_name), 0, "plans")
    x = torch.ones(2, 6, device=device)
    failures.near(overlap_torch.allreduce_rmsnorm(x, None, x[0])[0], x, "a norm", atol=1e-5)
    parts = [torch.ones(1, 4, 2, 8, device=device)] * 3
    failures.near(overlap_torch.context_parallel_attention(*parts), parts[0], "attention")
    shape, how = (("all_reduce", (64, 64), torch.float32), {"tile": (32, 32), "device": device})
    for what, call in (
        ("tune", lambda: overlap_torch.tune(device=device.type)),
        ("a job", lambda: overlap_torch.produce(*shape, **how).__enter__()),
    ):
        failures.says(message_of(call), ["OVERLAP_PLANS=0"], what)


@pytest.mark.ranks((2, "gloo"))
def test_backend_fake_runs_each_op_dry(failures: Failures) -> None:
    """A dry run: this rank's own part of the work, in the right shapes, and nobody is waited for."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group = group_on("fake")
    for op in OPS:
        for case in OPS[op].of(CASES):
            arguments = OPS[op].arguments(case, rank, world, rank_device())
            leaves = [leaf.requires_grad_() for leaf in tensors_of(arguments)]
            outputs = tensors_of(OPS[op].wrapper(*arguments, group=group))
            right = OPS[op].expected(case, rank, world, rank_device())
            shapes = [output.shape for output in outputs] == [value.shape for value in right]
            failures.expect(None if shapes else str(outputs), op, case)
            if op == "gemm_allreduce":
                own = functional.linear(*arguments)
                failures.expect(difference(outputs[0], own), op, case)
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
            missing = [i for i, leaf in enumerate(leaves) if leaf.grad.shape != leaf.shape]
            failures.expect(f"gradients {missing}" if missing else None, op, case)
    layer = ColumnParallelLinear(6, 8, sequence_parallel=True, group=group)
    output = layer(torch.ones(4, 6, requires_grad=True))
    output.sum().backward()
    shapes = (output.shape, layer.weight.grad.to_local().shape) == (
        (4 * world, 8 // world),
        (8 // world, 6),
    )
    failures.expect(None if shapes else f"{output.shape}", "layer")
    ids = torch.arange(8).view(4, 2) % (2 * world)
    experts = (torch.ones(2, 6, 6).requires_grad_(), torch.ones(2, 6, 3))
    made = overlap_torch.moe(torch.ones(4, 6), ids, torch.ones(4, 2), *experts, group=group)
    made.sum().backward()
    failures.equal(made.shape, (4, 6), "experts")
    said = message_of(overlap_torch.tune, group=group, device="cpu")
    failures.holds("is fake, which runs none", said, "tune")


@pytest.mark.parametrize("kind", ["meta", "fake"])
@pytest.mark.ranks((2, "gloo"))
def test_styles_run_dry_on_tensors_without_memory(failures: Failures, kind: str) -> None:
    """As PyTorch's styles do, for estimates of a model's memory."""
    # A name of its own: PyTorch's cache of DTensor operators takes an equal mesh for this one, also in later tests.
    mesh = DeviceMesh.from_group(group_on("fake"), "cpu", mesh_dim_names=("dry",))
    with torch.device("meta") if kind == "meta" else FakeTensorMode():
        for layout in (Replicate(), Shard(0)):
            model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 6))
            plan = {
                "0": OverlapColwiseParallel(input_layouts=layout),
                "1": OverlapRowwiseParallel(output_layouts=layout),
            }
            output = parallelize_module(model, mesh, plan)(torch.ones(4, 6, requires_grad=True))
            output.sum().backward()
            failures.equal((output.shape, model[0].weight.grad.shape), ((4, 6), (8, 6)), layout)
        layer = ColumnParallelLinear(6, 8, group=mesh)
        failures.equal(layer(torch.ones(4, 6, requires_grad=True)).shape, (4, 4), "layer")


# --- LocalTensorMode ---


@pytest.fixture(params=[2, 3])
def local_ranks(request):
    """As many ranks as a process stands for in the mode, over a fake group."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


def together(parts: Sequence[Any], requires_grad: bool = False) -> Any:
    """All ranks' tensors as one, their numbers as one; what is equal as it is."""
    if isinstance(parts[0], torch.Tensor):
        return LocalTensor(dict(enumerate(parts)), requires_grad)
    if isinstance(parts[0], list):
        return [together(each, requires_grad) for each in zip(*parts, strict=True)]
    if isinstance(parts[0], int) and len(set(parts)) > 1:
        return torch.SymInt(LocalIntNode(dict(enumerate(parts))))
    return parts[0]


def of_rank(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    return tensor._local_tensors[rank] if isinstance(tensor, LocalTensor) else tensor


@pytest.mark.parametrize(
    ("op", "differentiated"), [*((op, True) for op in OPS), ("gemm_alltoall", False)]
)
def test_local_tensors_are_all_ranks_operands(local_ranks, op, differentiated, monkeypatch):
    failures = Failures()
    device, ranks = torch.device("cpu"), range(local_ranks)
    if op == "gemm_alltoall" and differentiated:  # the mode's GEMMs of gradients want equal rows
        monkeypatch.setattr(OPS[op], "counts", lambda *_: [[2] * local_ranks] * local_ranks)
    for case in OPS[op].of(CASES):
        everybody = [OPS[op].arguments(case, r, local_ranks, device) for r in ranks]
        right = [OPS[op].expected(case, r, local_ranks, device) for r in ranks]
        gradients = [output_gradients(op, right[r], r) for r in ranks]
        with LocalTensorMode(local_ranks):
            arguments = together(everybody, differentiated)
            outputs = tensors_of(OPS[op].wrapper(*arguments))
            if differentiated:
                torch.autograd.backward(outputs, together(gradients))
        for r in ranks:
            mine = [of_rank(output, r) for output in outputs]
            failures.expect_equal(mine, right[r], op, case, "rank", r)
            if not differentiated:
                continue
            used = range(len(outputs))
            derivative = right_gradients(op, case, local_ranks, device, 0, used, r)
            mine = [of_rank(leaf.grad, r) for leaf in tensors_of(arguments)]
            failures.expect_equal(mine, derivative, op, case, "gradients of rank", r)
    assert not failures.lines, failures.lines


def unsharded(sizes: tuple[int, ...]) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """A layer, and its output's gradient, its input, its output and what the gradients are."""
    in_features, out_features, *leading = sizes
    layer = integer_linear(in_features, out_features, True)
    input = integers(*leading, in_features, seed=3).requires_grad_()
    gradient = integers(*leading, out_features, seed=4)
    output = layer(input)
    output.backward(gradient)
    right = [output.detach(), input.grad, layer.weight.grad, layer.bias.grad]
    layer.zero_grad()
    return layer, [input.detach(), gradient], right


def styled(
    style: type, given: Placement, wanted: Placement, ranks: int, layer: torch.nn.Module, operands
) -> list[torch.Tensor] | None:
    """Output and gradients of a layer under a style, whole, on the last rank; None where the mode itself refuses them."""
    with LocalTensorMode(ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        how = style(input_layouts=given, output_layouts=wanted, use_local_output=False)
        try:
            layer = parallelize_module(copy.deepcopy(layer), mesh, how)
            input = distribute_tensor(operands[0], mesh, [given]).requires_grad_()
            output = layer(input)
            output.backward(distribute_tensor(operands[1], mesh, output.placements))
        except (RuntimeError, AssertionError):
            return None
        tensors = [output, input.grad, layer.weight.grad, layer.bias.grad]
        wholes = [tensor.redistribute(placements=[Replicate()]).to_local() for tensor in tensors]
        wholes = [getattr(tensor, "wait", lambda tensor=tensor: tensor)() for tensor in wholes]
    return [of_rank(tensor, ranks - 1).detach() for tensor in wholes]


@pytest.mark.parametrize("sizes", [(12, 6, 6, 12), (7, 5, 5, 7)], ids=["equal", "unequal"])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(OverlapColwiseParallel, ColwiseParallel), (OverlapRowwiseParallel, RowwiseParallel)],
    ids=["colwise", "rowwise"],
)
def test_local_tensors_in_styles_are_what_they_are_in_pytorchs(local_ranks, ours, theirs, sizes):
    """The mode takes all layouts of equal parts, and few of others, with PyTorch's styles either."""
    failures, equal = Failures(), sizes[0] % 6 == 0
    layer, operands, expected = unsharded(sizes)
    layouts = (Replicate(), Shard(0), Shard(1), Shard(-1))
    ran = []
    for where in itertools.product(layouts, repeat=2):
        mine, right = (
            styled(style, *where, local_ranks, layer, operands) for style in (ours, theirs)
        )
        ran.append((mine is not None, right is not None))
        if mine is not None:
            failures.expect_equal(mine, expected, ours.__name__, *where)
        if equal:
            for own, their in zip(mine, right, strict=True):  # which adds thirds of a bias
                failures.expect(close(own, their), ours.__name__, *where, "beside PyTorch's")
    assert not failures.lines, failures.lines
    assert all(mine or not right for mine, right in ran), ran
    assert any(mine for mine, _ in ran), ran


def test_local_tensors_with_scales_are_refused(local_ranks):
    message = ""
    with LocalTensorMode(local_ranks):
        operands = [torch.ones(16, 16).to(torch.float8_e4m3fn) for _ in range(2)]
        scales = {"scale_input": torch.ones(1), "scale_weight": torch.ones(1)}
        message = message_of(overlap_torch.gemm_allreduce, *operands, **scales)
    assert message.startswith("gemm_allreduce: operands with scales cannot be LocalTensors")
