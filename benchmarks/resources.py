"""What a GEMM leaves to communication, and what that costs it: python -m overlap_torch.benchmarks.resources

    --out FOLDER     results as resources.json, and pictures (needs matplotlib)
    torchrun --nproc-per-node 2 -m overlap_torch.benchmarks.resources      the same beside NCCL's all-reduces

A GEMM and a kernel of n CTAs that moves bytes, as communication does, begin together. Each GEMM (cuBLAS, this package's mma.sync and
Hopper kernels, Triton) leaves SMs to the other one by a smaller persistent grid, by a green context, by shared memory that it
pads its blocks with, or not at all, and the moving kernel's stream has high or low priority. What is measured, in turns:

    gemm_us, moving_us      each alone
    together_us             both, from the first's begin to the last's end
    gemm_beside_us          the GEMM beside the other
    moving_beside_us        the other beside the GEMM
    hidden                  share of the shorter one's time that the other one hides: 1 is all, 0 one after the other, less is worse
    robust                  over the shapes, the least of hidden for this setting

The moving kernel reads and writes exactly `moved_bytes`, the same with every number of CTAs. On one GPU it copies within the GPU; with torchrun it is
an all-reduce of as many bytes, by a communicator of as many CTAs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from overlap_torch import plan
from overlap_torch._resources import green_context
from overlap_torch.plan import Kernel, Problem

SHAPES = [(4096, 8192, 7168), (8192, 8192, 2048), (8192, 4096, 3584), (2048, 16384, 4096)]
MOVED_BYTES = 64 << 20
SMS = (0, 8, 16, 24)
PADS = (0, 64 << 10)  # of shared memory, for this package's kernels
CTAS = (4, 8, 16, 24)


@dataclass(frozen=True)
class Setting:
    """What a GEMM leaves, and to what."""

    gemm: str
    by: str  # "nothing", "grid", "green_context" or "padding"
    sms: int
    pad_bytes: int
    high_priority: bool
    ctas: int


@dataclass(frozen=True)
class Result:
    """Times in microseconds."""

    shape: tuple[int, int, int]
    setting: Setting
    moved_bytes: int
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


def settings() -> Iterator[Setting]:
    """Every way that each GEMM has."""
    machine_kernels = ["sm80"] + (
        ["sm90_pingpong"] if torch.cuda.get_device_capability() >= (9, 0) else []
    )
    for gemm, high, ctas in itertools.product(
        ["cublas", "triton", *machine_kernels], (True, False), CTAS
    ):
        yield Setting(gemm, "nothing", 0, 0, high, ctas)
        for sms in SMS[1:]:
            if gemm != "cublas":
                yield Setting(gemm, "grid", sms, 0, high, ctas)
            yield Setting(gemm, "green_context", sms, 0, high, ctas)
        if gemm in machine_kernels:
            for pad in PADS[1:]:
                yield Setting(gemm, "padding", 0, pad, high, ctas)


def gemm_of(setting: Setting, shape: tuple[int, int, int]) -> Callable[[], object] | None:
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
            made = plan.row_panels(
                problem,
                1,
                kernel=Kernel.__members__[setting.gemm.upper()],
                comm_sms=grid_sms,
                smem_pad_bytes=setting.pad_bytes,
            )
            code = plan.encode(made)
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


def timed(
    first: Callable[[], object] | None,
    second: Callable[[], object] | None,
    stream: torch.cuda.Stream,
):
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


def median_times(
    gemm: Callable[[], object], moving: Callable[[], object], stream, rounds: int
) -> list[float]:
    """gemm, moving, together, gemm beside, moving beside."""
    rows = []
    for turn in range(rounds + 1):
        alone = timed(gemm, None, stream)[0], timed(None, moving, stream)[1]
        beside = timed(gemm, moving, stream)
        if turn > 0:
            rows.append([*alone, max(beside), *beside])
    times = [statistics.median(column) for column in zip(*rows, strict=True)]
    if not dist.is_initialized():
        return times
    shared = torch.tensor(times, dtype=torch.float64, device="cuda")
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return shared.tolist()


def measure(rounds: int, gemms: list[str] | None) -> list[Result]:
    distributed = dist.is_initialized()
    movers = {ctas: mover(ctas, distributed) for ctas in CTAS}
    streams = {high: torch.cuda.Stream(priority=-5 if high else 0) for high in (True, False)}
    results = []
    for shape in SHAPES:
        for setting in settings():
            if gemms and setting.gemm not in gemms:
                continue
            gemm = gemm_of(setting, shape)
            if gemm is None:
                continue
            times = median_times(gemm, movers[setting.ctas], streams[setting.high_priority], rounds)
            results.append(Result(shape, setting, MOVED_BYTES, *times))
    return results


def robust(results: list[Result], setting: Setting) -> float:
    return min(one.hidden for one in results if one.setting == setting)


def show(results: list[Result]) -> None:
    """For each GEMM, way and number of CTAs: what it gets and costs, over the shapes."""
    print(
        "| GEMM | by | SMs | pad | priority | CTAs | GEMM, us | moving, us | together, us | hidden | robust |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for setting in dict.fromkeys(one.setting for one in results):
        own = [one for one in results if one.setting == setting]

        def mean(name: str, own: list[Result] = own) -> float:
            return statistics.fmean(getattr(one, name) for one in own)

        print(
            f"| {setting.gemm} | {setting.by} | {setting.sms} | {setting.pad_bytes >> 10} KiB | "
            f"{'high' if setting.high_priority else 'low'} | {setting.ctas} | "
            f"{mean('gemm_us'):.0f} / {mean('gemm_beside_us'):.0f} | {mean('moving_us'):.0f} / {mean('moving_beside_us'):.0f} | "
            f"{mean('together_us'):.0f} | {mean('hidden'):.2f} | {robust(results, setting):.2f} |"
        )
    print("Times: alone / beside each other; means over the shapes.")


def draw(results: list[Result], folder: Path) -> None:
    """A picture for each GEMM: hidden over CTAs, a line for each way."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for gemm in dict.fromkeys(one.setting.gemm for one in results):
        figure, axes = pyplot.subplots(figsize=(8, 5))
        own = [one for one in results if one.setting.gemm == gemm and one.setting.high_priority]
        ways = dict.fromkeys(
            (one.setting.by, one.setting.sms, one.setting.pad_bytes) for one in own
        )
        for way in ways:
            points = {}
            for one in own:
                if (one.setting.by, one.setting.sms, one.setting.pad_bytes) == way:
                    points.setdefault(one.setting.ctas, []).append(one.hidden)
            axes.plot(list(points), [statistics.fmean(each) for each in points.values()], marker="o",
                      label=f"{way[0]} {way[1] or ''} {f'{way[2] >> 10} KiB' if way[2] else ''}".strip())  # fmt: skip
        axes.set_xlabel("CTAs of the moving kernel")
        axes.set_ylabel("hidden share of the shorter one's time")
        axes.set_title(f"{gemm}: what it leaves to communication")
        axes.legend(fontsize=8)
        figure.tight_layout()
        figure.savefig(folder / f"resources_{gemm}.png", dpi=120)
        pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--gemm",
        action="append",
        help="cublas, triton, sm80 or sm90_pingpong; all, if none is named",
    )
    parser.add_argument("--out", type=Path, help="folder for resources.json and pictures")
    options = parser.parse_args()
    distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if distributed:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    with torch.no_grad():
        results = measure(options.rounds, options.gemm)
    if not distributed or dist.get_rank() == 0:
        print(
            f"{torch.cuda.get_device_name()}, {sm_count()} SMs, bf16, {MOVED_BYTES >> 20} MiB moved"
        )
        show(results)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            rows = [asdict(one) | {"hidden": one.hidden} for one in results]
            (options.out / "resources.json").write_text(json.dumps(rows, indent=1) + "\n")
            draw(results, options.out)
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
