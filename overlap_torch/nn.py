"""Layers built on the ops."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.nn import functional

from overlap_torch._ops import Group, gemm_allreduce, group_name

__all__ = ["RowParallelLinear"]


def _shard(features: int, world_size: int, rank: int) -> tuple[int, int]:
    """Where rank's part of `features` begins, and its size: as torch.tensor_split cuts."""
    size, longer = divmod(features, world_size)
    return rank * size + min(rank, longer), size + (rank < longer)


class _SliceLastDim(torch.autograd.Function):
    """This rank's part of a replicated tensor. Each rank knows its own part's gradient, so backward gathers them."""

    @staticmethod
    def forward(ctx, input: torch.Tensor, group: str, world_size: int, rank: int) -> torch.Tensor:
        ctx.group, ctx.world_size, ctx.features = group, world_size, input.shape[-1]
        begin, size = _shard(input.shape[-1], world_size, rank)
        # A copy also where the part is the whole: a function that returns its input as it is loses its backward when
        # compiled.
        return input.narrow(-1, begin, size).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sizes = [_shard(ctx.features, ctx.world_size, r)[1] for r in range(ctx.world_size)]
        padded = functional.pad(grad, (0, sizes[0] - grad.shape[-1]))
        gathered = functional_collectives.all_gather_tensor(
            padded.unsqueeze(0).contiguous(), gather_dim=0, group=ctx.group
        )
        parts = [gathered[r].narrow(-1, 0, size) for r, size in enumerate(sizes)]
        return torch.cat(parts, dim=-1), None, None, None


class RowParallelLinear(torch.nn.Module):
    """``torch.nn.Linear`` whose input features are spread over a group: ``all_reduce(input @ weight.T) + bias``.

    Each rank holds ``weight`` [out_features, its part of in_features], cut as ``torch.tensor_split`` cuts: where
    in_features is not a multiple of the world size the first ranks hold one more, and the others' operands are padded
    with zeros in each call, so that all ranks run the same problem. ``bias`` [out_features] is replicated and added
    once, after the reduction. The output is [..., out_features], equal on all ranks.

    Args:
        in_features: of the whole layer, over all ranks.
        out_features: of the layer; every rank computes all of them.
        bias: whether the layer adds one.
        group: None (the default group), a process group's name, a ``ProcessGroup`` or a one-dimensional ``DeviceMesh``.
        input_is_parallel: the input is this rank's part [..., its part of in_features], as a column-parallel layer
            leaves it. If False it is the whole, replicated input [..., in_features]; the layer takes this rank's part,
            and backward gathers the input's gradient.
        device, dtype: of the parameters.

    Backward of the GEMM does not communicate (see :func:`overlap_torch.gemm_allreduce`). Parameters are drawn as those
    of ``torch.nn.Linear``, so making the layer is a collective call, unless its device is ``meta``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group = None,
        input_is_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.input_is_parallel = input_is_parallel
        self.group = group_name(group)
        process_group = _resolve_process_group(self.group)
        self.world_size = dist.get_world_size(process_group)
        self.rank = dist.get_rank(process_group)
        if self.rank < 0:
            raise ValueError(
                f"this rank is not in the group {self.group!r}; make the layer on the group's ranks only"
            )
        self._begin, self.local_in_features = _shard(in_features, self.world_size, self.rank)
        self._padding = _shard(in_features, self.world_size, 0)[1] - self.local_in_features
        factory = {"device": device, "dtype": dtype}
        self.weight = torch.nn.Parameter(
            torch.empty(out_features, self.local_in_features, **factory)
        )
        if bias:
            self.bias = torch.nn.Parameter(torch.empty(out_features, **factory))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the parameters as ``torch.nn.Linear(in_features, out_features)`` does: uniformly, bound by in_features.

        Rank 0 of the group draws a seed for all, so that the parts of the weight differ and the biases do not, however
        the ranks were seeded. A collective call, except for parameters on ``meta``, which it leaves alone.
        """
        if self.weight.is_meta:
            return
        seeds = [int(torch.randint(2**31, ()).item())]
        dist.broadcast_object_list(seeds, group_src=0, group=_resolve_process_group(self.group))
        bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0.0
        generator = torch.Generator(self.weight.device).manual_seed(seeds[0] + 1 + self.rank)
        self.weight.uniform_(-bound, bound, generator=generator)
        if self.bias is not None:
            # Drawn on the CPU: the same bits on every rank, whatever its device.
            generator = torch.Generator().manual_seed(seeds[0])
            self.bias.copy_(
                torch.empty(self.out_features).uniform_(-bound, bound, generator=generator)
            )

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, *, group: Group = None, input_is_parallel: bool = True
    ) -> RowParallelLinear:
        """This rank's part of a ``torch.nn.Linear`` that every rank of the group holds in full; copies."""
        layer = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            group=group,
            input_is_parallel=input_is_parallel,
            device="meta",
        )
        part = linear.weight.detach().narrow(1, layer._begin, layer.local_in_features)
        layer.weight = torch.nn.Parameter(
            part.clone(memory_format=torch.contiguous_format),
            requires_grad=linear.weight.requires_grad,
        )
        if linear.bias is not None:
            layer.bias = torch.nn.Parameter(
                linear.bias.detach().clone(), requires_grad=linear.bias.requires_grad
            )
        return layer.train(linear.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., this rank's part of in_features], or [..., in_features] in full, to [..., out_features]."""
        expected = self.local_in_features if self.input_is_parallel else self.in_features
        if input.shape[-1] != expected:
            raise ValueError(
                f"the input's last dim must be {expected} (in_features={self.in_features}, rank {self.rank} of "
                f"{self.world_size}, input_is_parallel={self.input_is_parallel}), but its shape is {tuple(input.shape)}"
            )
        if not self.input_is_parallel:
            input = _SliceLastDim.apply(input, self.group, self.world_size, self.rank)
        weight = self.weight
        if self._padding > 0:
            input = functional.pad(input, (0, self._padding))
            weight = functional.pad(weight, (0, self._padding))
        return gemm_allreduce(input, weight, self.bias, group=self.group)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"rank={self.rank}, world_size={self.world_size}, input_is_parallel={self.input_is_parallel}"
        )
