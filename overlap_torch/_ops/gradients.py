"""Parts that the Functions of layers share: torch.func's transforms, and nodes that C++ owns.

The gradients of ops are in C++, csrc/binding/ops/autograd.cc. A layer's Function follows the same rule: a tensor is either
this rank's own or replicated. A replicated tensor counts once in the differentiated function, and every rank has its whole
gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.utils import _pytree as pytree

from overlap_torch._ops import dtensor, eager

# True if the call is within one of torch.func's transforms.
transforms_are_active = torch._C._are_functorch_transforms_active

Gradient = torch.Tensor | None


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """[..., C] -> [rows, C]."""
    return tensor.unsqueeze(0) if tensor.dim() == 1 else tensor.flatten(0, -2)


def weight_gradient(grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """[..., N], [..., K] -> [N, K], summed over the rows."""
    return rows(grad).t() @ rows(input)


class TransformedFunction(torch.autograd.Function):
    """A Function for torch.func's transforms. Under vmap it runs for one element of the batch after another.

    So every rank needs a batch of the same size, as each element has its collectives. ``forward`` takes no context.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """As ``Function.apply``, but without reading the signature of ``forward`` at every call for default arguments."""
        if transforms_are_active():
            return super().apply(*args)
        return super(torch.autograd.Function, cls).apply(*unwrap_dead_wrappers(args))

    @classmethod
    def apply_in_backward(cls, *args: Any) -> Any:
        """As ``apply``, for a backward: records nothing if its results cannot be differentiated."""
        recorded = torch.is_grad_enabled() or transforms_are_active()
        return cls.apply(*args) if recorded else cls.forward(*args)

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        return _one_by_one(cls.apply, info.batch_size, in_dims, args)


def side_by_side(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenates along the last dim; a single tensor stays as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=-1)


def in_parts(
    whole: Gradient, grads: Sequence[Gradient], needs: Sequence[bool]
) -> list[torch.Tensor | None]:
    """The gradients of several weights, or of their biases, as parts of the gradient of all used ones, one after the other.

    ``grads``: those of the outputs [..., N_i], None for an unused one. ``needs``: the gradients that are wanted.
    """
    if len(grads) == 1:
        return [whole if needs[0] and grads[0] is not None else None]
    found, begin = [], 0
    for grad, needed in zip(grads, needs, strict=True):
        size = 0 if grad is None else grad.shape[-1]
        found.append(whole.narrow(0, begin, size) if needed and grad is not None else None)
        begin += size
    return found


def refuse_tangents(op: str, *operands: torch.Tensor | None) -> None:
    """Raises NotImplementedError if an operand has a tangent."""
    if forward_ad._current_level < 0:
        return
    for operand in operands:
        if operand is not None and forward_ad.unpack_dual(operand).tangent is not None:
            raise NotImplementedError(
                f"{op} has reverse-mode gradients only, but an operand has a tangent (forward_ad, "
                "torch.func.jvp): differentiate with backward() or torch.autograd.grad, or detach the operand"
            )


def refuse_transforms(op: str) -> None:
    """Raises NotImplementedError within a transform of torch.func; a compiler does not see the question."""
    if not is_dynamo_compiling() and transforms_are_active():
        raise NotImplementedError(
            f"{op} takes no transform of torch.func (grad, vmap and others): differentiate with backward() or torch.autograd.grad, "
            "and make one dim of a vmap's elements"
        )


def needs_recording(op: str, *operands: torch.Tensor | None) -> bool:
    """True if a kernel has to record the call; raises NotImplementedError if an operand has a tangent."""
    dtensor.make_ops_known()
    refuse_tangents(op, *operands)
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*operands)


def recorded(outputs: Any, keeps_gradients: bool = False) -> Any:
    """The result of a Function of operands and weights, a tensor or a tuple, with nodes that C++ owns.

    Backward may then want the operands' gradients first and the weights' gradients later, as in zero-bubble schedules of
    pipelines; ``needs_input_grad`` says which. With ``keeps_gradients``, or several outputs, the later backward gets the
    same tensors as the first: see :func:`kept`. The outputs may be changed in place. Compilers and torch.func make their
    own nodes.
    """
    if is_compiling() or transforms_are_active():
        return outputs
    return eager.recorded(outputs, keeps_gradients)


def kept(place: Any, grad: torch.Tensor) -> Any:
    """The result that an earlier backward with the same gradient left in ``place.kept``, or None."""
    pair, place.kept = place.kept, None
    return pair[1] if pair is not None and pair[0] is grad else None


def register_vmap(op: torch._ops.OpOverload) -> None:
    """Registers vmap of an op: one call for each element of the batch, so every rank needs the same number of elements."""

    def rule(info: Any, in_dims: Any, *args: Any, **keywords: Any) -> tuple[Any, Any]:
        return _one_by_one(op, info.batch_size, in_dims, args, **keywords)

    torch.library.register_vmap(op.name(), rule)


def _one_by_one(
    call: Callable[..., Any], batch_size: int, in_dims: Any, args: Any, **keywords: Any
) -> tuple[Any, Any]:
    """The stacked results of calls for each element of a batch, and the dims in which they are stacked."""
    if batch_size == 0:
        raise ValueError(
            "vmap over a dim of size 0: there is no call whose results could be stacked"
        )
    leaves, spec = pytree.tree_flatten(args)
    dims = pytree.tree_leaves(in_dims)
    results = []
    for i in range(batch_size):
        parts = [
            leaf if dim is None else leaf.select(dim, i)
            for leaf, dim in zip(leaves, dims, strict=True)
        ]
        result, result_spec = pytree.tree_flatten(
            call(*pytree.tree_unflatten(parts, spec), **keywords)
        )
        results.append(result)
    stacked = [
        None if parts[0] is None else torch.stack(parts) for parts in zip(*results, strict=True)
    ]
    out_dims = [None if tensor is None else 0 for tensor in stacked]
    return (
        pytree.tree_unflatten(stacked, result_spec),
        pytree.tree_unflatten(out_dims, result_spec),
    )


register_vmap(torch.ops.overlap._collective.default)
