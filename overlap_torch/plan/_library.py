"""The op library's plans: the plan of a problem, the plans that were set, and the machine for which they are made."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from overlap_torch import _plan
from overlap_torch._ops import Group, group_name
from overlap_torch._plan import (
    DType,
    Invariance,
    Machine,
    Op,
    Plan,
    Problem,
    Profile,
    Recipe,
    decode,
    encode,
    validate,
)
from overlap_torch.plan._names import enum_member, enum_name

Device = str | torch.device | None


def plan_for(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype | DType | str = "bfloat16",
    *,
    device: Device = None,
    group: Group = None,
    op: Op | str = Op.GEMM_ALLREDUCE,
    recipe: Recipe | str = Recipe.NONE,
    output_dtype: torch.dtype | DType | str | None = None,
    fast_accum: bool = False,
    invariance: Invariance | str | None = None,
) -> Plan:
    """The plan that the op would run now for an output [m, n] and inner dimension k on each rank.

    It is the plan that was set for that problem, else the planner's. ``device`` None means the current CUDA device, or the
    CPU if there is none. ``group`` is as in :func:`overlap_torch.gemm_allreduce`. Scaled operands have ``recipe``,
    ``output_dtype`` and ``fast_accum`` (the ops' ``use_fast_accum``); ``dtype`` is then the input's. ``invariance`` None
    takes the value of ``OVERLAP_INVARIANCE``.
    """
    problem = Problem(
        m, n, k, dtype, op=op, recipe=recipe, output_dtype=output_dtype, fast_accum=fast_accum
    )
    asked = None if invariance is None else enum_name(enum_member(Invariance, invariance))
    return _plan_of(problem, device, group, asked)


def plan_of(problem: Problem, device: Device, group: Group) -> Plan:
    """As :func:`plan_for`; the group says how many ranks there are."""
    return _plan_of(problem, device, group, enum_name(problem.invariance))


def _plan_of(problem: Problem, device: Device, group: Group, invariance: str | None) -> Plan:
    code = torch.ops.overlap.plan_for(
        enum_name(problem.op),
        problem.m,
        problem.n,
        problem.k,
        getattr(torch, enum_name(problem.dtype)),
        device_of(device),
        group_name(group),
        enum_name(problem.recipe),
        getattr(torch, enum_name(problem.output_dtype)),
        problem.fast_accum,
        invariance,
    )
    return decode(list(code))


def set_plan(plan: Plan, *, device: Device = None, group: Group = None) -> None:
    """Makes the op run ``plan`` for ``plan.problem`` from now on; every rank has to set the same plan.

    ``device`` None means the CPU for a plan over gloo, else the current CUDA device. Raises ValueError if ``validate``
    refuses the plan on a device with this number of SMs, or if a program needs more memory than the device has.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"set_plan takes a plan.types.Plan, but it is a {type(plan).__name__}")
    where = device_of(device, plan)
    check_on(where, plan)
    torch.ops.overlap.set_plan(encode(plan), where, group_name(group))


def clear_plans(group: Group = None) -> None:
    """Forgets the plans set for the group, so that the planner's plans run again. Every rank has to call it."""
    torch.ops.overlap.clear_plans(group_name(group))


@contextmanager
def use_plan(plan: Plan, *, device: Device = None, group: Group = None) -> Iterator[Plan]:
    """``with use_plan(plan):`` sets the plan for its problem, and afterwards restores the previous one."""
    where = device_of(device, plan)
    before = plan_of(plan.problem, where, group)
    set_plan(plan, device=where, group=group)
    try:
        yield plan
    finally:
        set_plan(before, device=where, group=group)


def machine(device: Device = None, group: Group = None) -> Machine:
    """The planner's view of device and link, for ``candidates`` and ``predict``.

    The first call for a group measures its link, so every rank of the group has to make it.
    ``device`` None means the current CUDA device, or the CPU if there is none.
    """
    where = (device_of(device), group_name(group))
    result = parse_machine(torch.ops.overlap.machine(*where))
    result.profile = Profile.parse(*torch.ops.overlap.machine_profile(*where))
    return result


def peer_memory(device: Device = None, group: Group = None) -> str:
    """A text that says how the group's ranks map each other's memory: ``"CUDA IPC"``; ``"NCCL windows"``, and why
    CUDA IPC was refused; or ``"none"``, and why. Empty on CPU, and for groups that run no plans.

    The first call for a group makes its communicators, as :func:`machine` does, so every rank of the group has to make it.
    """
    where = device_of(device)
    if where.type != "cuda":
        return ""
    name = group_name(group)
    torch.ops.overlap.machine(where, name)
    return torch.ops.overlap.peer_memory(name)


def parse_machine(text: str) -> Machine:
    result = Machine()
    for field in text.split():
        name, _, value = field.partition("=")
        kind = type(getattr(result, name))
        setattr(result, name, value == "1" if kind is bool else kind(value))
    return result


def device_of(device: Device, plan: Plan | None = None) -> torch.device:
    if device is not None:
        device = torch.device(device)
    elif plan is not None and plan.chunks:
        device = torch.device("cpu" if plan.chunks[0].transport.traits.on_cpu else "cuda")
    else:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def check_on(device: torch.device, plan: Plan) -> None:
    """Raises ValueError if the plan cannot run there: `validate` refuses it with this number of SMs, or a program needs
    more memory than the device has."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    machine = _plan.usual_machine(plan)
    if gpu is not None and machine.arch > 0:
        # If there are few SMs, waiting kernels may leave none to the GEMM.
        machine.sm_count = gpu.multi_processor_count
    validate(plan, machine)
    if not plan.program.transfers or plan.problem.traits.rows_by_rank:
        return  # no plan of an all-to-all knows its rows
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    total_bytes = host_bytes if gpu is None else gpu.total_memory
    for rank in range(plan.problem.world_size):
        made = json.loads(_plan.steps_json(plan, rank, Machine()))
        held = sum(scratch["bytes"] for scratch in made["scratch"])
        if held > total_bytes:
            raise ValueError(
                f"program needs {held} bytes on rank {rank} beside operands and results, the device has {total_bytes}: take fewer "
                "rows of scratch, or reuse them, and smaller areas, because added data first arrives in memory of the call"
            )
