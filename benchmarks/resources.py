"""The room that a GEMM leaves to communication, and its cost: python -m overlap_torch.benchmarks resources

    --out FOLDER     results as resources.json, and a picture, resources.svg (needs matplotlib)
    --quick          two shapes, fewer settings and rounds: a look, of some 20 s
    --from FILE      the table and the picture of a resources.json again; needs no GPU
    torchrun --nproc-per-node 2 -m overlap_torch.benchmarks resources      the same beside NCCL's all-reduces

A GEMM and a kernel of n CTAs that moves bytes, as communication does, begin together. Each GEMM (cuBLAS, this package's mma.sync and
Hopper kernels, Triton) leaves SMs to the other one by a smaller persistent grid, by a green context, by shared memory that it
pads its blocks with, or not at all, and the moving kernel's stream has high or low priority. The study measures, in turns:

    gemm_us, moving_us      each alone
    together_us             both, from the first's begin to the last's end
    gemm_beside_us          the GEMM beside the other
    moving_beside_us        the other beside the GEMM
    hidden                  share of the shorter one's time that the other one hides: 1 is all, 0 one after the other, less is worse
    robust                  over the shapes, the least of hidden for this setting

The moving kernel moves exactly as many bytes with every number of CTAs. On one GPU it copies them within the GPU, which reads and
writes each once; with torchrun it is an all-reduce by a communicator of as many CTAs, for which a ring sends and receives
2 (n - 1) / n of them on each of n GPUs. `bytes_per_gpu` in the file says how many. Times are medians, of the slowest rank. After
--seconds (140) no further setting begins, on no rank; the settings of a shape that are left out are missing in all that is told.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from overlap_torch import plan
from overlap_torch._kernels.resources import green_context
from overlap_torch.plan import Problem
from overlap_torch.plan.types import Kernel

from .study import Study

MOVED_BYTES = 64 << 20


@dataclass(frozen=True)
class Grid:
    """The variations, and how often each is measured."""

    shapes: tuple[tuple[int, int, int], ...] = (
        (4096, 8192, 7168),
        (8192, 8192, 2048),
        (8192, 4096, 3584),
        (2048, 16384, 4096),
    )
    sms: tuple[int, ...] = (8, 16, 24)
    pads: tuple[int, ...] = (64 << 10,)  # bytes of shared memory, for this package's kernels
    ctas: tuple[int, ...] = (4, 8, 16, 24)
    rounds: int = 7
    gemms: tuple[str, ...] = ("cublas", "triton", "sm80", "sm90_pingpong")


QUICK = Grid(shapes=((4096, 8192, 7168), (8192, 8192, 2048)), sms=(16,), ctas=(8, 16), rounds=4)


@dataclass(frozen=True)
class Leaves:
    """A GEMM, and what it leaves."""

    gemm: str
    by: str  # "nothing", "grid", "green_context" or "padding"
    sms: int = 0
    pad_bytes: int = 0

    @property
    def words(self) -> str:
        amount = f" {self.pad_bytes >> 10} KiB" if self.pad_bytes else ""
        return self.by.replace("_", " ") + (f" {self.sms} SMs" if self.sms else amount)


@dataclass(frozen=True)
class Result:
    """Times in microseconds, beside a kernel of so many CTAs on a stream of high or low priority."""

    shape: tuple[int, int, int]
    leaves: Leaves
    high_priority: bool
    ctas: int
    gemm_us: float
    moving_us: float
    together_us: float
    gemm_beside_us: float
    moving_beside_us: float

    @property
    def hidden(self) -> float:
        both = self.gemm_us + self.moving_us
        return (both - self.together_us) / min(self.gemm_us, self.moving_us)


@triton.jit
def _move(source, target, count, BLOCK: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0) * BLOCK
    while begin < count:
        place = begin + tl.arange(0, BLOCK)
        tl.store(target + place, tl.load(source + place))
        begin += step


@triton.jit
def _triton_gemm(a, b, c, tiles, M, N, K, GROUP: tl.constexpr,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """c = a @ b.T, persistent, of whole tiles."""
    columns = tl.cdiv(N, BLOCK_N)
    index = tl.program_id(0)
    while index < tiles:
        in_group = GROUP * columns
        first = index // in_group * GROUP
        size = min(tl.cdiv(M, BLOCK_M) - first, GROUP)
        rows = (first + index % in_group % size) * BLOCK_M + tl.arange(0, BLOCK_M)
        of_columns = index % in_group // size * BLOCK_N + tl.arange(0, BLOCK_N)
        inner = tl.arange(0, BLOCK_K)
        left = a + rows[:, None] * K + inner[None, :]
        right = b + of_columns[None, :] * K + inner[:, None]
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for _ in range(0, K, BLOCK_K):
            sums = tl.dot(tl.load(left), tl.load(right), sums)
            left += BLOCK_K
            right += BLOCK_K
        tl.store(
            c + rows.to(tl.int64)[:, None] * N + of_columns[None, :], sums.to(c.dtype.element_ty)
        )
        index += tl.num_programs(0)


def sm_count() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def ways(study: Grid, capability: tuple[int, int]) -> Iterator[Leaves]:
    """Every way that each GEMM has."""
    for gemm in study.gemms:
        if gemm == "sm90_pingpong" and capability != (9, 0):
            continue
        yield Leaves(gemm, "nothing")
        for sms in study.sms:
            if gemm != "cublas":
                yield Leaves(gemm, "grid", sms)
            yield Leaves(gemm, "green_context", sms)
        if gemm.startswith("sm"):
            for pad in study.pads:
                yield Leaves(gemm, "padding", 0, pad)


def gemm_of(setting: Leaves, shape: tuple[int, int, int]) -> Callable[[], object] | None:
    """Launches the GEMM; None where the kernel has no such setting."""
    m, n, k = shape
    a, b = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    grid_sms = setting.sms if setting.by == "grid" else 0
    if setting.gemm == "cublas":
        out = torch.empty(m, n, device="cuda", dtype=a.dtype)
        launch: Callable[[], object] = lambda: torch.mm(a, b.t(), out=out)  # noqa: E731
    elif setting.gemm == "triton":
        out = torch.empty(m, n, device="cuda", dtype=a.dtype)
        tiles = m // 128 * (n // 256)
        programs = sm_count() - setting.sms if setting.by != "nothing" else sm_count()

        def launch() -> object:
            return _triton_gemm[(min(tiles, programs),)](
                a, b, out, tiles, m, n, k, GROUP=8, BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, num_warps=8, num_stages=3
            )  # fmt: skip
    else:
        problem = Problem(m, n, k, torch.bfloat16, 2)
        try:
            made = plan.templates.row_panels(
                problem,
                1,
                kernel=Kernel.__members__[setting.gemm.upper()],
                comm_sms=grid_sms,
                smem_pad_bytes=setting.pad_bytes,
            )
            code = plan.files.encode(made)
            torch.ops.overlap.gemm_alone(a, b, code)
        except (ValueError, RuntimeError):
            return None  # more shared memory than there is

        def launch() -> object:
            return torch.ops.overlap.gemm_alone(a, b, code)

    if setting.by != "green_context":
        return launch
    context = green_context(
        sm_count() - setting.sms, torch.device("cuda", torch.cuda.current_device())
    )

    def in_context() -> None:
        context.set_context()
        try:
            launch()
        finally:
            context.pop_context()

    return in_context


def mover(ctas: int, distributed: bool) -> Callable[[], object]:
    """Moves MOVED_BYTES on the current stream by a kernel of so many CTAs."""
    if distributed:
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = ctas
        options.config.cga_cluster_size = 0
        group = dist.new_group(pg_options=options)
        message = torch.zeros(MOVED_BYTES // 2, device="cuda", dtype=torch.bfloat16)
        return lambda: dist.all_reduce(message, group=group)
    source = torch.zeros(MOVED_BYTES // 8, device="cuda", dtype=torch.int64)
    target = torch.empty_like(source)
    return lambda: _move[(ctas,)](source, target, source.numel(), BLOCK=1024, num_warps=8)


def bytes_per_gpu(world: int) -> int:
    """The bytes that the moving kernel reads and writes within a GPU, or sends and receives."""
    return 2 * MOVED_BYTES if world == 1 else 4 * MOVED_BYTES * (world - 1) // world


def timed(
    first: Callable[[], object] | None,
    second: Callable[[], object] | None,
    stream: torch.cuda.Stream,
) -> tuple[float, float]:
    """Microseconds from a common begin: the end of what this stream does, and of what `stream` does."""
    own = torch.cuda.current_stream()
    begin, own_end, other_end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()
        torch.cuda.synchronize()
    torch.cuda._sleep(200_000)  # both are enqueued before either begins
    begin.record()
    stream.wait_stream(own)
    if first is not None:
        first()
    own_end.record()
    with torch.cuda.stream(stream):
        if second is not None:
            second()
        other_end.record()
    torch.cuda.synchronize()
    return 1e3 * begin.elapsed_time(own_end), 1e3 * begin.elapsed_time(other_end)


Beside = tuple[bool, int]  # priority, CTAs


def measure_way(
    gemm: Callable[[], object],
    movers: dict[int, Callable[[], object]],
    streams: dict[bool, torch.cuda.Stream],
    rounds: int,
) -> dict[Beside, list[float]]:
    """For each priority and number of CTAs: gemm, moving, together, gemm beside, moving beside; all in turns."""
    cases = list(itertools.product(streams, movers))
    rows: dict[Beside, list[list[float]]] = {case: [] for case in cases}
    for turn in range(rounds + 1):
        gemm_us = timed(gemm, None, streams[True])[0]
        moving_us = {ctas: timed(None, move, streams[True])[1] for ctas, move in movers.items()}
        for high, ctas in cases:
            beside = timed(gemm, movers[ctas], streams[high])
            if turn > 0:
                row = [gemm_us, moving_us[ctas], max(beside), *beside]
                rows[high, ctas].append(row)
    medians = torch.tensor(
        [[statistics.median(column) for column in zip(*rows[case], strict=True)] for case in cases],
        dtype=torch.float64,
    )
    if dist.is_initialized():
        slowest = medians.cuda()
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        medians = slowest.cpu()
    return dict(zip(cases, medians.tolist(), strict=True))


def in_time(deadline: float) -> bool:
    """True if there is time left by rank 0's clock."""
    left = time.monotonic() < deadline
    if dist.is_initialized():
        answer = torch.tensor([left], dtype=torch.int32, device="cuda")
        dist.broadcast(answer, 0)
        left = bool(answer.item())
    return left


