"""The style that gathers a module's input once for all of the module's column-parallel layers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput

from overlap_torch._layers.dtensor import Placements, is_foreign, sharded_dim
from overlap_torch._layers.fp8 import Recipe
from overlap_torch._layers.linear import Operands, Place, autocast_dtype, columns_sequence
from overlap_torch._layers.meshes import check_mesh, same_ranks
from overlap_torch._layers.placements import from_local, local_rows, redistribute, to_local


class _Ahead(NamedTuple):
    """An output that was computed while its input was gathered, until the module calls its reader."""

    input: torch.Tensor
    output: torch.Tensor
    version: int  # of the input
    modes: tuple[object, ...]
    weight: torch.Tensor


def _modes(input: torch.Tensor) -> tuple[object, ...]:
    """The modes on which an output depends beside its operands."""
    return input.requires_grad, torch.is_grad_enabled(), autocast_dtype(input.device.type)


class GatheredReader:
    """A layer whose output may be computed while its input is gathered."""

    ahead: _Ahead | None

    device_mesh: DeviceMesh
    place: Place
    world_size: int
    input_layout: Placement
    in_features: int
    fp8: Recipe | None

    def operands(self, input: torch.Tensor) -> Operands:
        """This rank's parameters."""
        raise NotImplementedError

    def _set_ahead(self, ahead: _Ahead | None) -> None:
        """Sets the attribute without ``torch.nn.Module.__setattr__``, the slowest part of a reader, unless something traces
        it."""
        if torch.compiler.is_compiling():
            # A checkpoint that Dynamo traces takes no changes of modules, but this one ends within the module's call.
            utils = torch._dynamo.utils
            utils._disable_side_effect_safety_checks_for_current_subtracer(
                setattr, self, "ahead", ahead
            )
        else:
            self.__dict__["ahead"] = ahead

    def take_ahead(self, input: torch.Tensor) -> torch.Tensor | None:
        """This rank's part of the output features, if it has been computed ahead for this input, and not been taken."""
        ahead = self.ahead
        if ahead is None or ahead.input is not input:
            return None
        self._set_ahead(None)
        if ahead.weight is not self.weight or ahead.modes != _modes(input):
            return None
        if torch.compiler.is_compiling():
            # Dynamo does not know versions; the compiler of its graph does.
            torch._check(
                input._version == ahead.version,
                lambda: (
                    "a compiled module changed the input that OverlapPrepareModuleInput had gathered in place, and then "
                    "called a reader with it: change a copy, or give OverlapPrepareModuleInput readers=[]"
                ),
            )
        elif input._version != ahead.version:
            return None
        return ahead.output


