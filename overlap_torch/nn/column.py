"""The column-parallel layer: output features are cut over the ranks."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.distributed.tensor import Shard

from overlap_torch import _linear
from overlap_torch._dtensor import Placements
from overlap_torch._ops import Group
from overlap_torch._sharding import GatherFeatures, shard_range
from overlap_torch.nn.parameters import ParallelLinear


class ColumnParallelLinear(ParallelLinear):
    """``torch.nn.Linear`` whose output features are spread over a group: ``input @ weight.T + bias``, a part per rank.

    ``weight`` [out_features, in_features] and ``bias`` [out_features] are DTensors, ``Shard(0)``: each rank holds
    ceil(out_features / world size) rows, in rank order, as long as there are rows left. The input [..., in_features] is
    replicated, the output [..., this rank's part of out_features] is what :class:`RowParallelLinear` takes; both are plain
    tensors. Backward all-reduces the input's gradient, chunk by chunk behind the GEMM that computes it.

    With ``sequence_parallel`` the input is this rank's tokens [its part of tokens, ..., in_features], cut as
    :func:`overlap_torch.nn.token_slice` says. They are gathered while the GEMM computes on those that have arrived,
    the output has all tokens in dim 0, and backward reduce-scatters the input's gradient.

    Args:
        in_features: of the layer; every rank takes all of them.
        out_features: of the whole layer, over all ranks.
        bias: whether the layer adds one.
        group: None (the default group), a process group's name, a ``ProcessGroup`` or a one-dimensional ``DeviceMesh``.
        sequence_parallel: whether the input's tokens (dim 0) are spread over the ranks.
        gather_output: the output is [..., out_features], gathered from all ranks, and its gradient the same on every rank.
        device, dtype: of the parameters.

    Parameters are drawn as those of ``torch.nn.Linear``, so making the layer is a collective call, unless its device is
    ``meta``. State dicts hold DTensors; ``load_state_dict`` also takes this rank's parts and the whole
    ``torch.nn.Linear``'s tensors, :meth:`full_state_dict` gathers those.
    """

    _placements: ClassVar[dict[str, Placements]] = {"weight": (Shard(0),), "bias": (Shard(0),)}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group = None,
        sequence_parallel: bool = False,
        gather_output: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, group, sequence_parallel, device, dtype)
        self.gather_output = gather_output

    @property
    def local_out_features(self) -> int:
        """This rank's part of out_features."""
        return self._local_features

    @classmethod
    def from_linear(
        cls,
        linear: torch.nn.Linear,
        *,
        group: Group = None,
        sequence_parallel: bool = False,
        gather_output: bool = False,
    ) -> ColumnParallelLinear:
        """This rank's part of a ``torch.nn.Linear`` that every rank of the group holds in full; copies."""
        layer = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            group=group,
            sequence_parallel=sequence_parallel,
            gather_output=gather_output,
            device="meta",
        )
        layer._copy_parts(linear)
        return layer

    def forward(self, input: torch.Tensor, tokens: int | None = None) -> torch.Tensor:
        """[..., in_features] to [..., this rank's part of out_features], or to all of them with ``gather_output``.

        ``tokens``, with ``sequence_parallel`` only: how many there are over all ranks, that is, dim 0 of the output.
        None if every rank has as many as this one.
        """
        self._check_features(input, self.in_features, "")
        weight, bias = self._local_parameters()
        if self.sequence_parallel:
            output = _linear.column_sequence(
                input,
                weight,
                bias,
                group=self.group,
                world_size=self.world_size,
                tokens=self._all_tokens(input, tokens),
                padding=self._padding,
            )
        elif tokens is not None:
            raise ValueError(f"tokens={tokens} has a meaning with sequence_parallel=True only")
        else:
            output = _linear.column(
                input,
                weight,
                bias,
                group=self.group,
                world_size=self.world_size,
                padding=self._padding,
            )
        if self.gather_output:
            output = GatherFeatures.apply(
                output, self.out_features, self.group, self.world_size, self.rank
            )
        return output

    def _all_tokens(self, input: torch.Tensor, tokens: int | None) -> int:
        if tokens is None:
            return input.shape[0] * self.world_size
        own = shard_range(tokens, self.world_size, self.rank)[1]
        if input.shape[0] != own:
            raise ValueError(
                f"of tokens={tokens} rank {self.rank} of {self.world_size} holds {own}, but its input's shape is "
                f"{tuple(input.shape)}"
            )
        return tokens

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, gather_output={self.gather_output}"
