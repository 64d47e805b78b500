"""``overlap_torch.report()``: the problems that the ops ran, their plans and gains, and why others ran as the sequence."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import torch
from torch.compiler import is_compiling

from overlap_torch._ops import (
    library,  # noqa: F401  (the library holds the ops)
    ways,
)
from overlap_torch._symm_mem import replace
from overlap_torch._text import first_of, table
from overlap_torch.plan import Plan
from overlap_torch.plan._names import enum_name
from overlap_torch.plan.files import decode
from overlap_torch.plan.types import Schedule

_LAST_INPUT = "_overlap_last_input"  # a layer's attribute: the shape of its forward's last input
_FALLBACK = "_overlap_fallback"  # a module's attribute: why its style is PyTorch's
_NOTE = "_overlap_note"  # a module's attribute: gives lines for the report
# Why a layer calls no op, though others may call the same problem.
_FOREIGN = "PyTorch's linear map"
_MOST_READERS = 6  # layers that may share a gather, for which all combinations are tried


class ReportRow(TypedDict):
    """One plan by which a problem ran, or one reason for having none.

    ``layer``: the module's path in the model; several paths, separated by commas, if they share the call; empty for calls
    outside layers, and without a model. ``direction``: ``forward`` or ``backward`` of the layer, or empty. ``op``, ``m``,
    ``n``, ``k``, ``dtype``, ``world_size``: the problem, as in :class:`overlap_torch.plan.Problem`; the op is empty and the
    numbers are 0 in the row of a layer that called no op. ``group``: the process group's name. ``device``: ``cpu`` or
    ``cuda``. ``calls``: how often this process called the problem on the group; layers with the same problem show the same
    number. ``overlapped``: whether communication runs beside the GEMM. ``plan``: None if no plan ran. ``captured``: True
    for the plan that CUDA graphs run instead of a plan with windows. ``predicted_us``, ``sequence_us``: the cost model's
    times of the plan, and of a GEMM and a collective one after the other, in microseconds; None if the model has none.
    ``gain``: ``sequence_us / predicted_us``, or None. ``why``: why nothing overlapped; empty if something did.
    """

    layer: str
    direction: str
    op: str
    m: int
    n: int
    k: int
    dtype: str
    world_size: int
    group: str
    device: str
    calls: int
    overlapped: bool
    plan: Plan | None
    captured: bool
    predicted_us: float | None
    sequence_us: float | None
    gain: float | None
    why: str


class Report(list[ReportRow]):
    """The result of :func:`overlap_torch.report`: a list of dicts, :class:`ReportRow`; ``str()`` of it is a table.

    The table has one line for layers that differ only in the numbers in their paths. ``notes``: lines after the table, on
    the replacements of :func:`overlap_torch.replace_symm_mem`, on the transport of calls of experts and attention, on the model's
    norms after ``integrations.transformers.fuse_norms``, and on groups without CUDA IPC; empty if there is none of these.
    """

    notes: Sequence[str] = ()

    def __str__(self) -> str:
        return "\n".join([self._table(), *self.notes])

    def _table(self) -> str:
        if not self:
            return "No op of overlap_torch that has plans has been called."
        lines: dict[tuple[str, ...], list[str]] = {}
        for row in self:
            cells = _cells(row)
            lines.setdefault((re.sub(r"\d+", "*", row["layer"]), *cells), []).append(row["layer"])
        titles = ("layer", "op", "M x N x K", "ranks", "calls", "plan", "gain", "why not")
        rows = [(first_of(layers), *cells) for (_, *cells), layers in lines.items()]
        return "\n".join(table([titles, *rows]))


def _cells(row: ReportRow) -> tuple[str, ...]:
    op = f"{row['op']}, backward" if row["direction"] == "backward" else row["op"]
    problem = f"{row['m']} x {row['n']} x {row['k']} {row['dtype']}" if op else ""
    ranks = f"{row['world_size']} {row['device']}" if op else ""
    gain = "" if row["gain"] is None else f"{row['gain']:.2f}x"
    return op, problem, ranks, str(row["calls"]), _plan_in_words(row), gain, row["why"]


def _plan_in_words(row: ReportRow) -> str:
    plan = row["plan"]
    if plan is None:
        return ""
    where = ", in CUDA graphs" if row["captured"] else ""
    if plan.schedule == Schedule.SEQUENTIAL:
        return f"sequence{where}"
    chunks = len(plan.chunks)
    transport = enum_name(plan.chunks[0].transport) if plan.chunks else ""
    return (
        f"{chunks} chunk{'s' if chunks > 1 else ''}, {transport}, {enum_name(plan.kernel)}{where}"
    )


# --- the notes of layers --------------------------------------------------------------------------------------


def note_call(layer: torch.nn.Module, input: torch.Tensor) -> None:
    """Notes that a layer's forward was called. Compiled code notes nothing."""
    if not is_compiling():
        layer.__dict__[_LAST_INPUT] = input.shape


