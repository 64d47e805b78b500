"""Device meshes over the ranks of a pool, modules with DTensor parameters on them, and parallelize_module's styles."""

import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from checks import Failures
from operands import difference, rank_device
from overlap_torch.parallel import (
    OverlapColwiseParallel,
    OverlapPrepareModuleInput,
    OverlapRowwiseParallel,
)

# The styles of a module's input, of columns and of rows.
PYTORCH = (PrepareModuleInput, ColwiseParallel, RowwiseParallel)
OVERLAP = (OverlapPrepareModuleInput, OverlapColwiseParallel, OverlapRowwiseParallel)


@functools.cache
def mesh(*shape: int) -> DeviceMesh:
    """All ranks, in one dimension unless a shape is given; two are called dp and tp."""
    names = ("dp", "tp") if len(shape) == 2 else ("tp",)
    shape = shape or (dist.get_world_size(),)
    return init_device_mesh(rank_device().type, shape, mesh_dim_names=names)


def whole_of(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The whole of a tensor that is the same on every rank, a DTensor or not."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; another tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def cut(tensor: torch.Tensor, placement: Placement, distributed: bool = False) -> torch.Tensor:
    """A whole tensor's part on this rank, or all parts as a DTensor."""
    parts = distribute_tensor(tensor.detach(), mesh(), [placement])
    return parts if distributed else parts.to_local()


def check_parameter_gradients(
    failures: Failures,
    module: torch.nn.Module,
    whole: torch.nn.Module,
    *where: object,
    **tolerances: float,
) -> None:
    """Gradients of a module with DTensor parameters are those of the whole one, which may have none."""
    for (name, own), right in zip(module.named_parameters(), whole.parameters(), strict=True):
        grad = whole_of(own.grad)
        if tolerances:
            failures.near(grad, right.grad, "gradient of", name, *where, **tolerances)
        else:
            failures.expect(difference(grad, right.grad), "gradient of", name, *where)


def gathered_tokens(prepare: type = OverlapPrepareModuleInput, dim: int = 0, **options: object):
    """The style of a module whose input is cut along ``dim``, and is gathered for the layers in it."""
    return prepare(input_layouts=Shard(dim), desired_input_layouts=Replicate(), **options)
