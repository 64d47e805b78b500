"""Stock Triton kernels in jobs, aligned by their source: exact results, signals after stores, and what is refused."""

import itertools
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

import kernels
import odd_kernels
import overlap_torch
from captures import capture, refill, replayed
from checks import Failures, message_of
from kernels import (
    expect,
    interpreted,  # noqa: F401  (a fixture of every test here)
)
from operands import rank_device

TILE = (32, 32)


# Whole tiles, and some that reach beyond the matrix and across the ranks' parts.
SHAPES = [(128, 64, 40), (108, 48, 24)]
FORMS = [
    "grouped order", "autotuned", "two axes", "swizzle2d", "persistent", "persistent, while", "descriptors",
    "descriptors, halves", "block pointers",
]  # fmt: skip


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
@pytest.mark.seconds(500)
def test_aligned_products_are_exact(failures: Failures) -> None:
    ot, stock = kernels.aligned_and_stock()
    dtype = torch.float32
    rank = dist.get_rank()
    collectives = ("all_reduce", "reduce_scatter")
    for seed, (name, collective) in enumerate(itertools.product(FORMS, collectives)):
        m, n, k = SHAPES[(seed // 2 + seed) % 2]
        form = stock.PRODUCTS[name]
        kernel = ot.aligned(form.kernel, output=form.output)
        a, b = kernels.operands(m, n, k, seed=seed, dtype=dtype)
        expected = kernels.reduced(m, n, k, seed, collective)
        launches: set[int] = set()
        for turn in range(2):  # the second launch finds what the first has proven
            with overlap_torch.produce(
                collective, (m, n), dtype, tile=form.tile, chunks=3, device=a.device
            ) as job:
                job.output.fill_(float("nan"))
                form.launch(kernel, a, b, job.output, job.programs)
            expect(
                failures, f"{name}, {m, n, k}, {collective}, turn {turn}", job.result(), expected
            )
            launches.add(len(job._prepared.aligned))
        failures.equal(len(launches), 1, name, "second launch", "proven again")
        if name == "autotuned" and not a.is_cuda:
            continue  # nothing times configurations there
        if not a.is_cuda:  # where parts may be smaller than a page
            with overlap_torch.produce(
                collective, (m, n), dtype, tile=form.tile, signals=False
            ) as job:
                form.launch(kernel, a, b, job.output, job.programs)
            expect(failures, f"{name}, {m, n, k}, without signals", job.result(), expected)
        alone = torch.empty(m, n, dtype=dtype, device=a.device)
        form.launch(kernel, a, b, alone, 4)  # outside of a job
        expect(failures, f"{name}, {m, n, k}, alone", alone, kernels.product(m, n, k, seed, rank))


# --- other kernels ----------------------------------------------------------------------------------------------


def produced(form, kernel, shape: tuple[int, int], launch) -> torch.Tensor:
    with overlap_torch.produce(
        "all_reduce", shape, torch.float32, tile=form, chunks=3, device=rank_device()
    ) as job:
        job.output.fill_(float("nan"))
        launch(kernel, job.output, job.programs)
    return job.result()


def check_experts(failures: Failures) -> None:
    """A loop over problems, whose numbers stay within each problem."""
    ot, stock = kernels.aligned_and_stock()
    count, rows, n, k = 3, 48, 64, 40
    for seed in range(2):
        tokens, _ = kernels.operands(count * rows, n, k, seed=seed, dtype=torch.float32)
        weights = kernels.numbers(count, k, n, seed=50 + seed, rank=dist.get_rank()).to(
            tokens.device
        )

        def launch(kernel, c, programs) -> None:
            kernel[(programs,)](tokens, weights, c, n, k, count, rows, BM=16, BN=32, BK=32)  # noqa: B023

        expected = sum(
            kernels.numbers(count * rows, k, seed=seed, rank=r).double().view(count, rows, k)
            @ kernels.numbers(count, k, n, seed=50 + seed, rank=r).double()
            for r in range(dist.get_world_size())
        )
        result = produced((16, 32), ot.aligned(stock.experts, "c_ptr"), (count * rows, n), launch)
        expect(failures, f"seed {seed}", result, expected.view(-1, n))


def check_norms(failures: Failures) -> None:
    """Rows of several stores: bit for bit what the kernel does by itself, whose result is right."""
    ot, stock = kernels.aligned_and_stock()
    m, n = 37, 80
    x = torch.randn(m, n, generator=torch.Generator().manual_seed(dist.get_rank())).to(
        rank_device()
    )
    weight, mean = torch.linspace(-1, 1, n, device=x.device), torch.empty(m, device=x.device)

    def launch(kernel, y, programs) -> None:
        kernel[(m,)](x, y, weight, mean, x.stride(0), n, 1e-5, BLOCK=32)

    own = torch.empty_like(x)
    launch(stock.normed, own, 0)
    right = torch.nn.functional.layer_norm(x.double(), (n,), weight.double(), None, 1e-5)
    failures.near(own.double(), right, "the stock kernel", atol=1e-5)
    expected = own.clone()
    dist.all_reduce(expected)
    mean.fill_(float("nan"))
    expect(
        failures, "y", produced((1, n), ot.aligned(stock.normed, "y_ptr"), (m, n), launch), expected
    )
    means = x.double().mean(1)
    failures.near(mean.double(), means, "the means, which are no output of the job", atol=1e-6)


def check_attention(failures: Failures) -> None:
    """Two axes, descriptors of the caller's, and an autotuned block."""
    ot, stock = kernels.aligned_and_stock()
    batch, heads, length, d = 1, 2, 64, 16
    shape = (batch * heads * length, d)
    q, k, v = (
        [kernels.numbers(*shape, seed=seed, rank=r) for r in range(dist.get_world_size())]
        for seed in range(3)
    )
    expected = 0
    for operands in zip(q, k, v, strict=True):
        of_q, of_k, of_v = (one.double().view(batch * heads, length, d) for one in operands)
        expected = expected + ((of_q @ of_k.mT).tril() @ of_v).view(shape)
    mine = [one[dist.get_rank()].to(rank_device()) for one in (q, k, v)]

    def launch(kernel, o, programs) -> None:
        described = [stock.described(one, [1, 1]) for one in (*mine, o)]
        blocks = lambda named: (length // named["BM"], batch * heads)  # noqa: E731
        kernel[blocks](*described, length, heads, d)

    result = produced((32, d), ot.aligned(stock.tuned_attention, "o_desc"), shape, launch)
    expect(failures, "o", result, expected)


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
@pytest.mark.parametrize("check", [check_experts, check_norms, check_attention])
def test_aligned_kernels_of_other_forms_are_exact(failures: Failures, check) -> None:
    check(failures)


# Form, a rank's rows, chunks.
WAITS = [
    ("grouped order", 64, 2),
    ("autotuned", 32, 1),
    ("persistent, while", 75, 2),
    ("two axes", 40, 2),
    ("descriptors", 64, 2),
]


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_aligned_kernels_wait_exactly(failures: Failures) -> None:
    """The rows come to be as the kernel's waits ask for them."""
    ot, stock = kernels.aligned_and_stock()
    rank, world = dist.get_rank(), dist.get_world_size()
    for seed, (name, rows, chunks) in enumerate(WAITS):
        form, n, k = stock.PRODUCTS[name], 48, 40
        kernel = ot.aligned(form.kernel, output=form.output, input="a_ptr")
        x = [kernels.numbers(rows, k, seed=seed, rank=r) for r in range(world)]
        b = kernels.numbers(k, n, seed=90 + seed, rank=rank)
        out = torch.full((world * rows, n), float("nan"), device=rank_device())
        with (
            overlap_torch.resources(comm_sms=8),
            overlap_torch.consume(
                "all_gather", x[rank].to(out.device), columns=n, tile=form.tile, chunks=chunks
            ) as job,
        ):
            form.launch(kernel, job.gathered, b.to(out.device), out, job.programs)
        expect(failures, f"{name} of {rows} rows", out, torch.cat(x).double() @ b.double())
        expect(failures, f"{name}, rows", job.result(), torch.cat(x))


@pytest.mark.ranks((2, "nccl"))
def test_aligned_kernels_are_captured(failures: Failures) -> None:
    """After one launch outside of the capture, which times configurations and proves them."""
    ot, stock = kernels.aligned_and_stock()
    form = stock.PRODUCTS["autotuned"]
    m, n, k = 256, 128, 64
    a, b = kernels.operands(m, n, k, seed=0, dtype=torch.float32)
    kernel = ot.aligned(form.kernel, output=form.output)

    def call() -> torch.Tensor:
        with overlap_torch.produce(
            "all_reduce", (m, n), a.dtype, tile=form.tile, chunks=2, device=a.device
        ) as job:
            form.launch(kernel, a, b, job.output, job.programs)
        return job.result()

    graph, result = capture(call)
    for seed in range(1, 4):
        refill([a, b], kernels.operands(m, n, k, seed=seed, dtype=torch.float32))
        found = replayed(graph, result)
        expect(failures, f"replay {seed}", found, kernels.reduced(m, n, k, seed))
    overlap_torch.check()


# --- when --------------------------------------------------------------------------------------------------------


@pytest.mark.ranks((1, "gloo"))
@pytest.mark.fresh(environment=kernels.INTERPRETED | {"OVERLAP_DEBUG": "1"})
def test_aligned_kernels_signal_stored_tiles(failures: Failures) -> None:
    """At each signal its tile is stored, and no tile is signalled twice or never: with a counter for each tile, by which
    signals name their tiles.
    """
    ot, stock = kernels.aligned_and_stock()
    m, n, k = 108, 80, 24
    a, b = kernels.operands(m, n, k, seed=1, dtype=torch.float32)
    real = ot.signal
    for name in FORMS:
        form = stock.PRODUCTS[name]
        kernel = ot.aligned(form.kernel, output=form.output)
        signalled: list[int] = []

        def watched(counters, chunk, name=name, tile=form.tile, signalled=signalled) -> None:
            number = chunk.handle.data.item()
            row, column = (
                place * size for place, size in zip(divmod(number, job.columns), tile, strict=True)
            )
            early = job.output[row : row + tile[0], column : column + tile[1]].isnan().any()
            failures.expect("signalled before it is stored" if early else None, name, number)
            signalled.append(number)
            real(counters, chunk)

        with overlap_torch.produce("all_reduce", (m, n), a.dtype, tile=form.tile, chunks=3) as job:
            job.output.fill_(float("nan"))
            with mock.patch.object(ot, "signal", watched):
                form.launch(kernel, a, b, job.output, job.programs)
        order = job.tile_order.tolist()
        wrong = sorted(signalled) != sorted(order) or name == "grouped order" and signalled != order
        failures.expect(f"{signalled}, the job's order is {order}" if wrong else None, name)


@pytest.mark.ranks((1, "gloo"))
def test_aligned_kernels_load_rows_that_have_arrived(failures: Failures) -> None:
    """Rows are there only after a wait for their chunk."""
    ot, stock = kernels.aligned_and_stock()
    m, n, k = 108, 48, 24
    a, b = kernels.operands(m, n, k, seed=1, dtype=torch.float32)
    real = ot.wait
    for name in ("swizzle2d", "two axes", "persistent", "persistent, while", "descriptors"):
        form = stock.PRODUCTS[name]
        kernel = ot.aligned(form.kernel, output=form.output, input="a_ptr")
        out = torch.full((m, n), float("nan"))

        def watched(arrived, chunk, tile=form.tile) -> None:
            real(arrived, chunk)
            for number, awaited in enumerate(job.tile_chunk.tolist()):
                if awaited == chunk.handle.data.item():
                    row = number // job.columns * tile[0]
                    job.gathered[row : row + tile[0]] = a[row : row + tile[0]]

        with overlap_torch.consume("all_gather", a, columns=n, tile=form.tile, chunks=2) as job:
            job.gathered.fill_(float("nan"))
            with mock.patch.object(ot, "wait", watched):
                form.launch(kernel, job.gathered, b, out, job.programs)
        expect(failures, name, out, kernels.product(m, n, k, 1, 0))


# --- what is refused -----------------------------------------------------------------------------------------------

BY_SOURCE = {
    "no_store": "no store through c_ptr is found",
    "no_number": "no_number has no tl.program_id",
    "split_k": "several programs may add to a tile of c_ptr: an atomic, as of a split K",
    "chosen": "c_ptr is aliased: one of two pointers is chosen here",
    "assigned_on_one_way": "c_ptr is aliased: out points to it or elsewhere",
    "unknown_function": "a pointer to c_ptr is passed to plain, which is no @triton.jit function",
    "kept_with_others": "c_ptr is aliased: a pointer to it is one of several values",
    "by_flags": r"where a tile of c_ptr lies, or whether it is stored, depends on memory: tl.load\(flags",
    "by_indices": r"where a tile of c_ptr lies, or whether it is stored, depends on memory: tl.load\(indices",
    "many_outputs": "c_ptr has the pointers of several outputs; a job has one, of which they may be rows",
    "asks_elsewhere": "ask, which is called here, asks for tl.program_id itself",
    "two_loops": "there are two loops over tiles",
    "stores_after_its_loop": "this is outside of the loop over tiles",
    "read_when_increased": "tile is read after it was increased",
    "by_block_pointers": "the rows of a block pointer to a_ptr are unknown",
    "of_a_part": "the rows of a descriptor that does not begin at a_ptr are unknown",
    "by_blocks": r"where a tile of c_ptr lies, or whether it is stored, depends on memory: tl.load_tensor_descriptor\(",
    "by_position": "a_ptr is positional-only, which Triton's interpreter cannot pass: delete the /",
    "by_keyword": r"N is keyword-only, which Triton's interpreter cannot pass: delete the \*",
    "of_special_warps": "a loop of specialized warps cannot signal",
}
BY_LAUNCH = {
    "of_special_warps_maybe": ((4,), {"SPECIAL": True}, "SPECIAL is True there"),
    "in_place": ((6,), {}, "c_ptr is aliased: a_ptr is the same memory"),
    "half_a_row": ((6,), {}, "stores rows 0 to 0 and columns 0 to 15.*make the job with tile=.1, 16."),
    "some_rows": ((6,), {}, "row 5, column 0 of the output is stored by no program"),
    "twice": ((12,), {}, "number 11 stores a tile, but the job has 6"),
    "any_width": ((3,), {"BM": 64}, r"stores rows 0 to 1 and columns 0 to 31.*tile=\(2, 32\)"),
    "tuned": ((6,), {}, "none of the 2 configurations of triton.autotune computes that.*BM=8: .*BM=16: "),
    "all_rows": ((6,), {}, "the tile of rows 0 to 0 loads rows 0 to 5 of the input, and waits for its own rows only"),
    "every_other_row": ((6,), {}, "the tile of rows 1 to 1 loads rows 2 to 2 of the input"),
    "placed": ((6,), {}, "where a tile of c_ptr lies, or whether it is stored, depends on memory: index"),
    "counted": ((2,), {}, "a program stores rows 0 to 4.* take them by `for tile in range"),
}  # fmt: skip


WAITING = ("by_block_pointers", "of_a_part", "all_rows", "every_other_row")


def place_of(name: str) -> str:
    """The file and the line of a refused kernel that its comment marks."""
    path = Path(__file__).parents[1] / "lib" / "refused_kernels.py"
    lines = path.read_text().splitlines()
    begin = lines.index(next(one for one in lines if one.startswith(f"def {name}(")))
    line = next(i for i in range(begin, len(lines)) if lines[i].endswith("# here"))
    return f"{path}:{line + 1}: overlap_torch.triton.aligned cannot follow {name}: "


def refusal(name: str) -> str:
    """The message of a refused kernel, or of its launch."""
    import overlap_torch.triton as ot
    import refused_kernels

    input = "a_ptr" if name in WAITING else None
    kernel = ot.aligned(getattr(refused_kernels, name), "c_ptr", input)
    grid, given, _ = BY_LAUNCH[name]
    a, n = torch.ones(6, 32), 6
    if name in WAITING:
        with overlap_torch.consume("all_gather", a, columns=32, tile=(1, 32)) as job:
            kernel[grid](job.gathered, torch.empty_like(a), n)
    else:
        with overlap_torch.produce("all_reduce", a.shape, a.dtype, tile=(1, 32)) as job:
            kernel[grid](job.output if name == "in_place" else a, job.output, n, **given)


@pytest.mark.ranks((1, "gloo"))
def test_aligned_refuses_by_file_and_line(failures: Failures) -> None:
    kernels.stock()
    reasons = BY_SOURCE | {name: reason for name, (_, _, reason) in BY_LAUNCH.items()}
    for name, reason in reasons.items():
        said = message_of(refusal, name)
        place = place_of("any_width" if name == "tuned" else name)
        named = re.match(reason, said[len(place) :], re.DOTALL) or re.search(f": .*{reason}", said)
        failures.expect(None if said.startswith(place) and named else f"said {said!r}", name)
        line = "ot.wait(arrived" if name in WAITING else "ot.signal(counters"
        failures.says(said, ("Write these lines by hand", "ot.tile(tile_order", line), name)


@triton.jit
def of_another_module(a_ptr, c_ptr, tiles, L: tl.constexpr):
    """Its helper has a default by a name of the helper's module."""
    tile = tl.program_id(0)
    row = tl.load(a_ptr + tile * 32 + tl.arange(0, 32))
    odd_kernels.put(c_ptr, 2 * row, tile)


@pytest.mark.ranks((2, "gloo"))
def test_aligned_kernels_of_rare_forms_are_exact(failures: Failures) -> None:
    """Loops that keep something from turn to turn, more programs than tiles, arguments by keyword, functions as arguments; in the
    reverse order where it may be changed.
    """
    ot, _ = kernels.aligned_and_stock()
    device = rank_device()
    rows = torch.arange(24 * 32.0, device=device).view(24, 32)
    forms = [
        (odd_kernels.aliased, 5, 5), (odd_kernels.by_step, 5, 5), (odd_kernels.by_functions, 24, 1),
        (odd_kernels.awaits, 24, torch.zeros(25, dtype=torch.int32)), (odd_kernels.prefetched, 5, 5), (odd_kernels.counted_twice, 5, 5), (odd_kernels.first_turn, 5, 5),
        (odd_kernels.returns, 24, 1), (odd_kernels.returns, 30, 1), (odd_kernels.keywords, 24, 1),
        (of_another_module, 24, 1), (odd_kernels.by_argument, 24, odd_kernels.twice),
    ]  # fmt: skip
    for kernel, programs, last in forms:
        aligned = ot.aligned(kernel, output="c_ptr")
        right = torch.empty_like(rows)
        kernel[(programs,)](rows, right, 24, last)
        with overlap_torch.produce(
            "all_reduce",
            rows.shape,
            rows.dtype,
            tile=(1, 32),
            chunks=3,
            tile_order=lambda m, n: range(m * n)[::-1],
        ) as job:
            job.output.fill_(float("nan"))
            aligned[(programs,)](rows, job.output, 24, last)
        expect(failures, f"{aligned.__name__}, {programs}", job.result(), 2 * right)


@pytest.mark.ranks((1, "gloo"))
def test_aligned_looks_at_each_launch(failures: Failures) -> None:
    """A function among the arguments that reads the program's number, an alias in a later launch, programs that signal no tile; a
    number that no address needs is no new kind of launch."""
    ot, _ = kernels.aligned_and_stock()
    rows = torch.ones(6, 32)

    def launched(kernel, programs, *given, aliased=False):
        with overlap_torch.produce("all_reduce", rows.shape, rows.dtype, tile=(1, 32)) as job:
            ot_kernel = kernel if hasattr(kernel, "diff") else ot.aligned(kernel, output="c_ptr")
            ot_kernel[(programs,)](job.output if aliased else rows, job.output, *given)
        return len(job._prepared.aligned)

    said = message_of(launched, odd_kernels.by_argument, 6, 6, odd_kernels.by_number)
    failures.says(
        said,
        ("F, which is called here, is by_number, which asks for tl.program_id itself",),
        "called",
    )
    kernel = ot.aligned(odd_kernels.returns, output="c_ptr")
    before = launched(kernel, 6, 6, 1)
    failures.equal([launched(kernel, 6, 6, unread) for unread in (2, 3)], [before] * 2, "numbers")
    failures.says(
        message_of(launched, kernel, 6, 6, 1, aliased=True), ("a_ptr is the same memory",), "alias"
    )
    said = message_of(launched, odd_kernels.masked, 8, 6, 1)
    failures.says(said, ("2 of 8 programs have none of the job's 6 tiles",), "programs")


@pytest.mark.ranks((1, "gloo"))
def test_aligned_shows_the_lines_that_it_changed(failures: Failures) -> None:
    ot, stock = kernels.aligned_and_stock()
    diff = ot.aligned(stock.in_turns, "c_ptr", "a_ptr").diff()
    added = [line[1:].strip() for line in diff.splitlines() if line.startswith("+")]
    for line in ("tile = ot.tile(tile_order, index)", "ot.wait(arrived, chunk)"):
        failures.holds(line, added, line)


@pytest.mark.ranks((1, "gloo"))
def test_aligned_misuse_is_refused(failures: Failures) -> None:
    ot, stock = kernels.aligned_and_stock()
    a, b = torch.ones(64, 32), torch.ones(32, 32)
    signals, waits = (ot.aligned(stock.in_turns, "c_ptr", input) for input in (None, "a_ptr"))

    def produce(kernel, out=None) -> None:
        with overlap_torch.produce("all_reduce", (64, 32), a.dtype, tile=TILE) as job:
            stock.of_programs(False)(kernel, a, b, job.output if out is None else out, 2)

    def consume(kernel, given=None) -> None:
        with overlap_torch.consume("all_gather", a, columns=32, tile=TILE) as job:
            stock.of_programs(False)(
                kernel, job.gathered if given is None else given, b, torch.empty(64, 32), 2
            )

    for call, pattern in (
        (
            lambda: ot.aligned(stock.in_turns, "d_ptr"),
            "d_ptr is no argument of in_turns, allowed are a_ptr, b_ptr, c_ptr, M, N",
        ),
        (lambda: ot.aligned(lambda x: x, "x"), "allowed is a @triton.jit function, also below"),
        (lambda: produce(waits), 'leave out input="a_ptr" of aligned'),
        (lambda: consume(signals), r'is made by aligned\(kernel, output="c_ptr", input='),
        (lambda: produce(signals, torch.empty(64, 32)), "c_ptr must be job.output of .*but is"),
        (lambda: consume(waits, torch.empty(64, 32)), "a_ptr must be job.gathered of .*but is"),
        (lambda: produce(signals), "^$"),
    ):
        said = message_of(call)
        failures.expect(None if re.search(pattern, said) else f"said {said!r}", pattern)
