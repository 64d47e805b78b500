"""Kernels whose source was aligned, and their launches in jobs; a probe proves each kind of launch once."""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import inspect
import itertools
import linecache
import math
import types
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.runtime import Autotuner, Heuristics

from overlap_torch._kernels import probe as _probe
from overlap_torch._kernels.align import align, asking, by_hand
from overlap_torch._kernels.follow import Source, Unfollowed, function_of, reads
from overlap_torch._kernels.job import Job, entered
from overlap_torch._kernels.proof import Mismatch, prove

_SCRATCH = 72  # counters or flags of a timed run, as in csrc/binding/kernels/kernel_job.h
_PLAIN = frozenset([int, float, bool, str, type(None)])
_LOOPS = "Programs of several tiles take them by `for tile in range(tl.program_id(0), tiles, programs)` or `while tile < tiles`"
_numbers = itertools.count()


class Aligned:
    """A kernel that takes its tiles from the job in whose ``with`` it is launched; see :func:`overlap_torch.triton.aligned`.

    Outside a job, and in a job without signals, it runs the stock kernel.
    """

    def __init__(
        self, kernel: object, output: str, input: str | None, ot: types.ModuleType
    ) -> None:
        self._kernel, self._output, self._input = kernel, output, input
        inner = _innermost(kernel)
        self._function = function_of(inner)
        self.__name__ = self._function.__name__
        try:
            self._alignment = align(Source.of(self._function), output, input, ot)
            self._probe = _probe.probe(self._alignment)
        except Unfollowed as error:
            raise ValueError(self._refusal(str(error))) from None
        self._names = list(inner.arg_names)
        self._places = {name: place for place, name in enumerate(self._names)}
        self._decides = kernel is not inner  # decorators read any argument

    def _refusal(self, why: str) -> str:
        place, _, reason = why.partition(": ")
        return (
            f"{place}: overlap_torch.triton.aligned cannot follow {self.__name__}: {reason}"
            + by_hand(self._input)
        )

    def diff(self) -> str:
        """The lines of the kernel that were changed, as a unified diff."""
        return self._alignment.diff()

    def __getitem__(self, grid: object) -> Callable[..., object]:
        return functools.partial(self._launch, grid)

    @functools.cached_property
    def _jitted(self) -> object:
        function = _compiled(self._alignment.after, self._function)
        return _jit(_innermost(self._kernel), function, len(self._alignment.tables))

    @functools.cached_property
    def _probing(self) -> object:
        return _compiled_probe(self._probe.function, self._function)

    def _launch(self, grid: object, *args: object, **kwargs: object) -> object:
        job = entered()
        if job is None:
            return self._kernel[grid](*args, **kwargs)
        self._check_operands(job, args, kwargs)
        if not job._prepared.signals or (job._prepared.stores and job._debug is None):
            return self._kernel[grid](*args, **kwargs)
        given = dict(zip(self._names, args, strict=False)) | kwargs
        self._check_aliases(job, given)
        all_ = callable(grid) or self._decides
        values = [
            (one if all_ or name in self._probe.constants else type(one))
            if type(one) in _PLAIN
            else _key(one)
            for name, one in given.items()
        ]
        key = (self, job._debug is None, None if callable(grid) else tuple(grid), *given, *values)
        known = job._prepared.aligned
        inner, chain = known.get(key) or (None, None)
        if inner is None:
            inner, chain = known[key] = self._prove(job, grid, args, kwargs)
        inner.counters = job.counters if self._input is None else job.arrived
        return chain.run(*args, grid=grid, warmup=False, **kwargs)

    def _argument(self, name: str, args: tuple, kwargs: dict[str, object]) -> torch.Tensor:
        place = self._places[name]
        value = args[place] if place < len(args) else kwargs.get(name)
        if isinstance(value, torch.Tensor):
            return value
        base = getattr(value, "base", None)  # of a descriptor
        if not isinstance(base, torch.Tensor):
            raise ValueError(
                f"{self.__name__}: {name} is {value!r}, allowed is a tensor or a descriptor of one"
            )
        return base

    def _check_operands(self, job: Job, args: tuple, kwargs: dict[str, object]) -> None:
        consumes = job._rows is not None
        what = job._prepared.what
        if consumes != (self._input is not None):
            raise ValueError(
                f"{self.__name__} is launched in {what}: "
                + (
                    f'a kernel that waits is made by aligned(kernel, output="{self._output}", input=...)'
                    if consumes
                    else f'leave out input="{self._input}" of aligned, as no kernel waits there'
                )
            )
        name, matrix = self._matrix(job)
        given = self._argument(name, args, kwargs)
        if given is matrix:
            return
        if given.data_ptr() != matrix.data_ptr() or given.numel() != matrix.numel():
            raise ValueError(
                f"{self.__name__}: {name} must be job.{'gathered' if consumes else 'output'} of {what}, "
                f"{tuple(matrix.shape)}, but is another tensor, {tuple(given.shape)}"
            )

    # --- once for each kind of launch -----------------------------------------------------------------------------

    def _prove(
        self, job: Job, grid: object, args: tuple, kwargs: dict[str, object]
    ) -> tuple[_Inner, object]:
        """The kernel with its tables, and the decorators above it."""
        what = job._prepared.what
        if job._capturing:
            raise RuntimeError(
                f"{what}: the first launch of {self.__name__} with these arguments cannot be captured into a CUDA graph, "
                "because its tiles are looked for; make one outside, with the same arguments"
            )
        tables, proven, refused = {}, [], []
        results: dict[tuple, object] = {}
        varying = sorted({name for config in _configs(self._kernel) for name in config.kwargs})
        for config in _configs(self._kernel) or [None]:
            if proven and not job._prepared.on_gpu:
                break  # nothing is timed in the interpreter
            recorder = _Recorder(self._names)
            chain = _chain(self._kernel, recorder, config and [config])
            chain.run(*args, grid=grid, warmup=False, **kwargs)
            constants = [name for name in self._names if name in self._probe.constants]
            key = (recorder.grid, *(_key(recorder.meta.get(name)) for name in constants))
            if key not in results:
                results[key] = self._result(job, recorder)
            if isinstance(results[key], Mismatch):
                refused.append((config, results[key]))
                continue
            proven.append(config)
            place = tuple([recorder.meta.get(name) for name in varying])
            read = {name: recorder.meta.get(name) for name in constants}
            tables[place] = (*results[key], recorder.grid, read)
        if not proven:
            raise ValueError(self._none_fits(what, refused))
        inner = _Inner(self._jitted, varying, tables)
        return inner, _chain(self._kernel, inner, None if proven[0] is None else proven)

    def _result(
        self, job: Job, recorder: _Recorder
    ) -> tuple[torch.Tensor, torch.Tensor] | Mismatch:
        for name, line in self._alignment.never.items():
            if recorder.meta.get(name):
                place = f"{self._alignment.before.file}:{line}"
                why = f"{name} is {recorder.meta[name]!r} there, which neither waits nor signals allow; pass False"
                raise ValueError(self._refusal(f"{place}: {why}"))
        self._check_called(recorder.meta)
        output, stored = (
            self._argument(self._output, (), recorder.meta),
            recorder.meta[self._output],
        )

        def probe(owner: torch.Tensor, *first: object) -> None:
            place = owner.view(output.shape)
            if stored is not output:  # a descriptor
                descriptor = copy.copy(stored)
                descriptor.base, place = place, descriptor
            self._probing[recorder.grid](*first, **recorder.meta | {self._output: place})

        programs = math.prod(recorder.grid)
        try:
            return prove(job, probe, output, self._input, programs, self._alignment.in_order)
        except Mismatch as error:
            return (
                error
                if self._alignment.loops or programs >= job.tiles
                else Mismatch(f"{error}. {_LOOPS}")
            )
        except triton.OutOfResources as error:
            return Mismatch(f"the run that looks for its tiles does not fit: {error}")

    def _check_called(self, given: dict[str, object]) -> None:
        """No function among the arguments asks for the program's number, or finds a tile's place in memory."""
        lines = dict.fromkeys(self._probe.placing, self._alignment.store_line)
        for name, line in (lines | self._alignment.called).items():
            default = inspect.signature(self._function).parameters[name].default
            for source in map(Source.of, _functions(given.get(name, default))):
                why = None
                if source.calls(tl.program_id) or next(asking(source, set()), None):
                    why = f"{name}, which is called here, is {source.name}, which asks for tl.program_id itself"
                elif name in self._probe.placing and reads(source):
                    why = _probe.DEPENDS.format(self._output, source.name)
                if why is not None:
                    raise ValueError(self._refusal(f"{self._alignment.before.file}:{line}: {why}"))

    def _check_aliases(self, job: Job, given: dict[str, object]) -> None:
        """Only the followed argument may point to the job's matrix."""
        name, matrix = self._matrix(job)
        begin, end = matrix.data_ptr(), matrix.data_ptr() + matrix.nbytes
        for other, value in given.items():
            value = getattr(value, "base", value)
            if other == name or not isinstance(value, torch.Tensor):
                continue
            if value.data_ptr() < end and begin < value.data_ptr() + value.nbytes:
                place = f"{self._alignment.before.file}:{self._alignment.store_line}"
                why = f"{name} is aliased: {other} is the same memory"
                raise ValueError(self._refusal(f"{place}: {why}"))

    def _matrix(self, job: Job) -> tuple[str, torch.Tensor]:
        if self._input is not None:
            return self._input, job.gathered
        return self._output, job.output

    def _none_fits(self, what: str, refused: list[tuple[object, Mismatch]]) -> str:
        place = f"{self._alignment.before.file}:{self._alignment.store_line}"
        first = refused[0][1]
        if refused[0][0] is None:
            return self._refusal(f"{place}: {first} ({what})")
        shown = "; ".join(
            f"{', '.join(f'{name}={value}' for name, value in config.kwargs.items())}: {error}"
            for config, error in refused[:4]
        )
        more = f"; and {len(refused) - 4} more" if len(refused) > 4 else ""
        return self._refusal(
            f"{place}: a job has one tile, and none of the {len(refused)} configurations of triton.autotune computes that of "
            f"{what}: {shown}{more}"
        )


