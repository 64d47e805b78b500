"""The base of the column and the row layer: its parameters in the form of an op's operands, and its checks."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from overlap_torch._layers.dtensor import mesh_within
from overlap_torch._layers.fp8 import recipe_of
from overlap_torch._layers.linear import Operands, Place
from overlap_torch._layers.maps import let_compile
from overlap_torch._layers.meshes import group_mesh, note_mesh
from overlap_torch._layers.placements import foreign_linear, in_place, local_parts, to_local
from overlap_torch._layers.sharding import checked_count
from overlap_torch._ops import Group, group_name
from overlap_torch._ops.group import place_of
from overlap_torch._ops.nested import check_input
from overlap_torch._watch.report import note_call, note_foreign
from overlap_torch.nn.parameters import CutParameters


class ParallelLinear(CutParameters):
    """A ``torch.nn.Linear`` whose parameters are DTensors over a group: base of the column and the row layer.

    The parameters' mesh is the ``DeviceMesh`` given as ``group``, or else one that the program has made over the group's
    ranks. Without either it is ``DeviceMesh.from_group`` of the group, until a layer or a style is given a mesh. For FSDP2
    over other ranks give a dimension of the whole mesh, such as ``mesh["tp"]``; ``DistributedDataParallel`` does not take
    DTensors. State dicts hold the DTensors, and making them does not communicate.

    ``load_state_dict`` takes DTensors, this rank's parts as plain tensors, and the weight and bias of the whole
    ``torch.nn.Linear``. It communicates only for DTensors with another mesh or other placements: all ranks of the group
    must load those, at the same time.

    Threads of a process make layers one after another: PyTorch's DTensors are not made in two threads at once (torch 2.11
    crashes), and a group's collective calls need one order on all ranks.

    A parameter may also be replaced by this rank's part as a plain tensor, as by ``torch.func.functional_call``.

    With a tuple of out_features it replaces a ``torch.nn.Linear`` for each of them, and all of this holds for the
    parameters of each: ``weights.0``, ``biases.0`` and so on, instead of ``weight`` and ``bias``.
    """

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
        let_compile()
        recipe_of(fp8)  # raises for a name that it does not know
        self.in_features = checked_count("in_features", in_features)
        self.out_features = out_features
        self.sequence_parallel = sequence_parallel
        self.group = group_name(group)
        self.world_size, self.rank = place_of(self.group)
        self.fp8 = fp8
        self._several = isinstance(out_features, tuple)
        # The names in state dicts: the parameters of each torch.nn.Linear.
        self._names: list[tuple[str, str]] = [("weight", "bias")]
        if self._several:
            self._names = [(f"weights.{i}", f"biases.{i}") for i in range(len(out_features))]
        # For each weight: this rank's part of the cut dim, and how much smaller that is than the largest part.
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

    @property
    def fp8(self) -> str | None:
        """The name of the recipe by which the layer computes; None: in the operands' dtype. It may be set at any time."""
        return self._fp8

    @fp8.setter
    def fp8(self, name: str | None) -> None:
        self._place = Place(self.group, self.world_size, self.rank, recipe_of(name))
        self._fp8 = name

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Each weight and its bias, as the module has them."""
        if not self._several:
            return [self._pair()]
        biases = [None] * len(self._names) if self.biases is None else self.biases
        return list(zip(self.weights, biases, strict=True))

    def _pair(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        # A module's attributes are slow, and needed only with a parametrization.
        parameters = self._parameters
        weight = parameters["weight"] if "weight" in parameters else self.weight  # noqa: SIM401
        bias = parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401
        return weight, bias

    def _operands(
        self, input: torch.Tensor, i: int, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> Operands:
        """This rank's parts of the i-th pair as plain tensors, with gradients to the parameters."""
        of_weight, of_bias = self._names[i]
        weight, bias = self._in_place(of_weight, weight), self._in_place(of_bias, bias)
        own = local_parts(weight, bias, input.requires_grad)
        return Operands(*own, self._paddings[i])

    def _in_place(self, name: str, parameter: torch.Tensor | None) -> torch.Tensor | None:
        """A parameter in its placement, on the layer's ranks; a plain tensor is this rank's part."""
        mesh = self._mesh
        found = in_place(self, name, parameter, self._placements_of(name), mesh)
        if found is not None and found is parameter and isinstance(found, DTensor):
            other = found._spec.mesh
            if other is not mesh and not torch.compiler.is_compiling():
                self.__dict__["_mesh"] = other  # the next comparison is quick
        return found

    def _of_foreign(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        columns: bool,
        features: int,
        tokens: int | None = None,
    ) -> torch.Tensor:
        """The output, before it is gathered, for a weight that no op takes, such as one that torchao has quantized."""
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
        check_input(type(self).__name__, input)
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

    def extra_repr(self) -> str:
        # Weights are not read: a parametrization would compute them, perhaps on this rank alone.
        biases = self.biases if self._several else [self.bias]
        bias: bool | list[bool] = [one is not None for one in biases or [None]]
        bias = bias[0] if len(set(bias)) == 1 else bias
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, "
            f"rank={self.rank}, world_size={self.world_size}, sequence_parallel={self.sequence_parallel}"
            + ("" if self.fp8 is None else f", fp8={self.fp8!r}")
        )


class _ParameterList(torch.nn.ParameterList):
    """The layers' lists, which take DTensors where the layers do."""

    register_parameter = torch.nn.Module.register_parameter


def _device_of_parameters(device: torch.device | str | None) -> torch.device:
    """The device on which a module's parameters are made: accelerate's ``init_empty_weights`` moves them when they are
    registered."""
    module = torch.nn.Module()
    module.register_parameter("parameter", torch.nn.Parameter(torch.empty(0, device=device)))
    return module.parameter.device
