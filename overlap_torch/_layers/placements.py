"""DTensors to this rank's parts and back, and from placement to placement, with gradients that can be differentiated.

``DTensor``'s own ``to_local``, ``from_local`` and ``redistribute`` are right for a first derivative, but lose the second
without an error (torch 2.11): the results of their backward have no history.

Importing this loads ``torch.distributed.tensor``, which takes most of a second.
"""

from __future__ import annotations

import copy

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.nn import functional

from overlap_torch._layers.dtensor import Placements, mesh_within, sharded_dim, wrap
from overlap_torch._layers.meshes import check_mesh
from overlap_torch._layers.sharding import shard_range
from overlap_torch._ops.gradients import TransformedFunction, recorded


def to_local(tensor: DTensor, grad_placements: Placements | None = None) -> torch.Tensor:
    """``DTensor.to_local`` of a DTensor on a one-dimensional mesh.

    If the sharded dim does not divide by the ranks, the gradient is contiguous. For parts of unequal sizes ``DTensor``
    would compute other strides on each rank, and autograd would store such a gradient replicated.
    """
    if not torch.is_grad_enabled():
        return tensor.to_local()
    if torch.compiler.is_compiling() and not _is_uneven(tensor):
        return tensor.to_local(grad_placements=grad_placements)
    return recorded(_ToLocal.apply(tensor, grad_placements))


