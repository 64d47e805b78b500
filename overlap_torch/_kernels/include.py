"""Where the headers are that kernels of the caller's include."""

from __future__ import annotations

from pathlib import Path


def include_path() -> str:
    """The folder of ``overlap/signal.cuh``, which CUDA kernels include that signal or await chunks.

    For ``extra_include_paths`` of ``torch.utils.cpp_extension.load_inline``.
    """
    return str(Path(__file__).parents[1] / "include")
