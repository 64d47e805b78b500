"""Styles for ``torch.distributed.tensor.parallel.parallelize_module`` whose Linear layers overlap their communication.

Use them in place of ``ColwiseParallel``, ``RowwiseParallel`` and ``PrepareModuleInput``::

    plan = {
        # Outside attention and MLP tokens are divided among the ranks. Each of the two gathers them once.
        "attention": OverlapPrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
        "attention.wq": OverlapColwiseParallel(), ...
        "attention.wo": OverlapRowwiseParallel(output_layouts=Shard(1)),
        "mlp": OverlapPrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "mlp.gate": OverlapColwiseParallel(), "mlp.up": OverlapColwiseParallel(),
        "mlp.down": OverlapRowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(block, device_mesh, plan)

They make no more collectives than PyTorch's styles, and move no more bytes.

Parameters are DTensors with the placements that PyTorch's styles give them, so checkpoints, optimizers, gradient clipping
and FSDP2 see no difference. The layer's forward is replaced, because a hook cannot reach the GEMM between the collectives.
"""

from __future__ import annotations

import warnings
from typing import ClassVar

import torch
import torch.nn.utils.parametrize
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from overlap_torch._layers.dtensor import Placements, is_foreign, sharded_dim
from overlap_torch._layers.fp8 import Recipe, recipe_of_config
from overlap_torch._layers.linear import (
    Operands,
    Place,
    columns,
    columns_sequence,
    row,
    row_sequence,
)
from overlap_torch._layers.maps import let_compile
from overlap_torch._layers.meshes import check_mesh, note_mesh
from overlap_torch._layers.placements import (
    add_bias,
    foreign_linear,
    from_local,
    in_place,
    local_parts,
    local_rows,
    redistribute,
    to_local,
)
from overlap_torch._layers.prepare import GatheredReader, OverlapPrepareModuleInput
from overlap_torch._ops.dtensor import make_ops_known
from overlap_torch._ops.nested import check_input
from overlap_torch._watch.report import note_call, note_fallback, note_foreign

__all__ = ["OverlapColwiseParallel", "OverlapPrepareModuleInput", "OverlapRowwiseParallel"]

make_ops_known()


class OverlapColwiseParallel(ColwiseParallel):
    """``ColwiseParallel`` that gathers the input, and reduces its gradient, beside the GEMM.

    A ``torch.nn.Linear`` handles its input, forward and backward, as follows:

    - a tensor with ``input_layouts=Replicate()``, the default: nothing; the gradient is all-reduced beside its GEMM;
    - ``Shard(d)`` of a dim other than the last, tensor or DTensor: gathered while the GEMM computes the rows that have
      arrived; the gradient is reduce-scattered beside its GEMM. Layers that share such an input share the gather after
      :class:`OverlapPrepareModuleInput`. As after PyTorch's style the gathered input is kept for the weight's gradient;
    - a replicated DTensor: nothing; the gradient stays ``Partial``, and the module that made the DTensor reduces it once
      for all layers that share it;
    - other placements: redistributed to ``Replicate()`` first.

    The output is contiguous for any dim d. A DTensor's sharded dim may be of any size; a tensor's must be the same on every
    rank. A torchao ``Float8Linear`` computes in fp8 as its config says, and gathers fp8 numbers and their
    scales. ``ColwiseParallel`` handles every other module, such as ``torch.nn.Embedding``.

    Keyword Args:
        input_layouts, output_layouts, use_local_output: as in ``ColwiseParallel``.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if not is_plain_linear(module):
            return super()._apply(module, device_mesh)
        return _overlapped(self, module, OverlapColwiseLinear, device_mesh)


class OverlapRowwiseParallel(RowwiseParallel):
    """``RowwiseParallel`` that reduces the output beside the GEMM.

    A ``torch.nn.Linear`` handles its output, by ``output_layouts``, as follows:

    - ``Replicate()``, the default: all-reduced beside the GEMM; backward does not communicate;
    - ``Shard(d)`` of a dim other than the last: reduce-scattered beside the GEMM; the gradient is gathered while backward's
      GEMM computes the rows that have arrived, and the bias's gradient is summed over the ranks;
    - other placements: redistributed after the GEMM.

    The output is contiguous for any dim d. The sharded dim may be of any size, divided as ``Shard`` divides it. A torchao
    ``Float8Linear`` computes in fp8 as its config says. ``RowwiseParallel`` handles every other module, such as
    ``torch.nn.Embedding``.

    Keyword Args:
        input_layouts, output_layouts, use_local_output: as in ``RowwiseParallel``.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if not is_plain_linear(module):
            return super()._apply(module, device_mesh)
        return _overlapped(self, module, OverlapRowwiseLinear, device_mesh)


