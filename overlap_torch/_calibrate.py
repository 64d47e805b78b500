"""``python -m overlap_torch calibrate``: measures what work takes on this machine, and fits a profile to it.

What is measured: GEMMs of the framework and of the package's kernels, copies on the device, and, on several ranks, whole
plans in turns. The fit moves the profile's times and rates from those of a known profile as far as the measured times ask
for: least squares of the logarithms, in which a number that moves by 30 % weighs as much as a time that is off by 4 %. What
was not measured stays as it was.

Each limit on NCCL's CTAs is a communicator for each lane, with memory of its own. A fitted profile has two: where NCCL was
measured with several numbers of CTAs, the fewest that reach 95 % of the link's rate by themselves, and those of which two lanes
together reach 80 %.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from overlap_torch import _tune, _tuned_files
from overlap_torch._launch import Ranks, current_device, launch
from overlap_torch._plan_json import enum_name
from overlap_torch.plan import (
    BAND_ROWS,
    Kernel,
    Machine,
    Plan,
    Problem,
    Profile,
    Schedule,
    decode,
    encode,
    from_dict,
    machine,
    make_sequential,
    predict,
    row_panels,
    to_dict,
)

SCHEMA, KIND = 1, "overlap_torch.recording"
_NOISE = 0.04  # of a measured time, and of what the model cannot say
_SPREAD = 0.3  # of a profile's numbers from one machine to the next
_FURTHEST = 1.2  # in the logarithm: a number moves by no more than a factor of 3.3
_OUTLIER = 3.0  # times the noise: what is further off was disturbed
_STEPS = 25  # at most
_WORTH_UNDOING = 0.005  # of the time that choices lose: a move that costs so much is undone
_MOST_UNDONE = 4
# Sections of numbers that a GPU has, and a CPU; and numbers that are limits of a choice, not what work takes.
_GPU = ("gemm", "beside", "host", "sync", "link", "calls", "local", "peer")
_CPU = ("cpu",)
_CHOICES = {
    "gemm.sustained_rate",  # in Machine.sm_gflops
    "gemm.cool_us",
    "gemm.large_tile_rounds",
    "gemm.large_tile_factor",
    "host.short_call_us",
    "link.slow_most_gbps",
    "link.fast_least_gbps",
    "link.fast_most_gbps",
    "peer.fast_gbps",
    "cpu.chunk_flops",
}
_COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
_CTAS = (1, 2, 4, 8, 12, 16, 24, 32)
_MESSAGE = 64 << 20
_MACHINE = (
    "arch",
    "sm_count",
    "sm_gflops",
    "has_sm80_kernels",
    "has_sm90_kernels",
    "link_latency_us",
    "link_gbps",
    "windows",
    "peer_gbps",
)


@dataclass(frozen=True)
class Time:
    """A measured one: of a whole plan, of its GEMM alone, of a copy of so many bytes on the device, or of a collective of so
    many bytes by so many CTAs of NCCL's, alone."""

    what: str  # "plan", "gemm", "copy" or a collective of _COLLECTIVES
    us: float
    plan: Plan | None = None
    bytes: int = 0
    ctas: int = 0


@dataclass(frozen=True)
class Recording:
    """What was measured, and on what."""

    gpu: str
    machine: dict[str, Any]
    times: tuple[Time, ...]

    def on(self, profile: Profile) -> Machine:
        """The machine, whose work takes what the profile says."""
        fields = dict(self.machine)
        if fields["arch"] == 0:  # a CPU's machine is its profile
            cpu = json.loads(profile.to_json())["cpu"]
            fields |= {
                "sm_count": cpu["cores"],
                "sm_gflops": cpu["core_gflops"],
                "link_latency_us": cpu["link_latency_us"],
                "link_gbps": cpu["link_gbps"],
            }
        return Machine(**fields, profile=profile)


# --- the file -------------------------------------------------------------------------------------------------


