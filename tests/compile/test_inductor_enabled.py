"""The compile pass in Inductor: switched on and off, beside other passes, through the cache, and strict."""

import functools
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache
from torch.nn.functional import linear

import overlap_torch
from checks import Failures, message_of
from graphs import count, zeros_like_results
from layers import integers, my_part, ops_called
from operands import difference

inductor = overlap_torch.inductor


class Gather(torch.autograd.Function):
    """Rows of all ranks; backward sums what reaches them, and scatters it."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return functional.all_gather_tensor(x, 0, dist.group.WORLD)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return functional.reduce_scatter_tensor(grad, "sum", 0, dist.group.WORLD)


class Scatter(torch.autograd.Function):
    """The sum over the ranks, this rank's rows of it; backward gathers."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return functional.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return functional.all_gather_tensor(grad, 0, dist.group.WORLD)


def mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """As Megatron has it, by hand."""
    g = Gather.apply(x)
    return Scatter.apply(linear(linear(g, gate).relu() * linear(g, up), down))


def whole_mlp(*operands: torch.Tensor) -> torch.Tensor:
    x, gate, up, down = operands
    return linear(linear(x, gate).relu() * linear(x, up), down)


def bare(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Any:
    """GEMMs and collectives, and nothing that Inductor has to write a kernel for."""
    g = Gather.apply(x)
    return Scatter.apply(linear(linear(g, gate), down)), linear(g.detach(), up.detach())


ROWS = Counter(
    {
        ("forward", "all_gather", "allgather_gemm.weights", 2): 1,
        ("forward", "reduce_scatter", "gemm_reducescatter", 1): 1,
        ("backward", "all_gather", "allgather_gemm", 1): 1,
        ("backward", "reduce_scatter", "gemm_reducescatter", 2): 1,
    }
)


def rows_of(report: list[Any]) -> Counter[Any]:
    return Counter((row["direction"], row["collective"], row["op"], row["gemms"]) for row in report)


def operands_of(*leading: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """x, gate, up and down: the whole ones, and this rank's parts."""
    shapes = ((*leading, 8), (12, 8), (12, 8), (8, 12))
    whole = [integers(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    parts = [my_part(tensor, dim).clone() for tensor, dim in zip(whole, CUT, strict=True)]
    return [t.requires_grad_() for t in whole], [t.requires_grad_() for t in parts]


CUT = (0, 0, 0, 1)  # the dims that are cut over the ranks


def step(failures: Failures, compiled: Any, rows: int) -> None:
    """Forward and backward of the MLP against the whole one."""
    whole, parts = operands_of(rows, 3)
    expected = whole_mlp(*whole)
    weight = integers(*expected.shape, seed=9)
    (expected * weight).sum().backward()
    found = compiled(*parts)
    (found * my_part(weight, 0)).sum().backward()
    failures.expect(difference(found, my_part(expected.detach(), 0)), rows)
    for i, (own, right, dim) in enumerate(zip(parts, whole, CUT, strict=True)):
        failures.expect(difference(own.grad, my_part(right.grad, dim)), "gradient", i, rows)


def bare_step(failures: Failures, compiled: Any) -> None:
    whole, parts = operands_of(4)
    expected = linear(linear(whole[0], whole[1]), whole[3])
    weight = integers(*expected.shape, seed=9)
    expected.backward(weight)
    found, other = compiled(*parts)
    found.backward(my_part(weight, 0).contiguous())
    failures.expect(difference(found, my_part(expected.detach(), 0)))
    failures.expect(difference(other, linear(whole[0], my_part(whole[2], 0))), "up")
    for i in (0, 1, 3):
        right = my_part(whole[i].grad, CUT[i])
        failures.expect(difference(parts[i].grad, right), "gradient", i)


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
@pytest.mark.seconds(400)
def test_inductor_compiles_and_reports_out_of_its_cache(failures: Failures) -> None:
    rows = ROWS.copy()
    del rows["backward", "reduce_scatter", "gemm_reducescatter", 2]
    rows["backward", "reduce_scatter", "gemm_reducescatter", 1] = 1
    inductor.report(clear=True)
    with fresh_cache():
        for again in range(2):
            torch._dynamo.reset()
            counters.clear()
            compiled = torch.compile(bare, backend=inductor.backend, fullgraph=True)
            names = ops_called(functools.partial(bare_step, failures, compiled))
            failures.equal(names, {"allgather_gemm", "gemm_reducescatter"}, "ops", again)
            failures.equal(counters["inductor"]["fxgraph_cache_hit"], 2 * again, again)
            found = inductor.report(clear=True)
            failures.equal(rows_of(found), rows, again)
            failures.holds("4 of 4 collectives fused, 0 missed", str(found), again)
    failures.expect(None if not inductor.report() else "is not cleared", "report")


@pytest.mark.long  # Inductor compiles C++ or Triton
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
@pytest.mark.seconds(400)
def test_inductor_compiles_dynamic_rows_once(failures: Failures) -> None:
    torch._dynamo.reset()
    inductor.report(clear=True)
    with inductor.enable(strict=True):
        compiled = torch.compile(mlp, fullgraph=True, dynamic=True)
        for rows in (4, 6, 10):
            step(failures, compiled, rows)
    found = inductor.report(clear=True)
    failures.equal(rows_of(found), ROWS, "rows")


@pytest.mark.ranks((2, "gloo"))
def test_inductor_strict_raises_for_what_is_missed(failures: Failures) -> None:
    """For a missed collective, and not for one that has no GEMM beside it."""

    def missed(x, w):
        y = x @ w
        return functional.all_reduce(y, "sum", dist.group.WORLD), y.relu()

    def apart(x, w):
        return functional.all_reduce(x.relu(), "sum", dist.group.WORLD) @ w

    def compiler(gm, inputs):
        config.post_grad_custom_pre_pass(gm.graph)
        return zeros_like_results(gm)

    messages = []
    for function in (missed, apart):
        torch._dynamo.reset()
        backend = aot_autograd(fw_compiler=compiler)
        try:
            with inductor.enable(strict=True), torch.no_grad():
                torch.compile(function, backend=backend)(torch.ones(4, 5), torch.ones(5, 6))
            messages.append("")
        except Exception as error:  # Dynamo wraps the exceptions of a backend
            failures.equal(type(error.inner_exception), inductor.MissedCollective)
            messages.append(str(error))
    failures.equal(messages[1], "")
    for part in (
        "MissedCollective",
        "test_inductor_enabled.py",
        "its GEMM's product is also read by aten.relu",
    ):
        failures.holds(part, messages[0])


class Other(CustomGraphPass):
    """A pass that stood in the slot before."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: list[Counter[str]] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.seen.append(count(graph.owning_module))

    def uuid(self) -> str:
        return self.name


def test_inductor_key_says_when_norms_are_fused() -> None:
    """With OVERLAP_INVARIANCE=batch no norm is, so that its bits do not depend on the number of rows."""
    show = "from overlap_torch import inductor as i; i.enable(); print(i.config.post_grad_custom_pre_pass.uuid())"
    keys = [
        subprocess.check_output(
            [sys.executable, "-c", show], env={**os.environ, "OVERLAP_INVARIANCE": how}
        )
        for how in ("none", "batch")
    ]
    assert keys[0] != keys[1]


@pytest.mark.ranks((2, "gloo"))
def test_inductor_chains_with_the_pass_before_it(failures: Failures) -> None:
    """The passes in the slot over time, and the keys."""
    found: dict[str, Any] = {"before": config.post_grad_custom_pre_pass is None}
    enabled = inductor.enable()
    plain = config.post_grad_custom_pre_pass
    found["plain key"] = plain.uuid() is not None
    with inductor.enable(strict=True):  # twice is once
        strict = config.post_grad_custom_pre_pass
        found["not nested"] = strict.previous is None
        found["another key"] = strict.uuid() not in (None, plain.uuid())
    found["restored"] = config.post_grad_custom_pre_pass is plain
    found["context"] = enabled is not None
    inductor.disable()
    found["disabled"] = config.post_grad_custom_pre_pass is None
    inductor.disable()

    first = Other("first")
    config.post_grad_custom_pre_pass = first
    inductor.enable(groups=[dist.group.WORLD])
    chained = config.post_grad_custom_pre_pass
    found["chained key"] = chained.uuid() not in (None, plain.uuid())
    graphs = {}

    def keep(gm, inputs):
        graphs["gm"] = gm
        return zeros_like_results(gm)

    torch._dynamo.reset()
    x, w = torch.ones(4, 5), torch.ones(5, 6)
    backend = aot_autograd(fw_compiler=keep)
    with torch.no_grad():
        torch.compile(
            lambda x, w: functional.all_reduce(x @ w, "sum", dist.group.WORLD), backend=backend
        )(x, w)
    chained(graphs["gm"].graph)
    found["first sees the collective"] = first.seen == [Counter({"all_reduce": 1})]
    found["then it is fused"] = count(graphs["gm"]) == Counter({"gemm_allreduce": 1})
    inductor.disable()
    found["the first is left"] = config.post_grad_custom_pre_pass is first
    found["refused"] = "Other object" in message_of(inductor.disable)
    config.post_grad_custom_pre_pass = lambda graph: None
    with inductor.enable():
        found["no key beside a pass without one"] = config.post_grad_custom_pre_pass.uuid() is None
    config.post_grad_custom_pre_pass = None
    failures.equal(len(found), 13)
    failures.equal([name for name, holds in found.items() if not holds], [])
