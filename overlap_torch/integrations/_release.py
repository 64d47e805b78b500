"""The known releases of a framework: an integration replaces private functions, or functions that may change."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata


def require(distribution: str, releases: Sequence[str], extra: str) -> None:
    """Refuses a framework that is not installed, or whose release is not in ``releases``, such as "0.3".

    Raises:
        ImportError: the message names the installed release, the known ones, and what to install.
    """
    known = " or ".join(f"{distribution} {release}.*" for release in releases)
    remedy = f"in the checkout `pip install '.[{extra}]'`"
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        raise ImportError(
            f"{distribution} is not installed; this integration is for {known}: {remedy}"
        ) from None
    if not any(version == release or version.startswith(f"{release}.") for release in releases):
        raise ImportError(
            f"{distribution} {version} is installed, but this integration knows {known}, and may not fit others: {remedy}, or "
            "an overlap_torch that knows it"
        )
