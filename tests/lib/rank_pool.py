"""Rank processes for tests.

`run` keeps one pool of ranks for each (world size, backend) and hands it one job after another, so that process start,
imports and rendezvous are paid once a session. `run_fresh` starts ranks for a single job, for tests that lose ranks or
need an environment of their own. A job is a module-level function; every rank calls it with the same arguments.

A job that does not end in time never hangs the suite: the ranks write their stacks, are killed, and the test fails with
stacks and output in the message. The store is held by the test process, so that it outlives any rank.
"""

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

JOBS_OF_A_CROWDED_POOL = 10  # after which it ends, so that others find memory
GRACE_S = 8.0  # what the other ranks get to answer once one rank has failed
POOL_GROUP_TIMEOUT_S = 60.0
START_TIMEOUT_S = 120.0

# Multicast is not needed by any test, and some hosts do not offer it. Everything here runs on one host.
# Ranks are daemons, and start no processes.
_COMPILES_ALONE = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
_ENVIRONMENT = {
    **_COMPILES_ALONE,
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
# The server that ranks are forked from imports these once for all of them. All of them together start no thread.
_IMPORTED_BESIDE_GPUS = ("torch", "torch.distributed")
_IMPORTED = ("pytest", "overlap_torch", "torch.distributed.tensor", "torch._inductor.compile_fx")
# Every rank a host of its own, as NCCL sees it: it goes through its network transport, over sockets. (Ranks of one host
# must have a GPU each.)
_HOSTS = {"NCCL_HOSTID": "overlap_torch-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
_NETWORK = {**_HOSTS, "OVERLAP_PEERS": "0"}


def shares_gpus() -> bool:
    """True if several ranks may use a GPU: each gets a turn of it, as processes do."""
    return os.environ.get("OVERLAP_TEST_SHARED_GPUS") == "1"


def whole_grids() -> bool:
    """True for whole grids of parameters, not only a part in which each two values meet."""
    return os.environ.get("OVERLAP_TEST_WHOLE_GRIDS") == "1"


def under_load(seconds: float) -> float:
    """A deadline of `seconds` on a machine of its own, longer where many test processes share the machine."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return seconds * max(1.0, workers / 4) * (4 if shares_gpus() else 1)


def _network() -> dict[str, str]:
    if os.environ.get("OVERLAP_TEST_NETWORK") == "1":
        return _NETWORK
    return _HOSTS if shares_gpus() else {}


def _start_method(environment: dict[str, str]) -> str:
    """Fork from a server that has imported the package, unless the environment holds what Triton reads at its import."""
    if "TRITON_INTERPRET" in environment:
        return "spawn"
    os.environ.update(_COMPILES_ALONE)
    gpus = os.path.exists("/dev/nvidiactl")  # no import may touch a GPU before the fork
    multiprocessing.set_forkserver_preload([*(_IMPORTED_BESIDE_GPUS if gpus else _IMPORTED)])
    return "forkserver"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job on one rank."""

    kind: str  # "returned", "raised", "died" or "hung"
    value: Any = None  # what the job returned
    detail: str = ""  # traceback, exit code and the end of the output, or stacks
    crowded: bool = False  # the rank's GPU is nearly full

    def result(self) -> Any:
        """The value that the job returned; an AssertionError where it ended otherwise."""
        assert self.kind == "returned", self
        return self.value


class RankFailure(AssertionError):
    """A job failed on some rank; the message holds every rank's part."""


class Ranks:
    """The processes of one process group, rank 0 to world - 1."""

    def __init__(
        self, world: int, backend: str, group_timeout_s: float, environment: dict[str, str]
    ) -> None:
        from torch.distributed import TCPStore  # late: collecting tests should not need torch

        context = multiprocessing.get_context(_start_method(environment))
        self.name = f"{world} {backend} rank{'s' if world > 1 else ''}"
        self.jobs = 0
        self._folder = tempfile.mkdtemp(prefix="overlap_ranks_")
        self._store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._connections: list[Connection] = []
        self._processes = []
        network = _network()
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, world, backend, self._store.port, group_timeout_s),
                kwargs={
                    "environment": {
                        name: value.replace("{rank}", str(rank)).replace("{host}", str(rank // 2))
                        for name, value in (_ENVIRONMENT | network | environment).items()
                    },
                    "folder": self._folder,
                    "connection": there,
                },
                daemon=True,
            )
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)
        started = self._collect(START_TIMEOUT_S)
        if any(outcome.kind != "returned" for outcome in started):
            message = self._describe("start", started)
            self.kill()
            raise RankFailure(message)

    def call(self, job: Callable[..., Any], args: Sequence[Any], timeout_s: float) -> list[Outcome]:
        """Runs the job on every rank; never raises for what a rank did. `timeout_s` is for a machine that nobody shares."""
        message = pickle.dumps((job, tuple(args)))
        for connection in self._connections:
            connection.send_bytes(message)
        return self._collect(under_load(timeout_s))

    def check(self, job: Callable[..., Any], outcomes: Sequence[Outcome]) -> list[Any]:
        """The values that the job returned; raises RankFailure unless every rank returned."""
        if any(outcome.kind != "returned" for outcome in outcomes):
            raise RankFailure(self._describe(job.__name__, outcomes))
        return [outcome.value for outcome in outcomes]

    def close(self) -> None:
        """Ends the ranks in order: each destroys its process group."""
        for connection in self._connections:
            try:
                connection.send_bytes(pickle.dumps(None))
            except OSError:
                pass
        deadline = time.monotonic() + GRACE_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(GRACE_S)
        for connection in self._connections:
            connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _collect(self, timeout_s: float) -> list[Outcome]:
        deadline = time.monotonic() + timeout_s
        outcomes: dict[int, Outcome] = {}
        failed = False
        while len(outcomes) < len(self._processes):
            waiting: dict[Any, int] = {}
            for rank, process in enumerate(self._processes):
                if rank not in outcomes:
                    waiting[self._connections[rank]] = rank
                    waiting[process.sentinel] = rank
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in {waiting[item] for item in ready}:
                outcomes[rank] = self._receive(rank)
                if outcomes[rank].kind != "returned" and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + self.grace_s)
        hung = [rank for rank in range(len(self._processes)) if rank not in outcomes]
        for rank, stacks in zip(hung, self._stacks(hung), strict=True):
            outcomes[rank] = Outcome("hung", detail=stacks)
        return [outcomes[rank] for rank in range(len(self._processes))]

    grace_s = GRACE_S

    def _receive(self, rank: int) -> Outcome:
        try:
            if self._connections[rank].poll(0):
                return pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, OSError):
            pass
        self._processes[rank].join(GRACE_S)
        said = _tail(os.path.join(self._folder, f"output{rank}"), 6000)
        return Outcome(
            "died", detail=f"exit code {self._processes[rank].exitcode}\n{said}".rstrip()
        )

    def _stacks(self, ranks: Sequence[int]) -> list[str]:
        for rank in ranks:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        if ranks:
            time.sleep(1.0)
        return [
            _tail(os.path.join(self._folder, f"stacks{rank}"), 6000)
            + _native_stacks(self._processes[rank].pid)
            for rank in ranks
        ]

    def _describe(self, what: str, outcomes: Sequence[Outcome]) -> str:
        parts = [f"{what} on {self.name}:"]
        for rank, outcome in enumerate(outcomes):
            parts.append(f"--- rank {rank} {outcome.kind}\n{outcome.detail}".rstrip())
            output = _tail(os.path.join(self._folder, f"output{rank}"), 3000)
            if outcome.kind not in ("returned", "died") and output:
                parts.append(f"--- rank {rank}, end of its output\n{output}")
        return "\n".join(parts)