def local_parts(
    weight: torch.Tensor, bias: torch.Tensor | None, read: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """This rank's parts of a layer's parameters, as plain tensors. Plain tensors already are parts.

    ``read``: backward reads the weight. It then raises if a weight that requires grad was changed in place, as autograd
    does for a plain one: its parts do not count the changes.
    """
    if torch.compiler.is_compiling():  # it cannot trace how `_whole` makes DTensors
        traced = [to_local(one) if isinstance(one, DTensor) else one for one in (weight, bias)]
        return traced[0], traced[1]
    if not isinstance(weight, DTensor) or not (bias is None or isinstance(bias, DTensor)):
        return _part(weight), _part(bias)
    if not torch.is_grad_enabled():
        return weight._local_tensor, None if bias is None else bias._local_tensor
    if torch._C._are_functorch_transforms_active():
        # torch.func wraps the tensors that it differentiates, and these wrappers are not DTensors. DTensors are constants
        # to it.
        with temporarily_clear_interpreter_stack():
            return _apply_parts(weight, bias, read)
    return _apply_parts(weight, bias, read)


def _part(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return local_parts(tensor, None)[0] if isinstance(tensor, DTensor) else tensor


class _LocalParts(torch.autograd.Function):
    """`DTensor.to_local` of a weight, and a bias or None. Parts may differ in size.

    The gradients have the mesh, placements, shape and strides of their DTensors. `to_local` computes the strides as if
    every part had this rank's size; autograd then stores the gradient in another layout, replicated. Two calls of
    `to_local` also take the host twice the time.
    """

    @staticmethod
    def forward(
        ctx, weight: DTensor, bias: DTensor | None, read: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.read = (weight, weight._version) if read else None
        # New tensors, because autograd writes into the tensors that it gets.
        weight_part = weight._local_tensor.detach()
        if bias is None:
            ctx.specs = weight._spec, None
            return weight_part, None
        bias_part = bias._local_tensor.detach()
        ctx.specs = weight._spec, bias._spec
        needs_weight, needs_bias, _ = ctx.needs_input_grad
        if not needs_weight:
            ctx.mark_non_differentiable(weight_part)
        elif not needs_bias:
            ctx.mark_non_differentiable(bias_part)
        return weight_part, bias_part

    @staticmethod
    def backward(ctx, *grads: torch.Tensor | None) -> tuple[DTensor | None, ...]:
        if ctx.read is not None and ctx.read[0]._version != ctx.read[1]:
            raise RuntimeError(
                f"a layer's weight {tuple(ctx.read[0].shape)}, which gradients need, has been modified by an inplace operation "
                "between the layer's forward and backward, as by an optimizer's step: call backward() first"
            )
        make_whole = _whole_again if torch.is_grad_enabled() else _whole
        weight_grad, bias_grad = (
            grad if grad is None else make_whole(grad, spec)
            for grad, spec in zip(grads, ctx.specs, strict=True)
        )
        return weight_grad, bias_grad, None


# `Function.apply` without its Python code for transforms.
_apply_parts = super(torch.autograd.Function, _LocalParts).apply


def _whole(part: torch.Tensor, spec: DTensorSpec) -> DTensor:
    # PyTorch's dispatch may write into a spec, so each DTensor has its own.
    return DTensor(part.detach().contiguous(), copy.copy(spec), requires_grad=False)


def _whole_again(part: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """`_whole` that can be differentiated."""
    return _FromLocal.apply(part, spec.mesh, spec.placements, spec.shape)


def local_rows(input: torch.Tensor, dim: int, world_size: int) -> tuple[torch.Tensor, int]:
    """This rank's part of an input cut in `dim`, and the size of the whole input's `dim`.

    A plain tensor already is this rank's part, and every rank's part has its size.
    """
    if isinstance(input, DTensor):
        return to_local(input), input.shape[dim]
    return input, input.shape[dim] * world_size


def from_local(
    local: torch.Tensor, mesh: DeviceMesh, placements: Placements, shape: torch.Size | None = None
) -> DTensor:
    """``DTensor.from_local`` without a check. ``shape`` is the whole's; None if every rank's part has one size."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return _FromLocal.forward(local, mesh, placements, shape)
    return _FromLocal.apply(local, mesh, placements, shape)


def redistribute(tensor: DTensor, placements: Placements) -> DTensor:
    """``DTensor.redistribute``, in its mesh."""
    if torch.compiler.is_compiling():
        return tensor.redistribute(placements=placements)
    # PyTorch cannot detach a DTensor that requires a gradient in inference mode.
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            return tensor.redistribute(placements=placements)
    if not torch.is_grad_enabled():
        return tensor.redistribute(placements=placements)
    return _Redistribute.apply(tensor, placements)


def in_place(
    layer: torch.nn.Module,
    name: str,
    parameter: torch.Tensor | None,
    placements: Placements,
    mesh: DeviceMesh,
) -> torch.Tensor | None:
    """A layer's parameter in its placements. A parametrization, tied weights or a loaded tensor may have brought another.

    Raises:
        ValueError: a DTensor on other ranks than the mesh's, or a plain tensor that is not this rank's part.
    """
    if parameter is None:
        return None
    if isinstance(parameter, DTensor):
        spec = parameter._spec
        if spec.mesh is not mesh:
            check_mesh(f"{type(layer).__name__}: its {name}", parameter, mesh)
        return parameter if spec.placements == placements else redistribute(parameter, placements)
    shape = layer._full_shape(name)
    own, dim = list(shape), sharded_dim(placements[0], len(shape))
    if dim is not None:
        _, own[dim] = shard_range(own[dim], layer.world_size, layer.rank)
    if list(parameter.shape) != own:
        raise ValueError(
            f"{type(layer).__name__}: its {name} is a plain tensor of shape {tuple(parameter.shape)}, but rank {layer.rank}'s part "
            f"of {tuple(shape)} is {tuple(own)}: give that part, or a DTensor of the whole"
        )
    return parameter


def add_bias(output: DTensor, bias: torch.Tensor | None) -> DTensor:
    """The sum in the output's placement. A plain bias is the whole."""
    if bias is None:
        return output
    if not isinstance(bias, DTensor):
        bias = from_local(bias, output.device_mesh, (Replicate(),))
    if torch.is_autocast_enabled(output.device.type):
        bias = bias.to(output.dtype)
    return redistribute(output + bias, output.placements)


def foreign_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mesh: DeviceMesh,
    given: Placement,
    wanted: Placement,
    *,
    columns: bool,
    features: int,
    shape: tuple[int, ...] | None = None,
) -> DTensor:
    """Computes a layer whose weight no op takes as PyTorch's styles do: DTensors before and after the weight's own linear
    map.

    ``given``: the placement of an input that is no DTensor. ``shape``: the whole input's, None if every rank's part has one
    size. ``columns``: True if N, the ``features``, is cut over the ranks, else K is. ``weight`` represents the whole
    weight, or is this rank's part of it.
    """
    if not isinstance(input, DTensor):
        input = from_local(input, mesh, (given,), None if shape is None else torch.Size(shape))
    input = redistribute(input, (Replicate() if columns else Shard(input.dim() - 1),))
    if mesh_within(weight) is not None:
        output = functional.linear(input, weight, bias if columns else None)
    elif columns:
        own_bias = to_local(bias) if isinstance(bias, DTensor) else bias
        part = functional.linear(to_local(input, (Partial(),)), weight, own_bias)
        whole = torch.Size((*part.shape[:-1], features))
        output = from_local(part, mesh, (Shard(part.dim() - 1),), whole)
    else:
        output = from_local(functional.linear(to_local(input), weight), mesh, (Partial(),))
    output = redistribute(output, (wanted,))
    return output if columns else add_bias(output, bias)


class _ToLocal(TransformedFunction):
    @staticmethod
    def forward(tensor: DTensor, grad_placements: Placements | None) -> torch.Tensor:
        local = tensor.to_local()
        return local.view_as(local)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        tensor, grad_placements = inputs
        ctx.mesh = tensor.device_mesh
        ctx.placements = grad_placements or _of_gradient(tensor.placements)
        ctx.shape = tensor.shape if _is_uneven(tensor) else None

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[DTensor, None]:
        return _FromLocal.apply_in_backward(grad, ctx.mesh, ctx.placements, ctx.shape), None


class _FromLocal(TransformedFunction):
    @staticmethod
    def forward(
        local: torch.Tensor, mesh: DeviceMesh, placements: Placements, shape: torch.Size | None
    ) -> DTensor:
        if shape is None:
            return DTensor.from_local(local, mesh, placements, run_check=False)
        return wrap(local, mesh, placements, shape)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.placements = output.placements

    @staticmethod
    def backward(ctx, grad: DTensor) -> tuple[torch.Tensor | None, ...]:
        placements = _of_gradient(ctx.placements)
        if grad.placements != placements:
            grad = _Redistribute.apply_in_backward(grad, placements)
        # A part of a sum is this rank's own, but its gradient is the whole sum's gradient.
        return _ToLocal.apply_in_backward(grad, ctx.placements), None, None, None


class _Redistribute(TransformedFunction):
    @staticmethod
    def forward(tensor: DTensor, placements: Placements) -> DTensor:
        return tensor.redistribute(placements=placements)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        tensor, _ = inputs
        ctx.placements = _of_gradient(tensor.placements)

    @staticmethod
    def backward(ctx, grad: DTensor) -> tuple[DTensor, None]:
        return _Redistribute.apply_in_backward(grad, ctx.placements), None


def _of_gradient(placements: Placements) -> Placements:
    """The placements of the gradient: the gradient of a sum is replicated."""
    return tuple(Replicate() if placement.is_partial() else placement for placement in placements)


def _is_uneven(tensor: DTensor) -> bool:
    """True if parts differ in size."""
    for of_mesh, placement in enumerate(tensor.placements):
        dim = sharded_dim(placement, tensor.dim())
        if dim is not None and tensor.shape[dim] % tensor.device_mesh.size(of_mesh) != 0:
            return True
    return False