def write(path: str | Path, recording: Recording) -> None:
    """A line for the machine, and one for each time."""
    at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    head = {"schema": SCHEMA, "kind": KIND, "at": at, "gpu": recording.gpu}
    lines: list[dict[str, Any]] = [{**head, "machine": recording.machine}]
    for time in recording.times:
        line: dict[str, Any] = {"what": time.what, "us": round(time.us, 3)}
        line |= {"bytes": time.bytes} if time.plan is None else {"plan": to_dict(time.plan)}
        line |= {"ctas": time.ctas} if time.what in _COLLECTIVES else {}
        lines.append(line)
    Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def read(path: str | Path) -> Recording:
    """Raises ValueError for a file that is none."""
    try:
        head, *lines = map(json.loads, Path(path).read_text(encoding="utf-8").splitlines())
        if head["schema"] != SCHEMA or head["kind"] != KIND:
            raise ValueError(f"schema {head['schema']!r}, kind {head['kind']!r}")
        recording = Recording(head["gpu"], head["machine"], tuple(map(_time, lines)))
        recording.on(Profile.shipped())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: {error!r}; allowed is what `calibrate --record` writes, schema {SCHEMA}, kind {KIND!r}"
        ) from error
    return recording


def _time(line: dict[str, Any]) -> Time:
    us = float(line["us"])
    if line["what"] not in ("plan", "gemm", "copy", *_COLLECTIVES) or not 0.0 < us < math.inf:
        raise ValueError(f"a line has {line['what']!r} of {us} us")
    if line["what"] in _COLLECTIVES:
        if int(line["ctas"]) < 1:
            raise ValueError(f"a line has {line['ctas']} CTAs")
        return Time(line["what"], us, bytes=int(line["bytes"]), ctas=int(line["ctas"]))
    if line["what"] == "copy":
        return Time("copy", us, bytes=int(line["bytes"]))
    plan = from_dict(line["plan"])
    return Time(line["what"], us, plan)


# --- the fit --------------------------------------------------------------------------------------------------


def expected_us(time: Time, on: Machine, numbers: dict[str, float]) -> float:
    """What the profile with these numbers says of it."""
    if time.plan is None:
        return numbers["local.copy_start_us"] + time.bytes / (1e3 * numbers["local.copy_gbps"])
    found = predict(time.plan, on)
    if time.what == "plan":
        return found.total_us
    beside = time.plan.schedule == Schedule.OVERLAPPED
    return found.gemm_us / (numbers["beside.nccl_factor"] if beside else 1.0)


@dataclass(frozen=True)
class Fit:
    """A profile, and how far what it expects is from what was measured.

    Attributes:
        profile: the fitted one.
        moved: numbers that moved by 1 % and more: before and now.
        rms: root mean square error of the logarithms, by kind of work, before and now.
        regret: what is lost where the plan of the smallest expected time is taken, of those measured: the mean over
            problems of its measured time over the best one's, less 1; before and now.
    """

    profile: Profile
    moved: dict[str, tuple[float, float]]
    rms: dict[str, tuple[float, float]]
    regret: tuple[float, float]


def fit(recording: Recording, start: Profile | None = None, name: str = "calibrated") -> Fit:
    """Fits a profile to what was measured, from the numbers of `start`; None: the shipped one's.

    Raises:
        ValueError: nothing was measured.
    """
    by_ctas = cta_limits(recording.times)
    times = tuple(time for time in recording.times if time.what not in _COLLECTIVES)
    if not times:
        raise ValueError("nothing was measured, so nothing can be fitted")
    start = start or Profile.shipped()
    text = json.loads(start.to_json())
    if by_ctas is not None:
        text = with_cta_limits(text, *by_ctas)
    numbers = dict(_numbers(text))
    sections = _CPU if recording.machine["arch"] == 0 else _GPU
    kinds = Profile.fields()  # whole numbers are of CTAs, rows and bytes
    names = [
        one
        for one, value in numbers.items()
        if one.split(".")[0] in sections
        and one not in _CHOICES
        and kinds[one].startswith("a number")
        and value > 0.0
    ]
    measured = torch.tensor([time.us for time in times], dtype=torch.float64).log()

    def logs(x: torch.Tensor) -> torch.Tensor:
        moved = {
            one: numbers[one] * math.exp(by) for one, by in zip(names, x.tolist(), strict=True)
        }
        profile = _profile(text, moved)
        on = recording.on(profile)
        all_numbers = {**numbers, **moved}
        us = [expected_us(time, on, all_numbers) for time in times]
        return torch.tensor(us, dtype=torch.float64).log()

    first = logs(torch.zeros(len(names), dtype=torch.float64))
    x = _least_squares(logs, measured, len(names))
    moved = {
        one: _rounded(numbers[one] * math.exp(by))
        for one, by in zip(names, x.tolist(), strict=True)
        if abs(by) >= 0.01
    }

    def chosen_by(moves: dict[str, float]) -> float:
        moved = {one: math.log(value / numbers[one]) for one, value in moves.items()}
        at = torch.tensor([moved.get(one, 0.0) for one in names], dtype=torch.float64)
        return _regret(times, logs(at).tolist())

    moved = _without_worse_choices(moved, chosen_by)
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    made = {
        "by": "calibrate",
        "at": today,
        "note": f"{len(times)} times, from {start.name}",
    }
    profile = _profile(
        {**text, "name": name, "made": made, "machine": {"gpu": recording.gpu}}, moved
    )
    all_numbers = {**numbers, **moved}
    on = recording.on(profile)
    us = [expected_us(time, on, all_numbers) for time in times]
    now = torch.tensor(us, dtype=torch.float64).log()
    return Fit(
        profile,
        {one: (numbers[one], value) for one, value in moved.items()},
        _rms(times, first - measured, now - measured),
        (_regret(times, first.tolist()), _regret(times, now.tolist())),
    )


