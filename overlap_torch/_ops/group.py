"""Process groups, in the forms that the ops take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _device_capability, _resolve_process_group

from overlap_torch._ops.graphs import constant_in_graphs

_MEMBERS_ONLY = "call ops and make layers on the group's ranks only"

# The default group, a group's name, a group, or a one-dimensional mesh.
Group = str | dist.ProcessGroup | DeviceMesh | None


def group_name(group: Group = None) -> str:
    """The name by which the operators know a process group.

    ``group`` is None (the default group), a name, a ``ProcessGroup`` or a one-dimensional ``DeviceMesh``.

    Raises:
        ValueError: a group or a mesh without this rank, or a mesh of several dimensions.
        TypeError: none of the above.
        RuntimeError: there is no default group.
    """
    if isinstance(group, str):
        return group
    if group is None:
        group = dist.group.WORLD
        if group is None:
            raise RuntimeError(
                "no process group: call torch.distributed.init_process_group() first, or give group= a process group"
            )
    if isinstance(group, dist.ProcessGroup):
        return group.group_name
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group= takes a one-dimensional DeviceMesh, but got one of {group.ndim} dimensions; "
                'name the dimension, as in mesh["tp"]'
            )
        if group.get_coordinate() is None:
            raise ValueError(
                f"group= is a DeviceMesh that this rank is not in, {group}; {_MEMBERS_ONLY}"
            )
        return group.get_group().group_name
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "group= is GroupMember.NON_GROUP_MEMBER, which new_group returns on ranks that are not in the group; "
            f"{_MEMBERS_ONLY}"
        )
    raise TypeError(
        f"group= takes None, a group's name, a ProcessGroup or a one-dimensional DeviceMesh, not {type(group).__name__}"
    )


def process_group(name: str) -> dist.ProcessGroup:
    """The process group with this name.

    Raises:
        ValueError: there is no group of this name, or this rank is not in it.
    """
    try:
        return _resolve_process_group(name)
    except RuntimeError as error:
        raise ValueError(
            f"no process group is named {name!r} on this rank: give the group_name of a group that it is in, and "
            f"{_MEMBERS_ONLY}"
        ) from error


def world_size(name: str) -> int:
    """Number of ranks of the group that has this name."""
    return process_group(name).size()


def sizes() -> tuple[tuple[str, int], ...]:
    """Name and number of ranks of each of this rank's process groups, ordered by name."""
    if not dist.is_initialized():
        return ()
    groups = torch.distributed.distributed_c10d._world.pg_names
    return tuple(sorted((str(name), group.size()) for group, name in groups.items()))


def group_rank(name: str) -> int:
    """This rank's number in the group that has this name."""
    return process_group(name).rank()


@constant_in_graphs
def place_of(name: str) -> tuple[int, int]:
    """The group's number of ranks, and this rank's; ValueError if this rank is not in it."""
    group = process_group(name)
    return group.size(), group.rank()


@constant_in_graphs
def reaches(device: torch.device, group: str) -> bool:
    """True if the group's ranks map each other's memory on such a device. Collective at the group's first call."""
    return torch.ops.overlap._copies_reach_peers(device, group)


def broadcast_integers(values: Sequence[int], group: dist.ProcessGroup | str) -> list[int]:
    """The values of the group's rank 0, on every rank; other ranks may pass another number of values. A collective call.

    torch.distributed's collectives of objects would work, but need NumPy.
    """
    if isinstance(group, str):
        group = process_group(group)
    devices = _device_capability(group)
    device = "cpu" if "cpu" in devices else devices[0]
    count = torch.tensor([len(values)], device=device)
    dist.broadcast(count, group_src=0, group=group)
    own = values if dist.get_rank(group) == 0 else [0] * int(count.item())
    shared = torch.tensor(own, dtype=torch.int64, device=device)
    dist.broadcast(shared, group_src=0, group=group)
    return shared.tolist()
