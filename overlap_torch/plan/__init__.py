"""Plans: how an op runs, as data.

A plan says which kernel computes the tiles and in which order, and how they are divided into chunks. It says how each chunk
is communicated, where tiles are stored meanwhile, and which resources the GEMM leaves to communication. The planner makes a
plan for each problem; this module shows it, and sets others::

    plan = plan_for(4096, 8192, 7168, torch.bfloat16)           # what the op would do now
    panels = templates.row_panels(plan.problem, 4, kernel="sm90_pingpong", comm_sms=16, max_ctas=16)
    with use_plan(panels):                                      # on every rank
        overlap_torch.gemm_allreduce(input, weight)

All ranks of a group must set the same plans at the same point between their calls of the ops.

``print(plan.explain())`` shows a plan's steps, their memory and expected times, and why it was taken;
``plan.plot("plan.png")`` draws it. ``python -m overlap_torch explain`` does both.

:mod:`~overlap_torch.plan.templates` makes plans. :mod:`~overlap_torch.plan.programs` makes plans with transfers that are
written by hand or read from other compilers' files. :mod:`~overlap_torch.plan.files` saves and loads plans, and
:mod:`~overlap_torch.plan.types` has their parts.
"""

from __future__ import annotations

import warnings
from typing import Any

from overlap_torch._plan import Machine, Plan, Problem, Profile, candidates, predict, validate
from overlap_torch.plan import files, programs, templates, types
from overlap_torch.plan._explain import explain
from overlap_torch.plan._library import (
    clear_plans,
    machine,
    peer_memory,
    plan_for,
    set_plan,
    use_plan,
)
from overlap_torch.plan._picture import plot

__all__ = [
    "Machine", "Plan", "Problem", "Profile", "candidates", "clear_plans", "files", "machine",
    "peer_memory", "plan_for", "predict", "programs", "set_plan", "templates", "types", "use_plan", "validate",
]  # fmt: skip

Plan.explain = explain  # type: ignore[method-assign]
Plan.plot = plot  # type: ignore[method-assign]

# Names that moved out of this module, by the module that has them now.
_PLACES = {name: place for place in (files, programs, templates, types) for name in place.__all__}


def __getattr__(name: str) -> Any:
    if (place := _PLACES.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"{__name__}.{name} is deprecated, use {place.__name__}.{name}",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(place, name)