def _without_worse_choices(
    moved: dict[str, float], regret: Callable[[dict[str, float]], float]
) -> dict[str, float]:
    """Without those moves, one by one, that make choices lose more than they gain in closeness.

    Times of few rows are the host's: they draw a number away, by which plans of many rows are then chosen, or the other way
    about.
    """
    now = regret(moved)
    for _ in range(_MOST_UNDONE):
        if now < _WORTH_UNDOING:
            break
        by = {
            one: regret({other: value for other, value in moved.items() if other != one})
            for one in moved
        }
        undone = min(by, key=by.__getitem__, default=None)
        if undone is None or by[undone] > now - _WORTH_UNDOING:
            break
        moved = {other: value for other, value in moved.items() if other != undone}
        now = by[undone]
    return moved


def _least_squares(
    logs: Callable[[torch.Tensor], torch.Tensor], measured: torch.Tensor, count: int
) -> torch.Tensor:
    """Where `logs` is closest to what was measured: by Levenberg and Marquardt, as the model has corners.

    Errors count by their squares up to `_OUTLIER` times the noise, and beyond that by themselves (Huber): a time that
    something disturbed moves little.
    """

    def weights(error: torch.Tensor) -> torch.Tensor:
        return (_OUTLIER * _NOISE / error.abs()).clamp(max=1.0)

    def cost(x: torch.Tensor, error: torch.Tensor) -> float:
        weight = weights(error)
        counted = (error / _NOISE).square() * weight * (2.0 - weight)
        return (counted.sum() + (x / _SPREAD).square().sum()).item()

    x = torch.zeros(count, dtype=torch.float64)
    expected = logs(x)
    best, damping = cost(x, measured - expected), 1.0
    for _ in range(_STEPS):
        columns = []
        for index in range(count):
            step = x.clone()
            step[index] += 0.02
            columns.append((logs(step) - expected) / 0.02)
        jacobian = torch.stack(columns, dim=1)
        error = measured - expected
        weighted = jacobian.T * weights(error) / _NOISE**2
        left = weighted @ jacobian + torch.eye(count).double() / _SPREAD**2
        right = weighted @ error - x / _SPREAD**2
        before = best
        for _ in range(8):
            damped = left + damping * torch.diag(left.diagonal())
            tried = (x + torch.linalg.solve(damped, right)).clamp(-_FURTHEST, _FURTHEST)
            found = logs(tried)
            now = cost(tried, measured - found)
            if now < best:
                x, expected, best = tried, found, now
                damping /= 4.0
                break
            damping *= 4.0
        if before - best < 1e-4 * before:
            break
    return x


