"""The reports of overlap_torch.report on layers, styles and calls, OVERLAP_LOG, and styles that
fall back to PyTorch's.
"""

import contextlib
import os
import tempfile
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.utils import parametrize

import overlap_torch
import rank_pool
from checks import Failures
from layers import Linears
from meshes import gathered_tokens
from overlap_torch import parallel, plan
from overlap_torch._ops import ways
from overlap_torch._watch import report
from overlap_torch.nn import ColumnParallelLinear, RowParallelLinear
from overlap_torch.parallel import OverlapColwiseParallel, OverlapRowwiseParallel
from overlap_torch.plan import Problem, candidates, predict
from overlap_torch.plan.templates import make_plan, make_sequential
from overlap_torch.plan.types import Op

TOKENS = 6  # of each rank
TINY = "too little work to cut into chunks"


class Adapted(torch.nn.Linear):
    """A Linear with a forward of its own, as adapters are."""


def own_group() -> dist.ProcessGroup:
    """All ranks, in a group that nobody has called an op on."""
    return dist.new_group(list(range(dist.get_world_size())))


class Layers(torch.nn.Module):
    """All kinds of layers, one after the other."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        mesh = DeviceMesh.from_group(group, "cpu")
        self.up = ColumnParallelLinear(8, 20, sequence_parallel=True, group=mesh)
        self.down = RowParallelLinear(20, 12, sequence_parallel=True, group=mesh)
        self.whole_up = ColumnParallelLinear(12, 24, group=mesh)
        self.whole_down = RowParallelLinear(24, 16, group=mesh)
        self.styled_up = torch.nn.Linear(16, 28)
        self.styled_down = torch.nn.Linear(28, 32)
        self.adapted = Adapted(16, 16)
        self.unused = RowParallelLinear(20, 12, group=mesh)
        styles = {
            "styled_up": OverlapColwiseParallel(input_layouts=Shard(0)),
            "styled_down": OverlapRowwiseParallel(output_layouts=Shard(0)),
            "adapted": OverlapColwiseParallel(),
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parallelize_module(self, mesh, styles)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        own = self.down(self.up(input))
        whole = self.whole_down(self.whole_up(own))
        return self.styled_down(self.styled_up(whole))


# layer, direction, op, m, n, k, calls
STEP = [
    ("up", "forward", "allgather_gemm", 12, 10, 8, 1),
    ("up", "backward", "gemm_reducescatter", 12, 8, 10, 1),
    ("down", "forward", "gemm_reducescatter", 12, 12, 10, 1),
    ("down", "backward", "allgather_gemm", 12, 10, 12, 1),
    ("whole_up", "backward", "gemm_allreduce", 6, 12, 12, 1),
    ("whole_down", "forward", "gemm_allreduce", 6, 16, 12, 1),
    ("styled_up", "forward", "allgather_gemm", 12, 14, 16, 1),
    ("styled_up", "backward", "gemm_reducescatter", 12, 16, 14, 1),
    ("styled_down", "forward", "gemm_reducescatter", 12, 32, 14, 1),
    ("styled_down", "backward", "allgather_gemm", 12, 14, 32, 1),
    ("adapted", "", "", 0, 0, 0, 0),
    ("unused", "", "", 0, 0, 0, 0),
]


def summary(rows: list[report.ReportRow]) -> list[tuple]:
    names = ("layer", "direction", "op", "m", "n", "k", "calls")
    return [tuple(row[name] for name in names) for row in rows]


def rows_of(
    group: dist.ProcessGroup, model: torch.nn.Module | None = None
) -> list[report.ReportRow]:
    return [row for row in overlap_torch.report(model) if row["group"] == group.group_name]


def step(model: torch.nn.Module) -> None:
    model(torch.ones(TOKENS, 8, requires_grad=True)).sum().backward()


@pytest.mark.ranks((2, "gloo"))
def test_report_names_layers_and_what_they_called(failures: Failures) -> None:
    group = own_group()
    model = Layers(group)
    others = set(summary(overlap_torch.report()))
    empty = {row["why"] for row in overlap_torch.report(model) if row["layer"] == "up"}
    failures.equal(empty, {"not called so far"}, "before")
    step(model)
    rows = overlap_torch.report(model)
    failures.equal([row for row in summary(rows) if row not in others], STEP, "after a step")
    by_layer = {row["layer"]: row for row in rows}
    why = {name: by_layer[name]["why"] for name in ("up", "unused", "adapted")}
    expected = {
        "up": TINY,
        "unused": "not called so far",
        "adapted": "PyTorch's style: it is a subclass of torch.nn.Linear, which may have a forward of its own",
    }
    failures.equal(why, expected, "why")
    up = by_layer["up"]
    facts = (up["group"], up["world_size"], up["dtype"], up["device"], up["overlapped"])
    failures.equal(facts, (group.group_name, 2, "float32", "cpu", False), "facts")
    failures.equal(up["gain"], 1.0, "gain of the sequence")
    # Layers of two blocks whose paths differ in numbers share a line.
    blocks = torch.nn.ModuleList([model, Layers(group)])
    step(blocks[1])
    lines = str(overlap_torch.report(blocks)).split("\n")
    found = [" ".join(line.split()) for line in lines if "whole_down" in line]
    line = (
        f"0.whole_down and 1 more gemm_allreduce 6 x 16 x 12 float32 2 cpu 2 sequence 1.00x {TINY}"
    )
    failures.equal(found, [line], "table")


class Pair(torch.nn.Module):
    """Two layers that may share a gather, in a group of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.group = own_group()
        self.q, self.k = (
            ColumnParallelLinear(8, size, sequence_parallel=True, group=self.group)
            for size in (20, 6)
        )
        self.other = RowParallelLinear(8, 6, group=self.group)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.q(input)


