"""The styles that :func:`overlap_torch.integrations.transformers.register` puts into transformers; importing it loads transformers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from transformers.distributed.tensor_parallel import (
    ALL_PARALLEL_STYLES,
    ColwiseParallel,
    RowwiseParallel,
    TensorParallelLayer,
)

from overlap_torch._layers.maps import let_compile
from overlap_torch._layers.meshes import check_mesh, note_mesh
from overlap_torch._layers.placements import from_local, local_parts, redistribute, to_local
from overlap_torch._layers.prepare import OverlapPrepareModuleInput
from overlap_torch._layers.sharding import SumGradient, TakePart
from overlap_torch._watch.report import note_fallback
from overlap_torch.parallel import (
    OverlapColwiseLinear,
    OverlapRowwiseLinear,
    is_plain_linear,
    replace_forward,
)

REGISTRY = ALL_PARALLEL_STYLES
TOKENS = Shard(1)  # of [batch, tokens, features]
# Attributes of modules: in a layer with cut tokens; a norm of theirs; a block, which gathers them; in a block.
_IN_LAYER, _SUMS, _GATHERS, _BLOCK = (
    f"_overlap_{name}" for name in ("in_layer", "sums", "gathers", "block")
)


class OverlapColwise(ColwiseParallel):
    """transformers' column-parallel style, which reduces the input's gradient, or gathers the input, beside its GEMM."""

    def install_forward(self, module: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
        """Replaces the forward of a plain ``torch.nn.Linear``; leaves all others to transformers' style."""
        if not _takes(module):
            return super().install_forward(module, mesh)
        return _linear(module, OverlapColwiseLinear, mesh, self)


