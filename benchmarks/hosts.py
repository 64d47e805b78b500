"""Groups on several hosts beside NCCL's collective, by the cost model: nothing is measured.

A machine is described: Hopper GPUs, the rate of each GPU's link on its host, and of its share of the network. NCCL's
collective over all ranks is taken to use each GPU's share of the network, too.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from functools import partial
from statistics import geometric_mean

from overlap_torch import _plan
from overlap_torch._tools.arguments import count, counts, rate
from overlap_torch.plan import Machine, Plan, Problem
from overlap_torch.plan._explain import H200

from .shapes import Shape, suite_group
from .study import Option, Study
from .tables import table

OPS = ("gemm_allreduce", "gemm_reducescatter", "allgather_gemm")
_REACHED = 0.9  # of a link's rate, by long messages


def described(hosts: int, ranks: int, link_gbps: float, network_gbps: float) -> Machine:
    """``ranks`` GPUs on each host, each with these GB/s on its host and between hosts. Latencies are assumed."""
    return Machine(
        arch=H200.arch,
        sm_count=H200.sm_count,
        sm_gflops=H200.sm_gflops,
        kernel_arch=90,
        # An all-reduce of M bytes sends M / ranks twice over each GPU's share.
        link_gbps=_REACHED * network_gbps * ranks / 2,
        link_latency_us=30.0 + 10.0 * hosts,
        clique=ranks,
        clique_gbps=_REACHED * link_gbps,
        across_gbps=_REACHED * network_gbps,
        across_latency_us=20.0,
    )


def fastest(problem: Problem, machine: Machine) -> tuple[Plan, float]:
    """The plan in two levels that is expected to be the fastest, and its time in microseconds."""
    plans = [plan for plan in _plan.candidates(problem, machine, all=True) if plan.clique]
    timed = [(plan, _plan.predict(plan, machine).total_us) for plan in plans]
    return min(timed, key=lambda one: one[1])


def bound(problem: Problem, machine: Machine, gemm_us: float) -> tuple[str, float]:
    """The longest of the GEMM, the bytes between hosts and those within a host, and its microseconds."""
    columns = problem.k if problem.op == _plan.Op.ALLGATHER_GEMM else problem.n
    # Each GPU's share, in thousands of bytes.
    moved = problem.m * columns * 2 / 1e3 / machine.clique
    ways = 2 if problem.op == _plan.Op.GEMM_ALLREDUCE else 1
    hosts = problem.world_size // machine.clique
    parts = {
        "GEMM": gemm_us,
        "network": ways * moved * (hosts - 1) / hosts / machine.across_gbps,
        "links of a host": ways * moved * (machine.clique - 1) / machine.clique_gbps,
    }
    return max(parts.items(), key=lambda one: one[1])


def _ranks_per_host(ranks: int, args: argparse.Namespace) -> int:
    if ranks > _plan.MAX_PEERS:
        raise ValueError(f"--ranks-per-host is {ranks}, allowed are 2 to {_plan.MAX_PEERS}")
    for hosts, shape in itertools.product(args.hosts, suite_group("m_train")):
        if shape.m % (hosts * ranks):
            raise ValueError(
                f"--hosts {hosts} of {ranks} ranks do not divide the suite's {shape.m} rows: take powers of two"
            )
    return ranks


OPTIONS = (
    Option("--hosts", type=partial(counts, least=2), default=[2, 4, 8]),
    Option("--ranks-per-host", type=partial(count, least=2), default=8, check=_ranks_per_host),
    Option("--link", type=rate, default=450.0, help="GB/s of a GPU on its host"),
    Option("--network", type=rate, default=50.0, help="GB/s of a GPU between hosts"),
)


def _rows(args: argparse.Namespace) -> Iterator[dict]:
    for op in OPS:
        for hosts in args.hosts:
            machine = described(hosts, args.ranks_per_host, args.link, args.network)
            for shape in suite_group("m_train"):
                yield _row(op, shape, machine, hosts)


def _row(op: str, shape: Shape, machine: Machine, hosts: int) -> dict:
    world = hosts * machine.clique
    problem = Problem(shape.m, shape.n, shape.k, "bfloat16", world, op)
    sequence = _plan.predict(_plan.make_sequential(problem, machine), machine)
    over_nccl = _plan.predict(_plan.make_plan(problem, machine), machine).total_us
    plan, levels_us = fastest(problem, machine)
    limit, limit_us = bound(problem, machine, sequence.gemm_us)
    return {
        "op": op,
        "hosts": hosts,
        "shape": str(shape),
        "sequence_us": sequence.total_us,
        "nccl": sequence.total_us / over_nccl,
        "levels": sequence.total_us / levels_us,
        "bound": sequence.total_us / limit_us,
        "limit": limit,
        "plan": str(plan),
    }


def _line(row: dict) -> str:
    return (
        f"{row['op']:19} {row['hosts']} hosts {row['shape']:>16}: sequence {row['sequence_us']:8.0f} us; over NCCL "
        f"{row['nccl']:.2f}, in two levels {row['levels']:.2f}, bound {row['bound']:.2f} by the {row['limit']}"
    )


def _summary(rows: list[dict], args: argparse.Namespace) -> str:
    cells = []
    for op, hosts in dict.fromkeys((row["op"], row["hosts"]) for row in rows):
        of = [row for row in rows if (row["op"], row["hosts"]) == (op, hosts)]
        limits = sorted({row["limit"] for row in of})
        means = [geometric_mean(row[name] for row in of) for name in ("nccl", "levels", "bound")]
        lowest = min(row["levels"] for row in of)
        cells.append(
            [f"`{op}`", str(hosts), f"{means[0]:.2f}", f"{means[1]:.2f} ({lowest:.2f})", f"{means[2]:.2f}", ", ".join(limits)]
        )  # fmt: skip
    titles = ["op", "hosts", "over NCCL", "in two levels (lowest)", "bound", "bound by"]
    return table(titles, cells)


STUDY = Study(OPTIONS, _rows, _line, _summary)
