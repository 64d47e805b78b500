"""Plans as JSON, the form in which they are saved, read and edited by hand.

The fields are those that the bound classes list in ``__fields__``: a type for each name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from overlap_torch._plan import Plan, Problem, Program, decode, encode, validate
from overlap_torch.plan._names import enum_member, enum_name

__all__ = [
    "decode", "encode", "from_dict", "from_json", "load", "save", "schema", "to_dict", "to_json",
]  # fmt: skip

# The version of the fields (csrc/plan/plan_fields.h): a release with other fields has another version. A plan's program
# has its own version, and is left out if there is none, as the ranks of a host are.
_VERSION = 1
_PROGRAM_VERSION = 1


def to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as dicts, lists, strings and numbers, the form in which it is saved as JSON."""
    data = {"version": _VERSION, **plain(plan)}
    if plan.program == Program():
        del data["program"]
    else:
        data["program"] = {"version": _PROGRAM_VERSION, **data["program"]}
    if plan.clique == 0:
        del data["clique"]
    return data


def from_dict(data: dict[str, Any]) -> Plan:
    """The plan that :func:`to_dict` made a dict of. Raises ValueError for a missing, unknown or bad field."""
    if not isinstance(data, dict):
        raise ValueError(f"a plan is a dict with the fields that to_dict writes, not {data!r}")
    data = _without_version("plan", data, _VERSION)
    program = data.get("program", {"version": _PROGRAM_VERSION, **plain(Program())})
    if isinstance(program, dict):
        program = _without_version("program", program, _PROGRAM_VERSION)
    try:
        plan = _read("plan", Plan, {"clique": 0, **data, "program": program})
    except TypeError as error:
        raise ValueError(f"plan has a field of a wrong type or range: {error}") from error
    validate(plan)
    return plan


def schema() -> dict[str, Any]:
    """The JSON schema (2020-12) of the result of :func:`to_dict`."""
    made = _schema(Plan)
    for data, version in ((made, _VERSION), (made["properties"]["program"], _PROGRAM_VERSION)):
        data["properties"]["version"] = {"const": version}
        data["required"].append("version")
    for name in ("program", "clique"):
        made["required"].remove(name)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def to_json(plan: Plan, *, indent: int | None = 2) -> str:
    """The plan as JSON text, with a ``version`` field."""
    return json.dumps(to_dict(plan), indent=indent)


def from_json(text: str) -> Plan:
    """The plan that :func:`to_json` wrote. Raises ValueError for text that is no JSON or no valid plan."""
    return from_dict(json.loads(text))


def save(plan: Plan, path: str | Path) -> None:
    """Writes the plan to a JSON file."""
    Path(path).write_text(to_json(plan) + "\n", encoding="utf-8")


def load(path: str | Path) -> Plan:
    """Reads the plan that :func:`save` wrote."""
    return from_json(Path(path).read_text(encoding="utf-8"))


def _without_version(what: str, data: dict[str, Any], version: int) -> dict[str, Any]:
    if data.get("version") != version:
        raise ValueError(
            f"{what} has version {data.get('version')!r}, this release reads {version}: "
            "make the plan again and save it"
        )
    return {name: data[name] for name in data if name != "version"}


def _schema(kind: Any) -> dict[str, Any]:
    """The schema of a field of this type, as :func:`_read` takes it."""
    if isinstance(kind, tuple):
        return {"type": "array", "items": _schema(kind[0])}
    if hasattr(kind, "__members__"):
        return {"enum": [enum_name(member) for member in kind.__members__.values()]}
    if not hasattr(kind, "__fields__"):
        return {"type": {bool: "boolean", int: "integer", float: "number"}[kind]}
    return {
        "type": "object",
        "properties": {name: _schema(field) for name, field in kind.__fields__.items()},
        "required": list(kind.__fields__),
        "additionalProperties": False,
    }


def plain(value: Any) -> Any:
    """A field's value in JSON's types."""
    if hasattr(value, "__fields__"):
        return {name: plain(getattr(value, name)) for name in value.__fields__}
    if hasattr(value, "__members__"):
        return enum_name(value)
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def _read(what: str, kind: Any, data: Any) -> Any:
    """A field of this type: a class, (an item's class,), an enumeration, or a type of numbers."""
    if isinstance(kind, tuple):
        if not isinstance(data, list):
            raise ValueError(f"{what} are {data!r}, expected a list")
        return [_read(f"{what}[{i}]", kind[0], item) for i, item in enumerate(data)]
    if hasattr(kind, "__members__"):
        return enum_member(kind, data)
    if not hasattr(kind, "__fields__"):
        return data  # the class checks it
    if kind is Problem and isinstance(data, dict):
        data = {"invariance": "none", **data}  # files from before there were others lack it
    _check_fields(what, data, kind.__fields__)
    owner = f"{what}'s" if what == "plan" else what
    values = {
        name: _read(f"{owner} {name}", field, data[name]) for name, field in kind.__fields__.items()
    }
    if kind is not Plan:
        return kind(**values)
    plan = Plan()
    for name, value in values.items():
        setattr(plan, name, value)
    return plan


def _check_fields(what: str, data: Any, names: Iterable[str]) -> None:
    expected = list(names)
    if not isinstance(data, dict):
        raise ValueError(f"{what} is {data!r}, expected a dict with {', '.join(expected)}")
    missing = [name for name in expected if name not in data]
    unknown = [name for name in data if name not in expected]
    if missing or unknown:
        raise ValueError(
            f"{what} lacks the fields {missing} and has the unknown fields {unknown}; "
            f"its fields are {expected}"
        )
