"""Meshes of layers and styles: one for each set of ranks of a living group, the user's own mesh if there is one.

Importing this loads ``torch.distributed.tensor``, which takes most of a second.
"""

from __future__ import annotations

import gc
import itertools
import weakref

import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group, _world
from torch.distributed.tensor import DTensor

from overlap_torch._ops.graphs import constant_in_graphs

# The mesh of each group's layers, by the group's name and the kind of device, as long as a tensor uses it.
_meshes: weakref.WeakValueDictionary[tuple[str, str], DeviceMesh] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)  # of groups that no longer exist


# A mesh's tensor of ranks is real under a FakeTensorMode, too.
_reads_meshes = unset_fake_temporarily()


@_reads_meshes
def group_mesh(group: str, device_type: str) -> DeviceMesh:
    """The one-dimensional mesh over a group, by its name. Does not communicate.

    It is the user's mesh over the group, or a named one over the same ranks, if there is one; else this module makes it.
    """
    mesh = _meshes.get((group, device_type))
    # After process groups were destroyed and made again, a name may belong to another group.
    if mesh is None or _group_of(mesh) is None:
        process_group = _resolve_process_group(group)
        ranks = dist.get_process_group_ranks(process_group)
        mesh = _users_mesh(process_group, ranks, device_type)
        if mesh is None:
            mesh = DeviceMesh.from_group(process_group, device_type)
            mesh._overlap_made = True
        _meshes[group, device_type] = mesh
    return mesh


@_reads_meshes
def note_mesh(mesh: DeviceMesh) -> None:
    """Notes the user's mesh of a layer or a style: layers that were given a group over its ranks use it from now on.

    Raises:
        ValueError: ranks that are not in the order of their process group.
    """
    order, ranks = dist.get_process_group_ranks(mesh.get_group()), mesh.mesh.tolist()
    if order != ranks:
        raise ValueError(
            f"the process group's ranks are {order}, but the mesh's ranks are {ranks}; make the mesh with its ranks in "
            "ascending order"
        )
    key = (mesh.get_group().group_name, mesh.device_type)
    known = _meshes.get(key)
    if known is mesh or (known is not None and known == mesh and _group_of(known) is not None):
        return
    _set_apart(_all_meshes())
    for other in list(_meshes.values()):
        made = getattr(other, "_overlap_made", False) and other.device_type == mesh.device_type
        if made and other.mesh.tolist() == ranks and _group_of(other) is not None:
            # The parameters, gradients and optimizers' states on it need not be made again.
            other.__dict__ = dict(mesh.__dict__)
    _meshes[key] = mesh


def same_ranks(mesh: DeviceMesh, other: DeviceMesh) -> bool:
    """True if the meshes are equal, or of one dimension with the same ranks in the same order."""
    return mesh is other or mesh == other or _same_line(mesh, other)


@constant_in_graphs
@_reads_meshes
def _same_line(mesh: DeviceMesh, other: DeviceMesh) -> bool:
    return mesh.ndim == other.ndim == 1 and mesh.mesh.tolist() == other.mesh.tolist()


def check_mesh(what: str, tensor: DTensor, mesh: DeviceMesh) -> None:
    """Raises ValueError unless the DTensor is on the ranks of the mesh. ``what`` names the tensor and its receiver."""
    if not same_ranks(tensor.device_mesh, mesh):
        raise ValueError(
            f"{what} is a DTensor with placements {tensor.placements} on {_named(tensor.device_mesh)}, but the layer's mesh is "
            f"{_named(mesh)}. Give it a DTensor on that mesh, or a plain tensor laid out as its input_layouts say: tensor.full_tensor() is the "
            "whole, tensor.to_local() this rank's part"
        )


@_reads_meshes
def _named(mesh: DeviceMesh) -> str:
    return f"{mesh} of ranks {mesh.mesh.tolist()}"


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The group of a mesh of one dimension; None if the group no longer exists, even if another has its name."""
    if mesh.ndim != 1 or not is_living(mesh):
        return None
    group = mesh.get_group()
    kept = mesh._get_root_mesh()._pg_registry.get(group.group_name, group)
    return group if kept is group else None


def _all_meshes() -> list[DeviceMesh]:
    """Every mesh of the process. PyTorch keeps no list, so this search takes tenths of a second, once for each group."""
    meshes = [found for found in gc.get_referrers(DeviceMesh) if isinstance(found, DeviceMesh)]
    return [mesh for mesh in meshes if _is_readable(mesh)]


def _is_readable(mesh: DeviceMesh) -> bool:
    """A mesh made under a LocalTensorMode can be read only under a mode with the same number of ranks."""
    try:
        return bool(mesh.mesh.numel())
    except (AssertionError, KeyError):  # the mode raises it for ranks that are not its own
        return False


def _users_mesh(group: dist.ProcessGroup, ranks: list[int], device_type: str) -> DeviceMesh | None:
    """A mesh that the program made over these ranks: over this group, else a named one."""
    found = _all_meshes()
    _set_apart(found)
    named = None
    for mesh in found:
        if mesh.device_type != device_type or getattr(mesh, "_overlap_made", False):
            continue
        names = mesh.mesh_dim_names or ()
        if mesh.ndim > 1 and (mesh._get_root_mesh() is not mesh or not is_living(mesh)):
            continue
        for one in [mesh] if mesh.ndim == 1 else [mesh[name] for name in names]:
            its_group = _group_of(one)
            if its_group is group and one.mesh.tolist() == ranks:
                return one
            if its_group is not None and one.mesh_dim_names and one.mesh.tolist() == ranks:
                named = one
    return named


@_reads_meshes
def is_living(mesh: DeviceMesh) -> bool:
    """True if this process has the mesh's place for it, and the groups of its dimensions exist, by their names."""
    try:
        ranks = mesh.mesh
        (place,) = (ranks == dist.get_rank()).nonzero().tolist()
        coordinate = mesh.get_coordinate()
        # LocalTensorMode has all ranks' places, and no single number.
        own = any(type(one) is not int for one in coordinate) or place == list(coordinate)
        for dim in range(mesh.ndim):
            line = ranks[(*place[:dim], slice(None), *place[dim + 1 :])].tolist()
            own = own and dist.get_process_group_ranks(mesh.get_group(dim)) == line
    except (RuntimeError, ValueError, KeyError):  # no such rank in it, or no such group
        return False
    return own


def _set_apart(meshes: list[DeviceMesh]) -> None:
    """Makes meshes whose groups no longer exist unequal to all others.

    PyTorch caches an operator's results for DTensors by equal meshes, and ignores groups: tensors of the new group would
    get the old group's mesh.
    """
    for mesh in meshes:
        if hasattr(mesh, "_dim_group_names") and mesh._dim_group_names and not is_living(mesh):
            mesh._thread_id = f"gone {next(_numbers)}"
            mesh._hash = None
            # DTensor's caches keep the mesh, and it would keep the groups' threads and sockets.
            for name, group in mesh._pg_registry.items():
                mesh._pg_registry[name] = group if group in _world.pg_map else None
