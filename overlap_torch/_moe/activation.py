"""An expert's activation: ``Gate``, and its operator with fake and gradients; on CUDA it is one kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from overlap_torch._layers.sharding import checked_number
from overlap_torch._moe.ops import define, library
from overlap_torch._ops.composition import accumulated

_ops = torch.ops.overlap
_aten = torch.ops.aten


def _silu_slope(x: torch.Tensor) -> torch.Tensor:
    """As aten's ``silu_backward``, which has no derivative."""
    sigmoid = x.sigmoid()
    return sigmoid * (1 + x * (1 - sigmoid))


# Each activation, and the gradient of its operand. The empty name is for a bias only.
_ACTIVATIONS = {
    "": (lambda x: x, lambda grad, x: grad),
    "silu": (functional.silu, lambda grad, x: grad * _silu_slope(x)),
    "gelu": (functional.gelu, _aten.gelu_backward),
    "gelu_tanh": (
        lambda x: functional.gelu(x, approximate="tanh"),
        lambda grad, x: _aten.gelu_backward(grad, x, approximate="tanh"),
    ),
    "relu": (functional.relu, lambda grad, x: _aten.threshold_backward(grad, x, 0)),
}
FORM = "str activation, float alpha, float limit, float offset, bool gated, bool interleaved"
_OPERANDS = "Tensor hidden, Tensor? up, Tensor? bias, Tensor? shares, Tensor offs"


@dataclass(frozen=True)
class Gate:
    """An expert's activation: ``act(alpha * gate) / alpha * (up + offset)``, in float32 (float64 for float64), rounded
    once.

    Args:
        name: ``"silu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"relu"``.
        alpha: a factor of the gate within the activation; 1.702 with ``"silu"`` is gpt-oss's ``gate * sigmoid(1.702 * gate)``.
        limit: the gate is clamped to at most this, up to the range from ``-limit`` to ``limit``; None: no clamp.
        offset: the number added to up.
        gated: False for experts without a gate: ``act(alpha * up) / alpha``, and ``gate_up`` is [e, I, H].

    Raises:
        ValueError: an unknown name, an alpha of 0, a limit that is not positive, or a limit or an offset without a gate.
    """

    name: str = "silu"
    alpha: float = 1.0
    limit: float | None = None
    offset: float = 0.0
    gated: bool = True

    def __post_init__(self) -> None:
        checked_number("alpha", self.alpha)
        checked_number("offset", self.offset)
        if self.limit is not None:
            checked_number("limit", self.limit)
        if not self.name or self.name not in _ACTIVATIONS or self.alpha == 0:
            raise ValueError(
                f"an activation is one of {', '.join(filter(None, _ACTIVATIONS))}, with an alpha other than 0, but got "
                f"{self.name!r} with alpha={self.alpha}"
            )
        if self.limit is not None and self.limit <= 0:
            raise ValueError(f"limit is a number above 0, or None, but is {self.limit}")
        if not self.gated and (self.limit is not None or self.offset != 0):
            raise ValueError(
                f"limit and offset are for experts with a gate, but got limit={self.limit} and offset={self.offset} with gated=False"
            )

    @classmethod
    def of(cls, activation: object) -> Gate:
        """A name's or a gate's; raises TypeError for anything else."""
        if isinstance(activation, str):
            return cls(activation)
        if not isinstance(activation, cls):
            raise TypeError(
                f"activation is {', '.join(map(repr, filter(None, _ACTIVATIONS)))} or an overlap_torch.Gate, but it is a "
                f"{type(activation).__name__}"
            )
        return activation

    def form(self, interleaved: bool) -> tuple[str, float, float, float, bool, bool]:
        """The operator's arguments; a limit of 0 means no limit."""
        return self.name, self.alpha, self.limit or 0.0, self.offset, self.gated, interleaved


NO_ACTIVATION = ("", 1.0, 0.0, 0.0, False, False)  # a form


def _operands(hidden, up, bias, offs, gated: bool, interleaved: bool):
    """Gate and up (None without a gate) with their biases, not rounded."""
    wide = accumulated(hidden.dtype)
    both = (hidden if up is None else torch.cat((hidden, up), 1)).to(wide)
    if bias is not None and bias.shape[0] > 0:
        both = both + bias.to(wide).index_select(0, _expert_of_rows(offs, hidden.shape[0]))
    if not gated:
        return both, None
    return (both[:, 0::2], both[:, 1::2]) if interleaved else both.chunk(2, 1)


def _expert_of_rows(offs: torch.Tensor, rows: int) -> torch.Tensor:
    """The expert of each row; rows after the last end count as the last expert's."""
    numbers = torch.arange(rows, device=offs.device)
    return torch.searchsorted(offs[:-1], numbers, right=True, out_int32=True)


def _clamped(gate, other, limit: float):
    """Both within the limit; without one, or without a gate, as they are."""
    if other is None or not limit:
        return gate, other
    return gate.clamp(max=limit), other.clamp(-limit, limit)


def _activated(activation: str, alpha: float, gate: torch.Tensor) -> torch.Tensor:
    act = _ACTIVATIONS[activation][0]
    return act(gate) if alpha == 1 else act(alpha * gate) / alpha


