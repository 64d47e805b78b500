"""What the tensor-parallel layers share: parameters cut over a group, made, loaded and put together again."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from overlap_torch._ops import Group, group_name
from overlap_torch._sharding import feature_range, gather_features, place_in


class ParallelLinear(torch.nn.Module):
    """A ``torch.nn.Linear`` of which each rank of a group holds a part: base of the column and the row layer.

    State dicts are this rank's parts, and neither saving nor loading them communicates. ``load_state_dict`` takes the
    whole ``torch.nn.Linear``'s weight and bias as well, and keeps this rank's part.
    """

    # Parameters that are cut over the ranks, and the dim in which they are; the others are replicated.
    _cut_dims: ClassVar[dict[str, int]]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        group: Group,
        sequence_parallel: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.sequence_parallel = sequence_parallel
        self.group = group_name(group)
        self.world_size, self.rank = place_in(self.group)
        factory = {"device": device, "dtype": dtype}
        self.weight = torch.nn.Parameter(torch.empty(self._local_shape("weight"), **factory))
        if bias:
            self.bias = torch.nn.Parameter(torch.empty(self._local_shape("bias"), **factory))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def _full_shape(self, name: str) -> tuple[int, ...]:
        return (self.out_features, self.in_features) if name == "weight" else (self.out_features,)

    def _local_shape(self, name: str) -> tuple[int, ...]:
        shape = list(self._full_shape(name))
        if name in self._cut_dims:
            dim = self._cut_dims[name]
            shape[dim] = feature_range(shape[dim], self.world_size, self.rank)[1]
        return tuple(shape)

    def _own_part(self, name: str, full: torch.Tensor) -> torch.Tensor:
        if name not in self._cut_dims:
            return full
        dim = self._cut_dims[name]
        return full.narrow(dim, *feature_range(full.shape[dim], self.world_size, self.rank))

    @property
    def _padding(self) -> int:
        """By how much this rank's part is smaller than the largest."""
        features = self._full_shape("weight")[self._cut_dims["weight"]]
        return (
            feature_range(features, self.world_size, 0)[1]
            - feature_range(features, self.world_size, self.rank)[1]
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the parameters as ``torch.nn.Linear(in_features, out_features)`` does: uniformly, bound by in_features.

        Rank 0 of the group draws a seed for all, so that what is cut differs between ranks and what is replicated does
        not, however the ranks were seeded. A collective call, except for parameters on ``meta``, which it leaves alone.
        """
        if self.weight.is_meta:
            return
        seeds = [int(torch.randint(2**31, ()).item())]
        dist.broadcast_object_list(seeds, group_src=0, group=_resolve_process_group(self.group))
        bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0.0
        own = torch.Generator(self.weight.device).manual_seed(seeds[0] + 1 + self.rank)
        # Drawn on the CPU: the same bits on every rank, whatever its device.
        common = torch.Generator().manual_seed(seeds[0])
        for name, parameter in self.named_parameters(recurse=False):
            if name in self._cut_dims:
                parameter.uniform_(-bound, bound, generator=own)
            else:
                parameter.copy_(
                    torch.empty(parameter.shape).uniform_(-bound, bound, generator=common)
                )

    def _copy_parts(self, linear: torch.nn.Linear) -> None:
        """Takes over parameters and mode of the whole layer; copies this rank's parts."""
        for name, parameter in linear.named_parameters(recurse=False):
            part = self._own_part(name, parameter.detach()).clone(
                memory_format=torch.contiguous_format
            )
            setattr(self, name, torch.nn.Parameter(part, requires_grad=parameter.requires_grad))
        self.train(linear.training)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        parts = {}
        for name in self._cut_dims:
            parameter, value = self._parameters[name], state_dict.get(prefix + name)
            if (
                parameter is not None
                and isinstance(value, torch.Tensor)
                and value.shape != parameter.shape
                and value.shape == self._full_shape(name)
            ):
                # A copy: assign=True makes it the parameter, and the whole must not stay alive for it.
                parts[prefix + name] = self._own_part(name, value).clone(
                    memory_format=torch.contiguous_format
                )
        super()._load_from_state_dict({**state_dict, **parts}, prefix, *args, **kwargs)

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The state dict of the whole ``torch.nn.Linear``, on every rank. A collective call over the layer's group."""
        state = self.state_dict()
        for name, dim in self._cut_dims.items():  # in the same order on every rank
            if name in state:
                features = self._full_shape(name)[dim]
                state[name] = gather_features(
                    state[name], dim, features, self.group, self.world_size
                )
        return state

    def _check_features(self, input: torch.Tensor, expected: int, option: str) -> None:
        if input.shape[-1] != expected:
            raise ValueError(
                f"the input's last dim must be {expected} (in_features={self.in_features}, rank {self.rank} of "
                f"{self.world_size}{option}), but its shape is {tuple(input.shape)}"
            )
        if self.sequence_parallel and input.dim() < 2:
            raise ValueError(
                "with sequence_parallel the input must be [tokens, ..., features], but its shape is "
                f"{tuple(input.shape)}"
            )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"rank={self.rank}, world_size={self.world_size}, sequence_parallel={self.sequence_parallel}"
        )


def full_state_dict(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state dict that the unsharded module would have, on every rank: parallel layers' parts are put together.

    A collective call: every rank of each layer's group makes it on the same module.
    """
    state = module.state_dict()
    for path, layer in module.named_modules():
        if isinstance(layer, ParallelLinear):
            for name, value in layer.full_state_dict().items():
                state[f"{path}.{name}" if path else name] = value
    return state
