"""``torch.compile`` puts the ops into models that do not call them, and says where it did::

    with overlap_torch.inductor.enable():                   # or enable() ... disable(), or the backend below
        model = torch.compile(model)
        model(x).sum().backward()
    print(overlap_torch.inductor.report())

A pass of Inductor finds GEMMs beside functional collectives, both those that DTensor's styles make and those written by hand:

- a GEMM whose product is all-reduced, or reduce-scattered along any dim, becomes ``gemm_allreduce`` or ``gemm_reducescatter``,
  with the bias after it; a sum of GEMMs, as backward has it, becomes one;
- a GEMM that reads a tensor all-gathered along any dim becomes ``allgather_gemm``; several of them share the gather;
- a GEMM of fp8 with scales of tensors or of rows (``_scaled_mm``) becomes the same with scales, also of rows that are gathered.

Views, permutations, slices, casts, and equal parts put together again may come between them. The pass sees forward and
backward graphs with static and dynamic shapes, on CPU and CUDA. It runs before PyTorch's own ``_micro_pipeline_tp`` pass,
which takes the rest. :func:`report` lists every collective of every graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule

from overlap_torch._inductor import VERSION
from overlap_torch._inductor import report as _reports
from overlap_torch._inductor.fusion import Settings, fuse
from overlap_torch._inductor.report import FusionReport, FusionRow
from overlap_torch._layers.rmsnorm import MOST_ROWS
from overlap_torch._ops.group import Group, group_name
from overlap_torch._ops.group import sizes as group_sizes

__all__ = [
    "FusionReport", "FusionRow", "MissedCollective", "backend", "disable", "enable", "report",
]  # fmt: skip

_SLOT = "post_grad_custom_pre_pass"  # of Inductor's configuration
_log = logging.getLogger(__name__)


class MissedCollective(RuntimeError):
    """``strict`` is set, and a collective beside a GEMM is not fused; ``rows`` are the graph's rows."""

    def __init__(self, rows: Sequence[FusionRow]) -> None:
        self.rows = FusionReport(rows)
        missed = "\n".join(
            f"  {row['collective']} {row['node']} ({row['direction']}, {row['source'] or 'source unknown'}): {row['why']}"
            for row in rows
            if row["missed"]
        )
        super().__init__(
            f"overlap_torch.inductor: collectives beside a GEMM that are not fused, under strict=True:\n{missed}\n"
            "Change the model there, or compile without strict=True"
        )


class _Pass(CustomGraphPass):
    """The content of Inductor's slot: the pass that was there before, then this one."""

    def __init__(self, settings: Settings, previous: Callable[[Graph], None] | None) -> None:
        self.settings = settings
        self.previous = previous

    def __call__(self, graph: Graph) -> None:
        if self.previous is not None:
            self.previous(graph)
        rows = fuse(graph, self.settings)
        if not rows:
            return
        _log.info("%s", FusionReport(rows))
        if self.settings.strict and any(row["missed"] for row in rows):
            raise MissedCollective(rows)
        _reports.keep(rows)

    def uuid(self) -> Any:
        """Inductor's cache key for graphs of this pass. None, which means no caching, if the pass before has no key.

        The key has the groups' sizes, because fusions depend on them and not every collective names them, and the number of
        rows up to which norms are fused, which OVERLAP_INVARIANCE decides.
        """
        key = (VERSION, self.settings, group_sizes(), MOST_ROWS)
        if self.previous is None:
            return key
        previous = self.previous.uuid() if isinstance(self.previous, CustomGraphPass) else None
        return None if previous is None else (*key, previous)


def _settings(strict: bool, groups: Iterable[Group] | None) -> Settings:
    names = None if groups is None else tuple(sorted({group_name(group) for group in groups}))
    return Settings(strict, names)


def _chained(settings: Settings) -> _Pass:
    previous = config.post_grad_custom_pre_pass
    return _Pass(settings, previous.previous if isinstance(previous, _Pass) else previous)


def enable(*, strict: bool = False, groups: Iterable[Group] | None = None) -> ExitStack:
    """Lets Inductor put the ops into the graphs that this process compiles from now on.

    Every rank calls it with the same arguments, before the model is first called: compiled graphs stay as they are. It
    takes the slot ``torch._inductor.config.post_grad_custom_pre_pass``; a pass that is already there runs first. A second
    call changes the settings.

    Args:
        strict: fail to compile if a collective beside a GEMM cannot be fused: PyTorch raises an ``InductorError``, whose
            ``inner_exception`` is a :class:`MissedCollective`. Collectives without a GEMM beside them, such as a parallel
            loss's, do not raise.
        groups: names, process groups or one-dimensional meshes whose collectives are considered; None: all groups.

    Returns:
        A context manager that restores the slot at its end. Backward is compiled at its first call, which must be within
        the context.
    """
    enabled = ExitStack()
    enabled.callback(setattr, config, _SLOT, config.post_grad_custom_pre_pass)
    config.post_grad_custom_pre_pass = _chained(_settings(strict, groups))
    return enabled


def disable() -> None:
    """Takes the pass out of Inductor's slot; compiled graphs stay as they are. Nothing happens if it is not there.

    Raises:
        RuntimeError: another pass has taken the slot, and may call this one.
    """
    current = config.post_grad_custom_pre_pass
    if isinstance(current, _Pass):
        config.post_grad_custom_pre_pass = current.previous
    elif current is not None:
        raise RuntimeError(
            f"overlap_torch.inductor.disable(): torch._inductor.config.post_grad_custom_pre_pass is {current!r}, which "
            "something else put there: remove that first"
        )


def report(clear: bool = False) -> FusionReport:
    """Every collective of every graph that was compiled with the pass: the op that replaced it, or why none did.

    Args:
        clear: forget the rows afterwards, so that the next report covers only later graphs.

    Returns:
        A list of :class:`FusionRow`, dicts, in the order of the graphs and of the collectives in them; ``str()`` of it is a
        table. Graphs that Inductor took from its cache are in it. Graphs without a collective are not.
    """
    return _reports.report(clear)


def backend(
    model: GraphModule,
    inputs: Sequence[Any],
    *,
    strict: bool = False,
    groups: Iterable[Group] | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Inductor with the pass, for one model: ``torch.compile(model, backend=overlap_torch.inductor.backend)``.

    ``functools.partial(overlap_torch.inductor.backend, strict=True)`` sets what :func:`enable` describes; ``mode`` and
    ``options`` are those of ``torch.compile`` for Inductor, which hands them on.
    """
    from torch._inductor.compile_fx import compile_fx

    patches: dict[str, Any] = {}
    if mode is not None:
        patches.update(torch._inductor.list_mode_options(mode))
    patches.update(options or {})
    patches[_SLOT] = _chained(_settings(strict, groups))
    return compile_fx(model, inputs, config_patches=patches)
