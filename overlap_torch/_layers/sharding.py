"""How tensors are cut over the ranks of a group, and Functions that take parts and gather them under autograd."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Sequence

import torch
from torch.compiler import is_compiling
from torch.nn import functional

from overlap_torch._ops import Group, group_name
from overlap_torch._ops.collectives import all_reduce, start_all_gather, wait
from overlap_torch._ops.gradients import Gradient, TransformedFunction, side_by_side
from overlap_torch._ops.group import place_of


def check_linear(linear: object) -> None:
    """Raises TypeError unless it is a ``torch.nn.Linear``, ValueError unless weight and bias are all that it has."""
    if not isinstance(linear, torch.nn.Linear):
        raise TypeError(f"from_linear takes torch.nn.Linear, but it is a {type(linear).__name__}")
    if linear._parameters.keys() != {"weight", "bias"}:
        raise ValueError(
            f"from_linear copies the parameters weight and bias, but those of the {type(linear).__name__} are "
            f"{', '.join(name for name, _ in linear.named_parameters())}: convert it before it is parametrized, or after "
            "torch.nn.utils.parametrize.remove_parametrizations"
        )


def checked_integer(name: str, value: int) -> int:
    """The number; raises TypeError for anything else."""
    if isinstance(value, (int, torch.SymInt)):
        return value
    try:
        return operator.index(value)
    except TypeError:
        kind = type(value).__name__
        raise TypeError(f"{name} must be an integer, but it is a {kind}: {value!r}") from None


def checked_count(name: str, value: int) -> int:
    """The number; raises TypeError or ValueError unless it is 0 or more."""
    value = checked_integer(name, value)
    if value < 0:
        raise ValueError(f"{name} must be 0 or more, but it is {value}")
    return value


def checked_number(name: str, value: float) -> float:
    """The number; raises TypeError for anything else."""
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is a number, but it is a {type(value).__name__}: {value!r}")
    return value


def shard_range(size: int, world_size: int, rank: int) -> tuple[int, int]:
    """The begin and the size of a rank's part of `size` tokens or features, cut as DTensor's Shard and torch.chunk cut.

    Only the last parts are shorter, so padding at the end of the whole makes all parts equal, and cutting the end off
    undoes it without a copy.
    """
    largest = -(-size // world_size)
    begin = min(rank * largest, size)
    return begin, min(largest, size - begin)


def shard_sizes(size: int, world_size: int) -> list[int]:
    """The sizes of all ranks' parts."""
    return [shard_range(size, world_size, rank)[1] for rank in range(world_size)]


def token_slice(tokens: int, *, group: Group = None) -> slice:
    """This rank's rows of a [tokens, ...] tensor when layers run sequence parallel.

    Every rank has ``ceil(tokens / world_size)`` rows, in rank order, as long as there are rows left: the last ranks may
    have fewer, or none. DTensor's ``Shard(0)`` is the same cut.
    """
    tokens = checked_count("tokens", tokens)
    world_size, rank = place_of(group_name(group))
    begin, size = shard_range(tokens, world_size, rank)
    return slice(begin, begin + size)


