"""The examples share this: a process for each rank, and the process group in each.

A process that torchrun has started is one of the ranks. One that python has started lets torchrun start them all.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist


def add_arguments(parser: argparse.ArgumentParser, usual: str) -> None:
    parser.add_argument("--ranks", type=int, help=f"{usual}; torchrun decides otherwise")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="GPUs where there are any")


def launch(
    work: Callable[[argparse.Namespace], None],
    options: argparse.Namespace,
    *,
    gpus: int | None = None,
    cpus: int = 2,
) -> None:
    """Runs `work(options)` on every rank: on all GPUs, or `gpus` of them, else on `cpus` ranks without one."""
    if "LOCAL_RANK" not in os.environ:
        found = torch.cuda.device_count() if options.device != "cpu" else 0
        ranks = options.ranks or min(found, gpus or found) or cpus
        threads = max(1, len(os.sched_getaffinity(0)) // ranks)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), *sys.argv]
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
        sys.exit(subprocess.run(command, env=environment, check=False).returncode)

    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    found = torch.cuda.device_count()
    if options.device == "cuda" and found < local_ranks:
        sys.exit(f"{local_ranks} ranks need a GPU each, but this machine has {found}")
    cuda = options.device != "cpu" and found >= local_ranks
    if cuda:
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    else:
        dist.init_process_group("gloo")
    work(options)
    dist.destroy_process_group()
    if not cuda:
        # PyTorch keeps a group that a DeviceMesh has used, and gloo's threads with it. One that lets go of a tensor while
        # the interpreter ends aborts the process (pytorch/pytorch#190489).
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def current_device() -> torch.device:
    """This rank's GPU under NCCL, else the CPU."""
    cuda = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
