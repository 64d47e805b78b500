"""Measured times on disk. Nothing here raises: a file that cannot be read counts as missing; times that cannot be written
are dropped."""

from __future__ import annotations

import contextlib
import copy
import datetime
import fcntl
import hashlib
import json
import math
import os
import platform
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from overlap_torch.plan import Machine, Problem, validate
from overlap_torch.plan._names import enum_name
from overlap_torch.plan.files import decode
from overlap_torch.plan.types import Invariance, Recipe

SCHEMA = 1
_KIND = "overlap_torch.tuned"
# Variables that may change a plan's time, and those that do not: the folder, the log, the build, who calls tune or the ops.
_PREFIXES = ("NCCL_", "OVERLAP_")
_IDLE = (
    "NCCL_HOSTID",
    "OVERLAP_ARCHS",
    "OVERLAP_CACHE",
    "OVERLAP_CUDA",
    "OVERLAP_DEBUG",
    "OVERLAP_DTYPES",
    "OVERLAP_HOST_ID",
    "OVERLAP_LOG",
    "OVERLAP_MOE_ROWS",
    "OVERLAP_ON_FAILURE",
    "OVERLAP_SGLANG",
    "OVERLAP_TIMEOUT_S",
    "OVERLAP_TUNE",
    "OVERLAP_VLLM",
)
_LOOKS, _LOOK_S = 500, 0.01  # for another job's lock
_unwritten: dict[Path, dict[str, Any]] = {}  # entries that the disk did not take


def folder() -> Path:
    """The folder of the times: $OVERLAP_CACHE, else overlap_torch in the user's cache folder."""
    given = os.environ.get("OVERLAP_CACHE")
    if given:
        return Path(given)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "overlap_torch"


def environment(device: torch.device, machine: Machine, world: int) -> dict[str, str]:
    """The environment for which times hold; the same on all ranks. It leaves out clocks, drivers' patches and power limits."""
    gpu = device.type == "cuda"
    found = {
        "device": torch.cuda.get_device_name(device) if gpu else platform.machine(),
        "arch": str(machine.arch),
        "sm_count": str(machine.sm_count if gpu else os.cpu_count()),
        "peers": str(machine.peer_gbps > 0.0),
        "windows": str(machine.windows),
        "world": str(world),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu else "none",
        "build": torch.ops.overlap.build_info(),
    }
    if machine.serial:
        found["serial"] = "True"
    if machine.clique > 0:
        found["clique"] = str(machine.clique)
    for name in sorted(os.environ):
        if name.startswith(_PREFIXES) and name not in _IDLE:
            found[name] = os.environ[name]
    return found


@dataclass(frozen=True)
class Entry:
    """Times of one M in one mode: encoded plans, the sequence first, their microseconds, and the chosen one."""

    plans: list[list[int]]
    us: list[float]
    chosen: int


class Files:
    """The files of one environment: one for each op, N, K, dtype, way of scaling and number of ranks, with all M."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        text = json.dumps(environment, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._folder = folder() / str(SCHEMA) / digest
        self._warned = False

    def path(self, problem: Problem) -> Path:
        name = (
            f"{enum_name(problem.op)}-{problem.n}x{problem.k}-{enum_name(problem.dtype)}"
            f"{_variant(problem)}-w{problem.world_size}.json"
        )
        return self._folder / name

    def read(self, problem: Problem) -> dict[tuple[int, str], Entry]:
        """Entries by M and mode. It leaves out damaged entries, those of another schema or environment, and those with a
        plan that is not for their problem."""
        found: dict[tuple[int, str], Entry] = {}
        for key, data in self._entries(self.path(problem)).items():
            with contextlib.suppress(Exception):  # any fault of the file
                m, mode = key.split("/")
                found[int(m), mode] = _entry(data, problem, int(m))
        return found

    def write(
        self, problem: Problem, mode: str, plans: list[list[int]], us: list[float], chosen: int
    ) -> None:
        """Adds an entry, and keeps those that other jobs have written meanwhile."""
        path = self.path(problem)
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        entry = {f"{problem.m}/{mode}": {"plans": plans, "us": us, "chosen": chosen, "at": now}}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _others_wait(path.parent):
                self._replace(path, {**self._entries(path), **entry})
            _unwritten.pop(path, None)
        except OSError as error:
            _unwritten[path] = {**self._entries(path), **entry}
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"overlap_torch: measured times are not kept: {error}. OVERLAP_CACHE names another folder.",
                    stacklevel=2,
                )

    def _replace(self, path: Path, entries: dict[str, Any]) -> None:
        data = {
            "schema": SCHEMA,
            "kind": _KIND,
            "environment": self._environment,
            "entries": entries,
        }
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".new")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(data, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise

    def _entries(self, path: Path) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError, RecursionError):
            data = json.loads(path.read_text(encoding="utf-8"))
            if (
                isinstance(data, dict)
                and data.get("schema") == SCHEMA
                and data.get("kind") == _KIND
                and data.get("environment") == self._environment
                and isinstance(data.get("entries"), dict)
            ):
                entries = data["entries"]
        return {**entries, **_unwritten.get(path, {})}


def _others_wait(folder: Path) -> contextlib.ExitStack:
    """Locks the folder until the end of a ``with``. Another job may hold it for some seconds, or the disk know no locks: then it
    does without."""
    held = contextlib.ExitStack()
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        held.callback(os.close, handle)
        for _ in range(_LOOKS):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(_LOOK_S)
    return held


def _variant(problem: Problem) -> str:
    text = "" if problem.invariance == Invariance.NONE else f"-{enum_name(problem.invariance)}"
    if problem.recipe == Recipe.NONE:
        return text
    fast = "-fast_accum" if problem.fast_accum else ""
    return f"{text}-{enum_name(problem.recipe)}-{enum_name(problem.output_dtype)}{fast}"


def _entry(data: dict[str, Any], problem: Problem, m: int) -> Entry:
    """An entry of the file; raises if :meth:`write` cannot have made it."""
    plans, us, chosen = data["plans"], [float(one) for one in data["us"]], data["chosen"]
    if len(plans) != len(us) or not isinstance(chosen, int) or not 0 <= chosen < len(plans):
        raise ValueError("not as many times as plans")
    if not all(math.isfinite(one) and one > 0.0 for one in us):
        raise ValueError("a time that is none")
    of_this = copy.copy(problem)
    of_this.m = m
    for code in plans:
        plan = decode(code)
        validate(plan)
        if plan.problem != of_this:
            raise ValueError("a plan of another problem")
    return Entry(plans, us, chosen)
