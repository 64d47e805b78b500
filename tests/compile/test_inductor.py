"""The compile pass on functional collectives written by hand: what it fuses, what it says of the rest, that results are right."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.functional import linear, rms_norm

import rank_pool
from checks import Failures
from graphs import OPS, Graphs
from operands import integers, rank_device, subgroup
from overlap_torch._inductor.fusion import Settings
from overlap_torch.plan import Problem, use_plan
from overlap_torch.plan.templates import row_panels

WORLD = 2


class Functional:
    """The functional collectives, which the pass sees."""

    group = dist.group.WORLD

    def all_reduce(self, x: torch.Tensor, kind: str = "sum") -> torch.Tensor:
        return functional.all_reduce(x, kind, dist.group.WORLD)

    def reduce_scatter(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return functional.reduce_scatter_tensor(x, "sum", dim, dist.group.WORLD)

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        g = functional.all_gather_tensor(x, 0, dist.group.WORLD)
        # all_gather_tensor does the rest itself, but Dynamo does not trace into that (PyTorch 2.11).
        return g if dim == 0 else torch.cat(g.chunk(dist.get_world_size()), dim)


class Eager:
    """The same, of torch.distributed: what is right."""

    def all_reduce(self, x: torch.Tensor, kind: str = "sum") -> torch.Tensor:
        y = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(y, getattr(dist.ReduceOp, "SUM" if kind == "avg" else kind.upper()))
        return y / dist.get_world_size() if kind == "avg" else y

    def reduce_scatter(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return self.all_reduce(x).chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        parts = [
            torch.empty_like(x, memory_format=torch.contiguous_format)
            for _ in range(dist.get_world_size())
        ]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim)


@dataclass(frozen=True)
class Pattern:
    """A computation ``run(collectives, *tensors)``, the tensors, and what it must become."""

    run: Callable[..., Any]
    tensors: tuple[Any, ...]  # their shapes, or ones with a dtype or "scale" instead of `dtype`
    ops: str  # and collectives of the graph
    rows: str = ""  # of the report, where they are others: which op each collective is in, in the graph's order
    dtype: torch.dtype = torch.float32


def heads_apart(c, x, w):
    """As attention's output comes: [B, heads, S, D]."""
    y = x.transpose(1, 2).flatten(2)
    return c.all_reduce(linear(y, w)).unflatten(-1, (2, -1)).transpose(1, 2)


def view_by_hand(c, x, w):
    """The sequence is gathered in another spelling: as a dim of its own."""
    g = (
        c.all_gather(x)
        .view(WORLD, *x.shape)
        .permute(1, 0, 2, 3)
        .reshape(x.shape[0], -1, x.shape[2])
    )
    return linear(g, w)


def gathered_and_strided(c, x, w):
    """Memory is read as it lies, which is in another order behind the op."""
    g = c.all_gather(x, 1)
    return linear(g, w), g.as_strided((2, 5), (8, 1))


