"""DTensors as layers and styles use them: this rank's parts of parameters, with gradients back to the whole.

Importing this loads ``torch.distributed.tensor``, which takes most of a second.
"""

from __future__ import annotations

import copy

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec

Placements = tuple[Placement, ...]


def wrap(
    local: torch.Tensor, mesh: DeviceMesh, placements: Placements, shape: tuple[int, ...]
) -> DTensor:
    """The DTensor of this shape, of which `local` is this rank's part; parts may differ in size."""
    whole = torch.Size(shape)
    return DTensor.from_local(
        local.contiguous(),
        mesh,
        placements,
        run_check=False,
        shape=whole,
        stride=contiguous_strides(whole),
    )


def contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    return tuple(strides)


def local_parts(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """This rank's parts of a layer's parameters, as plain tensors. Plain tensors already are parts."""
    if torch.compiler.is_compiling():
        return _traced_part(weight), _traced_part(bias)
    if not isinstance(weight, DTensor) or not (bias is None or isinstance(bias, DTensor)):
        return _part(weight), _part(bias)
    if not torch.is_grad_enabled():
        return weight._local_tensor, None if bias is None else bias._local_tensor
    if torch._C._are_functorch_transforms_active():
        # torch.func wraps the tensors that it differentiates, and these wrappers are not DTensors. DTensors are constants
        # to it.
        with temporarily_clear_interpreter_stack():
            return _apply_parts(weight, bias)
    return _apply_parts(weight, bias)


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
        ctx, weight: DTensor, bias: DTensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.set_materialize_grads(False)
        # New tensors, because autograd writes into the tensors that it gets.
        weight_part = weight._local_tensor.detach()
        if bias is None:
            ctx.specs = weight._spec, None
            return weight_part, None
        bias_part = bias._local_tensor.detach()
        ctx.specs = weight._spec, bias._spec
        needs_weight, needs_bias = ctx.needs_input_grad
        if not needs_weight:
            ctx.mark_non_differentiable(weight_part)
        elif not needs_bias:
            ctx.mark_non_differentiable(bias_part)
        return weight_part, bias_part

    @staticmethod
    def backward(ctx, *grads: torch.Tensor | None) -> tuple[DTensor | None, ...]:
        make_whole = _Whole.apply if torch.is_grad_enabled() else _whole
        return tuple(
            grad if grad is None else make_whole(grad, spec)
            for grad, spec in zip(grads, ctx.specs, strict=True)
        )


# `Function.apply` without its Python code for transforms.
_apply_parts = super(torch.autograd.Function, _LocalParts).apply


def _whole(part: torch.Tensor, spec: DTensorSpec) -> DTensor:
    # PyTorch's dispatch may write into a spec, so each DTensor has its own.
    return DTensor(part.detach().contiguous(), copy.copy(spec), requires_grad=False)


class _Whole(torch.autograd.Function):
    """The DTensor of which every rank has a part: the reverse of `_LocalParts`."""

    @staticmethod
    def forward(ctx, part: torch.Tensor, spec: DTensorSpec) -> DTensor:
        ctx.placements = spec.placements
        return _whole(part, spec)

    @staticmethod
    def backward(ctx, grad: DTensor) -> tuple[torch.Tensor, None]:
        if grad.placements != ctx.placements:
            grad = grad.redistribute(placements=ctx.placements)
        return _LocalParts.apply(grad, None)[0], None


def _traced_part(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The part in a form that the compiler can trace: it cannot trace how `_Whole` makes DTensors."""
    if not isinstance(tensor, DTensor):
        return tensor
    dim = sharded_dim(tensor.placements[0], tensor.dim())
    if dim is None or tensor.shape[dim] % tensor.device_mesh.size() == 0:
        return tensor.to_local()
    return _UnequalPart.apply(tensor)


class _UnequalPart(torch.autograd.Function):
    """One tensor's `_LocalParts`, traced."""

    @staticmethod
    def forward(ctx, tensor: DTensor) -> torch.Tensor:
        ctx.device_mesh, ctx.placements = tensor.device_mesh, tensor.placements
        ctx.shape, ctx.strides = tensor.shape, tensor.stride()
        local = tensor.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            grad.contiguous(),
            ctx.device_mesh,
            ctx.placements,
            run_check=False,
            shape=ctx.shape,
            stride=ctx.strides,
        )


# AsyncCollectiveTensor: the result of a running gather. PyTorch traces with the others.
_PLAIN = {torch.Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor, AsyncCollectiveTensor}


def is_foreign(weight: torch.Tensor | None) -> bool:
    """True for a tensor of another class, such as a quantized one, and for a DTensor of such tensors: no op takes it."""
    kind = type(weight)
    if kind is DTensor:
        return not torch.compiler.is_compiling() and type(weight._local_tensor) not in _PLAIN
    return kind not in _PLAIN and weight is not None


def mesh_within(weight: torch.Tensor) -> DeviceMesh | None:
    """The mesh of the DTensors inside a foreign weight; None if the weight is this rank's part."""
    if isinstance(weight, DTensor):
        return weight.device_mesh
    flatten = getattr(weight, "__tensor_flatten__", None)
    within = [getattr(weight, name) for name in flatten()[0]] if flatten else vars(weight).values()
    return next((part.device_mesh for part in within if isinstance(part, DTensor)), None)


def sharded_dim(placement: Placement, dims: int) -> int | None:
    """The dim that `Shard` cuts; None for other placements.

    Raises:
        ValueError: a tensor of so few dims has no such dim.
    """
    if not placement.is_shard():
        return None
    if not -dims <= placement.dim < dims:
        raise ValueError(
            f"the placement {placement} cuts dim {placement.dim}, but the tensor has {dims} dims: give a layout with one "
            "of its dims, or a tensor with more"
        )
    return placement.dim % dims