class OverlapPrepareModuleInput(PrepareModuleInput):
    """``PrepareModuleInput`` that gathers beside the GEMMs of the layers that read the gathered input.

    Use it in place of ``PrepareModuleInput``: for an attention whose q, k and v, or an MLP whose gate and up, have the
    style :class:`OverlapColwiseParallel`::

        "attention": OverlapPrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
        "attention.wq": OverlapColwiseParallel(), ...

    An input whose layout is ``Shard(d)`` of a dim other than the last, and is to be ``Replicate()``, is gathered once, and
    the outputs of all its readers are computed while it arrives, before the module's own forward. Each reader takes its
    output when the module calls it with that input. Backward computes the input's gradient for all readers in one GEMM,
    and reduce-scatters it once, beside that GEMM. The module's other uses of the input see the gathered
    tensor, as after ``PrepareModuleInput``; gradients that arrive from there are added before the one reduce-scatter.
    All other inputs are prepared as ``PrepareModuleInput`` does.

    A reader computes its output itself if the module calls it with another tensor, with the input after a change in place,
    a second time, or under another grad mode or autocast than the module's. If a reader is not called, its output was
    computed for nothing; a warning names the reader, once. The gathered input lives as long as the module's forward refers
    to it. If a reader's weight needs a gradient, it lives until backward has computed that, as after
    ``PrepareModuleInput``. A gradient hook on the gathered input does not see the readers' gradients. Under autocast the
    input is gathered in autocast's dtype; other uses get these values in the input's own dtype.

    Under ``torch.inference_mode`` with ``use_local_output=False`` it does only what ``PrepareModuleInput`` does, because it
    could not detect that the module changed the input. ``torch.no_grad`` has no such limit.

    A compiled module in which a reader is called with the input after it was changed in place does not compile.
    ``torch.compile`` must be given a module around the one that has this style: hooks of the outermost module are compiled
    apart from its forward.

    Keyword Args:
        input_layouts, desired_input_layouts, input_kwarg_layouts, desired_input_kwarg_layouts, use_local_output: as
            in ``PrepareModuleInput``.
        readers: names of the submodules that read the gathered input, such as ``["wq"]``. None: the module's direct
            children with the style :class:`OverlapColwiseParallel`, ``input_layouts=Replicate()`` and the input's number of
            features, if one input is gathered. If several are, it is not known who reads which, so no output is computed
            ahead. Named readers read the first of several.

    Raises:
        ValueError: ``readers`` has a name that no submodule has.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        desired_input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
        readers: Sequence[str] | None = None,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_output,
        )
        self.readers = None if readers is None else tuple(readers)
        self._warned = False

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        torch.compiler.allow_in_graph(_replicated)
        for name in self.readers or ():
            if name not in dict(module.named_modules()):
                known = ", ".join(name for name, _ in module.named_children())
                raise ValueError(
                    f"readers names {name!r}, which is no submodule of {type(module).__name__}; its children are {known}"
                )

        def prepare(module, args, kwargs):
            return self._prepare(module, args, kwargs, device_mesh)

        module.register_forward_pre_hook(prepare, with_kwargs=True)
        module.register_forward_hook(self._finish, always_call=True)
        return module

    def _prepare(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mesh: DeviceMesh,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        layouts, desired = self.input_layouts, self.desired_input_layouts
        if layouts is None:
            layouts = desired = (None,) * len(args)
        if len(args) != len(layouts):
            raise ValueError(
                f"{type(module).__name__} was called with {len(args)} positional inputs, but input_layouts has "
                f"{len(layouts)}: give one for each, None for those that stay as they are"
            )
        values = [*args, *kwargs.values()]
        layouts = [*layouts, *(self.input_kwarg_layouts.get(name) for name in kwargs)]
        desired = [*desired, *(self.desired_input_kwarg_layouts.get(name) for name in kwargs)]
        gathered = [
            i
            for i, value in enumerate(values)
            if _is_gathered(value, layouts[i], desired[i], mesh) and mesh.size() > 1
        ]
        for i, value in enumerate(values):
            readers = []
            first = (
                gathered and i == gathered[0] and (len(gathered) == 1 or self.readers is not None)
            )
            if first and (self.use_local_output or not _in_inference_mode()):
                candidates = (reader for _, reader in self._candidates(module))
                found = [reader for reader in candidates if _can_read(reader, value, mesh)]
                # Cast and gathered once, for the readers with the first one's recipe.
                recipe = found[0].place.recipe if found else None
                readers = [reader for reader in found if reader.place.recipe == recipe]
            if readers:
                values[i] = _gather(value, layouts[i], readers, mesh, self.use_local_output)
            else:
                values[i] = self._prepare_input_arg(value, mesh, layouts[i], desired[i])
        return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))

    def _candidates(self, module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
        if self.readers is None:
            return list(module.named_children())
        return [(name, module.get_submodule(name)) for name in self.readers]

    def _finish(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Drops outputs that were not taken, after the module's forward, even if it raised."""
        unread = []
        for name, reader in self._candidates(module):
            if isinstance(reader, GatheredReader) and reader.ahead is not None:
                reader._set_ahead(None)
                unread.append(name)
        if unread and output is not None and not self._warned and not torch.compiler.is_compiling():
            self._warned = True
            warnings.warn(
                f"{type(module).__name__} did not call {', '.join(unread)} with its gathered input, so their GEMMs were "
                "wasted; name the layers that read it: OverlapPrepareModuleInput(readers=[...])",
                stacklevel=2,
            )


def _in_inference_mode() -> bool:
    """True if tensors have no versions, by which changes of the module are found. A plain tensor can be made in this mode."""
    return not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()


def _is_gathered(
    value: Any, layout: Placement | None, desired: Placement | None, mesh: DeviceMesh
) -> bool:
    if not isinstance(value, torch.Tensor) or layout is None or desired is None:
        return False
    if isinstance(value, DTensor) and not same_ranks(value.device_mesh, mesh):
        # PrepareModuleInput replicates it in its own mesh; another layout belongs to another mesh's parts.
        if value.device_mesh.ndim != 1 or not desired.is_replicate():
            check_mesh("OverlapPrepareModuleInput: an input", value, mesh)
        return False
    if layout == desired or not desired.is_replicate() or not value.is_floating_point():
        return False
    return _token_dim(value, layout) is not None


def _token_dim(value: torch.Tensor, layout: Placement) -> int | None:
    """The dim in which it is cut, if that is not the last one."""
    if isinstance(value, DTensor):
        layout = value.placements[0]
    dim = sharded_dim(layout, value.dim())
    return dim if dim is not None and dim < value.dim() - 1 else None