def gate_unrounded(
    hidden, up, bias, offs, activation, alpha, limit, offset, gated, interleaved
) -> torch.Tensor:
    """[R, 2I], a pair of [R, I], or [R, I] without a gate, to [R, I]; ``bias`` is of each expert, whose rows end at ``offs``."""
    gate, other = _operands(hidden, up, bias, offs, gated, interleaved)
    gate, other = _clamped(gate, other, limit)
    value = _activated(activation, alpha, gate)
    return value * (other + offset if offset else other) if gated else value


def _gradients(grad, operands, form) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gate's and up's, not rounded."""
    activation, alpha, limit, offset, gated, interleaved = form
    gate, other = _operands(*operands, gated, interleaved)
    slope = _ACTIVATIONS[activation][1]
    grad = grad.to(gate.dtype)
    if not gated:
        return slope(grad, alpha * gate), None
    cut, kept = _clamped(gate, other, limit)
    of_gate = slope(grad * (kept + offset), alpha * cut)
    of_other = grad * _activated(activation, alpha, cut)
    if limit:
        of_gate, of_other = of_gate * (gate <= limit), of_other * (other.abs() <= limit)
    return of_gate, of_other


@define(f"_moe_gate({_OPERANDS}, {FORM}) -> Tensor")
def _gate(hidden, up, bias, shares, offs, *form):
    """`gate_unrounded` times the rows' shares [R, 1] (None: 1), rounded."""
    value = gate_unrounded(hidden, up, bias, offs, *form)
    return (value if shares is None else value * shares.to(value.dtype)).to(hidden.dtype)


@define(f"_moe_gate_backward(Tensor grad, {_OPERANDS}, {FORM}) -> (Tensor, Tensor, Tensor, Tensor)")
def gate_backward(grad, hidden, up, bias, shares, offs, *form):
    """The gradients of hidden and up (without up, empty), the rows that `_moe_gate` returns, and the shares' gradients,
    [R, 1], not rounded."""
    value = _gate(hidden, up, bias, None, offs, *form)
    wide = accumulated(hidden.dtype)
    grad = grad.to(wide)
    dots = (grad * value.to(wide)).sum(1, keepdim=True)
    if shares is not None:
        shares = shares.to(wide)
        value, grad = (value.to(wide) * shares).to(hidden.dtype), grad * shares
    of_gate, of_other = _gradients(grad, (hidden, up, bias, offs), form)
    if of_other is None:
        return of_gate.to(hidden.dtype).contiguous(), hidden.new_empty(0), value, dots
    if up is not None:
        pair = (part.to(hidden.dtype).contiguous() for part in (of_gate, of_other))
        return *pair, value, dots
    both = torch.stack((of_gate, of_other), 2 if form[-1] else 1)
    return both.reshape(hidden.shape).to(hidden.dtype), hidden.new_empty(0), value, dots


def sums_of_experts(rows, shares, offs):
    """[R, N] to [e, N]: the sum of each expert's rows times their shares [R, 1] (None: 1)."""
    # Eight columns, as a grouped GEMM's rows begin at multiples of 16 bytes.
    ones = rows.new_ones(rows.shape[0], 8)
    factors = ones if shares is None else ones * shares.to(rows.dtype)
    return _ops._moe_weight_gradient(rows, factors, offs)[:, :, 0]


def _keep(ctx, inputs, output) -> None:
    operands, ctx.form = inputs[:5], inputs[5:]
    ctx.save_for_backward(*operands)


def _backward(ctx, grad):
    _, up, bias, shares, offs = operands = ctx.saved_tensors
    # A second derivative follows the composition; the operator has none of its own.
    compute = gate_backward if torch.is_grad_enabled() else _ops._moe_gate_backward
    of_hidden, of_up, _, dots = compute(grad, *operands, *ctx.form)
    of_up = None if up is None else of_up
    needs_bias = bias is not None and ctx.needs_input_grad[2]
    of_bias = None
    if needs_bias:
        both = of_hidden if up is None else torch.cat((of_hidden, of_up), 1)
        of_bias = sums_of_experts(both, None, offs)
    of_shares = None if shares is None else dots.to(shares.dtype)
    return of_hidden, of_up, of_bias, of_shares, *(None,) * 7


def _width(hidden, up, gated: bool) -> int:
    return hidden.shape[1] // (2 if gated and up is None else 1)


def _fake_gate(hidden, up, bias, shares, offs, *form):
    return hidden.new_empty((hidden.shape[0], _width(hidden, up, form[-2])))


def _fake_gate_backward(grad, hidden, up, bias, shares, offs, *form):
    return (
        torch.empty_like(hidden),
        hidden.new_empty(0) if up is None else torch.empty_like(up),
        hidden.new_empty((hidden.shape[0], _width(hidden, up, form[-2]))),
        hidden.new_empty((hidden.shape[0], 1), dtype=accumulated(hidden.dtype)),
    )


torch.library.register_fake("overlap::_moe_gate", _fake_gate, lib=library)
torch.library.register_fake("overlap::_moe_gate_backward", _fake_gate_backward, lib=library)
torch.library.register_autograd("overlap::_moe_gate", _backward, setup_context=_keep, lib=library)