class _Inner:
    """The aligned kernel with the tables of its configuration as its first arguments."""

    def __init__(self, fn: object, varying: list[str], tables: dict[tuple, tuple]) -> None:
        self.fn, self._varying, self._tables = fn, varying, tables
        self.counters: torch.Tensor | None = None

    def run(self, *args: object, grid: object, warmup: bool, **kwargs: object) -> object:
        place = tuple([kwargs.get(name) for name in self._varying])
        order, chunks, proven, read = self._tables[place]
        for name, value in read.items():
            if type(value) in _PLAIN and kwargs.get(name, value) != value:
                raise ValueError(
                    f"{name} is {kwargs[name]!r}, and was {value!r} in the first launch with the same arguments: let "
                    "triton.heuristics depend on these only"
                )
        if callable(grid):
            grid = functools.partial(_as_proven, grid, proven)
        return self.fn.run(order, chunks, self.counters, *args, grid=grid, warmup=warmup, **kwargs)


def _as_proven(grid: Callable[[dict], tuple], proven: tuple, meta: dict[str, object]) -> tuple:
    made = tuple(grid(meta))
    if made != proven:
        raise ValueError(
            f"the grid is {made}, and was {proven} in the first launch with the same arguments: let it depend on these only"
        )
    return made


class _Tuner(Autotuner):
    """Times configurations. Their signals and waits use counters of the timed runs, not the job's."""

    def _bench(self, *args: object, config: object, **meta: object) -> object:
        inner = self.fn
        while not isinstance(inner, _Inner):
            inner = inner.fn
        counters = inner.counters
        # Each run signals each tile, or finds that all chunks have arrived.
        inner.counters = counters.new_ones(max(_SCRATCH, len(counters)))
        try:
            return super()._bench(*args, config=config, **meta)
        finally:
            inner.counters = counters


