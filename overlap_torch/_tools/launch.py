"""Starts the ranks of a demo or a benchmark on this machine, and the process group in each."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing

from overlap_torch._tools.arguments import count
from overlap_torch._tools.variables import environment

_TIMEOUT = datetime.timedelta(seconds=120)


@dataclass(frozen=True)
class Ranks:
    """The number of ranks to start, and their device."""

    world_size: int
    device_type: str  # "cuda" or "cpu"

    @staticmethod
    def choose(world_size: int | None = None, device_type: str | None = None) -> Ranks:
        """All GPUs of this machine, or two CPU ranks if there is none, unless the options, or torchrun, say otherwise.

        Raises:
            ValueError: more ranks than GPUs or than torchrun started, no rank at all, or an environment that ops refuse.
        """
        environment()
        gpus = torch.cuda.device_count() if device_type != "cpu" else 0
        device_type = device_type or ("cuda" if gpus else "cpu")
        if "TORCHELASTIC_RUN_ID" in os.environ:
            started = int(os.environ["WORLD_SIZE"])
            if world_size not in (None, started):
                raise ValueError(
                    f"world is {world_size}, but torchrun started {started} ranks: leave --world out"
                )
            return Ranks(started, device_type)
        if world_size is None:
            world_size = gpus if device_type == "cuda" else 2
        if world_size < 1:
            raise ValueError(f"world must be at least 1, but is {world_size}; GPUs found: {gpus}")
        if device_type == "cuda" and world_size > gpus:
            raise ValueError(
                f"world is {world_size}, but this machine has {gpus} GPUs; NCCL needs one for each rank"
            )
        return Ranks(world_size, device_type)


def current_device() -> torch.device:
    """The device of this rank: its current GPU under NCCL, else the CPU."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def rank_options(world: str = "all GPUs, or 2 on CPU") -> dict[str, dict]:
    """``--world`` and ``--device`` with argparse's arguments; ``world`` says what the default is."""
    return {
        "--world": {"type": count, "help": f"ranks (default: {world})"},
        "--device": {
            "choices": ["cuda", "cpu"],
            "help": "of the ranks (default: cuda if there is a GPU)",
        },
    }


def add_options(parser: argparse.ArgumentParser, **world: str) -> None:
    """Adds :func:`rank_options`, for :meth:`Ranks.choose`."""
    for flag, arguments in rank_options(**world).items():
        parser.add_argument(flag, **arguments)


def launch(ranks: Ranks, worker: Callable[[object], None], argument: object) -> int:
    """Runs ``worker(argument)`` on every rank, each a process of its own with an initialised default group.

    ``worker`` is found by name in the children. Where torchrun has started this process, it is one of the ranks and
    starts no others. An exception in a rank ends the others and is raised here. Returns the exit status: that of a rank which
    ended its process, else 0.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _run(int(os.environ["LOCAL_RANK"]), ranks.device_type, None, None, worker, argument)
        return 0
    with tempfile.TemporaryDirectory(prefix="overlap_torch_") as folder:
        store = os.path.join(folder, "store")
        arguments = (ranks.device_type, ranks.world_size, store, worker, argument)
        try:
            torch.multiprocessing.spawn(_run, args=arguments, nprocs=ranks.world_size)
        except torch.multiprocessing.ProcessExitedException as error:
            return error.exit_code or 1
    return 0


def _run(
    local_rank: int,
    device_type: str,
    world_size: int | None,
    store: str | None,
    worker: Callable[[object], None],
    argument: object,
) -> None:
    place = (
        {}
        if store is None
        else {"init_method": f"file://{store}", "rank": local_rank, "world_size": world_size}
    )
    if device_type == "cuda":
        torch.cuda.set_device(local_rank)
        place["device_id"] = torch.device("cuda", local_rank)
    else:
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world_size or 1))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world))
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=_TIMEOUT, **place)
    worker(argument)
    # This must not run after an exception: it would wait for peers that may be in a collective that never ends.
    dist.destroy_process_group()
    if store is not None and device_type == "cpu":
        # PyTorch keeps a group that a DeviceMesh has used, and gloo's threads with it. A thread that frees a tensor while
        # the interpreter ends is killed in a destructor, and aborts the process (pytorch/pytorch#190489).
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
