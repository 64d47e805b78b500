"""Rows whose counts only the device knows, by an op of the tests' own on the types of csrc/steps: tests/steps_test."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from captures import capture, replayed
from checks import Failures
from operands import rank_device

ROWS, ROOM = 37, 40  # of a rank, and for each pair of ranks
OPS = torch.ops.overlap_test


def load() -> None:
    import overlap_torch  # noqa: F401  (loads the executors)

    torch.ops.load_library(Path(__file__).parents[1] / "_steps_test.so")


def listed(owners: torch.Tensor, world: int, room: int = ROOM) -> torch.Tensor:
    """For each rank its number of rows, then its rows in an order of their own. Places beyond a count hold no row."""
    shuffled = torch.randperm(len(owners), generator=torch.Generator().manual_seed(len(owners)))
    places = torch.full((world, room), -(1 << 40))
    for rank in range(world):
        rows = shuffled[owners[shuffled] == rank]
        places[rank, : len(rows)] = rows
    return torch.cat([torch.bincount(owners, minlength=world), places.flatten()])


def owners_of(draw: int, rank: int, world: int) -> torch.Tensor:
    """Any ranks; this rank for all rows; the last rank for all."""
    if draw > 1:
        return torch.full((ROWS,), rank if draw == 2 else world - 1)
    return torch.randint(world, (ROWS,), generator=torch.Generator().manual_seed(9 * draw + rank))


def integers(rank: int, *sizes: int) -> torch.Tensor:
    return torch.randint(-3, 4, sizes, generator=torch.Generator().manual_seed(rank))


@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (3, "gloo"), (2, "nccl"))
@pytest.mark.parametrize(
    "dtype, k, n", [(torch.bfloat16, 24, 40), (torch.float32, 7, 5)], ids=["16 bytes", "4 bytes"]
)
def test_rows_that_the_device_counts_come_home(
    failures: Failures, dtype: torch.dtype, k: int, n: int
) -> None:
    """Exactly, whatever the counts; in a CUDA graph, whose replays have other counts, as well."""
    load()
    rank, world, device = dist.get_rank(), dist.get_world_size(), rank_device()
    x = integers(rank, ROWS, k)
    weights = torch.stack([integers(100 + owner, n, k) for owner in range(world)])
    given = listed(owners_of(0, rank, world), world).to(device)
    call = partial(
        OPS.routed,
        x.to(device, dtype),
        weights[rank].to(device, dtype),
        given,
        ROOM,
        dist.group.WORLD.group_name,
    )
    graph, captured = capture(call) if device.type == "cuda" else (None, None)
    for draw in (0, 1, 2, 3):
        owners = owners_of(draw, rank, world)
        right = torch.einsum("rk,rnk->rn", x.double(), weights[owners].double()).to(device, dtype)
        given.copy_(listed(owners, world))
        failures.expect_equal([call()], [right], "plain", draw)
        if graph is not None:
            failures.expect_equal(replayed(graph, captured), right, "replay", draw)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_rows_that_the_device_counts_are_proved(world: int) -> None:
    """No fault, whatever the counts; each step of rank 0's that is left out or works elsewhere is missed."""
    load()

    def held(draw: int) -> list[int]:
        return torch.cat(
            [listed(owners_of(draw, rank, world), world) for rank in range(world)]
        ).tolist()

    for draw in (0, 1, 2, 3):
        assert OPS.prove(ROWS, ROOM, world, held(draw), False) == []
    assert OPS.prove(ROWS, ROOM, world, held(1), True) == []


def test_rows_that_the_device_counts_are_priced_by_their_room() -> None:
    load()
    assert OPS.price(128, 2) < OPS.price(4096, 2) < OPS.price(8192, 2)