def is_plain_linear(module: torch.nn.Module) -> bool:
    """True if the module's forward can be replaced; warns, once for each class, of Linear layers for which it cannot."""
    # A subclass has a forward of its own, a parametrized layer has other parameters.
    plain = type(module) is torch.nn.Linear or fp8_recipe(module) is not None
    own = "forward" in module.__dict__  # as accelerate's hooks
    if plain and not own and set(module._parameters) == {"weight", "bias"}:
        return True
    if isinstance(module, torch.nn.Linear):  # for other modules everybody expects PyTorch's style
        _warn_of_fallback(module)
    return False


def fp8_recipe(module: torch.nn.Module) -> Recipe | None:
    """The fp8 recipe of a torchao ``Float8Linear``; None for another module, and for recipes that the ops do not take."""
    kind = type(module)
    if (kind.__module__, kind.__name__) != ("torchao.float8.float8_linear", "Float8Linear"):
        return None
    # For FSDP's gathers in fp8 weights have their own class.
    own = module.config.enable_fsdp_float8_all_gather
    return None if own else recipe_of_config(module.config)


_warned: set[tuple[str, str]] = set()


def _warn_of_fallback(module: torch.nn.Linear) -> None:
    kind = type(module)
    if torch.nn.utils.parametrize.is_parametrized(module):
        why = "it is parametrized"
    elif kind is not torch.nn.Linear:
        why = "it is a subclass of torch.nn.Linear, which may have a forward of its own"
    elif "forward" in module.__dict__:
        why = "it was given a forward of its own, as hooks of accelerate do"
    else:
        why = f"its parameters are {', '.join(module._parameters)}, not weight and bias"
    note_fallback(module, f"PyTorch's style: {why}")
    name = f"{kind.__module__}.{kind.__qualname__}"
    if (name, why) in _warned:
        return
    _warned.add((name, why))
    warnings.warn(
        f"overlap_torch: a {name} takes PyTorch's style, and its communication is not overlapped, because {why}. "
        "A plain torch.nn.Linear is overlapped. This warning appears once for each class",
        stacklevel=2,
    )


def _overlapped(
    style: ColwiseParallel | RowwiseParallel,
    module: torch.nn.Linear,
    kind: type[_OverlapLinear],
    device_mesh: DeviceMesh,
) -> torch.nn.Module:
    """The layer with the style: its parameters distributed, its forward replaced."""
    let_compile()
    for name, parameter in list(module.named_parameters(recurse=False)):
        distributed = distribute_tensor(
            parameter, device_mesh, kind.placements[name], src_data_rank=style.src_data_rank
        )
        parameter = torch.nn.Parameter(distributed, requires_grad=parameter.requires_grad)
        module.register_parameter(name, parameter)
    layouts = (style.input_layouts[0], style.output_layouts[0])
    return replace_forward(module, kind, device_mesh, *layouts, style.use_local_output)


class _OverlapLinear(torch.nn.Linear):
    """A ``torch.nn.Linear`` with DTensor parameters that takes and returns what its style's layouts say."""

    placements: ClassVar[dict[str, Placements]]
    device_mesh: DeviceMesh
    group: str
    world_size: int
    rank: int
    place: Place
    input_layout: Placement
    output_layout: Placement
    use_local_output: bool
    fp8: Recipe | None  # of a torchao Float8Linear

    def _as_dtensor(self, local: torch.Tensor, placement: Placement) -> DTensor:
        """The DTensor of which this tensor is a rank's part; all parts have its size."""
        return from_local(local, self.device_mesh, (placement,))

    def _check(self, input: torch.Tensor) -> None:
        """Raises for an input that is no tensor of rows, or a DTensor on other ranks."""
        check_input(type(self).__name__, input)
        if isinstance(input, DTensor) and input.device_mesh is not self.device_mesh:
            check_mesh(f"{type(self).__name__}: its input", input, self.device_mesh)

    def _full_shape(self, name: str) -> tuple[int, ...]:
        features = (self.out_features, self.in_features)
        return features if name == "weight" else features[:1]

    def _local_parameters(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        pairs = (("weight", self.weight), ("bias", self.bias))
        places = self.placements
        own = [in_place(self, name, one, places[name], self.device_mesh) for name, one in pairs]
        return local_parts(*own, input.requires_grad)

    def _output(self, local: torch.Tensor, placement: Placement, size: int) -> torch.Tensor:
        """The layer's output: `local` is this rank's part of an output whose sharded dim has `size` elements."""
        dim = sharded_dim(placement, local.dim())
        if dim is None:
            as_wanted = self.output_layout.is_replicate()
        else:
            as_wanted = sharded_dim(self.output_layout, local.dim()) == dim
        if as_wanted and self.use_local_output:
            return local
        if dim is None or size % self.world_size == 0:
            output = self._as_dtensor(local, placement)
        else:
            shape = torch.Size((*local.shape[:dim], size, *local.shape[dim + 1 :]))
            output = from_local(local, self.device_mesh, (placement,), shape)
        if not as_wanted:
            output = redistribute(output, (self.output_layout,))
        return to_local(output) if self.use_local_output else output

    def _of_foreign(self, input: torch.Tensor, columns: bool) -> torch.Tensor:
        """The output for a weight that no op takes, such as one that torchao has quantized."""
        note_foreign(self, self.weight)
        sharded = sharded_dim(self.input_layout, input.dim()) == input.dim() - 1
        output = foreign_linear(
            input,
            self.weight,
            self.bias,
            self.device_mesh,
            self.input_layout,
            self.output_layout,
            columns=columns,
            features=self.out_features,
            shape=(*input.shape[:-1], self.in_features) if sharded else None,
        )
        return to_local(output) if self.use_local_output else output

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, input_layout={self.input_layout}, output_layout={self.output_layout}, "
            f"use_local_output={self.use_local_output}"
        )


