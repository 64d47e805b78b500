"""The tensor-parallel layers share this: parameters cut over a group, made, loaded and put together again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _device_capability, _resolve_process_group
from torch.distributed.tensor import DTensor, Replicate, Shard

from overlap_torch._layers import linear as _linear
from overlap_torch._layers.dtensor import (
    Placements,
    is_foreign,
    local_parts,
    mesh_within,
    sharded_dim,
    wrap,
)
from overlap_torch._layers.fp8 import Maps, recipe_of
from overlap_torch._layers.meshes import check_mesh, group_mesh, is_living, note_mesh
from overlap_torch._layers.placements import foreign_linear, to_local
from overlap_torch._layers.sharding import gather_parts, place_in, shard_range, shard_sizes
from overlap_torch._ops import Group, group_name
from overlap_torch._ops.group import broadcast_integers
from overlap_torch._ops.nested import refuse_nested
from overlap_torch._watch.report import note_call, note_foreign


class ParallelLinear(torch.nn.Module):
    """A ``torch.nn.Linear`` whose parameters are DTensors over a group: base of the column and the row layer.

    The parameters' mesh is the ``DeviceMesh`` given as ``group``, or else one that the program has made over the group's ranks,
    or ``DeviceMesh.from_group`` of the group until a layer or a style is given one. For FSDP2 over
    other ranks give a dimension of the whole mesh, such as ``mesh["tp"]``; ``DistributedDataParallel`` does not take
    DTensors. State dicts hold the DTensors, and making them does not communicate.

    ``load_state_dict`` takes DTensors, this rank's parts as plain tensors, and the weight and bias of the whole
    ``torch.nn.Linear``. It communicates only for DTensors with another mesh or other placements: all ranks of the group
    must load those, at the same time.

    A parameter may also be replaced by this rank's part as a plain tensor, as by ``torch.func.functional_call``.

    With a tuple of out_features it stands for as many ``torch.nn.Linear``s, and all of this holds for the parameters of each:
    ``weights.0``, ``biases.0`` and so on, in place of ``weight`` and ``bias``.
    """

    # Where weights and biases lie, as DTensor says it.
    _placements: ClassVar[dict[str, Placements]]

    # The original: accelerate's init_empty_weights puts another one in its place, which takes no DTensors.
    register_parameter = torch.nn.Module.register_parameter

    def __init__(
        self,
        in_features: int,
        out_features: int | tuple[int, ...],
        bias: bool | tuple[bool, ...],
        group: Group,
        sequence_parallel: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        fp8: str | None,
    ) -> None:
        super().__init__()
        recipe_of(fp8)  # raises for a name that it does not know
        self.fp8 = fp8
        self.in_features = in_features
        self.out_features = out_features
        self.sequence_parallel = sequence_parallel
        self.group = group_name(group)
        self.world_size, self.rank = place_in(self.group)
        self._several = isinstance(out_features, tuple)
        # As state dicts name them: those of each torch.nn.Linear.
        self._names: list[tuple[str, str]] = [("weight", "bias")]
        if self._several:
            self._names = [(f"weights.{i}", f"biases.{i}") for i in range(len(out_features))]
        # For each weight: this rank's part of the cut dim, and by how much that is smaller than the
        # largest.
        self._local_features: list[int] = []
        self._paddings: list[int] = []
        for name, _ in self._names:
            dim = self._cut_dim(name)
            part = self._local_shape(name)[dim]
            self._local_features.append(part)
            self._paddings.append(-(-self._full_shape(name)[dim] // self.world_size) - part)
        device = _device_of_parameters(device)
        if isinstance(group, DeviceMesh):
            mesh = group
            note_mesh(mesh)
        else:
            mesh = group_mesh(self.group, self._device_type(device))
        self._mesh_given = isinstance(group, DeviceMesh)
        self._mesh = mesh

        def made(name: str) -> torch.nn.Parameter:
            local = torch.empty(self._local_shape(name), device=device, dtype=dtype)
            return torch.nn.Parameter(self._wrap(name, local, mesh))

        weights = [made(name) for name, _ in self._names]
        with_bias = bias if isinstance(bias, tuple) else (bias,) * len(weights)
        biases = [
            made(name) if has_one else None
            for (_, name), has_one in zip(self._names, with_bias, strict=True)
        ]
        if self._several:
            self.weights = _ParameterList(weights)
            self.biases = _ParameterList(biases) if any(with_bias) else None
        else:
            (self.weight,) = weights
            self.register_parameter("bias", biases[0])
        self.reset_parameters()

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

    def _own_parameters(self) -> list[torch.nn.Parameter]:
        found = [self._parameter(name) for names in self._names for name in names]
        return [parameter for parameter in found if parameter is not None]

    def _any_weight(self) -> torch.Tensor:
        return self.weights[0] if self._several else self.weight

    def _local_parameters(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This rank's weight and bias as plain tensors, with gradients to the parameters."""
        # A module's attributes are slow; they are needed where there is a parametrization.
        parameters = self._parameters
        weight = parameters["weight"] if "weight" in parameters else self.weight  # noqa: SIM401
        bias = parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401
        return self._local_pair(weight, bias)

    def _local_lists(self) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """`_local_parameters` where there are several."""
        biases = [None] * len(self._names) if self.biases is None else self.biases
        pairs = [
            self._local_pair(weight, bias)
            for weight, bias in zip(self.weights, biases, strict=True)
        ]
        return [weight for weight, _ in pairs], [bias for _, bias in pairs]

    def _local_pair(
        self, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # The results of a parametrization may lie elsewhere.
        weight, bias = self._in_place("weight", weight), self._in_place("bias", bias)
        return local_parts(weight, bias)

    def _in_place(self, kind: str, parameter: torch.Tensor | None) -> torch.Tensor | None:
        if isinstance(parameter, DTensor):
            if parameter.device_mesh is not self._mesh:
                check_mesh(f"{type(self).__name__}: its {kind}", parameter, self._mesh)
                if not torch.compiler.is_compiling():
                    self.__dict__["_mesh"] = parameter.device_mesh  # the next comparison is quick
            if parameter._spec.placements != self._placements[kind]:
                return parameter.redistribute(placements=self._placements[kind])
        return parameter

    def _device_type(self, device: torch.device) -> str:
        """The mesh's device type for parameters on this device; those on ``meta`` are expected on
        the GPU if the group has it.
        """
        if device.type != "meta":
            return device.type
        supported = _device_capability(_resolve_process_group(self.group))
        return "cuda" if "cuda" in supported and torch.cuda.is_available() else "cpu"

    def _mesh_on(self, mesh: DeviceMesh, device_type: str) -> DeviceMesh:
        """The mesh for tensors on another kind of device: the group's own changes, a given one remains."""
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

        Several weights and biases are drawn as those of as many ``torch.nn.Linear``s.

        The first rank of the parameters' mesh draws a seed for all, so that what is cut differs between ranks and what is
        replicated does not, however the ranks were seeded. A collective call, except for parameters on ``meta``, which it
        leaves alone.
        """
        first = self._any_weight()
        if first.is_meta:
            return
        seeds = [int(torch.randint(2**31, (), device="cpu").item())]
        mesh = first.device_mesh
        for group in mesh.get_all_groups():
            seeds = broadcast_integers(seeds, group)
        bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0.0
        generators: dict[int, torch.Generator] = {}
        for parameter in self._own_parameters():
            local = parameter.to_local()
            # A number for each set of ranks that hold the same part: 0 where all do, else one of their own.
            number = 0
            for dim, placement in enumerate(parameter.placements):
                own = 0 if placement.is_replicate() else mesh.get_local_rank(dim) + 1
                number = number * (mesh.size(dim) + 1) + own
            # Drawn on the CPU if others draw the same: the same bits on every rank, whatever its device.
            shared = any(placement.is_replicate() for placement in parameter.placements)
            if number not in generators:
                generator = torch.Generator("cpu" if shared else local.device)
                generators[number] = generator.manual_seed(seeds[0] + number)
            drawn = torch.empty_like(local, device="cpu") if shared else local
            drawn.uniform_(-bound, bound, generator=generators[number])
            if shared:
                local.copy_(drawn)

    def _copy_parts(self, linears: Sequence[torch.nn.Linear]) -> None:
        """Takes over parameters and mode of the whole layer or layers; copies this rank's parts."""
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
                    # Into the caller's dict, from which the lists of parameters load next.
                    state_dict[prefix + name] = self._as_loaded(name, parameter, value)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    @torch.no_grad()
    def _as_loaded(self, name: str, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """A state dict's value, in the parameter's place; of another shape as it is, for the error that follows."""
        if isinstance(value, DTensor):
            _check_own(name, value)
            if isinstance(parameter, DTensor) and _same_place(value, parameter):
                local = value.to_local()
                mesh = self._mesh_on(parameter.device_mesh, local.device.type)
                return wrap(local, mesh, parameter.placements, parameter.shape)
            value = value.full_tensor()
        part = self._group_part(name, value)
        if part is None or not isinstance(parameter, DTensor):
            return value if part is None else part
        mesh = self._mesh_on(parameter.device_mesh, part.device.type)
        # FSDP2 puts its dims before the group's, and cuts the group's part once more.
        for dim, placement in enumerate(parameter.placements[:-1]):
            if not placement.is_replicate():
                size = part.shape[placement.dim]
                begin, size = shard_range(size, mesh.size(dim), mesh.get_local_rank(dim))
                part = part.narrow(placement.dim, begin, size).clone()
        return wrap(part, mesh, parameter.placements, parameter.shape)

    def _group_part(self, name: str, value: torch.Tensor) -> torch.Tensor | None:
        """This rank's part, given the whole or that part; None for a tensor of another shape."""
        full, own = self._full_shape(name), self._local_shape(name)
        if value.shape == full:
            return value if full == own else self._own_part(name, value)
        return value if value.shape == own else None

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The state dict of the whole ``torch.nn.Linear`` or of several, plain tensors on every rank.

        A collective call over the parameters' mesh: over the layer's group, and under FSDP2 over its groups too.
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

    def _of_foreign(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        columns: bool,
        features: int,
        tokens: int | None = None,
    ) -> torch.Tensor:
        """The output, before it is gathered, by a weight that no op takes, such as one that torchao has quantized."""
        note_foreign(self, weight)
        last = Shard(input.dim() - 1)
        given, wanted = (Replicate(), last) if columns else (last, Replicate())
        shape = None if columns else (*input.shape[:-1], self.in_features)
        if self.sequence_parallel and columns:
            given, shape = Shard(0), (tokens, *input.shape[1:])
        elif self.sequence_parallel:
            wanted = Shard(0)
        mesh = mesh_within(weight) or group_mesh(self.group, input.device.type)
        output = foreign_linear(
            input,
            weight,
            bias,
            mesh,
            given,
            wanted,
            columns=columns,
            features=features,
            shape=shape,
        )
        return to_local(output)

    def _check_features(self, input: torch.Tensor, expected: int, option: str) -> None:
        if input.is_nested:
            refuse_nested(type(self).__name__, "input", input)
        if isinstance(input, DTensor):
            raise TypeError(
                f"{type(self).__name__} takes this rank's tensor, but its input is a DTensor on {input.device_mesh} with "
                f"placements {input.placements}: call it with input.to_local() or input.full_tensor(), or give a "
                "torch.nn.Linear a style of overlap_torch.parallel, which takes DTensors"
            )
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
        note_call(self, input)

    @property
    def _maps(self) -> Any:
        """The linear maps: functions of :mod:`overlap_torch._layers.linear`, or these in fp8."""
        recipe = recipe_of(self.fp8)
        return _linear if recipe is None else Maps(recipe)

    def extra_repr(self) -> str:
        if self._several:
            biases = [None] * len(self._names) if self.biases is None else self.biases
            bias: bool | list[bool] = [one is not None for one in biases]
            bias = bias[0] if len(set(bias)) == 1 else bias
        else:
            bias = self.bias is not None
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, "
            f"rank={self.rank}, world_size={self.world_size}, sequence_parallel={self.sequence_parallel}"
            + ("" if self.fp8 is None else f", fp8={self.fp8!r}")
        )


class _ParameterList(torch.nn.ParameterList):
    """The layers' lists, which take DTensors where the layers do."""

    register_parameter = torch.nn.Module.register_parameter


def _device_of_parameters(device: torch.device | str | None) -> torch.device:
    """Where a module's parameters are made: accelerate's ``init_empty_weights`` moves them when they are registered."""
    module = torch.nn.Module()
    module.register_parameter("parameter", torch.nn.Parameter(torch.empty(0, device=device)))
    return module.parameter.device


def _same_place(one: DTensor, other: DTensor) -> bool:
    """True if the ranks hold the same parts of both, on whatever kind of device."""
    return (
        one.shape == other.shape
        and one.placements == other.placements
        and torch.equal(one.device_mesh.mesh, other.device_mesh.mesh)
    )


def _check_own(name: str, value: DTensor) -> None:
    """Refuses what another rank, or another number of ranks, has pickled: its mesh still says what it was there."""
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

    Parallel layers' parts are put together, and so are other DTensors. A collective call: every rank of each DTensor's
    mesh makes it on the same module.
    """
    state = module.state_dict()
    for path, layer in module.named_modules():
        if isinstance(layer, ParallelLinear):
            for name, value in layer.full_state_dict().items():
                state[f"{path}.{name}" if path else name] = value
    for name, value in state.items():
        if isinstance(value, DTensor):
            state[name] = value.full_tensor()
    return state
