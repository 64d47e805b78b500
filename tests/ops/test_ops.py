"""The ops against their specifications: equal, bit for bit, on integer data; as exact as the composition on normal data."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import overlap_torch
from checks import Failures, check_call, storage
from operands import (
    INPUT_LAYOUTS,
    WEIGHT_LAYOUTS,
    Case,
    difference,
    in_layouts_of_rank,
    place,
    rank_device,
    subgroup,
    world_name,
)
from ops import OPS, Arguments, every_op, map_tensors, tensors_of

CPU_DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]

# (M, N, K): nothing, one, primes, around multiples of every kernel's tiles.
SHAPES = [
    (0, 8, 8), (8, 0, 8), (8, 8, 0), (0, 0, 0), (0, 5, 0), (5, 0, 0),
    (1, 1, 1), (1, 64, 64), (64, 1, 64), (64, 64, 1), (7, 11, 13), (31, 37, 41),
    (16, 16, 16), (63, 64, 65), (64, 64, 64), (65, 63, 64), (127, 128, 32), (128, 128, 64),
    (129, 127, 33), (255, 65, 24), (256, 256, 8), (257, 130, 16), (384, 40, 56), (3, 300, 200),
]  # fmt: skip
GPU_SHAPES = [
    *SHAPES,
    (512, 256, 128), (513, 520, 72), (500, 1000, 300), (1024, 768, 512), (1031, 769, 129),
    (1, 4096, 1024), (16, 4096, 1024), (2048, 1024, 256),
]  # fmt: skip
LEADING = [(), (5,), (1,), (3, 4), (0, 4), (2, 3, 4), (2, 0, 3), (1, 1, 1)]
# With the dim that is cut; dims before it of one element, several and none, and more rows after those than tiles have.
DIMS = [((3, 4), 1), ((3, 4), -2), ((1, 5), 1), ((2, 3, 4), 1), ((2, 3, 4), 2), ((2, 3, 4), -3),
        ((0, 4), 1), ((4, 0), 1), ((2, 256), 1), ((5, 300), 1), ((3, 2, 128), -2)]  # fmt: skip


def check_cases(failures: Failures, op: str, cases: Sequence[Case], **keywords: Any) -> None:
    for seed, case in enumerate(OPS[op].of(cases)):
        check_call(failures, case, seed=seed, op=op, **keywords)


def shape_cases(shapes: Iterable[tuple[int, int, int]], dtype: torch.dtype) -> list[Case]:
    """Every shape, with a bias and both weight layouts by turns."""
    return [
        Case(
            (m,),
            n,
            k,
            dtype,
            bias=i % 2 == 1,
            weight_layout=("k_contiguous", "n_contiguous")[i // 2 % 2],
        )
        for i, (m, n, k) in enumerate(shapes)
    ]


@pytest.mark.parametrize("dtype", CPU_DTYPES, ids=str)
@every_op
def test_ops_are_exact_on_every_shape(failures: Failures, op: str, dtype: torch.dtype) -> None:
    shapes = GPU_SHAPES if rank_device().type == "cuda" else SHAPES
    check_cases(failures, op, shape_cases(shapes, dtype))


# As many ranks as a kernel's tables of peers hold. They share few cores, so few and small shapes: nothing, one row, fewer
# rows than ranks, and ragged ones.
EIGHT_SHAPES = [(0, 8, 8), (8, 8, 0), (1, 1, 1), (7, 11, 13), (129, 66, 20), (256, 40, 8)]


@every_op
@pytest.mark.ranks((8, "gloo"))
def test_ops_are_exact_between_eight_ranks(failures: Failures, op: str) -> None:
    cases = shape_cases(EIGHT_SHAPES, torch.float32) + shape_cases(EIGHT_SHAPES, torch.bfloat16)
    check_cases(failures, op, [*cases, Case((3, 4), 9, 5, torch.float64, True)])


@every_op
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_ops_take_any_leading_dims(failures: Failures, op: str, dtype: torch.dtype) -> None:
    cases = [Case(leading, 33, 40, dtype, bias) for leading in LEADING for bias in (False, True)]
    cases += [
        Case(leading, n, 40, dtype, bias, dim=dim)
        for leading, dim in DIMS
        for n, bias in ((33, True), (40, False), (0, False))
    ]
    check_cases(failures, op, cases)


@every_op
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (1, "nccl"), (2, "nccl"))
def test_ops_take_any_layout(failures: Failures, op: str, dtype: torch.dtype) -> None:
    cases = [
        Case((9, 16), 72, 64, dtype, i % 3 == 0, input, weight, dim)
        for i, (input, weight) in enumerate(itertools.product(INPUT_LAYOUTS, WEIGHT_LAYOUTS))
        for dim in (0, 1)
    ]
    check_cases(failures, op, cases)


@every_op
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.ranks((2, "gloo"), (3, "gloo"), (2, "nccl"), (4, "nccl"))
def test_ops_take_layouts_that_differ_between_ranks(
    failures: Failures, op: str, dtype: torch.dtype
) -> None:
    case = Case((140,), 136, 64, dtype, bias=True)
    for turn in range((len(INPUT_LAYOUTS) - 1) * len(WEIGHT_LAYOUTS)):
        check_call(failures, in_layouts_of_rank(case, turn, dist.get_rank()), seed=turn, op=op)


@every_op
@pytest.mark.parametrize("dtype", CPU_DTYPES, ids=str)
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (1, "nccl"), (2, "nccl"))
def test_ops_specification_is_the_composition(
    failures: Failures, op: str, dtype: torch.dtype
) -> None:
    """The expected results of this file are those of the unfused compositions, which are the specification."""
    cases = [*shape_cases(SHAPES, dtype), *(Case(one, 9, 5, dtype, True) for one in LEADING)]
    call = lambda *arguments, group: OPS[op].composition(*arguments, group)  # noqa: E731
    check_cases(failures, op, cases, call=call)


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@every_op
def test_ops_round_no_worse_than_the_composition(
    failures: Failures, op: str, dtype: torch.dtype, with_bias: bool
) -> None:
    """Errors against float64 on normal data, over all of this rank's results."""
    rank, world, device = place()
    m, n, k = (1024, 1024, 768) if device.type == "cuda" else (200, 160, 320)
    case = Case((m,), n, k, dtype, with_bias)

    def drawn(r: int) -> Arguments:
        generator = torch.Generator(device).manual_seed(r)
        # A reduction's bias is the same on every rank: any of them may add it.
        shared = torch.Generator(device).manual_seed(world)

        def draw(like: torch.Tensor) -> torch.Tensor:
            source = shared if like.dim() == 1 else generator
            return torch.randn(like.shape, generator=source, device=device).to(like.dtype)

        return map_tensors(draw, OPS[op].arguments(case, r, world, device))

    everybody = [drawn(r) for r in range(world)]
    exact = OPS[op].meaning([map_tensors(torch.Tensor.double, a) for a in everybody], math.inf)
    results = (
        OPS[op].operator(*everybody[rank], group=world_name()),
        OPS[op].composition(*everybody[rank], world_name()),
    )
    errors = [
        [
            (x.double() - y).square().sum()
            for x, y in zip(tensors_of(result), exact[rank], strict=True)
        ]
        for result in results
    ]
    error, composition = (math.sqrt(sum(squares)) for squares in errors)
    good = composition > 0 and error <= 1.05 * composition
    failures.expect(None if good else f"error {error}, composition {composition}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_ops_allreduce_result_is_the_same_on_every_rank(
    failures: Failures, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    input = torch.randn(150, 70, generator=generator).to(rank_device(), dtype)
    weight = torch.randn(90, 70, generator=generator).to(rank_device(), dtype)
    output = torch.ops.overlap.gemm_allreduce(input, weight, group=world_name())
    first = output.clone()
    dist.broadcast(first, 0)
    failures.expect(difference(output, first))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@every_op
def test_ops_outputs_are_fresh(failures: Failures, op: str, dtype: torch.dtype) -> None:
    """Results stay what they are while later calls run, and belong to nobody else."""
    case = Case((130,), 70, 48, dtype, bias=True)
    results = [
        tensors_of(check_call(failures, case, "call", seed, seed=seed, op=op)) for seed in range(6)
    ]
    outputs = [output for result in results for output in result if output.numel() > 0]
    places = {storage(output) for output in outputs}
    failures.equal(len(places), len(outputs))
    for seed, result in enumerate(results):
        expected = OPS[op].expected(case, *place(), seed)
        failures.expect_equal(result, expected, "after later calls", op, case, seed)
    # Writing to a result must not reach the next one's inputs, staging or the plan.
    for output in outputs:
        output.fill_(float("nan"))
    check_call(failures, case, "after the results were overwritten", seed=7, op=op)


@every_op
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.ranks((2, "gloo"), (3, "gloo"), (4, "gloo"), (2, "nccl"), (4, "nccl"))
def test_ops_take_any_group(failures: Failures, op: str, dtype: torch.dtype) -> None:
    """Subgroups, groups of one and several groups by turns, among all ranks."""
    world = dist.get_world_size()
    everybody = tuple(range(world))
    groups = [subgroup(everybody[:2]), subgroup(everybody[1:]), subgroup(everybody, "second")]
    groups += [subgroup((rank,)) for rank in everybody]
    groups += [subgroup((0, world - 1)), None]
    for seed, case in enumerate(shape_cases([(40, 24, 16), (7, 5, 3), (129, 66, 20)], dtype)):
        for index, group in enumerate(groups):
            member = group is not None or index == len(groups) - 1
            if member:
                check_call(failures, case, "group", index, seed=seed, group=group, op=op)


@every_op
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_ops_wrappers_take_a_group_in_every_form(failures: Failures, op: str) -> None:
    case = Case((6, 5), 12, 10, torch.float32, bias=True)
    mesh = init_device_mesh(rank_device().type, (dist.get_world_size(),))
    for group in (None, world_name(), dist.group.WORLD, mesh):

        def call(*arguments, group, given=group):
            return OPS[op].wrapper(*arguments, group=given)

        check_call(failures, case, "group given as", type(group).__name__, op=op, call=call)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@every_op
@pytest.mark.ranks((1, "nccl"), (2, "nccl"), (4, "nccl"))
def test_ops_follow_the_current_stream(failures: Failures, op: str, dtype: torch.dtype) -> None:
    """Operands made late on another current stream, results read on it, without any synchronisation in between."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream(priority=-1), torch.cuda.default_stream()]
    for seed, case in enumerate(shape_cases([(512, 384, 128), (300, 200, 100)] * 3, dtype)):
        expected = OPS[op].expected(case, *place(), seed)
        values = OPS[op].arguments(case, *place(), seed)
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[seed % len(streams)]):
            arguments = map_tensors(torch.zeros_like, values)
            # About 10 ms, in which the operands still hold the wrong values.
            torch.cuda._sleep(20_000_000)
            for operand, value in zip(tensors_of(arguments), tensors_of(values), strict=True):
                operand.copy_(value)
            outputs = tensors_of(OPS[op].operator(*arguments, group=world_name()))
            for operand in tensors_of(arguments):
                operand.fill_(float("nan"))  # after the op on its stream: must not reach it
            copies = [output.clone() for output in outputs]
            for output in outputs:
                output.fill_(float("nan"))
        torch.cuda.synchronize()
        failures.expect_equal(copies, expected, "stream", seed % len(streams), op, case)


@every_op
@pytest.mark.ranks((2, "nccl"))
def test_ops_take_cuda_tensors_in_a_gloo_group(failures: Failures, op: str) -> None:
    """The composition runs what the fast path cannot take."""
    group = dist.new_group(backend="gloo")
    for dtype in (torch.float32, torch.bfloat16):
        check_call(failures, Case((33,), 20, 12, dtype, bias=True), group=group, op=op)
    dist.destroy_process_group(group)


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_ops_plans_do_not_depend_on_what_ranks_do_not_share(failures: Failures) -> None:
    """Every rank has another number of threads."""
    torch.set_num_threads(1 + dist.get_rank() % 2)
    try:
        plans = [
            repr(overlap_torch.plan.plan_for(m, n, k, dtype, device=rank_device()))
            for m, n, k in ((64, 64, 64), (512, 512, 512), (1024, 1024, 1024), (4096, 2048, 512))
            for dtype in (torch.float32, torch.bfloat16)
        ]
    finally:
        torch.set_num_threads(1)
    failures.alike(plans)
