"""Tensor-parallel layers built on the ops: ``torch.nn.Linear`` divided among a group of ranks.

A pair of them makes an MLP or an attention block: :class:`ColumnParallelLinear` takes the whole input and leaves each rank
a part of the output features; :class:`RowParallelLinear` takes those parts and adds up. With ``sequence_parallel`` the
tokens outside the pair are divided among the ranks, too: the first layer gathers them, and the second scatters them. A
column-parallel layer with several outputs, ``ColumnParallelLinear(width, [q, k, v])``, communicates once for all of them.
:class:`MoE` divides the experts of a mixture among the ranks.
"""

from overlap_torch._layers.sharding import token_slice
from overlap_torch.nn.column import ColumnParallelLinear
from overlap_torch.nn.moe import MoE
from overlap_torch.nn.parameters import full_state_dict
from overlap_torch.nn.row import RowParallelLinear

__all__ = ["ColumnParallelLinear", "MoE", "RowParallelLinear", "full_state_dict", "token_slice"]