@pytest.mark.ranks((2, "gloo"))
def test_report_finds_the_layers_of_calls_that_were_not_noted(failures: Failures) -> None:
    """Calls of which the layers' forwards do not tell: compiled ones, of other sizes before, and of several layers."""

    def expect(rows: list[tuple], pair: Pair, where: str) -> None:
        found = summary(rows_of(pair.group, pair))
        failures.equal([row for row in found if row[2]], rows, where)

    gathers = ("forward", "allgather_gemm")
    pair = Pair()
    compiled = torch.compile(pair, fullgraph=True, backend="eager")
    with torch.no_grad():
        compiled(torch.ones(TOKENS, 8))
    expect([("q", *gathers, 12, 10, 8, 1)], pair, "compiled")
    pair = Pair()
    with torch.no_grad():
        for tokens in (TOKENS, TOKENS, 5 * TOKENS):
            pair(torch.ones(tokens, 8))
    expect([("q", *gathers, 60, 10, 8, 1), ("q", *gathers, 12, 10, 8, 2)], pair, "sizes")
    pair = Pair()
    weights = [pair.q.weight.to_local().detach(), pair.k.weight.to_local().detach()]
    overlap_torch.allgather_gemm(torch.ones(TOKENS, 8), weights, group=pair.group)
    call(5, 3, 4, pair.group)
    shared = ("q, k", *gathers, 12, 13, 8, 1)
    expect([shared, ("", "", "gemm_allreduce", 5, 3, 4, 1)], pair, "together")


