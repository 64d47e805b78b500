"""Machines and problems that the planner's tests make plans for, as measured ones are."""

from overlap_torch import plan as plans
from overlap_torch.plan import Machine, Plan, Problem
from overlap_torch.plan._library import parse_machine
from overlap_torch.plan.templates import make_plan, make_sequential
from overlap_torch.plan.types import DType, Op, Transport


def hopper(**changes: object) -> Machine:
    """GPUs of 132 SMs on a fast link, as a machine of H200s is measured."""
    fields = {
        "arch": 90,
        "sm_count": 132,
        "sm_gflops": 5600.0,
        "kernel_arch": 90,
        "link_latency_us": 9.0,
        "link_gbps": 260.0,
    }
    return Machine(**{**fields, **changes})


def slow(**changes: object) -> Machine:
    return hopper(**{"link_gbps": 18.0, "link_latency_us": 60.0, **changes})


def peers(**changes: object) -> Machine:
    """H200s that map each other's memory."""
    return hopper(**{"windows": True, "peer_gbps": 350.0, **changes})


def ampere(**changes: object) -> Machine:
    fields = {"arch": 80, "sm_count": 108, "sm_gflops": 2000.0, "kernel_arch": 80}
    return hopper(**{**fields, **changes})


def ada(**changes: object) -> Machine:
    """GPUs without wgmma on PCIe."""
    fields = {"arch": 89, "sm_count": 58, "sm_gflops": 1500.0, "link_gbps": 12.0}
    return hopper(**{**fields, "kernel_arch": 80, **changes})


def cpu(**changes: object) -> Machine:
    fields = {"arch": 0, "sm_count": 2, "sm_gflops": 50.0, "link_latency_us": 200.0}
    return Machine(**{**fields, "link_gbps": 1.0, **changes})


def big(**changes: object) -> Problem:
    """A large one; an all-to-all's rows differ by rank, so that it has none."""
    rows = 0 if changes.get("op") == Op.GEMM_ALLTOALL else 8192
    fields = {"m": rows, "n": 8192, "k": 7168, "dtype": DType.BFLOAT16, "world_size": 2}
    return Problem(**{**fields, **changes})


def checked_candidates(problem: Problem, machine: Machine) -> list[Plan]:
    """The planner's, valid, distinct and as their codes have them; and the plan that a rank makes that reads the machine is the same."""
    found = plans.candidates(problem, machine)
    for plan in found:
        plan.validate()
        assert plan.problem == problem
        assert plans.files.decode(plans.files.encode(plan)) == plan
    assert len({tuple(plans.files.encode(plan)) for plan in found}) == len(found)
    read = parse_machine(repr(machine))
    assert make_plan(problem, read) == make_plan(problem, machine)
    return found


def total(plan: Plan, machine: Machine) -> float:
    return plans.predict(plan, machine).total_us


def gain(plan: Plan, machine: Machine) -> float:
    """How many times as long the sequence takes."""
    return total(make_sequential(plan.problem, machine), machine) / total(plan, machine)


def over_peers(plan: Plan) -> bool:
    return plan.chunks[0].transport == Transport.PEER


# One on each side of the larger distinctions.
KINDS = {
    "peers": peers(),
    "windows": hopper(windows=True),
    "plain": hopper(),
    "slow": slow(),
    "ada": ada(),
    "cpu": cpu(),
}