def measure(study: Grid, seconds: float) -> tuple[list[Result], bool]:
    """The results, and whether they are all."""
    deadline = time.monotonic() + seconds
    movers = {ctas: mover(ctas, dist.is_initialized()) for ctas in study.ctas}
    streams = {high: torch.cuda.Stream(priority=-5 if high else 0) for high in (True, False)}
    results = []
    for shape in study.shapes:
        for way in ways(study, torch.cuda.get_device_capability()):
            if not in_time(deadline):
                return results, False
            gemm = gemm_of(way, shape)
            if gemm is None:
                continue
            found = measure_way(gemm, movers, streams, study.rounds)
            results += [Result(shape, way, *beside, *times) for beside, times in found.items()]
    return results, True


# --- what is told ---------------------------------------------------------------------------------------------


def write(path: Path, head: dict[str, Any], results: list[Result]) -> None:
    """One line for what holds for all, one for each result."""
    rows = [
        [*one.shape, *asdict(one.leaves).values(), int(one.high_priority), one.ctas]
        + [round(getattr(one, name), 1) for name in _TIMES]
        for one in results
    ]
    head = {**head, "columns": ["m", "n", "k", "gemm", "by", "sms", "pad_bytes", "high_priority", "ctas", *_TIMES]}  # fmt: skip
    lines = ",\n".join(map(json.dumps, rows))
    path.write_text(f'{{"head": {json.dumps(head)},\n"rows": [\n{lines}\n]}}\n')


