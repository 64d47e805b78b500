"""Gradients: local GEMMs, without communication; and autocast, as `torch.nn.functional.linear` has it."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

import overlap_torch
from checks import Failures
from operands import Case, difference, expected_output, make_operands, rank_device, world_name

CASES = [
    Case((6,), 5, 7), Case((), 9, 4), Case((2, 3), 4, 5), Case((2, 0, 3), 4, 5), Case((3,), 4, 0),
    Case((130,), 66, 40, weight_layout="n_contiguous"), Case((17,), 33, 20, input_layout="transposed"),
]  # fmt: skip
NEEDS = [needs for needs in itertools.product((False, True), repeat=3) if any(needs)]


def output_gradient(case: Case, device: torch.device) -> torch.Tensor:
    """Small integers, the same on every rank, dense in neither dim."""
    generator = torch.Generator().manual_seed(case.m + case.n)
    values = torch.randint(-1, 2, (*case.leading, case.n), generator=generator)
    return values.to(device, case.dtype)


def dense_gradients(
    case: Case, input: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor
) -> list[torch.Tensor]:
    """What the composition's derivative says, in float64 (exact on integers): for input, weight, bias."""
    rows = gradient.double().reshape(case.m, case.n)
    input = input.detach().double().reshape(case.m, case.k)
    exact = [rows @ weight.detach().double(), rows.t() @ input, rows.sum(0)]
    shapes = [(*case.leading, case.k), (case.n, case.k), (case.n,)]
    return [part.view(shape).to(case.dtype) for part, shape in zip(exact, shapes, strict=True)]


def check_gradients(dtype: torch.dtype) -> tuple[int, list[str]]:
    failures = Failures()
    device, rank, world = rank_device(), dist.get_rank(), dist.get_world_size()
    for seed, (case, needs) in enumerate(itertools.product(CASES, NEEDS)):
        case = case.with_(dtype=dtype, bias=needs[2] or seed % 2 == 0)
        operands = make_operands(case, rank, world, device, seed)
        leaves = [operands.input, operands.weight, operands.bias]
        for leaf, needed in zip(leaves, needs, strict=True):
            if needed:
                leaf.requires_grad_()
        gradient = output_gradient(case, device)
        output = overlap_torch.gemm_allreduce(*leaves, group=world_name())
        expected = expected_output(case, world, device, seed)
        failures.expect(difference(output.detach(), expected), case, "needs", needs)
        failures.expect(
            None if output.requires_grad else "the output needs no gradient", case, needs
        )
        output.backward(gradient)
        dense = dense_gradients(case, operands.input, operands.weight, gradient)
        for name, leaf, needed, right in zip(
            ("input", "weight", "bias"), leaves, needs, dense, strict=True
        ):
            if not needed:
                stray = leaf is not None and leaf.grad is not None
                failures.expect(
                    "has a gradient nobody asked for" if stray else None, name, case, needs
                )
            elif leaf.grad is None:
                failures.expect("has no gradient", name, case, needs)
            else:
                failures.expect(difference(leaf.grad, right), "gradient of", name, case, needs)
    return failures.result()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (3, "gloo"), (1, "nccl"), (2, "nccl"))
def test_autograd_gradients_are_the_compositions(ranks, dtype):
    ranks.expect_no_failures(check_gradients, dtype)


def backward_on_one_rank() -> tuple[int, list[str]]:
    failures = Failures()
    device, rank, world = rank_device(), dist.get_rank(), dist.get_world_size()
    case = Case((40,), 24, 16, torch.float32, bias=True)
    for turn in range(world):
        operands = make_operands(case, rank, world, device, turn)
        operands.input.requires_grad_()
        operands.weight.requires_grad_()
        output = overlap_torch.gemm_allreduce(operands.input, operands.weight, operands.bias)
        if rank == turn:  # nobody else ever runs a backward for this call
            gradient = output_gradient(case, device)
            output.backward(gradient)
            right = dense_gradients(case, operands.input, operands.weight, gradient)
            failures.expect(difference(operands.input.grad, right[0]), "turn", turn)
        again = overlap_torch.gemm_allreduce(operands.input, operands.weight, operands.bias)
        expected = expected_output(case, world, device, turn)
        failures.expect(difference(again.detach(), expected), "after turn", turn)
    return failures.result()


@pytest.mark.ranks((2, "gloo"), (3, "gloo"), (2, "nccl"))
def test_autograd_backward_does_not_communicate(ranks):
    """A backward that one rank runs alone would hang, or shift the ranks' next collectives against each other."""
    ranks.expect_no_failures(backward_on_one_rank, timeout_s=60)


