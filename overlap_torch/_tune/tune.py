"""Chooses plans by measuring: :func:`tune`. ``OVERLAP_TUNE=1`` calls it at each problem's first call.

Only rank 0 reads the cache and decides; all ranks use the plans that it sends, over the group's store. So all ranks choose
the same plan, and make the same collective calls. For each problem:

1. rank 0 says which plans to measure, or which one the cache has;
2. every rank says which of them it can run, and from which sources it was built; a plan that one rank cannot run is left
out;
3. all run the same plans in the same order, a fixed number of times, and send their times;
4. rank 0 takes the slowest rank's time of each turn, then each plan's median, and announces the best plan;
5. the winner is measured again and longer, and once more when the other problems have been: times move between
   levels that last for seconds.

Every wait has the group's deadline, and says which rank did not come.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import torch

from overlap_torch._layers.sharding import checked_count
from overlap_torch._ops.group import Group, group_name, process_group
from overlap_torch._tune.session import Session, Tuned, words
from overlap_torch.plan import Plan, Problem
from overlap_torch.plan._library import device_of

MODES = ("call", "row")


def tune(
    problems: Iterable[Problem] | None = None,
    *,
    modes: Sequence[str] = ("call",),
    group: Group = None,
    device: torch.device | str | None = None,
    most: int = 4,
    repeats: int = 10,
    cache: bool = True,
    progress: bool = False,
    plans: Iterable[Plan] = (),
) -> list[Tuned]:
    """Measures plans for problems, sets the fastest, and remembers the times. Every rank of the group calls it.

    The sequence is always measured, and stays unless another plan is clearly faster, so nothing gets slower. The cost
    model, corrected by times of nearby problems, chooses the other plans to measure. Times in the cache are not measured
    again; a damaged, foreign or unwritable cache is no error. If ranks differ, rank 0's ``problems`` count.

    Args:
        problems: problems with the group's number of ranks; None: all problems that this process has called so far.
            All-to-alls are left out, because they have one plan.
        modes: one or both of "call" (one call at a time, with cold caches) and "row" (calls back to back). The op runs the
            first mode's plan; the other mode's times are kept. On GPUs neither includes the host's time.
        group: as in :func:`overlap_torch.gemm_allreduce`.
        device: None: the current CUDA device, or the CPU if there is none.
        most: plans to measure beside the sequence, 1 or more.
        repeats: turns, 1 or more; each plan runs once a turn.
        cache: True reads and writes ``$OVERLAP_CACHE``, or ``overlap_torch`` in the user's cache folder.
        progress: True lets rank 0 draw a bar on stderr, or write lines if stderr is no terminal.
        plans: more plans to measure, for their own problems among these: edited plans, or plans with a program.

    Returns:
        A :class:`Tuned` for each problem and mode, in order; the same on all ranks.

    Raises:
        ValueError, TypeError: an argument that is not allowed, a call inside a CUDA graph's capture, or a problem
            of another number of ranks.
        RuntimeError: a rank did not come within the group's timeout.
    """
    check_arguments(modes, most, repeats)
    plans = list(plans)
    for plan in plans:
        if not isinstance(plan, Plan):
            raise TypeError(f"plans are of overlap_torch.plan, but got a {type(plan).__name__}")
    name = group_name(group)
    members = process_group(name)
    where = device_of(device)
    if where.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError("tune cannot run inside a CUDA graph's capture: call it before")
    if problems is None:
        wanted = [problem for problem, _ in called(name, where.type)]
    else:
        wanted = list(problems) if isinstance(problems, Iterable) else [problems]
        for problem in wanted:
            if not isinstance(problem, Problem):
                raise TypeError(
                    f"tune takes plan.types.Problem, several of them, but got a {type(problem).__name__}"
                )
    session = Session(name, members, where, most, repeats, cache, plans)
    wanted = session.agree_on(wanted)
    for problem in wanted:
        if problem.world_size != members.size():
            raise ValueError(
                f"tune: {problem} is for {problem.world_size} ranks, but the group has {members.size()}"
            )
    pairs = [(one, mode) for one in wanted for mode in modes]
    draws = progress and session.board.rank == 0
    results = []
    for index, (problem, mode) in enumerate(pairs):
        if draws:
            draw_bar(index, len(pairs), f"{words(problem)} {mode}")
        results.append(session.tune(index, problem, mode, takes=mode == modes[0]))
    for index in session.to_look_at_again():
        if draws:
            draw_bar(index, len(pairs), f"{words(pairs[index][0])} again")
        results[index] = session.look_once_more(index)
    if draws and wanted:
        draw_bar(len(results), len(results), "done")
    session.board.close()
    return results


def check_arguments(modes: Sequence[str], most: int, repeats: int) -> None:
    if isinstance(modes, str) or not modes or any(mode not in MODES for mode in modes):
        raise ValueError(f"modes is {modes!r}, allowed are sequences of {', '.join(MODES)}")
    if checked_count("most", most) < 1 or checked_count("repeats", repeats) < 1:
        raise ValueError(f"most is {most} and repeats {repeats}, allowed are 1 or more")


def called(group: str, device_type: str) -> list[tuple[Problem, int]]:
    """The problems that this process has called in the group on such devices, and how often."""
    found: dict[str, tuple[Problem, int]] = {}
    for row in torch.ops.overlap.plan_table():
        if row["group"] != group or row["device"] != device_type or row["k"] == "0":
            continue  # with K = 0 there is no GEMM beside the collective
        problem = Problem(
            *(int(row[size]) for size in ("m", "n", "k")),
            row["input_dtype"],
            int(row["world_size"]),
            row["op"],
            row["recipe"],
            row["output_dtype"],
            row["fast_accum"] == "1",
            row["invariance"],
        )
        _, calls = found.get(repr(problem), (problem, 0))
        found[repr(problem)] = (problem, calls + int(row["calls"]))
    return list(found.values())


def draw_bar(done: int, of: int, what: str) -> None:
    """Draws a bar on stderr, or writes a line each time if stderr is no terminal."""
    if not sys.stderr.isatty():
        print(f"{done}/{of} {what}".rstrip(), file=sys.stderr, flush=True)
        return
    width = 30
    filled = width * done // max(1, of)
    bar = "#" * filled + "." * (width - filled)
    end = "\n" if done == of else ""
    print(f"\r[{bar}] {done}/{of} {what:60}", end=end, file=sys.stderr, flush=True)
