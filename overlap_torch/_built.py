"""Says what to do if the package was not built; imported before all modules that need a built library."""

from __future__ import annotations

import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_FOLDER = Path(__file__).parent


_why = ""
if not (_FOLDER / "_C.so").exists():
    _why = "there is no _C.so"
elif not any((_FOLDER / f"_plan{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
    _why = f"there is no _plan for Python {sys.version_info.major}.{sys.version_info.minor}"
if _why:
    raise ImportError(
        f"overlap_torch is not built in {_FOLDER}: {_why}. If `pip install .` has installed it, start "
        "Python in another folder: here it finds the checkout first. Else build it, with `pip install .` "
        "in the project's folder, or with `make build` for use in the checkout."
    )
