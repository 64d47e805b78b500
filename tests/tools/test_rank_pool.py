"""The tests' own pools of ranks."""

from __future__ import annotations

import pytest

import rank_pool

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