_TIMES = ("gemm_us", "moving_us", "together_us", "gemm_beside_us", "moving_beside_us")


def read(path: Path) -> tuple[dict[str, Any], list[Result]]:
    data = json.loads(path.read_text())
    results = [
        Result((m, n, k), Leaves(gemm, by, sms, pad), bool(high), ctas, *times)
        for m, n, k, gemm, by, sms, pad, high, ctas, *times in data["rows"]
    ]
    return data["head"], results


def means(results: list[Result]) -> dict[tuple[Leaves, bool, int], dict[str, float]]:
    """Each setting's means over the shapes, and the least of hidden; settings that all shapes have."""
    shapes = len({one.shape for one in results})
    found: dict[tuple[Leaves, bool, int], list[Result]] = {}
    for one in results:
        found.setdefault((one.leaves, one.high_priority, one.ctas), []).append(one)
    return {
        setting: {name: statistics.fmean(getattr(one, name) for one in own) for name in (*_TIMES, "hidden")}
        | {"robust": min(one.hidden for one in own)}
        for setting, own in found.items()
        if len(own) == shapes
    }  # fmt: skip


def table(results: list[Result]) -> str:
    """For each GEMM and way the number of CTAs with which both together take least, at high priority, and what low priority makes of it."""
    found = means(results)
    lines = [
        "| GEMM | leaves | CTAs | GEMM, us | moving, us | together, us | hidden | at least | hidden at low priority |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for way in dict.fromkeys(way for way, _, _ in found):
        own = {ctas: one for (of, high, ctas), one in found.items() if of == way and high}
        ctas = min(own, key=lambda ctas: own[ctas]["together_us"])
        best, low = own[ctas], found[way, False, ctas]
        lines.append(
            f"| {way.gemm} | {way.words} | {ctas} | {best['gemm_us']:.0f}, {best['gemm_beside_us']:.0f} | "
            f"{best['moving_us']:.0f}, {best['moving_beside_us']:.0f} | {best['together_us']:.0f} | {best['hidden']:.2f} | "
            f"{best['robust']:.2f} | {low['hidden']:.2f} |"
        )
    lines.append(
        "\nTimes: alone, beside each other. Means over the shapes; at least: the shape with the least."
    )
    return "\n".join(lines)


def draw(results: list[Result], path: Path) -> None:
    """One picture: for each GEMM hidden over CTAs, a line for each way; dashed at low priority."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "resources"}
    from matplotlib import pyplot

    found = means(results)
    gemms = list(dict.fromkeys(way.gemm for way, _, _ in found))
    figure, axes = pyplot.subplots(
        1, len(gemms), figsize=(4.2 * len(gemms), 4.2), sharey=True, squeeze=False
    )
    for place, gemm in zip(axes[0], gemms, strict=True):
        for index, way in enumerate(dict.fromkeys(way for way, _, _ in found if way.gemm == gemm)):
            for high, style in ((True, "-"), (False, ":")):
                points = sorted(
                    (ctas, one["hidden"])
                    for (of, priority, ctas), one in found.items()
                    if of == way and priority == high
                )
                place.plot(*zip(*points, strict=True), style, color=f"C{index}", marker="o" if high else None,
                           label=way.words if high else None)  # fmt: skip
        place.set_title(gemm)
        place.set_xlabel("CTAs of the moving kernel")
        place.legend(fontsize=7)
    axes[0][0].set_ylabel("hidden share of the shorter one's time")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    path.write_text(
        re.sub(r"\s*\n\s*", " ", path.read_text()) + "\n"
    )  # one line: no diff of it is read
    pyplot.close(figure)


def told(pairs: list[tuple[dict[str, Any], list[Result]]], args: argparse.Namespace) -> str:
    """The table; writes and draws what --out asks for."""
    ((head, results),) = pairs
    if args.out is not None:
        if args.source is None:
            args.out.mkdir(parents=True, exist_ok=True)
            write(args.out / "resources.json", head, results)
        try:
            draw(results, args.out / "resources.svg")
        except ImportError:
            print("no picture: matplotlib is not installed")
    return (
        f"{head['world']} x {head['gpu']}, {head['sms']} SMs, bf16, {head['moved_bytes'] >> 20} MiB moved, "
        f"{head['bytes_per_gpu'] >> 20} MiB on each GPU, {head['rounds']} rounds, {head['seconds']:.0f} s"
        + ("" if head["complete"] else "; not all was measured in that time")
        + f"\n{table(results)}"
    )


def rows(args: argparse.Namespace) -> Iterator[tuple[dict[str, Any], list[Result]]]:
    """All results, with what they were measured on."""
    if args.source:
        yield read(args.source)
        return
    study = QUICK if args.quick else Grid()
    gemms = tuple(args.gemm or study.gemms)
    study = replace(study, rounds=args.rounds or study.rounds, gemms=gemms)
    begin = time.monotonic()
    distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if distributed:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    with torch.no_grad():
        results, complete = measure(study, args.seconds)
    world = dist.get_world_size() if distributed else 1
    head = {
        "gpu": torch.cuda.get_device_name(),
        "sms": sm_count(),
        "world": world,
        "torch": torch.__version__,
        "moved_bytes": MOVED_BYTES,
        "bytes_per_gpu": bytes_per_gpu(world),
        "rounds": study.rounds,
        "seconds": round(time.monotonic() - begin, 1),
        "complete": complete,
    }
    yield head, results
    if distributed:
        dist.destroy_process_group()


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--quick", action="store_true", help="two shapes, fewer settings")
    add("--rounds", type=int, help="of which each time is the median (default: 7)")
    add("--seconds", type=float, default=140, help="begin no further setting then")
    one = "one of those that are measured; all, if none is named"
    add("--gemm", action="append", choices=Grid().gemms, help=one)
    add("--out", type=Path, help="folder for resources.json and resources.svg")
    add("--from", type=Path, dest="source", help="a resources.json to tell again")


STUDY = Study(options, rows, lambda row: "", told, on_ranks=False)
