"""Stock Triton kernels in jobs, aligned by their source: exact results, signals after stores, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import kernels
import overlap_torch
import rank_pool
from kernels import interpreted  # noqa: F401  (a fixture of every test here)
from operands import difference

TILE = (32, 32)


def expect(failures: list[str], label: str, result: torch.Tensor, expected: torch.Tensor) -> None:
    found = difference(result.double().cpu(), expected.double().cpu())
    if found is not None:
        failures.append(f"{label}: {found}")


def check_products(cases: list[tuple]) -> tuple[int, list[str]]:
    """Each case: form, shape, collective, dtype."""
    stock, failures = kernels.stock(), []
    import overlap_torch.triton as ot

    rank, world = dist.get_rank(), dist.get_world_size()
    for seed, (name, (m, n, k), collective, dtype) in enumerate(cases):
        form = stock.PRODUCTS[name]
        kernel = ot.aligned(form.kernel, output=form.output)
        a, b = kernels.operands(m, n, k, seed=seed, dtype=dtype)
        expected = kernels.reduced(m, n, k, seed)
        launches: set[int] = set()
        if collective == "reduce_scatter":
            expected = expected.chunk(world)[rank]
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
        if len(launches) != 1:
            failures.append(f"{name}: the second launch was proven again")
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
    return len(cases), failures


# Whole tiles, and some that reach beyond the matrix and across the ranks' parts.
SHAPES = [(128, 64, 40), (108, 48, 24)]
FORMS = [
    "grouped order", "autotuned", "two axes", "swizzle2d", "persistent", "persistent, while", "descriptors",
    "descriptors, halves", "block pointers",
]  # fmt: skip


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_aligned_products_are_exact(ranks):
    collectives = ("all_reduce", "reduce_scatter")
    cases = [
        (name, SHAPES[(place + i) % 2], collective, torch.float32)
        for place, name in enumerate(FORMS)
        for i, collective in enumerate(collectives)
    ]
    ranks.expect_no_failures(check_products, cases, timeout_s=500)


# --- other kernels ----------------------------------------------------------------------------------------------


def produced(form, kernel, shape: tuple[int, int], launch) -> torch.Tensor:
    with overlap_torch.produce(
        "all_reduce", shape, torch.float32, tile=form, chunks=3, device=kernels.device()
    ) as job:
        job.output.fill_(float("nan"))
        launch(kernel, job.output, job.programs)
    return job.result()


def check_experts() -> tuple[int, list[str]]:
    """A loop over problems, whose numbers stay within each problem."""
    import overlap_torch.triton as ot

    stock, failures = kernels.stock(), []
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
    return 2, failures


def check_norms() -> tuple[int, list[str]]:
    """Rows of several stores: bit for bit what the kernel does by itself, whose result is right."""
    import overlap_torch.triton as ot

    stock, failures = kernels.stock(), []
    m, n = 37, 80
    x = torch.randn(m, n, generator=torch.Generator().manual_seed(dist.get_rank())).to(
        kernels.device()
    )
    weight, mean = torch.linspace(-1, 1, n, device=x.device), torch.empty(m, device=x.device)

    def launch(kernel, y, programs) -> None:
        kernel[(m,)](x, y, weight, mean, x.stride(0), n, 1e-5, BLOCK=32)

    own = torch.empty_like(x)
    launch(stock.normed, own, 0)
    right = torch.nn.functional.layer_norm(x.double(), (n,), weight.double(), None, 1e-5)
    if not torch.allclose(own.double(), right, atol=1e-5):
        failures.append("the stock kernel is wrong")
    expected = own.clone()
    dist.all_reduce(expected)
    mean.fill_(float("nan"))
    expect(
        failures, "y", produced((1, n), ot.aligned(stock.normed, "y_ptr"), (m, n), launch), expected
    )
    if not torch.allclose(mean.double(), x.double().mean(1), atol=1e-6):
        failures.append("the means, which are no output of the job, are wrong")
    return 2, failures


def check_attention() -> tuple[int, list[str]]:
    """Two axes, descriptors of the caller's, and an autotuned block."""
    import overlap_torch.triton as ot

    stock, failures = kernels.stock(), []
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
    mine = [one[dist.get_rank()].to(kernels.device()) for one in (q, k, v)]

    def launch(kernel, o, programs) -> None:
        described = [stock.described(one, [1, 1]) for one in (*mine, o)]
        blocks = lambda named: (length // named["BM"], batch * heads)  # noqa: E731
        kernel[blocks](*described, length, heads, d)

    result = produced((32, d), ot.aligned(stock.tuned_attention, "o_desc"), shape, launch)
    expect(failures, "o", result, expected)
    return 1, failures


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
@pytest.mark.parametrize("check", [check_experts, check_norms, check_attention])
def test_aligned_kernels_of_other_forms_are_exact(ranks, check):
    ranks.expect_no_failures(check)


def check_waits(cases: list[tuple]) -> tuple[int, list[str]]:
    """Each case: form, this rank's rows, chunks. The rows come to be as the kernel's waits ask for them."""
    import overlap_torch.triton as ot

    stock, failures = kernels.stock(), []
    rank, world = dist.get_rank(), dist.get_world_size()
    for seed, (name, rows, chunks) in enumerate(cases):
        form, n, k = stock.PRODUCTS[name], 48, 40
        kernel = ot.aligned(form.kernel, output=form.output, input="a_ptr")
        x = [kernels.numbers(rows, k, seed=seed, rank=r) for r in range(world)]
        b = kernels.numbers(k, n, seed=90 + seed, rank=rank)
        out = torch.full((world * rows, n), float("nan"), device=kernels.device())
        with (
            overlap_torch.resources(comm_sms=8),
            overlap_torch.consume(
                "all_gather", x[rank].to(out.device), columns=n, tile=form.tile, chunks=chunks
            ) as job,
        ):
            form.launch(kernel, job.gathered, b.to(out.device), out, job.programs)
        expect(failures, f"{name} of {rows} rows", out, torch.cat(x).double() @ b.double())
        expect(failures, f"{name}, rows", job.result(), torch.cat(x))
    return len(cases), failures


WAITS = [
    ("grouped order", 64, 2),
    ("autotuned", 32, 1),
    ("persistent, while", 75, 2),
    ("two axes", 40, 2),
    ("descriptors", 64, 2),
]


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_aligned_kernels_wait_exactly(ranks):
    ranks.expect_no_failures(check_waits, WAITS)


def check_graph() -> tuple[int, list[str]]:
    """After one launch outside of the capture, which times configurations and proves them."""
    import overlap_torch.triton as ot

    form, failures = kernels.stock().PRODUCTS["autotuned"], []
    m, n, k = 256, 128, 64
    a, b = kernels.operands(m, n, k, seed=0, dtype=torch.float32)
    kernel = ot.aligned(form.kernel, output=form.output)

    def call() -> torch.Tensor:
        with overlap_torch.produce(
            "all_reduce", (m, n), a.dtype, tile=form.tile, chunks=2, device=a.device
        ) as job:
            form.launch(kernel, a, b, job.output, job.programs)
        return job.result()

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    for seed in range(1, 4):
        fresh = kernels.operands(m, n, k, seed=seed, dtype=torch.float32)
        for tensor, values in zip((a, b), fresh, strict=True):
            tensor.copy_(values)
        result.fill_(float("nan"))
        graph.replay()
        expect(failures, f"replay {seed}", result, kernels.reduced(m, n, k, seed))
    overlap_torch.check()
    return 3, failures


@pytest.mark.ranks((2, "nccl"))
def test_aligned_kernels_are_captured(ranks):
    ranks.expect_no_failures(check_graph)


# --- when --------------------------------------------------------------------------------------------------------


def check_signals(names: list[str]) -> tuple[int, list[str]]:
    """At each signal its tile is stored, and no tile is signalled twice or never."""
    import overlap_torch.triton as ot

    stock, failures = kernels.stock(), []
    m, n, k = 108, 80, 24
    a, b = kernels.operands(m, n, k, seed=1, dtype=torch.float32)
    real = ot.signal
    for name in names:
        form = stock.PRODUCTS[name]
        kernel = ot.aligned(form.kernel, output=form.output)
        signalled: list[int] = []

        def watched(counters, chunk, name=name, tile=form.tile, signalled=signalled) -> None:
            number = chunk.handle.data.item()
            row, column = (
                place * size for place, size in zip(divmod(number, job.columns), tile, strict=True)
            )
            if job.output[row : row + tile[0], column : column + tile[1]].isnan().any():
                failures.append(f"{name}: tile {number} is signalled before it is stored")
            signalled.append(number)
            real(counters, chunk)

        with overlap_torch.produce("all_reduce", (m, n), a.dtype, tile=form.tile, chunks=3) as job:
            job.output.fill_(float("nan"))
            with mock.patch.object(ot, "signal", watched):
                form.launch(kernel, a, b, job.output, job.programs)
        order = job.tile_order.tolist()
        if sorted(signalled) != sorted(order) or name == "grouped order" and signalled != order:
            failures.append(
                f"{name}: the tiles came as {signalled}, and the job's order is {order}"
            )
    return len(names), failures


def check_arrivals(names: list[str]) -> tuple[int, list[str]]:
    """Rows are there only after a wait for their chunk."""
    import overlap_torch.triton as ot

    stock, failures = kernels.stock(), []
    m, n, k = 108, 48, 24
    a, b = kernels.operands(m, n, k, seed=1, dtype=torch.float32)
    real = ot.wait
    for name in names:
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
    return len(names), failures


def test_aligned_kernels_load_rows_that_have_arrived():
    names = ["swizzle2d", "two axes", "persistent", "persistent, while", "descriptors"]
    for seen, failures in rank_pool.run(
        1, "gloo", check_arrivals, names, environment=kernels.INTERPRETED
    ):
        assert not failures, failures
        assert seen == len(names)


def test_aligned_kernels_signal_stored_tiles():
    """With a counter for each tile, by which signals name their tiles."""
    environment = kernels.INTERPRETED | {"OVERLAP_DEBUG": "1"}
    for seen, failures in rank_pool.run(1, "gloo", check_signals, FORMS, environment=environment):
        assert not failures, failures
        assert seen == len(FORMS)


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
    "of_special_warps": "a loop of specialized warps cannot signal",
}
BY_LAUNCH = {
    "of_special_warps_maybe": ((4,), {"SPECIAL": True}, "SPECIAL is True there"),
    "in_place": ((6,), {}, "c_ptr is aliased: a_ptr is the same memory"),
    "half_a_row": (
        (6,),
        {},
        "stores rows 0 to 0 and columns 0 to 15.*make the job with tile=.1, 16.",
    ),
    "some_rows": ((6,), {}, "row 5, column 0 of the output is stored by no program"),
    "twice": ((12,), {}, "number 11 stores a tile, but the job has 6"),
    "any_width": ((3,), {"BM": 64}, r"stores rows 0 to 1 and columns 0 to 31.*tile=\(2, 32\)"),
    "tuned": (
        (6,),
        {},
        "none of the 2 configurations of triton.autotune computes that.*BM=8: .*BM=16: ",
    ),
    "all_rows": (
        (6,),
        {},
        "the tile of rows 0 to 0 loads rows 0 to 5 of the input, and waits for its own rows only",
    ),
}


