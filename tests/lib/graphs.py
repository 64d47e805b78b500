"""Graphs as Inductor's passes see them, run or only looked at, without the time that its code generation takes."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch.fx import GraphModule

from checks import Failures
from overlap_torch._inductor.fusion import Settings, fuse
from overlap_torch._inductor.report import FusionRow

COLLECTIVES = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor")
OPS = ("gemm_allreduce", "gemm_reducescatter", "allgather_gemm", "allreduce_rmsnorm")


class Graphs:
    """A backend of ``torch.compile``: applies the pass to each graph, as Inductor has it at that point, and keeps the rows.

    ``runs``: whether compiled code computes; otherwise its results are zeros, and nothing is communicated.
    """

    def __init__(self, runs: bool = True, settings: Settings | None = None) -> None:
        self.rows: list[FusionRow] = []
        self.ops: Counter[str] = Counter()  # of the graphs, after the pass
        self.graphs: list[GraphModule] = []
        self._runs = runs
        self._settings = settings or Settings()
        self.backend = aot_autograd(
            fw_compiler=self._compile,
            bw_compiler=self._compile,
            decompositions=select_decomp_table(),
            partition_fn=min_cut_rematerialization_partition,
        )

    def compile(self, function: Callable[..., Any], **keywords: Any) -> Callable[..., Any]:
        torch._dynamo.reset()
        return torch.compile(function, backend=self.backend, fullgraph=True, **keywords)

    def _compile(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        view_to_reshape(graph)
        self.rows += fuse(graph.graph, self._settings)
        graph.recompile()
        self.graphs.append(graph)
        self.ops += count(graph)
        return make_boxed_func(graph.forward if self._runs else zeros_like_results(graph))


def count(graph: GraphModule) -> Counter[str]:
    """Calls of collectives and of this package's ops in a graph."""
    names = (
        node.target._overloadpacket.__name__
        for node in graph.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
    )
    return Counter(name for name in names if name in COLLECTIVES + OPS)


def expect_counts(
    failures: Failures,
    graphs: Graphs,
    fused: dict[tuple[str, str], int],
    apart: dict[tuple[str, str], int],
) -> None:
    """``fused``: ops, and ``apart``: collectives that have no GEMM beside them, by direction and as counted by hand."""
    found = Counter((row["direction"], row["op"]) for row in graphs.rows if row["op"])
    failures.equal(found, Counter(fused), "fused")
    others = [row for row in graphs.rows if not row["op"]]
    found = Counter((row["direction"], row["collective"]) for row in others)
    failures.equal(found, Counter(apart), "not fused")
    missed = [row["why"] for row in others if row["missed"]]
    failures.expect(None if not missed else f"{missed}", "missed")
    calls = [sum(graphs.ops[name] for name in names) for names in (OPS, COLLECTIVES)]
    right = [sum(fused.values()), sum(apart.values())]  # a bias makes no collective of its own
    failures.expect(None if calls == right else f"{graphs.ops}", "calls")


def zeros_like_results(graph: GraphModule) -> Callable[..., list[Any]]:
    """A function in the graph's place that computes nothing."""
    (results,) = next(node for node in graph.graph.nodes if node.op == "output").args

    def function(*inputs: Any) -> list[Any]:
        return [
            torch.zeros(
                [_hint(size) for size in value.shape], dtype=value.dtype, device=value.device
            )
            if isinstance(value := getattr(result, "meta", {}).get("val"), torch.Tensor)
            else None
            for result in results
        ]

    return function


def _hint(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else size.node.hint
