"""Masks of frameworks' attentions: what a mask function is made of, and the refusal, by name, of what the op does not take."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn


def refuse(framework: str, takes: str, what: str, remedy: str) -> NoReturn:
    """Raises ValueError: what the attention takes, what it was given, what to do."""
    raise ValueError(
        f"overlap_torch's attention for {framework} takes {takes}, but not {what}: {remedy}"
    )


def closure_of(function: Callable, maker: str) -> dict[str, Any] | None:
    """The variables of a function that ``maker`` has made; None for other functions."""
    if not function.__qualname__.startswith(f"{maker}.<locals>."):
        return None
    return inspect.getclosurevars(function).nonlocals
