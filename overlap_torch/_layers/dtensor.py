"""DTensors as layers and styles use them: how they are made, and which tensors are DTensors of foreign classes.

Importing this loads ``torch.distributed.tensor``, which takes most of a second.
"""

from __future__ import annotations

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

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