PATTERNS = {
    "mm, all-reduce": Pattern(lambda c, x, w: c.all_reduce(x @ w), ((6, 5), (5, 7)), "gemm_allreduce"),
    "linear, all-reduce": Pattern(lambda c, x, w: c.all_reduce(linear(x, w)), ((2, 3, 5), (7, 5)), "gemm_allreduce"),
    "bias behind, two readers": Pattern(
        lambda c, x, w, b: (lambda y: (y.relu(), y.sum(-1)))(c.all_reduce(linear(x, w)) + b), ((2, 3, 5), (7, 5), (7,)), "gemm_allreduce"),
    "bias of every rank": Pattern(lambda c, x, w, b: c.all_reduce(linear(x, w, b)), ((2, 3, 5), (7, 5), (7,)), "gemm_allreduce all_reduce"),
    "average": Pattern(lambda c, x, w: c.all_reduce(x @ w, "avg"), ((6, 5), (5, 7)), "gemm_allreduce"),
    "average, bias of every rank": Pattern(
        lambda c, x, w, b: c.all_reduce(linear(x, w, b), "avg"), ((6, 5), (7, 5), (7,)), "gemm_allreduce all_reduce"),
    "transposed product": Pattern(lambda c, x, w: c.all_reduce((x @ w).t()) * 2, ((6, 5), (5, 7)), "gemm_allreduce"),
    "heads apart": Pattern(heads_apart, ((2, 4, 3, 2), (6, 8)), "gemm_allreduce"),
    "sum of products": Pattern(
        lambda c, x, y, w, v: c.all_reduce(x @ w + y @ v), ((6, 5), (6, 3), (5, 7), (3, 7)), "gemm_allreduce"),
    "biases of several, scattered": Pattern(
        lambda c, x, y, w, v, b: c.reduce_scatter(linear(x, w, b) + linear(y, v, b)), ((4, 5), (4, 3), (7, 5), (7, 3), (7,)),
        "gemm_reducescatter all_reduce"),
    "slice, all-reduce": Pattern(lambda c, x, w: c.all_reduce((x @ w)[1:, :-1]), ((6, 5), (5, 7)), "gemm_allreduce"),
    "reduce-scatter of dim 0": Pattern(lambda c, x, w: c.reduce_scatter(linear(x, w)), ((4, 3, 5), (7, 5)), "gemm_reducescatter"),
    "reduce-scatter, rows divided": Pattern(
        lambda c, x, w: c.reduce_scatter(x @ w).view(2, -1, w.shape[1]).relu(), ((8, 5), (5, 6)), "gemm_reducescatter"),
    "reduce-scatter of dim 1, bias": Pattern(
        lambda c, x, w, b: c.reduce_scatter(linear(x, w), 1) + b, ((3, 4, 5), (7, 5), (7,)), "gemm_reducescatter"),
    "reduce-scatter of dim 1 of one": Pattern(
        lambda c, x, w: c.reduce_scatter(linear(x, w), 1), ((1, 4, 5), (7, 5)), "gemm_reducescatter"),
    "reduce-scatter of columns": Pattern(
        lambda c, x, w: c.reduce_scatter(linear(x, w), 2), ((3, 4, 5), (6, 5)), "gemm_reducescatter"),
    "reduce-scatter of rows moved to the front": Pattern(
        lambda c, x, w: c.reduce_scatter(linear(x, w).transpose(0, 1)).transpose(0, 1) * 2, ((3, 4, 5), (7, 5)), "gemm_reducescatter"),
    "all-gather of dim 0": Pattern(lambda c, x, w: linear(c.all_gather(x), w), ((2, 3, 5), (7, 5)), "allgather_gemm"),
    "all-gather of dim 1": Pattern(
        lambda c, x, w, b: linear(c.all_gather(x, 1), w, b), ((2, 3, 5), (7, 5), (7,)), "allgather_gemm"),
    "all-gather of dim 1 of one": Pattern(lambda c, x, w: linear(c.all_gather(x, 1), w), ((1, 3, 5), (7, 5)), "allgather_gemm"),
    "all-gather by views": Pattern(view_by_hand, ((2, 3, 5), (7, 5)), "allgather_gemm"),
    "all-gather for all": Pattern(
        lambda c, x, w, v: (lambda g: (linear(g, w), linear(g, v).relu(), g + 1, g.sum(1)))(c.all_gather(x, 1)),
        ((2, 3, 5), (7, 5), (4, 5)), "allgather_gemm", "allgather_gemm.weights"),
    "all-gather with a bias of one": Pattern(
        lambda c, x, w, v, b: (lambda g: (linear(g, w), linear(g, v, b)))(c.all_gather(x)), ((2, 3, 5), (7, 5), (4, 5), (4,)),
        "allgather_gemm", "allgather_gemm.weights"),
    "two all-gathers of one tensor": Pattern(
        lambda c, x, w, v: linear(c.all_gather(x), w) + linear(c.all_gather(x), v), ((2, 5), (7, 5), (7, 5)), "allgather_gemm",
        "allgather_gemm.weights allgather_gemm.weights"),
    "all-gather, strides": Pattern(gathered_and_strided, ((2, 3, 5), (7, 5)), "allgather_gemm"),
    "all-gather, slices": Pattern(
        lambda c, x, w, v: (lambda g: (linear(g[:-1], w), linear(g[1:3], v).relu() * 2))(c.all_gather(x, 0)),
        ((2, 3, 5), (7, 5), (4, 5)), "allgather_gemm", "allgather_gemm.weights"),
    "all-gather, cast": Pattern(
        lambda c, x, w: linear(c.all_gather(x, 1).to(torch.bfloat16), w), ((2, 3, 5), ((7, 5), torch.bfloat16)), "allgather_gemm"),
    # The gathered tensor is the second operand, and no input of the graph.
    "all-gather of columns": Pattern(lambda c, x, w: x @ c.all_gather((w * 2).relu(), 1), ((4, 5), (5, 3)), "allgather_gemm"),
    "all-gather, all-reduce": Pattern(
        lambda c, x, w, v: c.all_reduce(linear(linear(c.all_gather(x), w).relu(), v)), ((2, 3, 5), (7, 5), (4, 7)),
        "allgather_gemm gemm_allreduce"),
}  # fmt: skip