class _Recorder:
    """Takes a kernel's place and records the arguments of its launch."""

    def __init__(self, names: list[str]) -> None:
        self.fn, self._names = self, names

    def run(self, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        self.meta = dict(zip(self._names, args, strict=False)) | kwargs
        self.grid = tuple(grid(self.meta) if callable(grid) else grid)


def _innermost(kernel: object) -> object:
    while isinstance(kernel, Autotuner | Heuristics):
        kernel = kernel.fn
    if function_of(kernel) is None:
        raise ValueError(
            f"overlap_torch.triton.aligned: kernel is {kernel!r}, allowed is a @triton.jit function, also below "
            "@triton.autotune and @triton.heuristics"
        )
    return kernel


def _configs(kernel: object) -> list[object]:
    while isinstance(kernel, Autotuner | Heuristics):
        if isinstance(kernel, Autotuner):
            return kernel.configs
        kernel = kernel.fn
    return []


def _chain(kernel: object, inner: object, configs: list[object] | None) -> object:
    """The kernel's decorators, put above another kernel, with some of the configurations."""
    if not isinstance(kernel, Autotuner | Heuristics):
        return inner
    made = copy.copy(kernel)
    made.fn = _chain(kernel.fn, inner, configs)
    if isinstance(kernel, Autotuner):
        made.__class__ = _Tuner
        made.configs, made.cache = configs, {}
    return made


def _key(value: object) -> object:
    """The part of a launch's argument on which addresses depend."""
    if isinstance(value, torch.Tensor) or hasattr(value, "data_ptr"):
        return None
    if isinstance(value, tl.constexpr):
        return value.value
    if isinstance(value, tuple | list):
        return tuple(map(_key, value))
    if hasattr(value, "block_shape"):
        return tuple(value.shape), tuple(value.strides), tuple(value.block_shape)
    return value


def _functions(value: object) -> list[types.FunctionType]:
    """The functions among a launch's argument, which may be a tuple of them."""
    value = getattr(value, "value", value)
    if isinstance(value, tuple | list):
        return [one for part in value for one in _functions(part)]
    function = function_of(value)
    return [] if function is None else [function]


def _jit(kernel: object, function: types.FunctionType, inserted: int) -> object:
    """Decorates as the kernel was, with this number of additional first parameters."""
    names = "version do_not_specialize do_not_specialize_on_alignment debug noinline launch_metadata".split()
    known = getattr(kernel, "kwargs", None)
    options = dict(known or {name: getattr(kernel, name, None) for name in names})
    for name in ("do_not_specialize", "do_not_specialize_on_alignment"):
        places = options.get(name) or []
        options[name] = [one + inserted if isinstance(one, int) else one for one in places]
    return triton.jit(**options)(function)


def _compiled(source: Source, like: types.FunctionType) -> types.FunctionType:
    """The function compiled from a source that ``inspect`` can find."""
    file = f"<aligned {source.name} {next(_numbers)}>"
    linecache.cache[file] = (len(source.text), None, source.text.splitlines(keepends=True), file)
    flags = like.__code__.co_flags & __future__.annotations.compiler_flag
    # Names are looked up now, so those defined below the kernel are found, too.
    names = {**like.__globals__, **source.names}
    code = compile(ast.parse(source.text), file, "exec", flags=flags, dont_inherit=True)
    exec(code, names)
    function = names[source.name]
    function.__module__ = like.__module__
    return function


def _compiled_probe(made: _probe.Function, like: types.FunctionType) -> object:
    names = dict(made.names)
    for one in made.inner:
        names[one.name] = _compiled_probe(one, like)
    source = Source(made.name, "", made.text, [], names)
    return triton.jit(_compiled(source, like))
