"""Code out of the wheels of vLLM and SGLang, which cannot be imported where the tests run: they need CUDA and another PyTorch.

OVERLAP_TEST_SOURCES names a folder that holds the wheels (pip download --no-deps vllm==0.33.0 sglang==0.5.23).
"""

import ast
import functools
import os
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional

SOURCES = os.environ.get("OVERLAP_TEST_SOURCES", "")


def _wheels(framework: str) -> list[Path]:
    return sorted(Path(SOURCES).glob(f"{framework}-*.whl")) if SOURCES else []


def own_code_of(framework: str, *values: object):
    """A row of parameters, for a long test with the framework's own code; it is skipped, and says so, where there is no wheel."""
    reason = f"no wheel of {framework}: OVERLAP_TEST_SOURCES={SOURCES!r} names no folder that holds it; see tests/lib/wheels.py"
    marks = (pytest.mark.long, pytest.mark.skipif(not _wheels(framework), reason=reason))
    return pytest.param(*(values or (framework,)), marks=marks)


@functools.cache
def text_of(module: str) -> str:
    """A module's source, from the wheel that its name begins with."""
    path = module.replace(".", "/")
    with zipfile.ZipFile(_wheels(module.partition(".")[0])[0]) as archive:
        own = f"{path}.py"
        return archive.read(own if own in archive.namelist() else f"{path}/__init__.py").decode()


def part_of(module: str, name: str) -> ast.ClassDef | ast.FunctionDef:
    """A class, a function, or a class's method (with a dot), without its decorators."""
    body, kinds = ast.parse(text_of(module)).body, ast.ClassDef | ast.FunctionDef
    for each in name.split("."):
        (found,) = [node for node in body if isinstance(node, kinds) and node.name == each]
        body = found.body
    found.decorator_list = []
    return found


def execute(names: dict[str, Any], *places: str) -> dict[str, Any]:
    """Runs parts of modules with these names, without those of annotations; a place is a module and its parts."""
    names |= {"torch": torch, "nn": nn, "F": functional, "logger": mock.Mock()}
    for place in places:
        module, *parts = place.split()
        sources = [ast.unparse(part_of(module, part)) for part in parts]
        exec("\n".join(["from __future__ import annotations", *sources]), names)
    return names
