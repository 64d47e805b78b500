"""The plug-ins of an installed overlap_torch that vLLM and SGLang find.

They call these functions in each of their processes. Nothing of overlap_torch is imported until a variable asks for it.
"""

from __future__ import annotations

import os


def vllm() -> None:
    """The plug-in of the group ``vllm.general_plugins``: with ``OVERLAP_VLLM=1`` its row-parallel
    layers and experts overlap, see docs/integrations.md.
    """
    if _asked_for("OVERLAP_VLLM"):
        from overlap_torch.integrations import vllm

        vllm.enable()


def sglang() -> None:
    """The plug-in of the group ``sglang.srt.plugins``: with ``OVERLAP_SGLANG=1`` its row-parallel
    layers and experts overlap, see docs/integrations.md.
    """
    if _asked_for("OVERLAP_SGLANG"):
        from overlap_torch.integrations import sglang

        sglang.enable()


def _asked_for(variable: str) -> bool:
    value = os.environ.get(variable, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{variable} must be 0 or 1, but it is {value!r}")
    return value == "1"
