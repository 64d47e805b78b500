"""Numerical gradients of the global functions: full, replicated operands in, the whole output out, in float64.

Each function cuts replicated operands into the ranks' parts, calls the op on them and puts the outputs' parts together,
so that an op whose gradients are right on each rank alone, but not together, fails.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import overlap_torch
from operands import rank_device

N, K, ROWS = 2, 3, 2  # of one rank's part


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


class _Whole(torch.autograd.Function):
    """All ranks' parts, one after the other along `dim`; the gradient of the whole is the same on every rank."""

    @staticmethod
    def forward(ctx, part: torch.Tensor, dim: int) -> torch.Tensor:
        parts: list[torch.Tensor] = [part] * dist.get_world_size()
        dist.all_gather_object(parts, part.cpu())
        sizes = [other.shape[dim] for other in parts]
        ctx.dim, ctx.size = dim, sizes[dist.get_rank()]
        ctx.begin = sum(sizes[: dist.get_rank()])
        return torch.cat(parts, dim).to(part.device)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.narrow(ctx.dim, ctx.begin, ctx.size).clone(), None


def mine(whole: torch.Tensor, dim: int) -> torch.Tensor:
    """This rank's part of a replicated tensor, in equal parts."""
    size = whole.shape[dim] // dist.get_world_size()
    return _Replicated.apply(whole).narrow(dim, dist.get_rank() * size, size)


def allreduce(input, weight, bias, dim):
    return overlap_torch.gemm_allreduce(mine(input, -1), mine(weight, 1), bias)


def reducescatter(input, weight, bias, dim):
    bias = None if bias is None else _Replicated.apply(bias)
    part = overlap_torch.gemm_reducescatter(mine(input, -1), mine(weight, 1), bias, dim=dim)
    return _Whole.apply(part, dim)


def allgather(input, weight, bias, dim):
    bias = None if bias is None else mine(bias, 0)
    part, gathered = overlap_torch.allgather_gemm(mine(input, dim), mine(weight, 0), bias, dim=dim)
    # Each rank uses another part of the gathered input, so that its gradients are added up over the ranks.
    size = gathered.shape[-1] // dist.get_world_size()
    used = gathered.narrow(-1, dist.get_rank() * size, size)
    return _Whole.apply(part, -1), _Whole.apply(used.square(), -1)


def allgather_weights(input, weight, bias, dim):
    weights = list(mine(weight, 0).split([1, N - 1]))
    biases = None if bias is None else [None, mine(bias, 0)[1:]]
    parts, gathered = overlap_torch.allgather_gemm(mine(input, dim), weights, biases, dim=dim)
    return *(_Whole.apply(part, -1) for part in parts), gathered.detach()


def alltoall(input, weight, bias, dim):
    rank, world = dist.get_rank(), dist.get_world_size()
    # Rank r sends its rows to rank r + 1, but one to itself where it is not the last.
    counts = [[0] * world for _ in range(world)]
    for r in range(world):
        kept = ROWS if world == 1 else int(r < world - 1)
        counts[r][r] = kept
        counts[r][(r + 1) % world] += ROWS - kept
    bias = None if bias is None else _Replicated.apply(bias)
    part = overlap_torch.gemm_alltoall(
        mine(input, 0),
        _Replicated.apply(weight),
        counts[rank],
        [row[rank] for row in counts],
        bias,
    )
    return _Whole.apply(part, 0)


def experts(input, weight, bias, dim):
    """Two choices of each token, one of which is none now and then; shares, and gate, up and down out of the operands."""
    world, x = dist.get_world_size(), mine(input, 0).tanh()
    own = mine(weight, 0)
    ids = torch.tensor([[0, world * N - 1], [world - 1, -1]], device=x.device)[: x.shape[0]]
    shares = x[:, :2].square()
    gate_up = torch.stack([own, own.sin()], 1)  # [e, 2, H]
    bias = None if bias is None else mine(bias, 0)[:, None].expand(-1, 2)
    output = overlap_torch.moe(
        x, ids, shares, gate_up, own.cos()[:, :, None], gate_up_bias=bias, activation="gelu"
    )
    return _Whole.apply(output, 0)


FUNCTIONS = {
    function.__name__: function
    for function in (allreduce, reducescatter, allgather, allgather_weights, alltoall, experts)
}
CALLS = [
    (name, leading, 0)
    for name in FUNCTIONS
    for leading in ((ROWS,), (ROWS, 2))
    if name != "experts" or len(leading) == 1
]
CALLS.append(("allreduce", (), 0))  # the others cut rows
CALLS += [(name, (2, ROWS), 1) for name in ("reducescatter", "allgather", "allgather_weights")]


def check_numerical_gradients(
    name: str, leading: tuple[int, ...], dim: int, with_bias: bool
) -> bool:
    world, device = dist.get_world_size(), rank_device()
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(device).requires_grad_()

    if name != "allreduce":
        leading = tuple(size * world if i == dim else size for i, size in enumerate(leading))
    features = K * world
    operands = [draw(*leading, features), draw(N * world, features)]
    if with_bias:
        operands.append(draw(N * world))

    def function(input, weight, bias=None):
        return FUNCTIONS[name](input, weight, bias, dim)

    return torch.autograd.gradcheck(function, operands)


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("name", "leading", "dim"), CALLS, ids=str)
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (2, "nccl"), whole=[(3, "gloo")])
def test_gradcheck_global_function(ranks, name, leading, dim, with_bias):
    assert all(ranks.run(check_numerical_gradients, name, leading, dim, with_bias))
