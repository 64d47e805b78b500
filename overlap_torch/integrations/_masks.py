"""Masks of frameworks' attentions: how to read a mask function, and the errors that name what the op does not take."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn


def refuse(framework: str, takes: str, what: str, remedy: str) -> NoReturn:
    """Raises ValueError with what the attention takes, what it was given, and what to do."""
    raise ValueError(
        f"overlap_torch's attention for {framework} takes {takes}, but not {what}: {remedy}"
    )


def name_of(mask: Callable) -> str:
    """A mask's name for errors; objects other than functions may have none."""
    return getattr(mask, "__qualname__", repr(mask))


def closure_of(function: Callable, maker: str) -> dict[str, Any] | None:
    """The captured variables of a function that ``maker`` has made; None for other functions."""
    if not name_of(function).startswith(f"{maker}.<locals>."):
        return None
    return inspect.getclosurevars(function).nonlocals
