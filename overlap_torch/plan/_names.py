"""The names of enumerations' members, as JSON and the op library know them."""

from __future__ import annotations

from typing import Any, TypeVar

_Enum = TypeVar("_Enum")


def enum_name(member: Any) -> str:
    """The name by which JSON and the op library know the member."""
    return member.name.lower()


def enum_member(enum: type[_Enum], value: Any) -> _Enum:
    """A member of the enumeration, from the member or its name in lower case."""
    if isinstance(value, enum):
        return value
    members: dict[str, _Enum] = enum.__members__  # type: ignore[attr-defined]
    names = {name.lower(): member for name, member in members.items()}
    if not isinstance(value, str) or value not in names:
        raise ValueError(f"{enum.__name__} is {value!r}, allowed are {', '.join(names)}")
    return names[value]
