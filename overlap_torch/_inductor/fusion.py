"""The pass over a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node

from overlap_torch._inductor.editing import (
    KINDS,
    WAIT,
    NotFused,
    arguments,
    collective_name,
    forget_intermediate_sizes,
    is_tensor,
    is_view,
    module_path,
    name_of,
    permutation,
    source_line,
    value,
)
from overlap_torch._inductor.gathers import fuse_gather
from overlap_torch._inductor.norms import fuse_norm
from overlap_torch._inductor.reductions import fuse_reduction
from overlap_torch._inductor.report import FusionRow
from overlap_torch._ops.group import world_size


@dataclass(frozen=True)
class Settings:
    """The settings of :func:`overlap_torch.inductor.enable`. ``groups``: names, or None for all."""

    strict: bool = False
    groups: tuple[str, ...] | None = None


def fuse(graph: Graph, settings: Settings) -> list[FusionRow]:
    """Puts the ops into a graph, in place; a row for each of its collectives, in the graph's order.

    The result depends only on the graph and the settings, so all ranks do the same.
    """
    collectives = [node for node in graph.nodes if collective_name(node) is not None]
    if not collectives:
        return []
    forget_intermediate_sizes(graph)
    rows = {node: _row(node) for node in collectives}
    # AOTAutograd calls the gradients that reach a backward graph tangents.
    inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
    backward = any(name.startswith("tangents") for name in inputs)
    # Reductions first, because they gain more from a GEMM that is between two collectives.
    for node in collectives:
        rows[node]["direction"] = "backward" if backward else "forward"
        if node.target in KINDS and KINDS[node.target] != "all_gather":
            _fuse_reduction(node, rows[node], settings)
    gathers: dict[tuple[Node, str], list[Node]] = {}
    for node in collectives:
        if KINDS.get(node.target) == "all_gather":
            gathers.setdefault((node.args[0], rows[node]["group"]), []).append(node)
        elif node.target not in KINDS:
            rows[node]["why"] = "the pass knows no op for it"
    for nodes in gathers.values():
        if not rows[nodes[0]]["op"]:  # else they are scales that were gathered with their tensor
            _fuse_gathers(nodes, rows, settings)
    for node in reversed(graph.nodes):
        if not node.users and (is_view(node) or permutation(node) is not None):
            graph.erase_node(node)  # the transposition of a weight for its GEMM
    stable_topological_sort(graph)
    graph.lint()
    return list(rows.values())


def _fuse_reduction(node: Node, row: FusionRow, settings: Settings) -> None:
    try:
        _check_group(row, settings)
    except NotFused as error:
        row["why"], row["missed"] = error.why, error.missed
        return
    results = [user for user in node.users if user.target is WAIT]
    try:
        output, of_op = fuse_reduction(node, row["group"], row["world_size"])
        row.update(of_op)
        results = [output]
    except NotFused as error:
        row["why"], row["missed"] = error.why, error.missed
    op = fuse_norm(results[0]) if len(results) == 1 else None
    if op is None:
        return
    if not row["op"]:  # no GEMM: the sum and its norm are one op
        row["why"], row["missed"], row["note"] = "", False, row["why"]
    row["op"] = op


def _fuse_gathers(
    nodes: Sequence[Node], rows_of: dict[Node, FusionRow], settings: Settings
) -> None:
    rows = [rows_of[node] for node in nodes]
    try:
        _check_group(rows[0], settings)
        gemms, scale_gathers = fuse_gather(nodes, rows[0]["group"], rows[0]["world_size"])
    except NotFused as error:
        for row in rows:
            row["why"], row["missed"] = error.why, error.missed
        return
    op = "allgather_gemm" if gemms == 1 else "allgather_gemm.weights"
    shared = f"{len(rows)} gathers of one tensor share the op" if len(rows) > 1 else ""
    scales = [rows_of[node] for node in scale_gathers]
    for row in rows + scales:
        row["op"], row["gemms"], row["note"] = op, gemms, shared
        row["why"], row["missed"] = "", False
    for row in scales:
        row["note"] = f"the scales of the gather {rows[0]['node']}, by the same op"


def _check_group(row: FusionRow, settings: Settings) -> None:
    if settings.groups is not None and row["group"] not in settings.groups:
        raise NotFused(f"it is of group {row['group']!r}, which groups= leaves out", missed=False)
    if row["world_size"] == 0:
        raise NotFused(f"no process group is named {row['group']!r} on this rank", missed=False)
    if row["world_size"] == 1:
        raise NotFused("a group of one has nothing to communicate", missed=False)


def _row(node: Node) -> FusionRow:
    group = str(arguments(node).get("group_name") or "")
    # The input, or the result of a collective of several tensors.
    tensor = next((value(one) for one in (*node.args[:1], node) if is_tensor(one)), None)
    return {
        "graph": 0,
        "direction": "",
        "collective": collective_name(node) or "",
        "node": node.name,
        "shape": [] if tensor is None else [str(size) for size in tensor.shape],
        "dtype": "" if tensor is None else name_of(tensor.dtype),
        "group": group,
        "world_size": _world_size(group),
        "op": "",
        "gemms": 0,
        "missed": False,
        "why": "",
        "note": "",
        "module": module_path(node),
        "source": source_line(node),
    }


def _world_size(group: str) -> int:
    """The group's number of ranks; 0 if this rank knows no group of this name."""
    try:
        return world_size(group)
    except ValueError:
        return 0
