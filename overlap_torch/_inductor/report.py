"""The pass's record of every graph, kept where compiled graphs are cached."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import zlib
from typing import TypedDict

from torch._dynamo.utils import counters

from overlap_torch._text import first_of, table

# A graph that Inductor takes from its cache passes no pass. But what it counted when it was compiled is cached and counted
# again, so the rows are what is counted.
_PREFIX = "overlap_torch.inductor:"
_kept: dict[str, list[FusionRow]] = {}


class FusionRow(TypedDict):
    """A collective of a compiled graph, and its op or the reason for none.

    ``graph``: the graph's number in the report, from 0. ``direction``: ``forward`` (inference, too) or ``backward``.
    ``collective``: ``all_reduce``, ``reduce_scatter``, ``all_gather``, or another functional collective's name. ``node``: its
    name in the graph. ``shape``: of this rank's input, each size as text, since it may be symbolic. ``dtype``, ``group`` (its
    name), ``world_size``. ``op``: ``gemm_allreduce``, ``gemm_reducescatter``, ``gemm_allreduce_rmsnorm``, ``allreduce_rmsnorm``,
    ``allgather_gemm`` or ``allgather_gemm.weights`` if it is fused, else empty. ``gemms``: the number of fused GEMMs.
    ``missed``: whether it is not fused although its neighbour is a GEMM. ``why``: why it is not fused; empty if it is.
    ``note``: further remarks. ``module``: the module's path in the model, and ``source``: ``file:line: code`` in it; both
    are forward's, for backward too, and empty if the compiler knows none.
    """

    graph: int
    direction: str
    collective: str
    node: str
    shape: list[str]
    dtype: str
    group: str
    world_size: int
    op: str
    gemms: int
    missed: bool
    why: str
    note: str
    module: str
    source: str


class FusionReport(list[FusionRow]):
    """The result of :func:`overlap_torch.inductor.report`: a list of dicts, :class:`FusionRow`;
    ``str()`` of it is a table."""

    def __str__(self) -> str:
        if not self:
            return "No graph with a collective was compiled with overlap_torch.inductor."
        titles = ("graph", "collective", "input", "group", "fused into", "why not", "where")
        lines: dict[tuple[str, ...], list[str]] = {}
        for row in self:
            lines.setdefault(_cells(row), []).append(_place(row))
        text = table([titles, *((*cells, first_of(places)) for cells, places in lines.items())])
        fused = sum(bool(row["op"]) for row in self)
        missed = sum(row["missed"] for row in self)
        text.append(
            f"{fused} of {len(self)} collectives fused, {missed} missed, "
            f"{len(self) - fused - missed} with no GEMM to fuse"
        )
        return "\n".join(text)


def _cells(row: FusionRow) -> tuple[str, ...]:
    op = row["op"]
    if row["gemms"] > 1:
        op += f", {row['gemms']} GEMMs"
    if row["note"]:
        op += f" ({row['note']})"
    return (
        f"{row['graph']} {row['direction']}",
        row["collective"],
        f"{' x '.join(row['shape'])} {row['dtype']}",
        f"{row['group']} ({row['world_size']} ranks)",
        op,
        row["why"],
    )


def _place(row: FusionRow) -> str:
    """``blocks.0.mlp.down, model.py:39``."""
    line = re.match(r"(.*?:\d+)", row["source"])
    parts = (row["module"], os.path.basename(line[1]) if line else "")
    return ", ".join(part for part in parts if part)


def keep(rows: list[FusionRow]) -> None:
    """Notes a graph's rows, in this process and in what Inductor caches with the graph."""
    text = json.dumps(rows)
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    _kept[key] = rows
    packed = base64.b85encode(zlib.compress(text.encode())).decode()
    counters["inductor"][f"{_PREFIX}{key}:{packed}"] += 1


def report(clear: bool) -> FusionReport:
    """All graphs' rows, each graph once even if it was compiled several times; with ``clear`` it then forgets them."""
    counted = [name for name in counters["inductor"] if name.startswith(_PREFIX)]
    for name in counted:
        key, _, packed = name.removeprefix(_PREFIX).partition(":")
        if key not in _kept:
            _kept[key] = json.loads(zlib.decompress(base64.b85decode(packed)))
    rows = FusionReport(
        {**row, "graph": number} for number, graph in enumerate(_kept.values()) for row in graph
    )
    if clear:
        _kept.clear()
        for name in counted:
            del counters["inductor"][name]
    return rows
