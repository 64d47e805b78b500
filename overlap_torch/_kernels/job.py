"""A kernel of the caller's between its call and its result."""

from __future__ import annotations

import threading

import torch

from overlap_torch._kernels import occupancy
from overlap_torch._kernels import resources as _resources
from overlap_torch._kernels.request import Prepared
from overlap_torch._ops.collectives import compares_all
from overlap_torch._ops.graphs import outside_graphs

_COMPILED = "a kernel between overlap_torch.produce or consume and its result is no op that torch.compile could trace"
untraced = outside_graphs(_COMPILED)  # a decorator


class _Entered(threading.local):
    def __init__(self) -> None:
        self.jobs: list[Job] = []


_entered = _Entered()
_of_graphs: set[Prepared] = set()  # CUDA graphs hold the addresses of their tables


def entered() -> Job | None:
    """The job of this thread's innermost ``with``."""
    return _entered.jobs[-1] if _entered.jobs else None


class Job:
    """A kernel of the caller's and its communication; :func:`produce` and :func:`consume` return it.

    The kernel is launched with these tensors. All except the first two are int32, on the device.

    Attributes:
        output: ``produce``: [rows, N], where the kernel stores its product, row-major. It is not the result, and after the
            ``with`` it belongs to the group.
        gathered: ``consume``: [world * rows, K], all ranks' rows; the kernel may read a tile's rows when the tile's
            chunk has arrived.
        tile_order: the tiles in the order in which to take them, each as row * columns + column of the grid of tiles.
        tile_chunk: for each tile the chunk that counts it (``produce``), or that it waits for (``consume``).
        counters: ``produce``: the counters to signal, zero at first.
        arrived: ``consume``: the flags to wait for.
        tiles: the number of tiles.
        programs: the number of programs that a persistent kernel launches: the SMs that it does not leave to communication,
            times the blocks of an SM if ``resources`` set that number.
        plan: the :class:`overlap_torch.Plan` of its communication.
    """

    output: torch.Tensor
    gathered: torch.Tensor
    tile_order: torch.Tensor
    tile_chunk: torch.Tensor
    counters: torch.Tensor
    arrived: torch.Tensor

    def __init__(self, prepared: Prepared, rows: torch.Tensor | None = None) -> None:
        self._prepared, self._rows = prepared, rows
        self._call = None
        self._result: torch.Tensor | None = None
        self._entered = self._failed = False
        self._debug: torch.Tensor | None = None
        self._context = None
        self.plan = prepared.plan
        self.tiles = len(prepared.chunks)
        self.columns = prepared.columns
        self.programs = prepared.programs

    @untraced
    def __enter__(self) -> Job:
        prepared = self._prepared
        if self._entered:
            raise RuntimeError(
                f"{prepared.what}: a job is entered once; make another one for the next call"
            )
        self._entered = True
        context = None
        resources = prepared.resources
        if resources.by == "green_context" and resources.comm_sms and prepared.on_gpu:
            context = _resources.green_context(self.programs, prepared.device)
        if self._capturing:
            _of_graphs.add(prepared)
        self._call, matrix, counters = prepared.job.begin(self._rows)
        self.tile_order, self.tile_chunk = prepared.tile_order, prepared.tile_chunk
        if self._rows is None:
            self.output = matrix
            self.counters = self._counters = counters
            exact = compares_all() or not prepared.on_gpu
            if exact and prepared.signals and not self._capturing:
                # Each tile has a counter of its own, so that signals are checked one by one.
                device = prepared.device
                self._debug = torch.zeros(self.tiles, dtype=torch.int32, device=device)
                self.counters = self._debug
                self.tile_chunk = torch.arange(self.tiles, dtype=torch.int32, device=device)
        else:
            self.gathered, self.arrived = matrix, counters
        if context is not None:
            self._stream = torch.cuda.current_stream(prepared.device)
            context.set_context()
            self._context = context
        _entered.jobs.append(self)
        return self

    @untraced
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        _entered.jobs.remove(self)
        if self._context is not None:
            self._context.pop_context()
            torch.cuda.set_stream(self._stream)
            self._context = None
        call, self._call = self._call, None
        if kind is not None:
            self._failed = True
            call.abandon(f"{self._prepared.what} by an exception, {kind.__name__}: {error}")
            return
        self._failed = True  # until it has been finished
        if self._debug is not None:
            self._check_tiles(call)
        self._result = call.finish()
        self._failed = False

    @untraced
    def result(self) -> torch.Tensor:
        """The communicated product (``produce``), or the gathered rows (``consume``); the same tensor each time.

        The caller's stream continues after the communication, as after any op. If the kernel never signals a tile, the wait
        for its chunk passes the group's deadline; then :func:`overlap_torch.check`, or the next op, raises.

        Raises:
            RuntimeError: the ``with`` has not ended, or was left by an exception.
        """
        if self._result is None:
            state = "was left by an exception" if self._failed else "has not ended"
            raise RuntimeError(f"{self._prepared.what} has no result: its `with` {state}")
        return self._result

    def smem_pad_bytes(self, shared_bytes: int) -> int:
        """Shared memory to add to each block of a CUDA kernel: the plan's, or that of ``resources(by="padding")``.

        Args:
            shared_bytes: the shared memory of a block without padding, static and dynamic together.

        Raises:
            ValueError: an SM has no room for ``ctas_per_sm`` blocks.
        """
        if self.plan.resources.smem_pad_bytes:
            return self.plan.resources.smem_pad_bytes
        prepared = self._prepared
        if not (prepared.on_gpu and prepared.resources.ctas_per_sm):
            return 0
        properties = torch.cuda.get_device_properties(prepared.device)
        return occupancy.smem_pad_bytes(
            shared_bytes,
            prepared.resources.ctas_per_sm,
            properties.shared_memory_per_multiprocessor,
        )

    def __getattr__(self, name: str) -> object:
        """Only the tensors that this job does not have, or not yet."""
        if name not in Job.__annotations__ or "_prepared" not in self.__dict__:
            raise AttributeError(f"'Job' object has no attribute {name!r}")
        has = "tile_order, tile_chunk, " + (
            "output, counters" if self._rows is None else "gathered, arrived"
        )
        raise AttributeError(
            f"{self._prepared.what} has no {name}: inside its `with`, this job has {has}"
        )

    @property
    def _capturing(self) -> bool:
        return self._prepared.on_gpu and torch.cuda.is_current_stream_capturing()

    def _check_tiles(self, call) -> None:
        """On CPU, and under OVERLAP_DEBUG=1: raises unless each tile was signalled once; then sets the chunks' counters, which
        the kernel did not see."""
        wrong = [
            f"({tile // self.columns}, {tile % self.columns}) {'never' if count == 0 else f'{count} times'}"
            for tile, count in enumerate(self._debug.tolist())
            if count != 1
        ]
        if wrong:
            shown = ", ".join(wrong[:8]) + (f" and {len(wrong) - 8} more" if len(wrong) > 8 else "")
            text = f"the kernel signalled tile {shown}; each tile (row, column) is signalled once"
            call.abandon(f"{self._prepared.what}: {text}")
            raise RuntimeError(f"{self._prepared.what}: {text}")
        counts = torch.tensor(self._prepared.job.chunk_tiles(), dtype=torch.int32)
        self._counters[: len(counts)].copy_(counts)