def add_note(module: torch.nn.Module, lines: Callable[[], Iterable[str]]) -> None:
    """Adds lines to the end of the reports of models with this module."""
    module.__dict__[_NOTE] = lines


def remove_note(module: torch.nn.Module) -> None:
    del module.__dict__[_NOTE]


def note_fallback(module: torch.nn.Module, why: str) -> None:
    """Notes that a style or a layer left this module to another style or layer, such as PyTorch's, for the reason ``why``. Compiled code
    notes nothing."""
    if not is_compiling():
        module.__dict__[_FALLBACK] = why


def remove_fallback(module: torch.nn.Module) -> None:
    """Removes that note, if there is one, after a call that was not left to another layer. Compiled code removes nothing."""
    if not is_compiling():
        module.__dict__.pop(_FALLBACK, None)


def note_foreign(module: torch.nn.Module, weight: torch.Tensor) -> None:
    """Notes that no op takes a weight of this class."""
    if not is_compiling():
        inner = getattr(weight, "_local_tensor", weight)
        note_fallback(module, f"{_FOREIGN}: a weight is a {type(inner).__name__}")


@dataclass
class _Layer:
    """An overlapping layer: the problems that it can have."""

    name: str
    group: str
    world_size: int
    columns: bool  # it cuts N over the ranks, else K
    n: int  # N and K of its GEMM on one rank
    k: int
    rows: set[int] = field(default_factory=set)  # the possible M after its last input
    called: bool = False