WAITING = ("by_block_pointers", "all_rows")


def place_of(name: str) -> str:
    """The file and the line of a refused kernel that its comment marks."""
    path = Path(__file__).parents[1] / "lib" / "refused_kernels.py"
    lines = path.read_text().splitlines()
    begin = lines.index(next(one for one in lines if one.startswith(f"def {name}(")))
    line = next(i for i in range(begin, len(lines)) if lines[i].endswith("# here"))
    return f"{path}:{line + 1}: overlap_torch.triton.aligned cannot follow {name}: "


def refusals() -> dict[str, str]:
    import overlap_torch.triton as ot
    import refused_kernels

    kernels.stock()
    messages = {}
    for name in BY_SOURCE:
        try:
            ot.aligned(
                getattr(refused_kernels, name), "c_ptr", "a_ptr" if name in WAITING else None
            )
        except ValueError as error:
            messages[name] = str(error)
    for name, (grid, given, _) in BY_LAUNCH.items():
        a, n = torch.ones(6, 32), 6
        try:
            kernel = ot.aligned(
                getattr(refused_kernels, name), "c_ptr", "a_ptr" if name in WAITING else None
            )
            if name == "all_rows":
                with overlap_torch.consume("all_gather", a, columns=32, tile=(1, 32)) as job:
                    kernel[grid](job.gathered, torch.empty_like(a), n)
            else:
                with overlap_torch.produce("all_reduce", a.shape, a.dtype, tile=(1, 32)) as job:
                    kernel[grid](job.output if name == "in_place" else a, job.output, n, **given)
        except ValueError as error:
            messages[name] = str(error)
    return messages