class OverlapColwiseLinear(_OverlapLinear, GatheredReader):
    """The layer that :class:`OverlapColwiseParallel` makes of a ``torch.nn.Linear``."""

    placements: ClassVar[dict[str, Placements]] = {"weight": (Shard(0),), "bias": (Shard(0),)}
    _overlap_columns = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As the style says."""
        self._check(input)
        note_call(self, input)
        if is_foreign(self._parameters.get("weight")):
            return self._of_foreign(input, columns=True)
        last = input.dim() - 1
        output = self.take_ahead(input)
        if output is None:
            output = self._computed(input)
        return self._output(output, Shard(last), self.out_features)

    def operands(self, input: torch.Tensor) -> Operands:
        """This rank's parameters."""
        weight, bias = self._local_parameters(input)
        return Operands(weight, bias, -(-self.out_features // self.world_size) - weight.shape[0])

    def _computed(self, input: torch.Tensor) -> torch.Tensor:
        """This rank's part of the output features."""
        distributed = isinstance(input, DTensor)
        placement = input.placements[0] if distributed else self.input_layout
        dim = sharded_dim(placement, input.dim())
        operands = [self.operands(input)]
        if dim is not None and dim != input.dim() - 1:
            local, tokens = local_rows(input, dim, self.world_size)
            return columns_sequence(local, operands, self.place, tokens, dim, keeps=True)[0]
        if placement.is_replicate() and not distributed:
            return columns(input, operands, self.place)[0]
        if not distributed:
            input = self._as_dtensor(input, placement)
        if not placement.is_replicate():  # redistributing it would reduce the gradient here
            input = redistribute(input, (Replicate(),))
        return columns(to_local(input, (Partial(),)), operands, self.place, reduces=False)[0]


class OverlapRowwiseLinear(_OverlapLinear):
    """The layer that :class:`OverlapRowwiseParallel` makes of a ``torch.nn.Linear``."""

    placements: ClassVar[dict[str, Placements]] = {"weight": (Shard(1),), "bias": (Replicate(),)}
    _overlap_columns = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As the style says."""
        self._check(input)
        note_call(self, input)
        if is_foreign(self._parameters.get("weight")):
            return self._of_foreign(input, columns=False)
        last = input.dim() - 1
        if not isinstance(input, DTensor) and sharded_dim(self.input_layout, input.dim()) != last:
            input = self._as_dtensor(input, self.input_layout)
        if isinstance(input, DTensor):
            input = to_local(redistribute(input, (Shard(last),)))
        weight, bias = self._local_parameters(input)
        padding = -(-self.in_features // self.world_size) - weight.shape[1]
        operands = Operands(weight, bias, padding)
        dim = sharded_dim(self.output_layout, input.dim())
        if self.output_layout.is_replicate():
            return self._output(row(input, operands, self.place), Replicate(), 0)
        if dim is not None and dim != last:
            output = row_sequence(input, operands, self.place, dim, keeps=True)
            return self._output(output, Shard(dim), input.shape[dim])
        # The input's gradient is this rank's own.
        (local,) = columns(input, [Operands(weight, None, 0)], self.place, reduces=False)
        partial = self._as_dtensor(local, Partial())
        output = redistribute(partial, (self.output_layout,))
        output = add_bias(output, self.bias)
        return to_local(output) if self.use_local_output else output


def replace_forward(
    module: torch.nn.Linear,
    kind: type[_OverlapLinear],
    device_mesh: DeviceMesh,
    input_layout: Placement,
    output_layout: Placement,
    use_local_output: bool,
) -> torch.nn.Module:
    module.fp8 = fp8_recipe(module)  # of the module's present class
    module.__class__ = kind
    note_mesh(device_mesh)
    module.device_mesh = device_mesh
    module.group = device_mesh.get_group().group_name
    module.world_size = device_mesh.size()
    module.rank = device_mesh.get_local_rank()
    module.place = Place(module.group, module.world_size, module.rank, module.fp8)
    module.input_layout = input_layout
    module.output_layout = output_layout
    module.use_local_output = use_local_output
    if isinstance(module, GatheredReader):
        module.ahead = None
    return module
