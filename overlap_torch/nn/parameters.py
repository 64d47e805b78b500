"""Parameters divided among a group: how they are made, loaded and gathered."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch._subclasses import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _device_capability, _resolve_process_group
from torch.distributed.tensor import DTensor

from overlap_torch._layers.dtensor import Placements, is_foreign, sharded_dim, wrap
from overlap_torch._layers.meshes import group_mesh, is_living
from overlap_torch._layers.sharding import gather_parts, shard_range, shard_sizes
from overlap_torch._ops.group import broadcast_integers


class CutParameters(torch.nn.Module):
    """The weights and biases of one ``torch.nn.Linear``, or of several, as DTensors: their placements, and how they load.

    A subclass sets ``in_features``, ``out_features``, ``group``, ``world_size``, ``rank`` and the names of its parameters.
    """

    in_features: int
    out_features: int | tuple[int, ...]
    group: str
    world_size: int
    rank: int
    _several: bool
    _names: list[tuple[str, str]]
    _mesh_given: bool

    # The placements of weights and biases.
    _placements: ClassVar[dict[str, Placements]]

    # The original method, because accelerate's init_empty_weights replaces it by one that takes no DTensors.
    register_parameter = torch.nn.Module.register_parameter

    def _full_shape(self, name: str) -> tuple[int, ...]:
        kind, _, number = name.partition(".")
        features = self.out_features[int(number)] if number else self.out_features
        return (features, self.in_features) if kind.startswith("weight") else (features,)

    def _placements_of(self, name: str) -> Placements:
        return self._placements["weight" if name.startswith("weight") else "bias"]

    def _cut_dim(self, name: str) -> int | None:
        """The dim in which a parameter is cut over the group; None if it is replicated."""
        return sharded_dim(self._placements_of(name)[0], len(self._full_shape(name)))

    def _local_shape(self, name: str) -> tuple[int, ...]:
        shape = list(self._full_shape(name))
        dim = self._cut_dim(name)
        if dim is not None:
            shape[dim] = shard_range(shape[dim], self.world_size, self.rank)[1]
        return tuple(shape)

    def _own_part(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of the whole; a copy, so that the whole need not stay alive for it."""
        dim = self._cut_dim(name)
        if dim is not None:
            full = full.narrow(dim, *shard_range(full.shape[dim], self.world_size, self.rank))
        return full.clone(memory_format=torch.contiguous_format)

    def _holder(self, name: str) -> tuple[torch.nn.Module | None, str]:
        """The module that has the parameter, this one or a list, and the parameter's name there."""
        path, _, own = name.rpartition(".")
        return (self._modules.get(path) if path else self), own

    def _parameter(self, name: str) -> torch.nn.Parameter | None:
        holder, own = self._holder(name)
        return None if holder is None else holder._parameters.get(own)

    def _device_type(self, device: torch.device) -> str:
        """The mesh's device type for parameters on this device. Parameters on ``meta`` are expected on the GPU if the group
        has one."""
        if device.type != "meta":
            return device.type
        supported = _device_capability(_resolve_process_group(self.group))
        return "cuda" if "cuda" in supported and torch.cuda.is_available() else "cpu"

    def _mesh_on(self, mesh: DeviceMesh, device_type: str) -> DeviceMesh:
        """The mesh for tensors on another kind of device: the group's own mesh changes, a given one remains."""
        if device_type in ("meta", mesh.device_type):
            return mesh
        if self._mesh_given or mesh.ndim != 1:
            return mesh
        return group_mesh(self.group, device_type)

    def _wrap(self, name: str, local: torch.Tensor, mesh: DeviceMesh) -> DTensor:
        with torch.no_grad():
            return wrap(local, mesh, self._placements_of(name), self._full_shape(name))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        def follow(tensor: torch.Tensor) -> torch.Tensor:
            result = fn(tensor)
            if not isinstance(result, DTensor):
                return result
            mesh = self._mesh_on(result.device_mesh, result.device.type)
            if mesh is result.device_mesh:
                return result
            return wrap(result.to_local(), mesh, result.placements, result.shape)

        return super()._apply(follow, recurse)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the parameters as ``torch.nn.Linear(in_features, out_features)`` does: uniformly, bound by in_features.

        Several weights and biases are drawn as in a ``torch.nn.Linear`` for each weight.

        The first rank of the parameters' mesh draws a seed for all, so that sharded parameters differ between ranks
        and replicated ones do not, however the ranks were seeded.
        This is a collective call, except for parameters on ``meta`` and fake ones, which it does not change.
        """
        first = self.weights[0] if self._several else self.weight
        if not holds_numbers(first):
            return
        seeds = [int(torch.randint(2**31, (), device="cpu").item())]
        mesh = first.device_mesh
        for group in mesh.get_all_groups():
            seeds = broadcast_integers(seeds, group)
        bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0.0
        generators: dict[int, torch.Generator] = {}
        found = (self._parameter(name) for names in self._names for name in names)
        for parameter in (one for one in found if one is not None):
            local = parameter.to_local()
            # A number for each set of ranks that hold the same part: 0 if all ranks do, else another number for each set.
            number = 0
            for dim, placement in enumerate(parameter.placements):
                own = 0 if placement.is_replicate() else mesh.get_local_rank(dim) + 1
                number = number * (mesh.size(dim) + 1) + own
            # If other ranks draw the same part, it is drawn on the CPU: the same bits on every rank and device.
            shared = any(placement.is_replicate() for placement in parameter.placements)
            if number not in generators:
                generator = torch.Generator("cpu" if shared else local.device)
                generators[number] = generator.manual_seed(seeds[0] + number)
            drawn = torch.empty_like(local, device="cpu") if shared else local
            drawn.uniform_(-bound, bound, generator=generators[number])
            if shared:
                local.copy_(drawn)

    def _copy_parts(self, linears: Sequence[torch.nn.Linear]) -> None:
        """Copies this rank's parts of the whole layer or layers, and takes over their mode."""
        for linear, names in zip(linears, self._names, strict=True):
            named = dict(zip(("weight", "bias"), names, strict=True))
            for kind, parameter in linear.named_parameters(recurse=False):
                name = named[kind]
                part = self._own_part(name, parameter.detach())
                mesh = self._mesh_on(self._parameter(name).device_mesh, part.device.type)
                own = torch.nn.Parameter(self._wrap(name, part, mesh), parameter.requires_grad)
                setattr(*self._holder(name), own)
        self.train(linears[0].training)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        for names in self._names:  # in the same order on every rank
            for name in names:
                parameter, value = self._parameter(name), state_dict.get(prefix + name)
                if parameter is None or is_foreign(parameter):
                    continue
                if isinstance(value, torch.Tensor):
                    # Stored in the caller's dict, from which the lists of parameters load next.
                    state_dict[prefix + name] = self._as_loaded(name, parameter, value)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    @torch.no_grad()
    def _as_loaded(self, name: str, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """A state dict's value with the parameter's placement. A value of another shape stays as it is, for the error that
        follows."""
        if isinstance(value, DTensor):
            _check_own(name, value)
            if isinstance(parameter, DTensor) and _same_place(value, parameter):
                local = value.to_local()
                mesh = self._mesh_on(parameter.device_mesh, local.device.type)
                return wrap(local, mesh, parameter.placements, parameter.shape)
            value = value.full_tensor()
        full, own, part = self._full_shape(name), self._local_shape(name), value
        if value.shape == full:
            part = value if full == own else self._own_part(name, value)
        elif value.shape != own:
            return value
        if not isinstance(parameter, DTensor):
            return part
        return placed(part, parameter, self._mesh_on(parameter.device_mesh, part.device.type))

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The state dict of the whole ``torch.nn.Linear`` or of several, plain tensors on every rank.

        This is a collective call over the parameters' mesh: over the layer's group, and with FSDP2 over its groups, too.
        """
        state = self.state_dict()
        for names in self._names:  # in the same order on every rank
            for name in names:
                if name in state and not is_foreign(state[name]):
                    state[name] = self._whole(name, state[name])
        return state

    def _whole(self, name: str, value: torch.Tensor) -> torch.Tensor:
        dim, shape = self._cut_dim(name), self._local_shape(name)
        if isinstance(value, DTensor):
            mesh, placements = value.device_mesh, value.placements
            value = value.to_local()
            for i, placement in enumerate(placements[:-1]):  # what FSDP2 has cut, see _as_loaded
                if not placement.is_replicate():
                    sizes = shard_sizes(shape[placement.dim], mesh.size(i))
                    group = mesh.get_group(i).group_name
                    value = gather_parts(value, placement.dim, sizes, group)
        if dim is None:
            return value
        sizes = shard_sizes(self._full_shape(name)[dim], self.world_size)
        return gather_parts(value, dim, sizes, self.group)


def holds_numbers(parameter: DTensor) -> bool:
    """False on ``meta`` and for fake tensors."""
    return not parameter.is_meta and not isinstance(parameter.to_local(), FakeTensor)


def placed(part: torch.Tensor, parameter: DTensor, mesh: DeviceMesh) -> DTensor:
    """This rank's part of the group as the parameter has it: FSDP2 puts its dims before the group's, and divides the part once
    more."""
    for dim, placement in enumerate(parameter.placements[:-1]):
        if not placement.is_replicate():
            size = part.shape[placement.dim]
            begin, size = shard_range(size, mesh.size(dim), mesh.get_local_rank(dim))
            part = part.narrow(placement.dim, begin, size).clone()
    return wrap(part, mesh, parameter.placements, parameter.shape)


def _same_place(one: DTensor, other: DTensor) -> bool:
    """True if the ranks hold the same parts of both, on any kind of device."""
    return (
        one.shape == other.shape
        and one.placements == other.placements
        and torch.equal(one.device_mesh.mesh, other.device_mesh.mesh)
    )


def _check_own(name: str, value: DTensor) -> None:
    """Refuses a DTensor that another rank, or another number of ranks, has pickled: its mesh still has that rank's place."""
    mesh = value.device_mesh
    if not is_living(mesh):
        raise RuntimeError(
            f"the state dict's {name} is a DTensor that was pickled by another rank, or by another number of ranks, than "
            f"loads it: its part is number {mesh.get_coordinate()} of {mesh}. Let each rank load what it has saved, or use "
            "torch.distributed.checkpoint, or save full_state_dict()"
        )


@torch.no_grad()
def full_state_dict(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state dict that the unsharded module would have, plain tensors on every rank.

    It gathers parallel layers' parts and other DTensors. It is a collective call: every rank of each DTensor's mesh makes
    it on the same module.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"full_state_dict takes a module, but it is a {type(module).__name__}")
    state = module.state_dict()
    for path, layer in module.named_modules():
        if isinstance(layer, CutParameters):
            for name, value in layer.full_state_dict().items():
                state[f"{path}.{name}" if path else name] = value
    for name, value in state.items():
        if isinstance(value, DTensor):
            state[name] = _gathered(value)
    return state


def _gathered(value: DTensor) -> torch.Tensor:
    """``full_tensor``, of fp8 too, which gloo does not carry."""
    if not value.is_floating_point() or value.element_size() > 1:
        return value.full_tensor()
    local = value.to_local().view(torch.uint8)
    whole = wrap(local, value.device_mesh, value.placements, value.shape)
    return whole.full_tensor().view(value.dtype)