_PARAMETERS = {"weight", "bias"}


def _can_read(module: torch.nn.Module, input: torch.Tensor, mesh: DeviceMesh) -> bool:
    return (
        isinstance(module, GatheredReader)
        # It must not be parametrized, and no hook of its own may wait for its input's gradient.
        and module._parameters.keys() == _PARAMETERS
        and not (module._backward_hooks or module._backward_pre_hooks)
        and not is_foreign(module.weight)
        and same_ranks(module.device_mesh, mesh)
        and module.input_layout.is_replicate()
        and module.in_features == input.shape[-1]
        # FSDP may have cut the weight once more until the layer itself is called.
        and (not isinstance(module.weight, DTensor) or module.weight.device_mesh.ndim == 1)
    )


def _gather(
    input: torch.Tensor,
    layout: Placement,
    readers: Sequence[GatheredReader],
    mesh: DeviceMesh,
    use_local_output: bool,
) -> torch.Tensor:
    """Returns the gathered input, and gives the readers their outputs."""
    if _in_inference_mode():
        with torch.inference_mode(False), torch.no_grad():
            return _gather(input, layout, readers, mesh, use_local_output)
    dim = _token_dim(input, layout)
    if torch.compiler.is_compiling() and not isinstance(input, DTensor):
        input = from_local(input, mesh, (layout,))
    local, tokens = local_rows(input, dim, readers[0].world_size)
    operands = [reader.operands(input) for reader in readers]
    *outputs, gathered = columns_sequence(
        local, operands, readers[0].place, tokens, dim, keeps=True
    )
    gathered = gathered.to(input.dtype)  # autocast has cast what was gathered
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        replicated = _as_replicated(gathered, mesh, use_local_output)
    elif isinstance(input, DTensor):
        replicated = _replicated(gathered, input, use_local_output)
    else:
        replicated = _Replicated.apply(gathered, input, mesh, (Shard(dim),), use_local_output)
    if not torch.compiler.is_compiling():
        _watch(replicated, outputs)
    version, modes = replicated._version, _modes(replicated)
    for reader, output in zip(readers, outputs, strict=True):
        reader._set_ahead(_Ahead(replicated, output, version, modes, reader.weight))
    return replicated


def _watch(gathered: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
    """Makes backward raise if the module changed a gathered DTensor in place, as autograd does for a plain tensor.

    The weights' gradients read its memory, but only the DTensor counts its changes.
    """
    version = gathered._version

    def check(grad: torch.Tensor) -> None:
        if gathered._version != version:
            raise RuntimeError(
                "the input that OverlapPrepareModuleInput had gathered has been modified by an inplace operation after a "
                "layer had read it, whose gradients need it: change a copy"
            )

    for output in outputs:
        if output.requires_grad and isinstance(gathered, DTensor):
            output.register_hook(check)


# If Dynamo traced this, its backward would expect a gradient with the output's placements.
def _replicated(gathered: torch.Tensor, input: DTensor, use_local_output: bool) -> torch.Tensor:
    return _Replicated.apply(gathered, input, input.device_mesh, input.placements, use_local_output)


def _as_replicated(
    gathered: torch.Tensor, mesh: DeviceMesh, use_local_output: bool
) -> torch.Tensor:
    if use_local_output:
        return gathered.view_as(gathered)
    return DTensor.from_local(gathered, mesh, [Replicate()], run_check=False)


class _Replicated(torch.autograd.Function):
    """The gathered input as its readers see it: replicated, a DTensor or a tensor.

    The gradient of `gathered` is a part of a sum. A gradient that every rank has in full needs no communication: this
    rank's part of it goes to `input`, the source of `gathered`: a DTensor, or this rank's part of one.
    """

    @staticmethod
    def forward(
        ctx,
        gathered: torch.Tensor,
        input: torch.Tensor,
        mesh: DeviceMesh,
        placements: Placements,
        use_local_output: bool,
    ) -> torch.Tensor:
        ctx.mesh, ctx.placements = mesh, placements
        ctx.of_dtensor = isinstance(input, DTensor)
        return _as_replicated(gathered, mesh, use_local_output)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if not isinstance(grad, DTensor):
            grad = from_local(grad, ctx.mesh, (Replicate(),))
        if grad.placements[0].is_partial():
            return to_local(grad), None, None, None, None
        grad = redistribute(grad, ctx.placements)
        return None, grad if ctx.of_dtensor else to_local(grad), None, None, None