def pad_end(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """`size` zeros after the end of a dim."""
    behind = -dim - 1 if dim < 0 else tensor.dim() - 1 - dim
    if type(size) is not int and type(size.node).__name__ == "LocalIntNode":
        raise NotImplementedError(
            f"ranks have parts of different sizes ({size} to pad), which layers and styles do not take under "
            "LocalTensorMode: take sizes that the number of ranks divides"
        )
    return functional.pad(tensor, (0, 0) * behind + (0, size)) if size > 0 else tensor


def cut_end(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """A dim without its last `size`, which `pad_end` added."""
    return tensor.narrow(dim, 0, tensor.shape[dim] - size) if size > 0 else tensor


def gather_parts(part: torch.Tensor, dim: int, sizes: Sequence[int], group: str) -> torch.Tensor:
    """All ranks' parts, put together along `dim`, in which they have these sizes. A collective call."""
    padded = pad_end(part, dim, max(sizes) - part.shape[dim])
    return _joined(wait(start_all_gather(padded.unsqueeze(0), group)), dim, sizes)


def _joined(padded: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    """The ranks' parts [ranks, ...], each without its padding, one after the other along `dim` of a part."""
    return torch.cat([padded[r].narrow(dim, 0, size) for r, size in enumerate(sizes)], dim)


class _Placed(TransformedFunction):
    """A Function that keeps its arguments after the tensor, which say where the parts are, as ``ctx.place``."""

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, *ctx.place = inputs


class TakePart(_Placed):
    """This rank's part of a replicated tensor's dim. Each rank knows its own part's gradient: backward gathers."""

    @staticmethod
    def forward(
        whole: torch.Tensor, dim: int, size: int, group: str, world_size: int, rank: int
    ) -> torch.Tensor:
        begin, own = shard_range(size, world_size, rank)
        # A copy also where the part is the whole: a function that returns its input as it is loses its backward when
        # compiled.
        return whole.narrow(dim, begin, own).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return GatherParts.apply_in_backward(grad, *ctx.place), None, None, None, None, None


class GatherParts(_Placed):
    """The replicated tensor of which each rank has a part of a dim: the reverse of `TakePart`."""

    @staticmethod
    def forward(
        part: torch.Tensor, dim: int, size: int, group: str, world_size: int, rank: int
    ) -> torch.Tensor:
        return gather_parts(part, dim, shard_sizes(size, world_size), group)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return TakePart.apply_in_backward(grad, *ctx.place), None, None, None, None, None


class _PlacedFeatures(TransformedFunction):
    """A Function of tensors after their place: group, world size, rank, and the whole size of each tensor's last dim."""

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.place = inputs[:4]
        if not is_compiling():  # Dynamo refuses the call; it materializes gradients
            ctx.set_materialize_grads(False)

    @classmethod
    def apply_to_used(cls, place: Sequence, grads: Sequence[Gradient]) -> tuple[Gradient, ...]:
        """The gradients of a backward's inputs: None for the place, and for results that were not used."""
        *ranks, sizes = place
        used = [i for i, grad in enumerate(grads) if grad is not None]
        of_used = tuple(sizes[i] for i in used)
        found = iter(cls.apply_in_backward(*ranks, of_used, *[grads[i] for i in used]))
        return *[None] * 4, *[None if grad is None else next(found) for grad in grads]


class TakeFeatures(_PlacedFeatures):
    """`TakePart` of several tensors' last dim."""

    @staticmethod
    def forward(
        group: str, world_size: int, rank: int, sizes: Sequence[int], *wholes: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        place = (group, world_size, rank)
        pairs = zip(wholes, sizes, strict=True)
        return tuple(TakePart.forward(whole, -1, size, *place) for whole, size in pairs)

    @staticmethod
    def backward(ctx, *grads: Gradient) -> tuple[Gradient, ...]:
        return GatherFeatures.apply_to_used(ctx.place, grads)


class GatherFeatures(_PlacedFeatures):
    """`GatherParts` of several tensors' last dim, by one gather of the parts side by side, padded to the largest."""

    @staticmethod
    def forward(
        group: str, world_size: int, rank: int, sizes: Sequence[int], *parts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        largest = [-(-size // world_size) for size in sizes]
        pairs = zip(parts, largest, strict=True)
        padded = [pad_end(part, -1, size - part.shape[-1]) for part, size in pairs]
        gathered = wait(start_all_gather(side_by_side(padded).unsqueeze(0), group))
        pairs = zip(gathered.split(largest, dim=-1), sizes, strict=True)
        return tuple(_joined(of, -1, shard_sizes(size, world_size)) for of, size in pairs)

    @staticmethod
    def backward(ctx, *grads: Gradient) -> tuple[Gradient, ...]:
        return TakeFeatures.apply_to_used(ctx.place, grads)


class SumGradient(_Placed):
    """A replicated parameter that each rank uses on its own rows: backward sums the ranks' gradients."""

    @staticmethod
    def forward(parameter: torch.Tensor, group: str) -> torch.Tensor:
        return parameter.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return Sum.apply_in_backward(grad, *ctx.place), None


class Sum(_Placed):
    """The replicated sum of the ranks' tensors: the reverse of `SumGradient`."""

    @staticmethod
    def forward(part: torch.Tensor, group: str, invariance: str | None = "none") -> torch.Tensor:
        return all_reduce(part, group, invariance)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return SumGradient.apply_in_backward(grad, ctx.place[0]), *[None] * len(ctx.place)
