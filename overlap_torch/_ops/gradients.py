"""The common part of the ops' gradients: reverse mode, of any order.

An op is linear in its input and in its weight. So its gradients are products of the same kind, and the gradients' gradients
are the op and its gradients again. Take one op, ``y = op(x, w, b)`` and ``gx, gw, gb = gradients(gy, x, w)``. If the
gradients of ``gx, gw, gb`` are ``vx, vw, vb``, then

- ``gy`` receives ``op([vx, x], [w, vw], vb)``: one call, of both pairs side by side along K;
- ``x`` and ``w`` receive the first two of ``gradients(gy, vx, vw)``.

A tensor is either this rank's own or replicated. A replicated tensor counts once in the differentiated function, and every
rank has its whole gradient. Therefore an op that sums over the ranks has gradients that do not, and the reverse. Autograd
cannot derive this from the gradients' own calls, so the gradients are Functions, which follow the lines above. They
communicate or not depending on requires_grad and on which outputs were used, which all ranks share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.utils import _pytree as pytree

from overlap_torch._ops import dtensor, eager
from overlap_torch._torch_versions import (
    SingleLevelFunction,
    enable_single_level_autograd_function,
    unwrap_dead_wrappers,
)

# True if the call is within one of torch.func's transforms.
transforms_are_active = torch._C._are_functorch_transforms_active

Gradient = torch.Tensor | None
Gradients = tuple[Gradient, Gradient, Gradient]  # of input, weight and bias


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """[..., C] -> [rows, C]."""
    return tensor.unsqueeze(0) if tensor.dim() == 1 else tensor.flatten(0, -2)


def weight_gradient(grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """[..., N], [..., K] -> [N, K], summed over the rows."""
    return rows(grad).t() @ rows(input)


class Product(Protocol):
    """``input @ weight.T + bias``, communicated in some way between the ranks of a group."""

    def __call__(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """The product; its gradients are recorded."""

    def leading_dims(self, grad: torch.Tensor) -> tuple[int, ...]:
        """All dims of the input except K, from the output's gradient."""

    def gradients(
        self, grad: torch.Tensor, input: Gradient, weight: Gradient, with_bias: bool
    ) -> Gradients:
        """The input's gradient if ``weight`` is given, the weight's if ``input`` is, the bias's if requested; none is
        recorded."""