class Readers(Linears):
    """Two layers that read one input."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.q(input).sum() + self.k(input).sum()


@pytest.mark.ranks((2, "gloo"))
def test_report_names_all_layers_that_share_a_gather(failures: Failures) -> None:
    group = own_group()
    model = torch.nn.ModuleDict({"attention": Readers(q=(8, 20), k=(8, 6))})
    styles = {
        "attention": gathered_tokens(),
        "attention.q": OverlapColwiseParallel(),
        "attention.k": OverlapColwiseParallel(),
    }
    parallelize_module(model, DeviceMesh.from_group(group, "cpu"), styles)
    model["attention"](torch.ones(TOKENS, 8, requires_grad=True)).backward()
    expected = [
        ("attention.q, attention.k", "forward", "allgather_gemm", 12, 13, 8, 1),
        ("attention.q, attention.k", "backward", "gemm_reducescatter", 12, 8, 13, 1),
    ]
    failures.equal(summary(rows_of(group, model)), expected)


def call(m: int, n: int, k: int, group: dist.ProcessGroup, times: int = 1) -> None:
    for _ in range(times):
        overlap_torch.gemm_allreduce(torch.ones(m, k), torch.ones(n, k), group=group)


@pytest.mark.ranks((2, "gloo"))
def test_report_says_what_plans_gain_and_why_not(failures: Failures) -> None:
    """Plans by hand and by the planner, and what is said of each."""
    group = own_group()
    machine = plan.machine("cpu", group)
    # A GEMM that is over at once hides nothing.
    no_gain = Problem(1024, 1024, 4, plan.types.DType.FLOAT32, 2, Op.GEMM_ALLREDUCE)
    failures.expect(None if len(candidates(no_gain, machine)) > 1 else "has none", "candidates")
    sequence_us = predict(make_sequential(no_gain, machine), machine).total_us
    best_us = min(predict(one, machine).total_us for one in candidates(no_gain, machine)[1:])
    call(1024, 1024, 4, group)
    (row,) = rows_of(group)
    expected = (
        f"the planner expects too little gain: the sequence {sequence_us:.0f} us, the best overlapped plan "
        f"{best_us:.0f} us; gloo moves bytes with the cores that compute"
    )
    failures.equal(row["why"], expected, "no gain")
    failures.equal(row["plan"], make_plan(no_gain, machine), "plan", "other")

    by_hand = plan.templates.row_panels(no_gain, 4, transport="gloo")
    with plan.use_plan(by_hand, group=group):
        call(1024, 1024, 4, group, times=3)
    with plan.use_plan(by_hand, group=group):
        call(1024, 1024, 4, group)
    call(1024, 1024, 4, group)
    first, second = rows_of(group)
    failures.equal(first["calls"], 2, "the planner's")
    facts = (second["calls"], second["plan"] == by_hand, second["overlapped"], second["why"])
    failures.equal(facts, (4, True, True, ""), "by hand")
    gain = sequence_us / predict(by_hand, machine).total_us
    failures.equal(second["gain"], pytest.approx(gain), "gain", "other")
    words = " ".join(str(report.Report([second])).split("\n")[1].split())
    right = f"gemm_allreduce 1024 x 1024 x 4 float32 2 cpu 4 4 chunks, gloo, library {gain:.2f}x"
    failures.equal(words, right, "table")

    large = Problem(2048, 2048, 512, plan.types.DType.FLOAT32, 2, Op.GEMM_ALLREDUCE)
    failures.equal(make_plan(large, machine).schedule, plan.types.Schedule.OVERLAPPED, "large")
    with plan.use_plan(make_sequential(large, machine), device="cpu", group=group):
        call(2048, 2048, 512, group)
    failures.equal(rows_of(group)[-1]["why"], "set_plan chose it", "a sequence by hand")

    call(0, 5, 6, group)
    row = rows_of(group)[-1]
    facts = (row["m"], row["plan"], row["gain"], row["why"])
    failures.equal(facts, (0, None, None, "M, N or K is 0: there is nothing to overlap"), "no rows")


@pytest.mark.ranks((1, "gloo"))
def test_report_says_that_a_group_of_one_has_nothing_to_communicate(failures: Failures) -> None:
    group = own_group()
    alone = "a group of one has nothing to communicate"
    column = ColumnParallelLinear(8, 4, group=group)
    column(torch.ones(2, 8))
    call(2, 3, 4, group, times=2)
    found = [(row["layer"], row["calls"], row["why"]) for row in overlap_torch.report(column)]
    for row in (("", 0, alone), ("", 2, alone)):
        failures.holds(row, found)
    overlap_torch.gemm_alltoall(torch.ones(2, 4), torch.ones(3, 4), [2], [2], group=group)
    row = rows_of(group)[-1]
    failures.equal((row["op"], row["calls"], row["why"]), ("gemm_alltoall", 1, alone))


@pytest.mark.ranks((2, "gloo"))
def test_report_says_what_carried_experts_and_attention(failures: Failures) -> None:
    group = own_group()
    x, experts = torch.ones(4, 8), torch.zeros(4, 1, dtype=torch.int64)
    weights = torch.ones(1, 16, 8), torch.ones(1, 8, 8)
    for transport in (None, None, "nccl"):
        overlap_torch.moe(x, experts, torch.ones(4, 1), *weights, transport=transport, group=group)
    q = torch.ones(1, 4, 2, 8)
    overlap_torch.context_parallel_attention(q, q, q, causal=True, group=group)
    begin = f"group '{group.group_name}', "
    found = [
        line.removeprefix(begin) for line in overlap_torch.report().notes if line.startswith(begin)
    ]
    by = "by collectives: peers do not carry"
    right = [
        f"moe: 2 calls {by} calls on cpu",
        f"moe: 1 call {by} transport='nccl'",
        f"context_parallel_attention: 1 call {by} calls on cpu",
    ]
    failures.equal(found, right)
    for number in range(1000):  # as reasons name numbers of tokens
        ways.note_way("moe", group.group_name, f"max_tokens={number}")
    last = list(ways.lines())
    failures.holds(len(last), range(1, 500))
    failures.holds("max_tokens=999", last[-1])


def test_report_of_no_calls_says_so():
    assert str(report.Report()) == "No op of overlap_torch that has plans has been called."


@contextlib.contextmanager
def stderr_in(path: str) -> Iterator[None]:
    """The stderr of this process, from whatever language."""
    kept = os.dup(2)
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(file)


def logged_lines() -> list[str]:
    group = dist.group.WORLD
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "stderr")
        with stderr_in(path):
            call(6, 5, 4, group, times=2)
            problem = Problem(64, 32, 8, plan.types.DType.FLOAT32, 2, Op.GEMM_ALLREDUCE)
            by_hand = plan.templates.row_panels(problem, 2, transport="gloo", tile=(16, 32))
            plan.set_plan(by_hand, group=group)
            call(64, 32, 8, group, times=2)
            call(0, 5, 4, group, times=2)
        with open(path) as file:
            return [line for line in file.read().split("\n") if line.startswith("overlap_torch:")]


@pytest.mark.parametrize("value", ["plans", "none"])
def test_log_names_each_new_plan_once_on_the_groups_first_rank(value):
    outcomes = rank_pool.run_fresh(2, "gloo", logged_lines, environment={"OVERLAP_LOG": value})
    first, second = (outcome.result() for outcome in outcomes)
    assert second == []
    if value == "none":
        assert first == []
        return
    assert len(first) == 3, first
    tiny, by_hand, empty = first
    assert "cpu: gemm_allreduce m=6 n=5 k=4 float32 world_size=2: sequential" in tiny
    assert tiny.endswith(f"; not overlapped: {TINY}")
    assert "gemm_allreduce m=64 n=32 k=8 float32 world_size=2: overlapped" in by_hand
    assert "; predicted " in by_hand and " us, the sequence " in by_hand
    assert empty.endswith(
        "gemm_allreduce m=0 n=5 k=4 float32 world_size=2: no plan; not overlapped: M, N or K is 0: there is nothing "
        "to overlap"
    )


class Doubled(torch.nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@pytest.mark.ranks((2, "gloo"))
def test_styles_say_once_that_they_fall_back(failures: Failures) -> None:
    parallel._warned.clear()

    def warned(module: torch.nn.Module, style: type) -> list[str]:
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with contextlib.suppress(KeyError):  # PyTorch's styles do not take parametrized layers
                parallelize_module(module, mesh, style())
        return [str(one.message) for one in caught if "overlap_torch" in str(one.message)]

    parametrized = torch.nn.Linear(8, 8)
    parametrize.register_parametrization(parametrized, "bias", Doubled())
    more = torch.nn.Linear(8, 8)
    more.register_parameter("scale", torch.nn.Parameter(torch.ones(8)))
    columns = OverlapColwiseParallel
    for what, style, module, parts in (
        ("plain", columns, torch.nn.Linear(8, 8), ()),
        ("embedding", columns, torch.nn.Embedding(8, 8), ()),
        ("subclass", columns, Adapted(8, 8), (".Adapted takes PyTorch's style", "it is a subclass of")),
        ("again", columns, Adapted(8, 8), ()),
        ("parameters", columns, more, ("torch.nn.modules.linear.Linear takes", "weight, bias, scale")),
        ("parametrized", columns, parametrized, ("ParametrizedLinear takes", "it is parametrized")),
        ("another style", OverlapRowwiseParallel, Adapted(8, 8), ()),  # the class has had its warning
    ):  # fmt: skip
        messages = warned(module, style)
        said = len(messages) == bool(parts) and all(part in messages[0] for part in parts)
        failures.expect(None if said else f"{messages}", what)
