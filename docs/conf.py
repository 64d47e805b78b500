"""Sphinx: the pages of this folder, and the reference from the docstrings. `make docs`."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

project = "overlap_torch"
author = "The overlap_torch authors"
release = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build"]
html_theme = "alabaster"
html_theme_options = {"page_width": "72rem", "description": "GEMMs that communicate finished tiles"}
html_static_path: list[str] = []

myst_heading_anchors = 3
# Links out of this folder are right on the forge; tests/tools/test_docs.py follows all of them.
suppress_warnings = ["myst.xref_missing", "myst.header"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": False}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
