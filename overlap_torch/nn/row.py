"""The row-parallel layer: input features are cut over the ranks, outputs are added up."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.distributed.tensor import Replicate, Shard

from overlap_torch._layers.dtensor import Placements, is_foreign
from overlap_torch._layers.linear import row, row_sequence
from overlap_torch._layers.sharding import TakePart, check_linear, checked_count
from overlap_torch._ops import Group
from overlap_torch.nn.linear import ParallelLinear


class RowParallelLinear(ParallelLinear):
    """``torch.nn.Linear`` with its input features divided among a group: ``all_reduce(input @ weight.T) + bias``.

    ``weight`` [out_features, in_features] is a DTensor, ``Shard(1)``: each rank holds ceil(in_features / world size)
    columns, in rank order, as long as there are columns left. Ranks with fewer columns pad their operands with zeros in
    each call, so that all ranks run the same problem. ``bias`` [out_features] is a DTensor, ``Replicate()``, and added
    once, after the reduction. Input and output are plain tensors; the output is [..., out_features], equal on all ranks.

    With ``sequence_parallel`` the sum is reduce-scattered. The input is [tokens, ..., this rank's part of in_features], and
    each rank gets only its own tokens' output [its part of tokens, ..., out_features], divided as
    :func:`overlap_torch.nn.token_slice` says. Any number of tokens works.

    Args:
        in_features: the whole layer's input features, over all ranks.
        out_features: the layer's output features; every rank computes all of them.
        bias: whether the layer adds one.
        group: None (the default group), a process group's name, a ``ProcessGroup`` or a one-dimensional ``DeviceMesh``.
        sequence_parallel: whether the output's tokens (dim 0) are divided among the ranks.
        input_is_parallel: the input is this rank's part [..., its part of in_features], as a column-parallel layer
            leaves it. If False it is the whole, replicated input [..., in_features]; the layer takes this rank's part,
            and backward gathers the input's gradient.
        device, dtype: the parameters' device and type.
        fp8: None, or ``"tensorwise"`` or ``"rowwise"``: output and gradients are computed in fp8, with scales of whole
            tensors or of rows, as in torchao's recipes of these names; parameters stay as they are. docs/fp8.md says more.

    Backward of the GEMM does not communicate (see :func:`overlap_torch.gemm_allreduce`); with ``sequence_parallel`` it
    gathers the output's gradient (see :func:`overlap_torch.gemm_reducescatter`), and the bias's is summed over the
    group. Parameters are drawn as in ``torch.nn.Linear`` from one seed for all ranks, so making the layer is a collective call,
    unless its device is ``meta``. State dicts hold DTensors. ``load_state_dict`` also takes this rank's parts and the whole
    ``torch.nn.Linear``'s tensors; :meth:`full_state_dict` gathers the whole tensors.
    """

    _placements: ClassVar[dict[str, Placements]] = {"weight": (Shard(1),), "bias": (Replicate(),)}
    _overlap_columns = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group = None,
        sequence_parallel: bool = False,
        input_is_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        fp8: str | None = None,
    ) -> None:
        # One number; the column layer takes several.
        out_features = checked_count("out_features", out_features)
        super().__init__(
            in_features, out_features, bias, group, sequence_parallel, device, dtype, fp8
        )
        self.input_is_parallel = input_is_parallel

    @property
    def local_in_features(self) -> int:
        """This rank's part of in_features."""
        return self._local_features[0]

    @classmethod
    def from_linear(
        cls,
        linear: torch.nn.Linear,
        *,
        group: Group = None,
        sequence_parallel: bool = False,
        input_is_parallel: bool = True,
        fp8: str | None = None,
    ) -> RowParallelLinear:
        """Copies this rank's part of a ``torch.nn.Linear`` that every rank of the group holds in full."""
        check_linear(linear)
        layer = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            group=group,
            sequence_parallel=sequence_parallel,
            input_is_parallel=input_is_parallel,
            device="meta",
            fp8=fp8,
        )
        layer._copy_parts([linear])
        return layer

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., this rank's part of in_features], or [..., in_features] in full, to [..., out_features].

        With ``sequence_parallel`` dim 0 of the input is all tokens and dim 0 of the output this rank's.
        """
        expected = self._local_features[0] if self.input_is_parallel else self.in_features
        self._check_features(input, expected, f", input_is_parallel={self.input_is_parallel}")
        if not self.input_is_parallel:
            input = TakePart.apply(
                input, -1, self.in_features, self.group, self.world_size, self.rank
            )
        pair = self._pair()
        if is_foreign(self._parameters.get("weight")):
            return self._of_foreign(input, *pair, False, self.out_features)
        mapped = row_sequence if self.sequence_parallel else row
        return mapped(input, self._operands(input, 0, *pair), self._place)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, input_is_parallel={self.input_is_parallel}"
