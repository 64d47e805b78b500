"""The shapes to measure: those of suite.json by group, shapes given as MxNxK, and transformer blocks by model or by sizes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

SUITE = Path(__file__).with_name("suite.json")
GROUPS = ("m_train", "m_small", "slow_link")


@dataclass(frozen=True)
class Shape:
    """M rows (tokens), N output features, K input features on each rank."""

    group: str  # the suite's group, or "custom"
    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"


@dataclass(frozen=True)
class Block:
    """A transformer block's sizes before sharding, and the tokens that go through it."""

    name: str  # the model's, or "custom"
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    tokens: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def __str__(self) -> str:
        sizes = "x".join(map(str, (self.hidden, self.heads, self.kv_heads, self.intermediate)))
        return f"{sizes if self.name == 'custom' else self.name}@{self.tokens}"

    def check_divisible(self, world_size: int, *more: str) -> None:
        """Raises ValueError where a size, or one of these more, cannot be cut into `world_size` equal parts."""
        for name in ("heads", "kv_heads", "intermediate", *more):
            if getattr(self, name) % world_size:
                raise ValueError(
                    f"block {self}: {name} = {getattr(self, name)} is not divisible by {world_size} ranks"
                )


# Hidden size, heads, key-value heads, intermediate size, as in the models' published configurations.
MODELS = {"llama3-8b": (4096, 32, 8, 14336), "llama3-70b": (8192, 64, 8, 28672)}


def suite_group(group: str) -> list[Shape]:
    """All shapes of one of the suite's groups."""
    suite = json.loads(SUITE.read_text())
    if group == "slow_link":
        return [
            Shape(group, shape["m"], shape["n"], shape["k"])
            for shape in suite["slow_link"]["shapes"]
        ]
    return [Shape(group, m, nk["n"], nk["k"]) for nk in suite["nk"] for m in suite[group]]


def _entries(text: str) -> list[str]:
    return list(filter(None, (part.strip() for part in text.split(","))))


def parse(text: str) -> list[Shape]:
    """Shapes from a comma-separated list of group names and MxNxK.

    Raises:
        ValueError: an entry is neither.
    """
    shapes: list[Shape] = []
    for entry in _entries(text):
        if entry in GROUPS:
            shapes += suite_group(entry)
        elif re.fullmatch(r"[1-9]\d{,8}(x[1-9]\d{,8}){2}", entry):
            shapes.append(Shape("custom", *(int(size) for size in entry.split("x"))))
        else:
            raise ValueError(
                f"shape {entry!r} is neither MxNxK from 1 to 999999999, as in 4096x8192x7168, nor one of {', '.join(GROUPS)}"
            )
    if not shapes:
        raise ValueError("no shapes given")
    return shapes


def parse_blocks(text: str) -> list[Block]:
    """Blocks from a comma-separated list of MODEL@TOKENS and HIDDENxHEADSxKV_HEADSxINTERMEDIATE@TOKENS.

    Raises:
        ValueError: an entry is neither, or its heads do not divide its sizes.
    """
    blocks: list[Block] = []
    for entry in _entries(text):
        what, _, tokens = entry.partition("@")
        sizes = MODELS.get(what)
        name = what if sizes else "custom"
        if sizes is None and re.fullmatch(r"\d{1,9}(x\d{1,9}){3}", what):
            sizes = tuple(int(size) for size in what.split("x"))
        if sizes is None or not re.fullmatch(r"\d{1,9}", tokens) or min(*sizes, int(tokens)) < 1:
            raise ValueError(
                f"block {entry!r} is neither MODEL@TOKENS, MODEL one of {', '.join(MODELS)}, nor "
                "HIDDENxHEADSxKV_HEADSxINTERMEDIATE@TOKENS, as in 4096x32x8x14336@8192"
            )
        block = Block(name, *sizes, int(tokens))
        if block.hidden % block.heads or block.heads % block.kv_heads:
            raise ValueError(
                f"block {entry!r}: {block.heads} heads must divide the hidden size {block.hidden}, and "
                f"{block.kv_heads} key-value heads the heads"
            )
        blocks.append(block)
    if not blocks:
        raise ValueError("no blocks given")
    return blocks
