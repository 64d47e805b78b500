"""The column-parallel layer: output features are cut over the ranks."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch.distributed.tensor import Shard

from overlap_torch._layers.dtensor import Placements, is_foreign
from overlap_torch._layers.linear import columns, columns_sequence
from overlap_torch._layers.sharding import (
    GatherFeatures,
    check_linear,
    checked_count,
    shard_range,
)
from overlap_torch._ops import Group
from overlap_torch.nn.linear import ParallelLinear


class ColumnParallelLinear(ParallelLinear):
    """``torch.nn.Linear`` with its output features divided among a group: ``input @ weight.T + bias``, a part on each rank.

    ``weight`` [out_features, in_features] and ``bias`` [out_features] are DTensors, ``Shard(0)``: each rank holds
    ceil(out_features / world size) rows, in rank order, as long as there are rows left. The input [..., in_features] is
    replicated. The output [..., this rank's part of out_features] is the input of :class:`RowParallelLinear`. Both are
    plain tensors. Backward all-reduces the input's gradient chunk by chunk, while its GEMM computes the next ones.

    With ``sequence_parallel`` the input is this rank's tokens [its part of tokens, ..., in_features], divided as
    :func:`overlap_torch.nn.token_slice` says. They are gathered while the GEMM computes those that have arrived. The output
    has all tokens in dim 0, and backward reduce-scatters the input's gradient.

    With a sequence of out_features (query, key and value; gate and up) the layer replaces one ``torch.nn.Linear`` for each
    of them, all with the same input, and returns a tuple of their outputs. Each has its own weight and bias, ``weights[i]``
    and ``biases[i]``, divided and drawn as in a separate layer. The input is gathered once for all of them. Its gradient,
    the sum over them, is all-reduced or reduce-scattered once.

    Args:
        in_features: the layer's input features; every rank takes all of them.
        out_features: the whole layer's output features, over all ranks; or a sequence of positive numbers.
        bias: whether the layer adds one; for several outputs also a sequence with a bool for each.
        group: None (the default group), a process group's name, a ``ProcessGroup`` or a one-dimensional ``DeviceMesh``.
        sequence_parallel: whether the input's tokens (dim 0) are divided among the ranks.
        gather_output: the output is [..., out_features], gathered from all ranks, and its gradient the same on every rank.
            Several outputs are gathered together.
        device, dtype: the parameters' device and type.
        fp8: None, or ``"tensorwise"`` or ``"rowwise"``: output and gradients are computed in fp8, with scales of whole
            tensors or of rows, as in torchao's recipes of these names; parameters stay as they are. docs/fp8.md says more.

    Raises:
        ValueError: a sequence of out_features that is empty or has a number below 1, not one ``bias`` for each of them, or
            an unknown group.
        TypeError: ``out_features`` that is neither a number nor a sequence, or a ``group`` that is none of the above.

    Parameters are drawn as in ``torch.nn.Linear`` from one seed for all ranks, so making the layer is a collective call, unless
    its device is ``meta``. State dicts hold DTensors. ``load_state_dict`` also takes this rank's parts and the whole
    ``torch.nn.Linear``'s tensors; :meth:`full_state_dict` gathers the whole tensors.
    """

    _placements: ClassVar[dict[str, Placements]] = {"weight": (Shard(0),), "bias": (Shard(0),)}
    _overlap_columns = True

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        bias: bool | Sequence[bool] = True,
        *,
        group: Group = None,
        sequence_parallel: bool = False,
        gather_output: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        fp8: str | None = None,
    ) -> None:
        if isinstance(out_features, Sequence):
            out_features = _checked_features(out_features)
        else:
            out_features = checked_count("out_features", out_features)
        bias = _checked_bias(bias, out_features)
        super().__init__(
            in_features, out_features, bias, group, sequence_parallel, device, dtype, fp8
        )
        self.gather_output = gather_output

    @property
    def local_out_features(self) -> int | tuple[int, ...]:
        """This rank's part of out_features; a part of each if there are several."""
        return tuple(self._local_features) if self._several else self._local_features[0]

    @classmethod
    def from_linear(
        cls,
        linear: torch.nn.Linear | Sequence[torch.nn.Linear],
        *,
        group: Group = None,
        sequence_parallel: bool = False,
        gather_output: bool = False,
        fp8: str | None = None,
    ) -> ColumnParallelLinear:
        """Copies this rank's part of a ``torch.nn.Linear`` that every rank of the group holds in full.

        A sequence of them, or a ``torch.nn.ModuleList``, becomes one layer with several outputs. They need the same
        in_features; some may have a bias and others none.
        """
        several = isinstance(linear, (Sequence, torch.nn.ModuleList))
        linears = list(linear) if several else [linear]
        for each in linears:
            check_linear(each)
        out_features = [each.out_features for each in linears]
        bias = [each.bias is not None for each in linears]
        in_features = [each.in_features for each in linears]
        if len(set(in_features)) > 1:
            raise ValueError(
                "the layers of a sequence read one input: they must have the same in_features, but they have "
                f"{in_features}"
            )
        layer = cls(
            in_features[0] if linears else 0,
            out_features if several else out_features[0],
            bias if several else bias[0],
            group=group,
            sequence_parallel=sequence_parallel,
            gather_output=gather_output,
            device="meta",
            fp8=fp8,
        )
        layer._copy_parts(linears)
        return layer

    def forward(
        self, input: torch.Tensor, tokens: int | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """[..., in_features] to [..., this rank's part of out_features], or to all of them with ``gather_output``.

        ``tokens``, only with ``sequence_parallel``: the number of tokens over all ranks, which is dim 0 of the output; None
        if every rank has as many as this one. With several out_features the result is a tuple of outputs.
        """
        self._check_features(input, self.in_features, "")
        if self.sequence_parallel:
            tokens = self._all_tokens(input, tokens)
        elif tokens is not None:
            raise ValueError(f"tokens={tokens} has a meaning only with sequence_parallel=True")
        pairs = self._pairs()
        own = self.weights if self._several else [self._parameters.get("weight")]
        if any(is_foreign(weight) for weight in own):
            features = self.out_features if self._several else [self.out_features]
            outputs = [
                self._of_foreign(input, *pair, True, size, tokens)
                for pair, size in zip(pairs, features, strict=True)
            ]
        else:
            operands = [self._operands(input, i, *pair) for i, pair in enumerate(pairs)]
            if self.sequence_parallel:
                outputs = columns_sequence(input, operands, self._place, tokens)
            else:
                outputs = columns(input, operands, self._place)
        if self.gather_output:
            sizes = self.out_features if self._several else (self.out_features,)
            place = (self.group, self.world_size, self.rank)
            outputs = GatherFeatures.apply(*place, sizes, *outputs)
        return tuple(outputs) if self._several else outputs[0]

    def _all_tokens(self, input: torch.Tensor, tokens: int | None) -> int:
        if tokens is None:
            return input.shape[0] * self.world_size
        tokens = checked_count("tokens", tokens)
        own = shard_range(tokens, self.world_size, self.rank)[1]
        if input.shape[0] != own:
            raise ValueError(
                f"of tokens={tokens} rank {self.rank} of {self.world_size} holds {own}, but its input's shape is "
                f"{tuple(input.shape)}"
            )
        return tokens

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, gather_output={self.gather_output}"


def _checked_features(out_features: Sequence[int]) -> tuple[int, ...]:
    try:
        sizes = tuple(operator.index(size) for size in out_features)
    except TypeError:
        raise TypeError(
            f"out_features must be an int or a sequence of ints, but it is {out_features!r}"
        ) from None
    if not sizes or min(sizes) <= 0:
        raise ValueError(
            "a sequence of out_features must hold one number or more, all of them positive, but it is "
            f"{out_features!r}"
        )
    return sizes


def _checked_bias(
    bias: bool | Sequence[bool], out_features: int | tuple[int, ...]
) -> bool | tuple[bool, ...]:
    if not isinstance(bias, Sequence):
        return bias
    if not isinstance(out_features, tuple) or len(bias) != len(out_features):
        raise ValueError(
            "bias must be True or False, or for a sequence of out_features one of them for each, but it is "
            f"{bias!r} for out_features={out_features!r}"
        )
    return tuple(bool(one) for one in bias)
