"""Tests of a framework are skipped where it is not installed, or of a release that the integration does not know."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import pytest

from overlap_torch.integrations import transformers
from overlap_torch.integrations._release import require


def needs(distribution: str, releases: Sequence[str], extra: str) -> pytest.MarkDecorator:
    """A mark that skips, and says what is installed and what is needed."""
    try:
        require(distribution, releases, extra)
    except ImportError as error:
        return pytest.mark.skipif(True, reason=str(error))
    return pytest.mark.skipif(False, reason="")


def needs_module(name: str) -> pytest.MarkDecorator:
    """A mark that skips where there is no such module."""
    return pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed")


needs_transformers = needs("transformers", transformers.RELEASES, "transformers")
needs_megatron = needs("megatron-core", ("0.19",), "megatron")
needs_torchtitan = needs("torchtitan", ("0.3",), "torchtitan")