_pools: dict[tuple, Ranks] = {}


def run(
    world: int,
    backend: str,
    job: Callable[..., Any],
    *args: Any,
    timeout_s: float = 120.0,
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """Runs `job(*args)` on every rank of the pool and returns the ranks' results, rank 0 first.

    `backend` is "gloo" or "nccl". Raises RankFailure, with every rank's traceback, if a rank raises, dies or takes
    longer than `timeout_s`; the pool is then given up, and the next call starts a new one. Each `environment` has a pool
    of its own.
    """
    key = (world, backend, *sorted((environment or {}).items()))
    ranks = _pools.pop(key, None) or Ranks(world, backend, POOL_GROUP_TIMEOUT_S, environment or {})
    try:
        outcomes = ranks.call(job, args, timeout_s)
        values = ranks.check(job, outcomes)
    except BaseException:  # pytest's timeout, too: a late answer would be taken for the next job's
        ranks.kill()
        raise
    _pools[key] = ranks
    ranks.jobs += 1
    # Groups keep the slots of their largest call, and ranks of many workers share a GPU.
    if ranks.jobs >= JOBS_OF_A_CROWDED_POOL and any(one.crowded for one in outcomes):
        close_all()
    return values


def run_fresh(
    world: int,
    backend: str,
    job: Callable[..., Any],
    *args: Any,
    group_timeout_s: float = 10.0,
    timeout_s: float = 60.0,
    environment: dict[str, str] | None = None,
) -> list[Outcome]:
    """Runs `job(*args)` once on ranks of its own and returns every rank's outcome, whatever it is.

    A rank that dies or raises does not cut the others short: they have until `timeout_s`. `environment` is set before
    the ranks import the package.
    """
    ranks = Ranks(world, backend, group_timeout_s, environment or {})
    ranks.grace_s = under_load(timeout_s)
    try:
        return ranks.call(job, args, timeout_s)
    finally:
        ranks.kill()


def findings(
    test: Callable[..., None], args: Sequence[Any], given: dict[str, Any]
) -> tuple[int, list[str]]:
    """A rank's job: a test, or a part of one, that takes `failures`."""
    from checks import Failures

    failures = Failures()
    test(failures, *args, **given)
    return failures.result()


def close_all() -> None:
    """Ends every pool."""
    while _pools:
        _pools.popitem()[1].close()


atexit.register(close_all)


def _native_stacks(process: int) -> str:
    """Where all threads are, in libraries too: of a hang in CUDA or NCCL, Python's stacks show one line. "" without gdb."""
    if shutil.which("gdb") is None:
        return ""
    command = ["gdb", "-p", str(process), "-batch", "-ex", "thread apply all backtrace 20"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return "\ngdb did not answer"
    lines = [line for line in done.stdout.splitlines() if line.startswith(("#", "Thread"))]
    return "\n" + "\n".join(lines)[:20000]


def _tail(path: str, size: int) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read()[-size:].strip()
    except OSError:
        return ""


def _serve(
    rank: int,
    world: int,
    backend: str,
    port: int,
    group_timeout_s: float,
    *,
    environment: dict[str, str],
    folder: str,
    connection: Connection,
) -> None:
    """Body of a rank process: joins the group, then answers jobs until it is told to end."""
    os.environ.update(environment)
    output = os.open(os.path.join(folder, f"output{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    stacks = open(os.path.join(folder, f"stacks{rank}"), "w")  # noqa: SIM115, kept open for the handler
    faulthandler.enable(all_threads=True)  # what a rank did when it died, in its output
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)

    def answer(outcome: Outcome) -> None:
        connection.send_bytes(pickle.dumps(outcome))

    def attempt(job: Callable[..., Any], *args: Any) -> Outcome:
        try:
            outcome = Outcome("returned", value=job(*args))
            pickle.dumps(outcome)
            return outcome
        except BaseException:  # whatever it is belongs to the test process
            return Outcome("raised", detail=traceback.format_exc())

    started = attempt(_join_group, rank, world, backend, port, group_timeout_s)
    answer(started)
    while started.kind == "returned":
        try:
            message = connection.recv_bytes()
        except EOFError:  # the test process is gone
            os._exit(1)
        try:
            task = pickle.loads(message)
        except BaseException:
            answer(Outcome("raised", detail=traceback.format_exc()))
            continue
        if task is None:
            break
        job, args = task
        outcome = attempt(job, *args)
        answer(replace(outcome, crowded=backend == "nccl" and _crowds()))
    if started.kind == "returned":
        import torch.distributed as dist

        dist.destroy_process_group()


def _crowds() -> bool:
    """Returns what the allocator keeps of a large job, and says whether less than a quarter of the GPU is free all the same."""
    import torch

    with contextlib.suppress(RuntimeError):  # a job that broke the device has said so itself
        if torch.cuda.memory_reserved() > 1 << 30:
            torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return 4 * free < total
    return False


def _join_group(rank: int, world: int, backend: str, port: int, group_timeout_s: float) -> None:
    import torch
    import torch.distributed as dist

    import overlap_torch  # noqa: F401, registers the ops: jobs need not import it

    torch.set_num_threads(1)
    _one_gloo_worker()
    if backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count() if shares_gpus() else rank)
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=START_TIMEOUT_S))
    timeout = timedelta(seconds=group_timeout_s)
    store.set_timeout(timeout)  # as torchrun's rendezvous does
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def _one_gloo_worker() -> None:
    """Gives each gloo group of this process one worker thread in place of two.

    The workers write the name of the work that they have done into one string, without a lock (ProcessGroupGloo::runLoop,
    PyTorch 2.11). DTensor's all-gathers have a long name, on the heap: two writers free it twice.
    """
    from torch.distributed import distributed_c10d

    class OneWorker(distributed_c10d.ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **_: Any) -> None:
            options = self._Options()
            options._timeout, options._threads = timeout, 1
            interface = os.environ["GLOO_SOCKET_IFNAME"]
            options._devices = [self.create_device(interface=interface)]
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OneWorker
