"""The tests' own pools of ranks, and parts of their grids."""

import dataclasses
import itertools
import os

import pytest

import rank_pool
from grids import where_each_pair_meets

OWN = {"OVERLAP_TEST_POOL": "interrupted"}  # no other test's pool


def answer(value: int) -> int:
    return value


def interrupt(ranks: rank_pool.Ranks, timeout_s: float) -> list[rank_pool.Outcome]:
    """As pytest's timeout does, while the ranks are at work."""
    raise KeyboardInterrupt


def test_rank_pool_of_an_interrupted_job_does_not_answer_the_next_one(monkeypatch):
    assert rank_pool.run(1, "gloo", answer, 1, environment=OWN) == [1]
    with monkeypatch.context() as patched:
        patched.setattr(rank_pool.Ranks, "_collect", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rank_pool.run(1, "gloo", answer, 2, environment=OWN)
    assert rank_pool.run(1, "gloo", answer, 3, environment=OWN) == [3]


def process(_: int) -> int:
    return os.getpid()


def test_rank_pool_ends_after_some_jobs_on_a_gpu_that_is_nearly_full(monkeypatch):
    rank_pool.close_all()
    first = rank_pool.run(1, "gloo", process, 0, environment=OWN)
    collected = rank_pool.Ranks._collect

    def crowded(ranks: rank_pool.Ranks, timeout_s: float) -> list[rank_pool.Outcome]:
        return [dataclasses.replace(one, crowded=True) for one in collected(ranks, timeout_s)]

    monkeypatch.setattr(rank_pool.Ranks, "_collect", crowded)
    for _ in range(rank_pool.JOBS_OF_A_CROWDED_POOL - 1):
        assert rank_pool.run(1, "gloo", process, 0, environment=OWN) == first
    assert rank_pool.run(1, "gloo", process, 0, environment=OWN) != first


@pytest.mark.parametrize(
    ("sizes", "most"), [((4, 5, 4), 22), ((2, 2, 2, 3), 7), ((3, 4), 12), ((5,), 5)]
)
def test_each_two_values_meet_in_a_part_of_a_grid(sizes, most):
    points = list(itertools.product(*map(range, sizes)))
    kept = [points[place] for place in where_each_pair_meets(points)]
    assert len(kept) == len({*kept}) <= most
    for (one, first), (other, second) in itertools.combinations(enumerate(sizes), 2):
        met = {(point[one], point[other]) for point in kept}
        assert met == {*itertools.product(range(first), range(second))}
    assert {value for point in kept for value in point} == {*range(max(sizes))}
