"""The refusal, by name, of what a framework's attention may be asked for and the op does not take."""

from __future__ import annotations

from typing import NoReturn


def refuse(framework: str, takes: str, what: str, remedy: str) -> NoReturn:
    """Raises ValueError: what the attention takes, what it was given, what to do."""
    raise ValueError(
        f"overlap_torch's attention for {framework} takes {takes}, but not {what}: {remedy}"
    )
