"""Operands of layers: integers in `torch.nn.Linear`s, the same on every rank, and the ranks' parts of tensors."""

from collections import OrderedDict
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from operands import rank_device


def integers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values in -2 ... 2, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(rank_device(), dtype)


def integer_linear(
    in_features: int, out_features: int, bias: bool, dtype: torch.dtype = torch.float32
) -> torch.nn.Linear:
    linear = torch.nn.Linear(in_features, out_features, bias, device=rank_device(), dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(integers(out_features, in_features, seed=1))
        if bias:
            linear.bias.copy_(integers(out_features, seed=2))
    return linear


def fill_with_integers(module: torch.nn.Module) -> None:
    """Every parameter, each drawn anew."""
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(integers(*parameter.shape, seed=100 + seed))


class Linears(torch.nn.Module):
    """Linear layers by name, of these in and out features, without a bias where the third value is False."""

    def __init__(self, **sizes: tuple[int, ...]) -> None:
        super().__init__()
        for name, size in sizes.items():
            self.add_module(name, torch.nn.Linear(*size, device=rank_device()))


class GatedMlp(torch.nn.Module):
    def __init__(self, width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(width, hidden, bias) for _ in range(2))
        self.down = torch.nn.Linear(hidden, width, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def chain(**layers: torch.nn.Module) -> torch.nn.Sequential:
    """A module with these layers, one after the other."""
    return torch.nn.Sequential(OrderedDict(layers))


def my_part(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """This rank's part, as DTensor's Shard cuts: equal parts, of which the last may be cut short."""
    world, rank = dist.get_world_size(), dist.get_rank()
    size = (tensor.shape[dim] + world - 1) // world
    begin = min(rank * size, tensor.shape[dim])
    return tensor.narrow(dim, begin, min(size, tensor.shape[dim] - begin))


def my_features(tensor: torch.Tensor) -> torch.Tensor:
    return my_part(tensor, -1)


def my_tokens(tensor: torch.Tensor) -> torch.Tensor:
    return my_part(tensor, 0)


# A layer's kind, whether tokens are cut, and the ops that run forward and backward.
OPS_OF_LAYERS = (
    ("column", False, set(), {"gemm_allreduce"}),
    ("column", True, {"allgather_gemm"}, {"gemm_reducescatter"}),
    ("row", False, {"gemm_allreduce"}, set()),
    ("row", True, {"gemm_reducescatter"}, {"allgather_gemm"}),
)


def counted_events(job: Callable[[], object]) -> dict[str, int]:
    """How often each name is in PyTorch's profile of the job on the host."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        job()
    return {event.key: event.count for event in profile.key_averages()}


def op_counts(job: Callable[[], object]) -> dict[str, int]:
    """How often each of this package's ops ran, in whatever thread; the ranks' comparison of calls is none of them."""
    # A name with a space is not an op's but that of one of its calls, or of a chunk.
    return {
        name.removeprefix("overlap::"): count
        for name, count in counted_events(job).items()
        if name.startswith("overlap::") and " " not in name and "::_" not in name
    }


def ops_called(job: Callable[[], object]) -> set[str]:
    """Names of the ops that :func:`op_counts` counts."""
    return set(op_counts(job))


def ops_of_a_step(run: Callable[[], object]) -> tuple[list[torch.Tensor], set[str], set[str]]:
    """The outputs of `run`, and the ops that it calls, and that backward of their sum calls."""
    outputs: list[torch.Tensor] = []
    forward = ops_called(lambda: outputs.extend(tree_leaves(run())))
    return outputs, forward, ops_called(sum(output.sum() for output in outputs).backward)