class OverlapRowwise(RowwiseParallel):
    """transformers' row-parallel style, which reduces or reduce-scatters the output beside its GEMM."""

    def install_forward(self, module: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
        """Replaces the forward of a plain ``torch.nn.Linear``; leaves all others to transformers' style."""
        if _takes(module):
            return _linear(module, _RowwiseLinear, mesh, self)
        module = super().install_forward(module, mesh)
        forward = module.forward

        def local_forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            output = forward(*args, **kwargs)
            return to_local(output) if _is_local_in(module) and _is_cut(output) else output

        module.forward = local_forward
        return module


class _RowwiseLinear(OverlapRowwiseLinear):
    """A row-parallel linear. If its block was given plain hidden states, its output is a plain tensor, too."""

    def _output(self, local: torch.Tensor, placement: Placement, size: int) -> torch.Tensor:
        if placement == self.output_layout and _is_local_in(self):
            return local
        return super()._output(local, placement, size)


class Sequence(TensorParallelLayer):
    """A layer whose hidden states are DTensors cut over the ranks. The first layer cuts whole hidden states on entry.

    Within the layer they are plain tensors, this rank's part, because an operator on a DTensor takes the host as long as
    several on a tensor. They stay DTensors in four cases: if parts differ in size; under a compiler, where DTensors cost
    nothing; if a norm has no style, because its gradient would silently be only that of this rank's tokens; and if hidden
    states have dropout, because DTensors draw different numbers for each rank's part.

    So a plain tensor that a norm of the layer sees is this rank's part, for any caller of the norm.
    """

    def install_forward(self, module: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
        """Gives the module its own class."""
        state = _State()
        for each in module.modules():
            setattr(each, _IN_LAYER, state)
        note_mesh(mesh)
        module._overlap_mesh = mesh
        # Other code may have set another forward on the module.
        module._overlap_forward = module.__dict__.pop("forward", None)
        module.__class__ = _with_cut_tokens(type(module))
        return module


@functools.cache
def _with_cut_tokens(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """A subclass of the layer's class with the style `Sequence`. transformers checkpoints the last class's forward, with
    all its work."""

    class WithCutTokens(kind):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            mesh, forward = self._overlap_mesh, self._overlap_forward or super().forward
            hidden = args[0] if args else kwargs["hidden_states"]
            _check(self, hidden, mesh)
            state = self.__dict__[_IN_LAYER]
            state.is_local = _may_be_local(self, hidden, mesh)
            if not state.is_local:
                return forward(*_with_hidden_states(_cut(hidden, mesh), args, kwargs), **kwargs)
            args = _with_hidden_states(_own_tokens(hidden, mesh), args, kwargs)
            output = forward(*args, **kwargs)
            if isinstance(output, tuple):
                return (from_local(output[0], mesh, (TOKENS,)), *output[1:])
            return from_local(output, mesh, (TOKENS,))

    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(WithCutTokens, name, getattr(kind, name))
    return WithCutTokens


def _check(module: torch.nn.Module, hidden: torch.Tensor, mesh: DeviceMesh) -> None:
    """Raises unless hidden states that are a DTensor are on the ranks of the module's style."""
    if isinstance(hidden, DTensor) and hidden.device_mesh is not mesh:
        check_mesh(f"{type(module).__name__}: its hidden states", hidden, mesh)


def _may_be_local(layer: torch.nn.Module, hidden: torch.Tensor, mesh: DeviceMesh) -> bool:
    if hidden.shape[TOKENS.dim] % mesh.size() != 0 or torch.compiler.is_compiling():
        return False
    if torch.is_grad_enabled() and _has_parameters_without_style(layer):
        return False
    return not (layer.training and _drops_hidden_states(layer))


def _has_parameters_without_style(module: torch.nn.Module) -> bool:
    """True if a module that sees the cut tokens (outside blocks, without a norm's style) has parameters with gradients.

    The parameters themselves do not tell: FSDP makes DTensors of those without a style, too, and plain tensors of them when
    they are used.
    """
    if _GATHERS in module.__dict__ or _SUMS in module.__dict__:
        return False
    return any(
        parameter is not None and parameter.requires_grad
        for parameter in module._parameters.values()
    ) or any(
        child is not None and _has_parameters_without_style(child)
        for child in module._modules.values()
    )


def _drops_hidden_states(layer: torch.nn.Module) -> bool:
    """True if any module of the layer has a dropout, except that of attention's weights. Looked up once for a layer."""
    found = layer.__dict__.get("_overlap_drops")
    if found is None:
        found = any(
            (isinstance(each, torch.nn.Dropout) and each.p > 0)
            or any(
                "drop" in name and "att" not in name and type(value) is float and value > 0
                for name, value in each.__dict__.items()
            )
            for each in layer.modules()
        )
        layer._overlap_drops = found
    return found


def _is_local_in(module: torch.nn.Module) -> bool:
    """True if the module's block was last given plain hidden states, by a layer with the style `Sequence`."""
    block = module.__dict__.get(_BLOCK)
    return block is not None and block.is_local


class _State:
    """A layer's or a block's state, known to all modules in it: whether hidden states were plain
    tensors when it was last called.

    The state also holds after the call, because backward may compute a part again. Each call of a block sets it, because
    layers may share the block.
    """

    is_local = False


def _is_cut(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and tensor.placements == (TOKENS,)


def _with_hidden_states(
    hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """The positional arguments with these hidden states first; without positional arguments they go to `kwargs`."""
    if args:
        return (hidden, *args[1:])
    kwargs["hidden_states"] = hidden
    return args


class SequenceNorm(TensorParallelLayer):
    """A norm of this rank's tokens: its parameters are replicated, and their gradients summed over the ranks."""

    def shard_param(self, module: torch.nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Makes a replicated DTensor of the parameter."""
        whole = module._parameters[param]
        if whole is not None:
            replicated = distribute_tensor(whole, mesh, [Replicate()], src_data_rank=None)
            module._parameters[param] = torch.nn.Parameter(
                replicated, requires_grad=whole.requires_grad
            )

    def install_forward(self, module: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
        """Replaces ``module.forward``; whole hidden states stay whole."""
        note_mesh(mesh)
        setattr(module, _SUMS, True)
        forward = module.forward
        group = mesh.get_group().group_name

        def norm(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            distributed = isinstance(hidden, DTensor)
            _check(module, hidden, mesh)
            cut = distributed or _IN_LAYER in module.__dict__
            sums = cut and torch.is_grad_enabled()
            parameters = dict(module._parameters)
            for name, parameter in parameters.items():
                if parameter is not None:
                    local, _ = local_parts(parameter, None)
                    module._parameters[name] = SumGradient.apply(local, group) if sums else local
            try:
                output = forward(to_local(hidden) if distributed else hidden, *args, **kwargs)
            finally:
                module._parameters.update(parameters)
            return from_local(output, mesh, (TOKENS,), hidden.shape) if distributed else output

        module.forward = norm
        return module


class SequenceInput(TensorParallelLayer):
    """A block whose hidden states are gathered once, beside the GEMMs of the column-parallel layers that read them."""

    def install_forward(self, module: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
        """Hooks that gather before the block's forward; the block gets a whole tensor."""
        setattr(module, _GATHERS, True)
        block = _State()
        for each in module.modules():
            setattr(each, _BLOCK, block)
        return _GatheredHiddenStates()._apply(module, mesh)


class _GatheredHiddenStates(OverlapPrepareModuleInput):
    """Gathers the first positional input or, without one, the keyword ``hidden_states``."""

    def __init__(self) -> None:
        super().__init__(
            input_kwarg_layouts={"hidden_states": TOKENS},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
            use_local_output=True,
        )

    def _prepare(self, module, args, kwargs, mesh):
        others = (None,) * (len(args) - 1)
        self.input_layouts = (TOKENS, *others) if args else None
        self.desired_input_layouts = (Replicate(), *others) if args else None
        hidden = args[0] if args else kwargs.get("hidden_states")
        layer = module.__dict__.get(_IN_LAYER)
        module.__dict__[_BLOCK].is_local = (
            layer is not None and layer.is_local and not isinstance(hidden, DTensor)
        )
        return super()._prepare(module, args, kwargs, mesh)


def _takes(module: torch.nn.Module) -> bool:
    if getattr(module, "_hf_quantized_needs_local_tp", False):
        note_fallback(module, "transformers' style: its weight is quantized")
        return False
    return is_plain_linear(module)


def _linear(
    module: torch.nn.Linear, kind: type, mesh: DeviceMesh, style: ColwiseParallel | RowwiseParallel
) -> torch.nn.Module:
    let_compile()
    return replace_forward(
        module, kind, mesh, style.input_layouts, style.output_layouts, style.use_local_output
    )


def _own_tokens(hidden: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's tokens, from whole or cut hidden states in parts of one size."""
    if isinstance(hidden, DTensor):
        return to_local(hidden if _is_cut(hidden) else redistribute(hidden, (TOKENS,)))
    place = (mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())
    return TakePart.apply(hidden, TOKENS.dim, hidden.shape[TOKENS.dim], *place)


def _cut(hidden: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    if isinstance(hidden, DTensor):
        return hidden
    return redistribute(from_local(hidden, mesh, (Replicate(),)), (TOKENS,))


def named() -> dict[str, TensorParallelLayer]:
    """The styles under their own names."""
    return {
        "overlap_colwise": OverlapColwise(),
        "overlap_colwise_gather_output": OverlapColwise(output_layouts=Replicate()),
        "overlap_rowwise": OverlapRowwise(),
        "overlap_rowwise_split_input": OverlapRowwise(input_layouts=Replicate()),
        "overlap_rowwise_sequence": OverlapRowwise(output_layouts=TOKENS, use_local_output=False),
        "overlap_sequence": Sequence(),
        "overlap_sequence_norm": SequenceNorm(),
        "overlap_sequence_input": SequenceInput(),
    }


def in_place_of_transformers() -> dict[str, TensorParallelLayer]:
    """The styles of these types under the names in models' plans, with transformers' layouts."""
    ours = {ColwiseParallel: OverlapColwise, RowwiseParallel: OverlapRowwise}
    ours |= {kind: kind for kind in ours.values()}  # another handle has registered it
    return {
        name: ours[type(style)](
            input_layouts=style.input_layouts,
            output_layouts=style.output_layouts,
            use_local_output=style.use_local_output,
        )
        for name, style in REGISTRY.items()
        if type(style) in ours and name not in named()
    }


# --- plans of sequence parallelism ----------------------------------------------------------------------------

_COLUMNS = ("colwise", "overlap_colwise")
_ROWS = ("rowwise", "overlap_rowwise")
_WITHIN_BLOCKS = ("replicated_with_grad_allreduce",)
_HEADS = ("colwise_gather_output", "colwise_rep", "overlap_colwise_gather_output")


def sequence_plan(model: Any) -> dict[str, str]:
    """See :func:`overlap_torch.integrations.transformers.sequence_plan`."""
    from transformers import AutoModelForCausalLM, PretrainedConfig

    if isinstance(model, PretrainedConfig):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model)
    kind = type(model).__name__
    # By names with * for a layer's number, as in plans.
    modules = {
        ".".join("*" if part.isdigit() else part for part in name.split(".")): module
        for name, module in model.named_modules()
    }
    plan: dict[str, str] = {}

    def refuse(why: str) -> ValueError:
        return ValueError(
            f"no plan of sequence parallelism is known for {kind}: {why}. Use its own plan, or write one of the styles that "
            "overlap_torch.integrations.transformers.register names"
        )

    blocks = {_parent(name) for name, style in model.tp_plan.items() if style in _ROWS}
    layers = {_parent(block) for block in blocks}
    if len(layers) != 1:
        raise refuse(
            f"its row-parallel layers are in blocks of {sorted(layers) or 'no layers at all'}"
        )
    (layer,) = layers
    for name, style in model.tp_plan.items():
        if _parent(name) in blocks and style in _COLUMNS:
            plan[name] = "overlap_colwise"
        elif _parent(name) in blocks and style in _ROWS:
            plan[name] = "overlap_rowwise_sequence"
        elif _parent(name) not in blocks and style in _HEADS:
            plan[name] = "overlap_colwise_gather_output"
        elif name.startswith(f"{layer}.") and style not in _WITHIN_BLOCKS:
            raise refuse(f"{name} has the style {style}")
    if "overlap_colwise_gather_output" not in plan.values():
        raise refuse("it has no column-parallel head, which gathers the last hidden states")
    plan[layer] = "overlap_sequence"
    for block in blocks:
        plan[block] = "overlap_sequence_input"
    trunk = _parent(_parent(layer))  # layers are numbered in a list
    for name, module in modules.items():
        has_parameters = next(module.parameters(), None) is not None
        if _parent(name) == layer and name not in blocks and has_parameters:
            if not _is_norm(module):
                raise refuse(f"{name}, a {type(module).__name__}, is neither a block nor a norm")
            plan[name] = "overlap_sequence_norm"
        elif _parent(name) == trunk and _is_norm(module):
            plan[name] = "overlap_sequence_norm"
    return plan


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _is_norm(module: torch.nn.Module) -> bool:
    """One weight for each feature, and perhaps a bias."""
    parameters = list(module.parameters())
    return bool(parameters) and all(parameter.dim() == 1 for parameter in parameters)