class _Replicated(torch.autograd.Function):
    """A replicated tensor of which every rank uses a part: backward sums the parts' gradients."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


def check_numerical_gradients(leading: tuple[int, ...], with_bias: bool) -> bool:
    """gradcheck of the global function: full, replicated operands in, the replicated output out, in float64."""
    rank, world, device = dist.get_rank(), dist.get_world_size(), rank_device()
    part = 3
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(device).requires_grad_()

    def function(input, weight, bias=None):
        mine = slice(rank * part, (rank + 1) * part)
        return overlap_torch.gemm_allreduce(
            _Replicated.apply(input)[..., mine], _Replicated.apply(weight)[:, mine], bias
        )

    operands = [draw(*leading, part * world), draw(4, part * world)]
    if with_bias:
        operands.append(draw(4))
    return torch.autograd.gradcheck(function, operands)


@pytest.mark.parametrize("leading", [(3,), (2, 2), ()], ids=str)
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (3, "gloo"), (2, "nccl"))
def test_autograd_passes_gradcheck(ranks, leading, with_bias):
    assert all(ranks.run(check_numerical_gradients, leading, with_bias))


def second_derivative() -> str:
    weight = torch.ones(3, 4, device=rank_device(), requires_grad=True)
    input = torch.ones(2, 4, device=rank_device(), requires_grad=True)
    output = overlap_torch.gemm_allreduce(input, weight)
    (gradient,) = torch.autograd.grad(output.sum(), input, create_graph=True)
    try:
        torch.autograd.grad(gradient.sum(), weight)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_autograd_second_derivative_raises(ranks):
    """Gradients are of first order: a second one must not come out silently wrong."""
    assert all(ranks.run(second_derivative))


def gradient_mode() -> list[bool]:
    weight = torch.ones(3, 4, device=rank_device(), requires_grad=True)
    input = torch.ones(2, 4, device=rank_device())
    graph = []
    for op in (overlap_torch.gemm_allreduce, torch.ops.overlap.gemm_allreduce):
        graph.append(op(input, weight, group=world_name()).requires_grad)
        with torch.no_grad():
            graph.append(op(input, weight, group=world_name()).requires_grad)
        with torch.inference_mode():
            graph.append(op(input, weight, group=world_name()).is_inference())
        graph.append(op(input, weight.detach(), group=world_name()).requires_grad)
    return graph


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_autograd_records_only_where_asked(ranks):
    for seen in ranks.run(gradient_mode):
        assert seen == [True, False, True, False] * 2


def check_autocast(enabled: bool, target: torch.dtype) -> tuple[int, list[str]]:
    failures = Failures()
    device, rank, world = rank_device(), dist.get_rank(), dist.get_world_size()
    given = [
        (torch.float32, torch.float32, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.float16, torch.bfloat16),
        (torch.float64, torch.float64, torch.float64),
    ]
    for seed, dtypes in enumerate(given):
        if not enabled and len(set(dtypes)) > 1:
            continue  # without autocast such a mixture is an error: test_errors.py
        # Exact in the narrowest of the dtypes.
        case = Case((20,), 12, 16, torch.bfloat16, bias=True)
        operands = make_operands(case, rank, world, device, seed)
        leaves = [
            tensor.to(dtype).requires_grad_()
            for tensor, dtype in zip(
                (operands.input, operands.weight, operands.bias), dtypes, strict=True
            )
        ]
        for op in (torch.ops.overlap.gemm_allreduce, overlap_torch.gemm_allreduce):
            with torch.autocast(device.type, target, enabled=enabled):
                linear = functional.linear(*leaves)
                output = op(*leaves, group=world_name())
            expected = expected_output(case, world, device, seed).to(linear.dtype)
            failures.expect(difference(output.detach(), expected), dtypes, "autocast", enabled)
            gradient = output_gradient(case, device).to(output.dtype)
            for leaf in leaves:
                leaf.grad = None
            output.backward(gradient)
            dense = dense_gradients(case, operands.input, operands.weight, gradient)
            for name, leaf, dtype, right in zip(
                ("input", "weight", "bias"), leaves, dtypes, dense, strict=True
            ):
                problem = (
                    "has no gradient"
                    if leaf.grad is None
                    else difference(leaf.grad, right.to(dtype))
                )
                failures.expect(problem, "gradient of", name, dtypes, "autocast", enabled)
    return failures.result()


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("enabled", [True, False], ids=["on", "off"])
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (1, "nccl"), (2, "nccl"))
def test_autocast_casts_as_linear_does(ranks, enabled, target):
    ranks.expect_no_failures(check_autocast, enabled, target)