def test_aligned_refuses_by_file_and_line():
    (messages,) = rank_pool.run(1, "gloo", refusals, environment=kernels.INTERPRETED)
    reasons = BY_SOURCE | {name: reason for name, (_, _, reason) in BY_LAUNCH.items()}
    for name, reason in reasons.items():
        message = messages.get(name, "")
        place = place_of("any_width" if name == "tuned" else name)
        assert message.startswith(place), (name, message, place)
        assert re.match(reason, message[len(place) :], re.DOTALL) or re.search(
            f": .*{reason}", message
        ), (name, message)
        assert "Write these lines by hand" in message and "ot.tile(tile_order" in message
        waits = name in WAITING
        assert ("ot.wait(arrived" if waits else "ot.signal(counters") in message


def diffs() -> list[str]:
    import overlap_torch.triton as ot

    stock = kernels.stock()
    given = [(stock.persistent, None), (stock.in_turns, "a_ptr"), (stock.over_axes, None)]
    return [ot.aligned(kernel, "c_ptr", input).diff() for kernel, input in given]


def test_aligned_shows_the_lines_that_it_changed():
    (shown,) = rank_pool.run(1, "gloo", diffs, environment=kernels.INTERPRETED)
    expected = [
        [
            "for tile in tl.range(start, tiles, PROGRAMS, flatten=False):",
            "tile_1 = ot.tile(tile_order, tile)",
            "tile = tile_1",
            "chunk = tl.load(tile_chunk + tile_1)",
            "row, column = grouped_place(ot.tile(tile_order, stored), M, N, BM, BN, GROUP)",
            "ot.signal(counters, chunk)",
        ],
        [
            "tile = ot.tile(tile_order, index)",
            "chunk = tl.load(tile_chunk + tile)",
            "ot.wait(arrived, chunk)",
        ],
        [
            "tile = ot.tile(tile_order, tl.program_id(0) + tl.num_programs(0) * tl.program_id(1))",
            "chunk = tl.load(tile_chunk + tile)",
            "ot.signal(counters, chunk)",
        ],
    ]
    for diff, lines in zip(shown, expected, strict=True):
        added = [line[1:].strip() for line in diff.splitlines() if line.startswith("+")]
        for line in lines:
            assert line in added, (line, diff)