def _layers(model: torch.nn.Module) -> Iterator[_Layer]:
    for name, module in model.named_modules():
        # Attributes of the layers' classes: they cut N over the ranks, else K; parameters are this rank's parts, else DTensors.
        kind = getattr(type(module), "_overlap_columns", None)
        holds_parts = getattr(type(module), "_overlap_holds_parts", False)
        if kind is None or module.__dict__.get(_FALLBACK, "").startswith(_FOREIGN):
            continue
        world_size = module.world_size
        weights = [
            parameter
            for key, parameter in module.named_parameters()
            if key.split(".")[0] in ("weight", "weights", "parametrizations")
            and parameter.dim() == 2
        ]
        if not weights:
            continue
        parts = 1 if holds_parts else world_size
        if kind:
            n = sum(-(-weight.shape[0] // parts) for weight in weights)
            k = weights[0].shape[1]
        else:
            n, k = weights[0].shape[0], -(-weights[0].shape[1] // parts)
        shape = module.__dict__.get(_LAST_INPUT)
        layer = _Layer(name, module.group, world_size, kind, n, k, called=shape is not None)
        if shape is not None and all(isinstance(size, int) for size in shape):
            layer.rows = _possible_rows(shape[:-1], world_size)
        yield layer


def _possible_rows(leading: Sequence[int], world_size: int) -> set[int]:
    """The possible M, if none or one of these dims is divided among the ranks, with padding to equal parts."""
    total = math.prod(leading)
    rows = {total, total * world_size}
    for size in leading:
        if size > 0:
            rows.add(total // size * (-(-size // world_size) * world_size))
    return rows


def _direction(problem: ReportRow, columns: bool, n: int, k: int) -> str | None:
    """The direction in which layers of these features call a problem of its sizes; None if they do not.

    Column layers gather forward and reduce backward, row layers the other way round.
    """
    forward = (problem["op"] == "allgather_gemm") == columns
    sizes = (n, k) if forward else (k, n)
    if problem["op"] == "gemm_alltoall" or sizes != (problem["n"], problem["k"]):
        return None
    return "forward" if forward else "backward"


# --- the report -----------------------------------------------------------------------------------------------


def report(model: torch.nn.Module | None = None) -> Report:
    """The ops' calls so far in this process, and the reasons where nothing overlapped; call it after a step::

        loss.backward()
        print(overlap_torch.report(model))

    Args:
        model: the model whose layers have the rows. None: all problems of all groups, without layers.

    Returns:
        A list of :class:`ReportRow`, dicts, in the order of the layers in the model; problems that no layer called follow.
        A layer's last input and its features identify its problems. If no layer's last input fits, as for earlier inputs of
        other sizes and in compiled models, only the features decide, and all layers with them are named. Modules that an
        overlapping style left to PyTorch's style, and calls that a layer of :mod:`overlap_torch.integrations.megatron` left
        to Megatron's, have a row with the reason. ``str()`` makes a table; times are in microseconds.

    Calls are counted in this process since each process group was made; CUDA graphs count at capture, not at replay.
    The report does not communicate, and need not be called on every rank.
    """
    if model is not None and not isinstance(model, torch.nn.Module):
        raise TypeError(f"report takes a module or None, but it is a {type(model).__name__}")
    found = Report(_rows(model))
    modules = () if model is None else model.modules()
    notes = (module.__dict__.get(_NOTE, tuple) for module in modules)
    found.notes = [
        *(replace.lines() if replace.is_replaced() else ()),
        *ways.lines(),
        *_peer_lines(found),
        *itertools.chain.from_iterable(note() for note in notes),
    ]
    return found


def _peer_lines(rows: Iterable[ReportRow]) -> Iterator[str]:
    """The groups on CUDA to which CUDA IPC is refused, or for which OVERLAP_PEER_MEMORY decides."""
    for group in dict.fromkeys(row["group"] for row in rows if row["device"] == "cuda"):
        text = torch.ops.overlap.peer_memory(group)
        if "CUDA IPC is refused" in text or "OVERLAP_PEER_MEMORY" in text:
            yield f"group '{group}', memory of peers: {text}"


def _rows(model: torch.nn.Module | None) -> list[ReportRow]:
    known = [_row(columns) for columns in torch.ops.overlap.plan_table()]
    if model is None:
        return known
    rows: list[ReportRow] = []
    places = {name: i for i, (name, _) in enumerate(model.named_modules())}
    layers = list(_layers(model))
    taken: set[int] = set()
    called = [layer for layer in layers if layer.called]
    steps = (
        (called, True),  # by the last input
        (called, False),  # by inputs of other sizes
        ([layer for layer in layers if not layer.called], False),  # compiled
    )
    for candidates, by_rows in steps:
        found: set[int] = set()
        for index, problem in enumerate(known):
            if index in taken:
                continue
            for layers_of, direction in _callers(problem, candidates, by_rows):
                name = ", ".join(layer.name for layer in layers_of)
                rows.append({**problem, "layer": name, "direction": direction})
                found.add(index)
        taken |= found
    named = {name for row in rows for name in row["layer"].split(", ")}
    rows += [_without_call(layer) for layer in layers if layer.name not in named]
    for name, module in model.named_modules():
        if why := module.__dict__.get(_FALLBACK):
            rows.append(_empty_row(name, why))
    rows.sort(key=lambda row: (places[row["layer"].split(", ")[0]], row["direction"] == "backward"))
    return rows + [problem for index, problem in enumerate(known) if index not in taken]


def _row(columns: Mapping[str, str]) -> ReportRow:
    code = [int(number) for number in columns["plan"].split()]
    predicted, sequence = (
        float(columns[name]) if columns[name] else None for name in ("predicted_us", "sequence_us")
    )
    return {
        "layer": "",
        "direction": "",
        **{name: columns[name] for name in ("op", "dtype", "group", "device", "why")},
        **{name: int(columns[name]) for name in ("m", "n", "k", "world_size", "calls")},
        **{name: columns[name] == "1" for name in ("overlapped", "captured")},
        "plan": decode(code) if code else None,
        "predicted_us": predicted,
        "sequence_us": sequence,
        "gain": sequence / predicted if predicted and sequence else None,
    }


def _callers(
    problem: ReportRow, layers: Sequence[_Layer], by_rows: bool
) -> list[tuple[Sequence[_Layer], str]]:
    """The layers that may have called it, each with a direction; or those that may have done so together."""
    fitting = [
        layer
        for layer in layers
        if layer.group == problem["group"] and (not by_rows or problem["m"] in layer.rows)
    ]
    found: list[tuple[Sequence[_Layer], str]] = []
    for layer in fitting:
        direction = _direction(problem, layer.columns, layer.n, layer.k)
        if direction is not None:
            found.append(([layer], direction))
    if found:
        return found
    # Siblings that read one gathered input: their GEMMs are one problem.
    readers: dict[tuple[str, int], list[_Layer]] = {}
    for layer in fitting:
        if layer.columns:
            parent = layer.name.rpartition(".")[0]
            readers.setdefault((parent, layer.k), []).append(layer)
    for (_, k), siblings in readers.items():
        count = len(siblings)  # of two layers or more together, the most first
        counts = range(count, 1, -1) if count <= _MOST_READERS else (count,)
        sets = (itertools.combinations(siblings, size) for size in counts)
        for together in itertools.chain.from_iterable(sets):
            direction = _direction(problem, True, sum(layer.n for layer in together), k)
            if direction is not None:
                found.append((together, direction))
                break
    return found


def _without_call(layer: _Layer) -> ReportRow:
    if not layer.called:
        why = "not called so far"
    elif layer.world_size == 1:
        why = "a group of one has nothing to communicate"
    else:
        why = "no op so far: its input is whole on every rank, and its gradient, where needed, is reduced elsewhere"
    return _empty_row(layer.name, why, layer.world_size, layer.group)


def _empty_row(layer: str, why: str, world_size: int = 0, group: str = "") -> ReportRow:
    texts = dict.fromkeys(("direction", "op", "dtype", "device"), "")
    numbers = dict.fromkeys(("m", "n", "k", "calls"), 0)
    nothing = dict.fromkeys(("plan", "predicted_us", "sequence_us", "gain"))
    place = {"layer": layer, "world_size": world_size, "group": group, "why": why}
    return {**texts, **numbers, **nothing, **place, "overlapped": False, "captured": False}