def cta_limits(times: Sequence[Time]) -> tuple[int, int] | None:
    """The two numbers of CTAs that NCCL's communicators are made for; None where NCCL was not measured by their number.

    By the mean over the collectives of the share of the best rate: the fewest CTAs that reach 80 % are two lanes', so that each
    has half of them; the fewest that reach 95 % are one lane's.
    """
    rates: dict[str, dict[int, float]] = {}
    for time in times:
        if time.what in _COLLECTIVES:
            rates.setdefault(time.what, {})[time.ctas] = time.bytes / time.us
    common = sorted(set.intersection(*(set(one) for one in rates.values()))) if rates else []
    if not common:
        return None
    shares = {
        ctas: statistics.fmean(one[ctas] / max(one.values()) for one in rates.values())
        for ctas in common
    }
    best = max(shares.values())
    two_lanes, one_lane = (
        next(ctas for ctas in common if shares[ctas] >= share * best) for share in (0.80, 0.95)
    )
    return -(-two_lanes // 2), one_lane


def with_cta_limits(text: dict[str, Any], each_of_two: int, one: int) -> dict[str, Any]:
    """A profile's text whose ways have lanes as before, and no other limits on CTAs than these."""
    ways = {}
    for name, pairs in text["ways"].items():
        own = {(one if lanes == 1 else each_of_two, lanes) for _, lanes in pairs}
        # The planner looks for the most SMs in the last one.
        ways[name] = [list(way) for way in sorted(own, key=lambda way: (way[0] * way[1], way))]
    calls = {name: one for name in ("pair_ctas", "many_ctas", "slow_link_ctas")}
    return {**text, "ways": ways, "all_to_all": {**text["all_to_all"], **calls}}


def _numbers(data: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, (int, float)):
            yield prefix + key, value


def _profile(text: dict[str, Any], numbers: dict[str, float]) -> Profile:
    copy = json.loads(json.dumps(text))
    for name, value in numbers.items():
        *path, last = name.split(".")
        place = copy
        for key in path:
            place = place[key]
        place[last] = value
    return Profile.parse(json.dumps(copy), "calibrate")


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def kind(time: Time) -> str:
    """Of work that a profile's numbers serve together."""
    if time.plan is None:
        return "copy"
    if time.what == "gemm":
        return f"gemm/{enum_name(time.plan.kernel)}"
    if time.plan.schedule == Schedule.SEQUENTIAL:
        return "sequence"
    transport = enum_name(time.plan.chunks[0].transport)
    return f"{transport}/{enum_name(time.plan.collective)}"


def _rms(
    times: Sequence[Time], before: torch.Tensor, now: torch.Tensor
) -> dict[str, tuple[float, float]]:
    kinds = [kind(time) for time in times]
    found = {}
    for one in [*sorted(set(kinds)), "all"]:
        mine = torch.tensor([one in (name, "all") for name in kinds])
        found[one] = (
            before[mine].square().mean().sqrt().item(),
            now[mine].square().mean().sqrt().item(),
        )
    return found


def _regret(times: Sequence[Time], expected: Sequence[float]) -> float:
    problems: dict[str, list[tuple[float, float]]] = {}
    for time, log_us in zip(times, expected, strict=True):
        if time.what == "plan" and time.plan is not None:
            problems.setdefault(repr(time.plan.problem), []).append((log_us, time.us))
    losses = [
        min(found)[1] / min(us for _, us in found) - 1.0
        for found in problems.values()
        if len(found) > 1
    ]
    return statistics.fmean(losses) if losses else 0.0


# --- measuring ------------------------------------------------------------------------------------------------

_GEMMS = [(m, 8192, k) for k in (1024, 2048, 4096, 8192) for m in (1024, 4096, 8192)]
_SMALL_GEMMS = [(16, 8192, 8192), (512, 4096, 4096)]
_COPIES = [1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]
_PROBLEMS = [
    (512, 8192, 4096),
    (2048, 8192, 4096),
    (4096, 8192, 2048),
    (8192, 8192, 7168),
    (8192, 4096, 3584),
    (16384, 8192, 2048),
]
_CPU_PROBLEMS = [(1024, 512, 512), (2048, 512, 256), (512, 512, 1024), (2048, 1024, 512)]


def record(turns: int, progress: bool) -> Recording | None:
    """Measures, on all ranks of the default group; rank 0 has the result. Takes 10 to 30 s."""
    device, world = current_device(), dist.get_world_size()
    mine = machine(device)
    jobs: list[Callable[[], list[Time]]] = []
    if device.type == "cuda":
        jobs += [lambda shape=shape: _gemms(shape, mine, turns) for shape in _GEMMS + _SMALL_GEMMS]
        jobs.append(lambda: _copies(turns))
    if world > 1 and device.type == "cuda":
        jobs += [lambda ctas=ctas: _collectives(ctas, turns) for ctas in _CTAS]
    if world > 1:
        sizes = _CPU_PROBLEMS if device.type == "cpu" else _PROBLEMS
        dtype = "float32" if device.type == "cpu" else "bfloat16"
        session = _tune.session(device, turns)
        jobs += [
            lambda op=op, shape=shape: _plans(session, Problem(*shape, dtype, world, op))
            for op in ("gemm_allreduce", "gemm_reducescatter", "allgather_gemm")
            for shape in sizes
        ]
    times: list[Time] = []
    for index, job in enumerate(jobs):
        if progress:
            _tune.draw_bar(index, len(jobs), "")
        times += job()
    if progress:
        _tune.draw_bar(len(jobs), len(jobs), "done")
    if dist.get_rank() != 0:
        return None
    fields = {name: getattr(mine, name) for name in _MACHINE}
    if world == 1:  # no link was measured, and nothing that was measured has one
        fields |= {"link_latency_us": 10.0, "link_gbps": 100.0}
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return Recording(gpu, fields, tuple(times))


def _plans(session: _tune.Session, problem: Problem) -> list[Time]:
    """The sequence, and up to eight plans, of all ways first."""
    codes = session.share([encode(plan) for plan in session.ranked(problem, 8)])
    plans = [decode(code) for code in codes]
    verdict = session.measure(problem, plans, "call")
    return [Time("plan", verdict["us"][i], plans[i]) for i in verdict["right"]]


def _gemms(shape: tuple[int, int, int], on: Machine, turns: int) -> list[Time]:
    """The framework's GEMM and the package's kernels, with all SMs and with fewer."""
    problem = Problem(*shape, "bfloat16", 2)
    plans = [make_sequential(problem, on)]
    kernels: tuple[Kernel, ...] = ()
    if on.has_sm90_kernels:
        kernels = (Kernel.SM90_PINGPONG, Kernel.SM90_PINGPONG_WIDE, Kernel.SM90_COOPERATIVE)
    elif on.has_sm80_kernels:
        kernels = (Kernel.SM80,)
    for kernel in kernels:
        whole = row_panels(problem, 1, kernel=kernel)
        panels = max(1, min(8, whole.tiles_m // BAND_ROWS))
        for left in (0, 8, 16, 32) if panels == 4 else (0,):
            plans.append(row_panels(problem, panels, kernel=kernel, comm_sms=left))
    input, weight = _tune.operands(problem, current_device(), 0)

    def call(plan: Plan) -> Callable[[], object]:
        if plan.schedule == Schedule.SEQUENTIAL:
            return lambda: torch.mm(input, weight.t())
        code = encode(plan)
        return lambda: torch.ops.overlap.gemm_alone(input, weight, code)

    us = medians_us([call(plan) for plan in plans], turns)
    return [Time("gemm", one, plan) for one, plan in zip(us, plans, strict=True)]


def _collectives(ctas: int, turns: int) -> list[Time]:
    """NCCL's, on all ranks of the default group, by a communicator of so many CTAs."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = ctas
    options.config.cga_cluster_size = 0  # which NCCL would take CTAs in multiples of
    group = dist.new_group(pg_options=options)
    world = dist.get_world_size()
    part = torch.zeros(_MESSAGE // 2 // world, dtype=torch.bfloat16, device=current_device())
    whole = part.repeat(world)
    calls = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
    }
    us = torch.tensor(medians_us(list(calls.values()), turns), device=current_device())
    dist.all_reduce(us, dist.ReduceOp.MAX, group=group)
    dist.destroy_process_group(group)
    return [
        Time(what, one, bytes=whole.nbytes, ctas=ctas)
        for what, one in zip(calls, us.tolist(), strict=True)
    ]


def _copies(turns: int) -> list[Time]:
    source, target = (
        torch.empty(max(_COPIES), dtype=torch.uint8, device=current_device()) for _ in range(2)
    )
    calls = [lambda size=size: target[:size].copy_(source[:size]) for size in _COPIES]
    us = medians_us(calls, turns)
    return [Time("copy", one, bytes=size) for one, size in zip(us, _COPIES, strict=True)]


def medians_us(calls: Sequence[Callable[[], object]], turns: int) -> list[float]:
    """Microseconds of each on the current CUDA device, in turns, each in flushed caches."""
    flush = torch.empty(_tune.FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    us: list[list[float]] = [[] for _ in calls]
    with torch.inference_mode():
        for call in calls:
            call()
        for turn in range(turns):
            events = []
            for place in range(len(calls)):
                index = (turn + place) % len(calls)
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                flush.zero_()
                begin.record()
                calls[index]()
                end.record()
                events.append((index, begin, end))
            torch.cuda.synchronize()
            for index, begin, end in events:
                us[index].append(1e3 * begin.elapsed_time(end))
    return [statistics.median(times) for times in us]


# --- the command line -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """What each rank of the command does."""

    turns: int
    record: str | None
    out: str | None


def main(argv: Sequence[str] | None = None) -> int:
    """Calibrates with these command line arguments; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m overlap_torch calibrate",
        description="Measures what work takes on this machine, for 10 to 30 s, fits a profile to it, and writes it into a "
        "file that OVERLAP_PROFILE takes. One GPU gives the part of GEMMs and copies. Starts the ranks itself, or is one "
        "of those that torchrun started.",
    )
    parser.add_argument(
        "--record", metavar="FILE", help="write down what was measured, and fit nothing"
    )
    parser.add_argument(
        "--from", metavar="FILE", dest="source", help="fit what --record wrote down"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="the profile (default: in the folder of `tune`, by GPU and ranks)",
    )
    parser.add_argument("--turns", type=int, default=8, help="of which each time is the median")
    parser.add_argument("--world", type=int, help="ranks (default: all GPUs, or 2 on CPU)")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], help="default: cuda where there is a GPU"
    )
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        if args.source and args.record:
            raise ValueError("--record measures and --from does not: give one of them")
        if args.turns < 1:
            raise ValueError(f"--turns is {args.turns}, allowed are 1 and more")
        if args.source:
            _finish(read(args.source), args.out)
            return 0
        ranks = Ranks.choose(args.world, args.device)
    except ValueError as error:
        parser.error(str(error))
    try:
        launch(ranks, run_rank, _Job(args.turns, args.record, args.out))
    except torch.multiprocessing.ProcessExitedException as error:
        return error.exit_code or 1
    return 0