class OpProduct(Product):
    """A product that is an op. It takes input, weight, ``counts`` and bias, and ``how`` by keyword, in the schema's
    order."""

    op: torch._ops.OpOverload
    short_op: Callable[..., Any]  # its short path
    # Backward communicates the operands' gradient, which the weights need, too, and their gradients are wanted later. This
    # keeps the communicated gradient until then.
    keeps_gradients = False
    is_split = False
    kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def __init__(self, group: str, *counts: Sequence[int], **how: Any) -> None:
        self.group, self.counts, self.how = group, counts, how

    def __call__(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        arguments = (input, weight, *self.counts, bias)
        return eager.call(
            self.short_op, self.op, self.group, *arguments, record=self.record, **self.how
        )

    def short(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Calls the op by its short path; nothing may be recorded."""
        return self.short_op(input, weight, *self.counts, bias, *self.how.values(), self.group)

    def redispatch(
        self,
        keyset: torch._C.DispatchKeySet,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Calls the op's kernel for the keys of the set."""
        arguments = (input, weight, *self.counts, bias)
        return self.op.redispatch(keyset, *arguments, **self.how, group=self.group)

    @classmethod
    def record(
        cls,
        group: str,
        input: torch.Tensor,
        weight: torch.Tensor,
        *counts_and_bias: Any,
        **how: Any,
    ) -> torch.Tensor:
        """The op for a call that only has a gradient to record: see `eager`."""
        *counts, bias = counts_and_bias
        # Its own copy of the counts, because backward comes later.
        product = cls(group, *map(list, counts), **how)
        output = _RecordedProduct.apply(product, product.short, input, weight, bias)
        return recorded(output, product.keeps_gradients)


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


class ProductGradients(TransformedFunction):
    """A product's gradients, which can be differentiated."""

    @staticmethod
    def forward(
        product: Product, with_bias: bool, grad: torch.Tensor, input: Gradient, weight: Gradient
    ) -> Gradients:
        return product.gradients(grad, input, weight, with_bias)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.product, _, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)  # a gradient that nobody used costs no communication

    @staticmethod
    def backward(ctx, v_input: Gradient, v_weight: Gradient, v_bias: Gradient):
        product: Product = ctx.product
        grad, input, weight = ctx.saved_tensors
        needs_grad, needs_input, needs_weight = ctx.needs_input_grad[2:]
        grad_grad = grad_input = grad_weight = None
        if needs_grad and (v_input is not None or v_weight is not None or v_bias is not None):
            left, right = [], []
            if v_input is not None:
                left.append(v_input)
                right.append(weight)
            if v_weight is not None:
                left.append(input)
                right.append(v_weight)
            if not left:  # K = 0: only the bias
                left.append(grad.new_empty((*product.leading_dims(grad), 0)))
                right.append(grad.new_empty((grad.shape[-1], 0)))
            grad_grad = product(side_by_side(left), side_by_side(right), v_bias)
        left = v_input if needs_weight else None
        right = v_weight if needs_input else None
        if left is not None or right is not None:
            grad_input, grad_weight, _ = ProductGradients.apply_in_backward(
                product, False, grad, left, right
            )
        return None, None, grad_grad, grad_input, grad_weight


def side_by_side(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenates along the last dim; a single tensor stays as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=-1)


def one_after_the_other(
    grads: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients [..., N_i] and weights [N_i, K] as for one output: [..., N] and [N, K]."""
    if len(grads) == 1:
        return grads[0], weights[0]
    return torch.cat(tuple(grads), dim=-1), torch.cat(tuple(weights))


def of_each(with_bias: Sequence[bool], values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Splits a Function's values, all weights' and then the existing biases', into two lists by weight."""
    count = len(with_bias)
    given = iter(values[count:])
    return list(values[:count]), [next(given) if has_one else None for has_one in with_bias]


class _RecordedProduct(SingleLevelFunction):
    """An op with one output, between the autograd keys and the keys below."""

    # Compiled autograd asks for it; only torch.autograd.Function has one.
    _compiled_autograd_key = staticmethod(torch.autograd.Function._compiled_autograd_key)

    @staticmethod
    def forward(
        ctx,
        product: OpProduct,
        run: Callable[..., torch.Tensor],
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        _, _, needs_input, needs_weight, _ = ctx.needs_input_grad
        ctx.product = product
        ctx.save_for_backward(input if needs_weight else None, weight if needs_input else None)
        return run(input, weight, bias)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[Gradient, ...]:
        input, weight = ctx.saved_tensors
        _, _, needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        ctx.product.is_split = input is not None and not needs_weight
        gradients = ProductGradients.apply_in_backward(
            ctx.product,
            needs_bias,
            grad,
            input if needs_weight else None,
            weight if needs_input else None,
        )
        return None, None, *gradients


def run_product(
    product: OpProduct,
    keyset: torch._C.DispatchKeySet,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """The autograd kernel of an op of one output."""
    run = partial(below_autograd, product.redispatch, keyset)
    if needs_recording(product.op.overloadpacket.__name__, input, weight, bias):
        output = record(_RecordedProduct, product, run, input, weight, bias)
        return recorded(output, product.keeps_gradients)
    return run(input, weight, bias)


# Autograd kernels of all ops; they take the keyset.
autograd_kernels = torch.library.Library("overlap", "IMPL")


def needs_recording(op: str, *operands: torch.Tensor | None) -> bool:
    """True if a kernel has to record the call; raises NotImplementedError if an operand has a tangent."""
    dtensor.make_ops_known()
    _refuse_tangents(op, operands)
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*operands)


def _refuse_tangents(op: str, operands: Iterable[torch.Tensor | None]) -> None:
    for operand in operands:
        if operand is not None and forward_ad.unpack_dual(operand).tangent is not None:
            raise NotImplementedError(
                f"{op} has reverse-mode gradients only, but an operand has a tangent (forward_ad, "
                "torch.func.jvp): differentiate with backward() or torch.autograd.grad, or detach the operand"
            )


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


def record(function: type[SingleLevelFunction], *args: Any) -> Any:
    """``function.apply`` within an autograd kernel.

    There the dispatcher has peeled off one of torch.func's levels, as for PyTorch's own operators, and peels off the others
    below the kernel. A ``torch.autograd.Function`` would take all of them at once.
    """
    if not transforms_are_active():
        return function.apply(*args)
    with enable_single_level_autograd_function():
        return function.apply(*args)


def below_autograd(
    redispatch: Callable[..., Any], keyset: torch._C.DispatchKeySet, *args: Any
) -> Any:
    """Continues a call in the kernels below the autograd keys of its ``keyset``."""
    keyset = keyset & torch._C._after_autograd_keyset
    with torch._C._AutoDispatchBelowAutograd():
        if not transforms_are_active():
            return redispatch(keyset, *args)
        # A Function's forward turns both modes off, but the levels below may still record.
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return redispatch(keyset, *args)


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