def tensors_of(tensors: tuple[Any, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Integers, and scales of 0.5, 1 and 2; other ones on every rank."""
    found = []
    for i, given in enumerate(tensors):
        with_kind = isinstance(given[0], tuple)
        (shape, kind), most = (given, 1) if with_kind else ((given, dtype), 2)
        drawn = integers(shape, rank_device(), dist.get_rank(), i, low=-most, high=most)
        found.append(2.0**drawn if kind == "scale" else drawn.to(kind))
    return found


def compare(failures: Failures, found: Any, right: Any, *where: object) -> None:
    found, right = ([r] if isinstance(r, torch.Tensor) else list(r) for r in (found, right))
    failures.expect_equal(found, right, *where)


def check_patterns(
    failures: Failures,
    patterns: dict[str, Pattern],
    dynamic: bool = False,
    seen: Functional | None = None,
    eager: Eager | None = None,
) -> None:
    for name, pattern in patterns.items():
        graphs = Graphs()
        compiled = graphs.compile(partial(pattern.run, seen or Functional()), dynamic=dynamic)
        tensors = tensors_of(pattern.tensors, pattern.dtype)
        with torch.no_grad():
            found = compiled(*tensors)
        compare(failures, found, pattern.run(eager or Eager(), *tensors), name)
        failures.equal(graphs.ops, Counter(pattern.ops.split()), name, "calls")
        rows = pattern.rows.split() or [op for op in pattern.ops.split() if op in OPS]
        failures.equal([row["op"] for row in graphs.rows], rows, name, "rows")
        for row in graphs.rows:
            failures.equal((row["why"], row["missed"]), ("", False), name, row["node"])
            failures.expect(None if row["source"] else "has no source", name, row["node"])


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_inductor_fuses_what_is_written_by_hand(failures: Failures) -> None:
    check_patterns(failures, PATTERNS)


@pytest.mark.ranks((2, "gloo"))
def test_inductor_adds_each_ranks_own_bias_behind_an_all_reduce(failures: Failures) -> None:
    """The op's bias is the same on all ranks: by this plan a rank adds it to its rows, and sends them to all."""
    problem = Problem(6, 7, 5, "float32", 2)
    owners = row_panels(problem, 1, transport="gloo", tile=(2, 7), collective="stripes")
    names = ("bias behind, two readers", "bias of every rank")
    with use_plan(owners):
        check_patterns(failures, {name: PATTERNS[name] for name in names})


DYNAMIC = [
    "heads apart",
    "slice, all-reduce",
    "reduce-scatter of dim 1, bias",
    "all-gather of dim 1",
    "all-gather, slices",
]


@pytest.mark.ranks((2, "gloo"))
@pytest.mark.seconds(600)
def test_inductor_fuses_dynamic_shapes(failures: Failures) -> None:
    names = list(PATTERNS) if rank_pool.whole_grids() else DYNAMIC
    check_patterns(failures, {name: PATTERNS[name] for name in names}, dynamic=True)


# --- what is not fused ----------------------------------------------------------------------------------------


# Why a computation is not fused (a part of what is said): of what counts as missed, and of what does not.
MISSED = {
    "gathered, cut in two": (
        lambda c, x, w: c.all_gather(x)[1:].chunk(2)[0] @ w, ((6, 5), (5, 7)), "reads it through aten.slice"),
    "two users": (lambda c, x, w: (lambda y: (c.all_reduce(y), y.sum()))(x @ w), ((6, 5), (5, 7)), "also read by aten.sum"),
    "dtype": (
        lambda c, x, w: c.all_reduce((x @ w).double()), ((6, 5), (5, 7)), "reduces in float64 what its GEMM computes in float32"),
    "kind": (lambda c, x, w: c.all_reduce(x @ w, "max"), ((6, 5), (5, 7)), "reduces by 'max'"),
    "residual": (
        lambda c, x, w, y: c.all_reduce(x @ w + y.relu()), ((6, 5), (5, 7), (6, 7)), "added to the result of aten.relu before"),
    "bias cut by columns": (
        lambda c, x, w, b: c.reduce_scatter(linear(x, w, b), 1), ((6, 5), (8, 5), (8,)),
        "a bias along the dim that is scattered"),
    "batched": (lambda c, x, w: c.all_reduce(torch.bmm(x, w)), ((2, 6, 5), (2, 5, 7)), "aten.bmm"),
    # [6, 8] read as [2, 24]: half of the rows, of all columns, but not as a part of either.
    "cut across": (lambda c, x, w: c.reduce_scatter((x @ w).reshape(16, 3)), ((6, 5), (5, 8)), "across rows or ranks"),
    "gathered and cast, read by others": (
        lambda c, x, w: (lambda g: (linear(g.bfloat16(), w.bfloat16()), g.relu()))(c.all_gather(x)), ((6, 5), (7, 5)),
        "but aten.relu reads it in float32"),
    "gathered, cast, cut": (
        lambda c, x, w: linear(c.all_gather(x)[:4].bfloat16(), w.bfloat16()), ((6, 5), (7, 5)),
        "its GEMM, aten.mm, reads it through aten.slice, which the pass does not follow"),
    "gathered, cast twice": (
        lambda c, x, w: linear(c.all_gather(x).bfloat16().float(), w), ((6, 5), (7, 5)),
        "reads it through prims.convert_element_type"),
    "gathered, joined to others": (
        lambda c, x, y, w: linear(torch.cat([c.all_gather(x), y]), w), ((6, 5), (6, 5), (7, 5)), "reads it through aten.cat"),
    "gathered, in parts": (
        lambda c, x, w: [linear(part, w) for part in c.all_gather(x).chunk(WORLD)], ((6, 5), (7, 5)),
        "reads it through aten.split"),
    "gathered for two, the second of which is missed": (
        lambda c, x, w: (lambda g: (g @ (g * 2).t(), linear(g.bfloat16().float(), w)))(c.all_gather(x)), ((6, 5), (7, 5)),
        "reads it through prims.convert_element_type"),
    "gathered, widened": (lambda c, x, w: linear(c.all_gather(x.bfloat16()).float(), w), ((6, 5), (7, 5)), "gather more bytes"),
}  # fmt: skip
APART = {
    "no GEMM": (lambda c, x: c.all_reduce(x.relu()), ((6, 5),), "what aten.relu computes"),
    "no GEMM, summed": (lambda c, x, y: c.all_reduce(x.relu() + y.relu()), ((6, 5), (6, 5)), "what aten.add computes"),
    "input": (lambda c, x: c.all_reduce(x), ((6, 5),), "an input of the graph"),
    "gathered for others": (lambda c, x: c.all_gather(x).relu(), ((6, 5),), "no GEMM reads it, but aten.relu"),
    "gathered along K": (lambda c, x, w: c.all_gather(x, 1) @ w, ((6, 5), (10, 7)), "along the dim that its GEMM sums over"),
    "gathered weight": (lambda c, x, w: linear(x, c.all_gather(w)), ((6, 5), (7, 5)), "it gathers a weight"),
    "gathered twice over": (lambda c, x: (lambda g: g @ (g * 2).t())(c.all_gather(x)), ((6, 5),), "other operand depends on it"),
    "weights gathered together": (
        lambda c, x, w, v: linear(x, c.all_gather(torch.cat([w, v])).select(0, 0)), ((6, 5), (1, 7, 5), (1, 7, 5)),
        "reads it through aten.select"),
}  # fmt: skip


def check_refused(
    failures: Failures,
    run: Callable[..., Any],
    tensors: tuple[Any, ...],
    expected: list[tuple[str, bool]],
    name: str,
) -> None:
    """Compiled but not run: the rows, a part of why and whether it counts as missed, and no op."""
    graphs = Graphs(runs=False)
    with torch.no_grad():
        graphs.compile(run)(*tensors_of(tensors))
    failures.equal([graphs.ops[op] for op in OPS], [0] * len(OPS), name)
    for row, (part, missed) in zip(graphs.rows, expected, strict=True):
        failures.holds(part, row["why"], name)
        failures.equal((row["op"], row["gemms"], row["missed"]), ("", 0, missed), name)


@pytest.mark.ranks((2, "gloo"))
def test_inductor_says_why_it_leaves_a_collective(failures: Failures) -> None:
    for refused, counts in ((MISSED, True), (APART, False)):
        for name, (run, shapes, why) in refused.items():
            check_refused(failures, partial(run, Functional()), shapes, [(why, counts)], name)


# Another collective between a GEMM and a collective: the rows' collectives, ops and why (a part of it), and which count as missed.
BETWEEN = "is waited for between"
WAITED = {
    "reduced twice": (
        lambda c, x, w: c.reduce_scatter(c.all_reduce(x @ w).reshape(4, 6)) * 2, ((6, 5), (5, 4)),
        [("all_reduce", "gemm_allreduce", "", False), ("reduce_scatter", "", f"all_reduce, {BETWEEN} its GEMM and it", False)]),
    "averaged, then reduced": (
        lambda c, x, w: c.all_reduce(c.all_reduce(x @ w, "avg")), ((6, 5), (5, 4)),
        [("all_reduce", "gemm_allreduce", "", False), ("all_reduce", "", f"all_reduce, {BETWEEN} its GEMM and it", False)]),
    "no op for the first two": (
        lambda c, x, w: c.all_reduce(c.all_reduce(c.all_reduce(x @ w, "max"), "min")),
        ((6, 5), (5, 4)),
        [
            ("all_reduce", "", "reduces by 'max'", True),
            ("all_reduce", "", f"all_reduce, {BETWEEN} its GEMM and it", False),
            ("all_reduce", "", f"all_reduce, {BETWEEN} its GEMM and it", False),
        ],
    ),
    "no GEMM before the first": (
        lambda c, x: c.all_reduce(c.all_reduce(x.relu())),
        ((6, 5),),
        [
            ("all_reduce", "", "what aten.relu computes, no GEMM's product", False),
            ("all_reduce", "", "what another collective computes, no GEMM's product", False),
        ],
    ),
    "added to a product": (
        lambda c, x, w, y: c.all_reduce(x @ w + c.all_reduce(y).t()),
        ((6, 5), (5, 4), (4, 6)),
        [
            ("all_reduce", "", "an input of the graph", False),
            ("all_reduce", "", "to the result of all_reduce, which is waited for in between", True),
        ],
    ),
    "fused, added to a product": (
        lambda c, x, w, v: c.all_reduce(x @ w + c.all_reduce(x @ v)),
        ((6, 5), (5, 4), (5, 4)),
        [
            ("all_reduce", "gemm_allreduce", "", False),
            ("all_reduce", "", "to the result of all_reduce, which is waited for in between", True),
        ],
    ),
    "gathered twice": (
        lambda c, x, w: linear(c.all_gather(c.all_gather(x), 1), w), ((2, 3, 5), (7, 5)),
        [("all_gather", "", f"all_gather, {BETWEEN} it and its GEMM", False), ("all_gather", "allgather_gemm", "", False)]),
    "gathered, reduced, gathered": (
        lambda c, x, w: linear(c.all_gather(c.reduce_scatter(c.all_gather(x, 1), 1)), w),
        ((2, 3, 5), (7, 5)),
        [
            ("all_gather", "", f"reduce_scatter, {BETWEEN} it and its GEMM", False),
            ("reduce_scatter", "", "what another collective computes", False),
            ("all_gather", "allgather_gemm", "", False),
        ],
    ),
    "gathered twice for no GEMM": (
        lambda c, x: c.all_gather(c.all_gather(x)).relu(),
        ((6, 5),),
        [
            ("all_gather", "", "no GEMM reads it, but _c10d_functional.all_gather", False),
            ("all_gather", "", "no GEMM reads it, but aten.relu", False),
        ],
    ),
}  # fmt: skip


@pytest.mark.ranks((2, "gloo"))
def test_inductor_says_what_is_waited_for_in_between(failures: Failures) -> None:
    for name, (run, shapes, right) in WAITED.items():
        graphs = Graphs()
        tensors = tensors_of(shapes)
        with torch.no_grad():
            found = graphs.compile(partial(run, Functional()))(*tensors)
        compare(failures, found, run(Eager(), *tensors), name)
        rows = [(row["collective"], row["op"], row["why"], row["missed"]) for row in graphs.rows]
        same = len(rows) == len(right) and all(
            row[:2] == part[:2]
            and part[2] in row[2]
            and bool(part[2]) == bool(row[2])
            and row[3] == part[3]
            for row, part in zip(rows, right, strict=False)
        )
        failures.expect(None if same else f"{rows}, not {right}", name)


@pytest.mark.ranks((2, "gloo"))
def test_inductor_leaves_other_groups_alone(failures: Failures) -> None:
    """Collectives of groups that are left out, or of one rank, and those that no op stands for."""
    alone = [subgroup((rank,)) for rank in range(dist.get_world_size())][dist.get_rank()]

    def function(x, w):
        product = x @ w
        first = functional.all_reduce(product, "sum", dist.group.WORLD)
        second = functional.all_reduce(x @ (w + 1), "sum", alone)
        third = functional.all_to_all_single(x @ (w + 2), None, None, dist.group.WORLD)
        return first, second, third

    found = []
    for settings in (Settings(groups=("no group",)), Settings()):
        graphs = Graphs(runs=False, settings=settings)
        with torch.no_grad():
            graphs.compile(function)(torch.ones(4, 5), torch.ones(5, 6))
        found += [(row["op"], row["why"], row["missed"]) for row in graphs.rows]
    ops, whys, missed = zip(*found, strict=True)
    failures.equal(ops, ("", "", "", "gemm_allreduce", "", ""))
    failures.equal(any(missed), False, "missed")
    unknown = "the pass knows no op for it"
    failures.equal((whys[2], whys[3], whys[5]), (unknown, "", unknown))
    for i, part in ((0, "groups= leaves out"), (1, "groups= leaves out"), (4, "a group of one")):
        failures.holds(part, whys[i])


# --- all-reduces with a residual and an RMSNorm after them ------------------------------------------------------


def llama_norm(rows, gain):
    """As transformers' Llama has it: rounded before the gain."""
    wide = rows.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return gain * wide.to(rows.dtype)


def gemma_norm(rows, gain):
    wide = rows.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (wide * (1.0 + gain.float())).type_as(rows)


def plain_norm(rows, gain):
    return rms_norm(rows, gain.shape, gain, 1e-6)


def half_layer(norm):
    """The sum is read twice: by the norm, and as the next half layer's residual."""

    def run(c, x, w, residual, gain):
        residual = residual + c.all_reduce(linear(x, w))
        return norm(residual, gain), residual * 2

    return run


def two_half_layers(c, x, w, residual, gain, v):
    residual = residual + c.all_reduce(linear(x, w))
    residual = residual + c.all_reduce(linear(llama_norm(residual, gain), v))
    return llama_norm(residual, gain), residual


def embedding_and_norm(c, x, gain):
    """Nothing is added, and no GEMM stands before it."""
    rows = c.all_reduce(x * 2)
    return plain_norm(rows, gain), rows


def squares_read(c, x, w, gain):
    wide = c.all_reduce(linear(x, w)).float()
    squares = wide.pow(2)
    norm = wide * torch.rsqrt(squares.mean(-1, keepdim=True) + 1e-5)
    return gain * norm.to(gain.dtype), squares.sum(-1)


_HALF = ((2, 3, 5), (16, 5), (2, 3, 16), (16,))
fused = partial(
    Pattern, ops="allreduce_rmsnorm", rows="gemm_allreduce_rmsnorm", dtype=torch.bfloat16
)
apart = partial(Pattern, ops="gemm_allreduce", dtype=torch.bfloat16)
NORMS = {
    "half layer, rms_norm": fused(half_layer(plain_norm), _HALF),
    "half layer, Llama": fused(half_layer(llama_norm), _HALF),
    "half layer, Gemma": fused(half_layer(gemma_norm), _HALF),
    "half layer in float16": fused(half_layer(llama_norm), _HALF, dtype=torch.float16),
    "half layer with a bias": fused(
        lambda c, x, w, residual, gain, b: llama_norm((c.all_reduce(linear(x, w)) + b) + residual, gain), (*_HALF, (16,))),
    "two half layers": fused(
        two_half_layers, (*_HALF, (16, 16)), ops="allreduce_rmsnorm allreduce_rmsnorm",
        rows="gemm_allreduce_rmsnorm gemm_allreduce_rmsnorm"),
    "all-reduce and norm": fused(embedding_and_norm, ((2, 3, 16), (16,)), rows="allreduce_rmsnorm"),
    "GEMM, all-reduce and norm": fused(
        lambda c, x, w, gain: llama_norm(c.all_reduce(linear(x, w)), gain), ((6, 5), (16, 5), (16,))),
    # More rows than gain, columns that the kernels do not take, a dtype likewise, another reader in between, another
    # axis, a gain that is computed.
    "more rows": apart(half_layer(llama_norm), ((513, 5), (16, 5), (513, 16), (16,))),
    "odd columns": apart(half_layer(llama_norm), ((3, 5), (12, 5), (3, 12), (12,))),
    "norms of parts of rows": apart(
        lambda c, x, w, gain: plain_norm(c.all_reduce((x @ w).view(6, 4, 8)), gain), ((6, 16), (16, 32), (8,))),
    "float32": apart(half_layer(plain_norm), _HALF, dtype=torch.float32),
    "the product read, too": apart(
        lambda c, x, w, residual, gain: (lambda s: (llama_norm(residual + s, gain), s.relu()))(c.all_reduce(linear(x, w))),
        _HALF),
    "the squares read, too": apart(squares_read, ((6, 5), (16, 5), (16,))),
    "a gain of the sum": apart(
        lambda c, x, w, residual: (lambda s: llama_norm(s, s[0, 0]))(residual + c.all_reduce(linear(x, w))), _HALF[:3]),
}  # fmt: skip


@pytest.mark.ranks((2, "gloo"))
def test_inductor_fuses_norms_after_all_reduces(failures: Failures) -> None:
    """Bit for bit as PyTorch's operators without a compiler: the op on CPU is those, and no code is generated beside it."""
    check_patterns(failures, NORMS)