def run_rank(job: _Job) -> None:
    """What each rank of the command does."""
    recording = record(job.turns, sys.stderr.isatty() and dist.get_rank() == 0)
    if recording is None:
        return
    if job.record:
        write(job.record, recording)
        print(f"{len(recording.times)} times in {job.record}")
    else:
        _finish(recording, job.out)


def _finish(recording: Recording, out: str | None) -> None:
    worlds = {
        time.plan.problem.world_size
        for time in recording.times
        if time.what == "plan" and time.plan
    }
    name = "-".join(recording.gpu.lower().split()) + (f"-x{max(worlds)}" if worlds else "")
    found = fit(recording, name=name)
    path = Path(out) if out else _tuned_files.folder() / "profiles" / f"{name}.json"
    os.makedirs(path.parent, exist_ok=True)
    path.write_text(found.profile.to_json() + "\n", encoding="utf-8")
    print(report(found))
    print(f"OVERLAP_PROFILE={path}")


def report(found: Fit) -> str:
    """What moved, and the errors, as text."""
    lines = [
        f"{name:40} {before:12.5g} -> {now:10.5g}" for name, (before, now) in found.moved.items()
    ]
    lines.append(f"{'root mean square error':40} {'before':>12}    {'now':>10}")
    lines += [
        f"  {name:38} {before:12.1%}    {now:10.1%}" for name, (before, now) in found.rms.items()
    ]
    before, now = found.regret
    lines.append(f"{'lost by the choice of plan, mean':40} {before:12.1%}    {now:10.1%}")
    return "\n".join(lines)