def misuse() -> list[str]:
    import overlap_torch.triton as ot

    stock, messages = kernels.stock(), []
    a, b = torch.ones(64, 32), torch.ones(32, 32)
    signals, waits = (
        ot.aligned(stock.in_turns, "c_ptr"),
        ot.aligned(stock.in_turns, "c_ptr", "a_ptr"),
    )

    def note(action) -> None:
        try:
            action()
            messages.append("")
        except ValueError as error:
            messages.append(str(error))

    def produce(kernel, out=None) -> None:
        with overlap_torch.produce("all_reduce", (64, 32), a.dtype, tile=TILE) as job:
            stock.of_programs(False)(kernel, a, b, job.output if out is None else out, 2)

    def consume(kernel, given=None) -> None:
        with overlap_torch.consume("all_gather", a, columns=32, tile=TILE) as job:
            stock.of_programs(False)(
                kernel, job.gathered if given is None else given, b, torch.empty(64, 32), 2
            )

    note(lambda: ot.aligned(stock.in_turns, "d_ptr"))
    note(lambda: ot.aligned(lambda x: x, "x"))
    note(lambda: produce(waits))
    note(lambda: consume(signals))
    note(lambda: produce(signals, torch.empty(64, 32)))
    note(lambda: consume(waits, torch.empty(64, 32)))
    note(lambda: produce(signals))
    return messages


def test_aligned_misuse_is_refused():
    (messages,) = rank_pool.run(1, "gloo", misuse, environment=kernels.INTERPRETED)
    expected = [
        "d_ptr is no argument of in_turns, allowed are a_ptr, b_ptr, c_ptr, M, N",
        "allowed is a @triton.jit function, also below @triton.autotune",
        'leave out input="a_ptr" of aligned',
        r'a kernel that waits is made by aligned\(kernel, output="c_ptr", input=',
        "c_ptr must be job.output of .*but is another tensor",
        "a_ptr must be job.gathered of .*but is another tensor",
        "^$",
    ]
    assert len(messages) == len(expected)
    for message, pattern in zip(messages, expected, strict=True):
        assert re.search(pattern, message), message
