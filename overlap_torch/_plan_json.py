"""Plans as JSON, the form in which they are saved, read and edited by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from overlap_torch._plan import (
    BandRun,
    Chunk,
    Collective,
    DType,
    Kernel,
    Layout,
    Op,
    Plan,
    Problem,
    Resources,
    Schedule,
    Transport,
    validate,
)

_VERSION = 1  # of the fields below; it changes when they do

_Enum = TypeVar("_Enum", Op, DType, Schedule, Kernel, Transport, Layout, Collective)


def to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as dicts, lists, strings and numbers, the form in which it is saved as JSON."""
    problem, resources = plan.problem, plan.resources
    return {
        "version": _VERSION,
        "problem": {
            "op": enum_name(problem.op),
            "m": problem.m,
            "n": problem.n,
            "k": problem.k,
            "dtype": enum_name(problem.dtype),
            "world_size": problem.world_size,
        },
        "schedule": enum_name(plan.schedule),
        "kernel": enum_name(plan.kernel),
        "tile_m": plan.tile_m,
        "tile_n": plan.tile_n,
        "cluster_m": plan.cluster_m,
        "layout": enum_name(plan.layout),
        "collective": enum_name(plan.collective),
        "bands": [{"tile_rows": run.tile_rows, "count": run.count} for run in plan.bands],
        "chunks": [
            {
                "tiles": chunk.tiles,
                "transport": enum_name(chunk.transport),
                "max_ctas": chunk.max_ctas,
            }
            for chunk in plan.chunks
        ],
        "resources": {
            "comm_sms": resources.comm_sms,
            "smem_pad_bytes": resources.smem_pad_bytes,
            "window": resources.window,
            "finish_ctas": resources.finish_ctas,
            "lanes": resources.lanes,
        },
    }


def from_dict(data: dict[str, Any]) -> Plan:
    """The plan that :func:`to_dict` took apart. ValueError for a missing, unknown or bad field."""
    if not isinstance(data, dict):
        raise ValueError(f"a plan is a dict with the fields that to_dict writes, not {data!r}")
    if data.get("version") != _VERSION:
        raise ValueError(
            f"plan has version {data.get('version')!r}, this release reads {_VERSION}: "
            "make the plan again and save it"
        )
    _check_fields(
        "plan",
        data,
        "version problem schedule kernel tile_m tile_n cluster_m layout collective bands chunks resources",
    )
    problem, resources = data["problem"], data["resources"]
    _check_fields("plan's problem", problem, "op m n k dtype world_size")
    _check_fields("plan's resources", resources, "comm_sms smem_pad_bytes window finish_ctas lanes")
    for name in ("bands", "chunks"):
        if not isinstance(data[name], list):
            raise ValueError(f"plan's {name} are {data[name]!r}, expected a list")
    for run in data["bands"]:
        _check_fields("plan's band run", run, "tile_rows count")
    for chunk in data["chunks"]:
        _check_fields("plan's chunk", chunk, "tiles transport max_ctas")

    try:
        plan = Plan()
        plan.problem = Problem(
            m=problem["m"],
            n=problem["n"],
            k=problem["k"],
            dtype=enum_member(DType, problem["dtype"]),
            world_size=problem["world_size"],
            op=enum_member(Op, problem["op"]),
        )
        plan.schedule = enum_member(Schedule, data["schedule"])
        plan.kernel = enum_member(Kernel, data["kernel"])
        plan.tile_m, plan.tile_n, plan.cluster_m = data["tile_m"], data["tile_n"], data["cluster_m"]
        plan.layout = enum_member(Layout, data["layout"])
        plan.collective = enum_member(Collective, data["collective"])
        plan.bands = [BandRun(run["tile_rows"], run["count"]) for run in data["bands"]]
        plan.chunks = [
            Chunk(chunk["tiles"], enum_member(Transport, chunk["transport"]), chunk["max_ctas"])
            for chunk in data["chunks"]
        ]
        plan.resources = Resources(**resources)
    except TypeError as error:
        raise ValueError(f"plan has a field of a wrong type or range: {error}") from error
    validate(plan)
    return plan


def to_json(plan: Plan, *, indent: int | None = 2) -> str:
    """The plan as JSON text, with a ``version`` field."""
    return json.dumps(to_dict(plan), indent=indent)


def from_json(text: str) -> Plan:
    """The plan that :func:`to_json` wrote. ValueError for text that is no JSON or no valid plan."""
    return from_dict(json.loads(text))


def save(plan: Plan, path: str | Path) -> None:
    """Writes the plan to a JSON file."""
    Path(path).write_text(to_json(plan) + "\n", encoding="utf-8")


def load(path: str | Path) -> Plan:
    """Reads the plan that :func:`save` wrote."""
    return from_json(Path(path).read_text(encoding="utf-8"))


def enum_name(member: Any) -> str:
    """The name by which JSON and the op library know the member."""
    return member.name.lower()


def enum_member(enum: type[_Enum], value: Any) -> _Enum:
    """A member of the enumeration, given itself or its name in lower case."""
    if isinstance(value, enum):
        return value
    names = {name.lower(): member for name, member in enum.__members__.items()}
    if not isinstance(value, str) or value not in names:
        raise ValueError(f"{enum.__name__} is {value!r}, allowed are {', '.join(names)}")
    return names[value]


def _check_fields(what: str, data: Any, names: str) -> None:
    expected = names.split()
    if not isinstance(data, dict):
        raise ValueError(f"{what} is {data!r}, expected a dict with {', '.join(expected)}")
    missing = [name for name in expected if name not in data]
    unknown = [name for name in data if name not in expected]
    if missing or unknown:
        raise ValueError(
            f"{what} lacks the fields {missing} and has the unknown fields {unknown}; "
            f"its fields are {expected}"
        )
