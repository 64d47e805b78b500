"""Types of the commands' arguments. Each refuses a value, before anything starts, with what is allowed."""

from __future__ import annotations

import math
import os
from argparse import ArgumentTypeError
from pathlib import Path

from overlap_torch._watch.drawing import figure

SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_PICTURES = (".png", ".svg", ".pdf")


def dtype(text: str) -> str:
    """A dtype's full name, by itself or by its short one."""
    return SHORT_DTYPES.get(text, text)


def short_dtype(text: str) -> str:
    """A dtype's short name, by itself or by its full one."""
    return {full: short for short, full in SHORT_DTYPES.items()}.get(text, text)


def count(text: str, least: int = 1) -> int:
    """A whole number, as 32 bits hold it."""
    if not text.strip().isdecimal() or not least <= int(text) < 1 << 31:
        raise ArgumentTypeError(
            f"is {text!r}, allowed are whole numbers from {least} to 2147483647"
        )
    return int(text)


def counts(text: str, least: int = 1) -> list[int]:
    """Whole numbers, each once, between commas."""
    words = [word for word in text.split(",") if word.strip()]
    if not words:
        raise ArgumentTypeError(f"is {text!r}, allowed are one whole number or more, as in 8,64")
    return list(dict.fromkeys(count(word, least) for word in words))


def rate(text: str) -> float:
    """A number greater than zero."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value < math.inf:
        raise ArgumentTypeError(f"is {text!r}, allowed are numbers greater than 0")
    return value


def output(text: str) -> str:
    """A file that rank 0 can write; "-" is stdout."""
    path = Path(text)
    if text == "-" or os.environ.get("RANK", "0") != "0":
        return text
    if not path.parent.is_dir():
        raise ArgumentTypeError(f"is {text}, but there is no folder {path.parent}: make it first")
    if path.is_dir() or text.endswith("/"):
        raise ArgumentTypeError(f"is {text!r}, a folder: name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ArgumentTypeError(f"is {text}, which you may not write: name another file")
    return text


def picture(text: str) -> str:
    """A file that matplotlib can draw."""
    if Path(text).suffix.lower() not in _PICTURES and not Path(text).is_dir():
        raise ArgumentTypeError(
            f"is {text!r}, allowed are names that end in {', '.join(_PICTURES)}"
        )
    try:
        figure(1, 1, "a picture")
    except ImportError as error:
        raise ArgumentTypeError(str(error)) from error
    return output(text)
