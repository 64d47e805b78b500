"""Finds the benchmark package: installed as ``overlap_torch.benchmarks``, ``benchmarks/`` in a source checkout."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

_NAME = "overlap_torch.benchmarks"


def load() -> ModuleType:
    """The benchmark package installed in this package, or that of its checkout; never that of another checkout."""
    if _NAME in sys.modules:
        return sys.modules[_NAME]
    package = Path(__file__).resolve().parents[1]
    if (package / "benchmarks" / "__init__.py").exists():
        return importlib.import_module(_NAME)
    source = package.parent / "benchmarks" / "__init__.py"
    if not source.exists():
        raise ImportError(
            f"the benchmarks are neither installed as {_NAME} nor found at {source}: reinstall the package"
        )
    spec = importlib.util.spec_from_file_location(
        _NAME, source, submodule_search_locations=[str(source.parent)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    spec.loader.exec_module(module)
    return module


def main(argv: Sequence[str]) -> int:
    """Runs ``python -m overlap_torch bench`` with these arguments; returns the exit status."""
    load()
    return importlib.import_module(f"{_NAME}.study").main(["bench", *argv])


def run_rank(pickled: bytes) -> None:
    """Runs each rank of a study: a rank can find this function, and its argument, before the benchmark package is loaded."""
    load()
    importlib.import_module(f"{_NAME}.study").run_rank(pickle.loads(pickled))
