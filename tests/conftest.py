"""Markers, what the machine can run, and the end of the rank pools."""

from collections import defaultdict

import pytest
from hypothesis import settings

import rank_pool
from grids import where_each_pair_meets

# A machine that runs other work beside the tests is slow, which is no failure.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")

_MARKERS = {
    "gpu": "needs a CUDA device",
    "gpu2": "needs two CUDA devices",
    "long": "takes minutes; left out unless chosen with -m long or -m races",
    "races": "the long race tests",
    "whole": "a point of a grid of which other points are enough; left out unless OVERLAP_TEST_WHOLE_GRIDS=1",
    "ranks": "ranks((world, backend), ..., long=[...], whole=[...]): the pools that a test with the fixture ranks runs on, those of "
    "its long version, and those of whole grids only",
    "peers": "a test with `failures` that needs ranks which map each other's memory",
    "fresh": "fresh(**options): the ranks of a test with `failures` are its own; options are those of rank_pool.run_fresh",
    "seconds": "seconds(number): the most that the ranks of a test with `failures` may take; 300 unless given",
}


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in _MARKERS.items():
        config.addinivalue_line("markers", meaning if "(" in meaning else f"{name}: {meaning}")


def gpu_count() -> int:
    """GPUs that torch can use here; does not initialise CUDA."""
    import torch

    return torch.cuda.device_count()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = config.getoption("markexpr", "")
    long_chosen = "long" in chosen or "races" in chosen
    for item in items:
        if item.get_closest_marker("long") and not long_chosen:
            item.add_marker(
                pytest.mark.skip(reason="takes minutes; choose it with -m long or -m races")
            )
        needed = (
            2 if item.get_closest_marker("gpu2") else 1 if item.get_closest_marker("gpu") else 0
        )
        if needed:
            found = gpu_count()
            if needed == 2 and rank_pool.shares_gpus():
                needed = 1
            if found < needed:
                reason = f"needs {needed} CUDA device{'s' if needed > 1 else ''}, this machine has {found}"
                item.add_marker(pytest.mark.skip(reason=reason))
    if not rank_pool.whole_grids():
        whole = [item for item in items if item.get_closest_marker("whole")]
        others = [item for item in items if not item.get_closest_marker("whole")]
        for item in whole + _beyond_each_pair(others):
            item.add_marker(pytest.mark.skip(reason="OVERLAP_TEST_WHOLE_GRIDS is not 1"))


def _beyond_each_pair(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests on CPU ranks without which any two values of a test's parameters still meet in another one of its tests."""
    grids = defaultdict(list)
    for item in items:
        ranks = item.callspec.params.get("ranks") if hasattr(item, "callspec") else None
        if ranks and ranks[1] == "gloo":
            grids[item.function].append(item)
    beyond = []
    for grid in grids.values():
        kept = where_each_pair_meets([_values(item) for item in grid])
        beyond += [item for place, item in enumerate(grid) if place not in kept]
    return beyond


def _values(item: pytest.Item) -> list[str]:
    """The ranks, and what each `parametrize` of the test gives."""
    given = item.callspec.params
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    names = [one.replace(",", " ").split() if isinstance(one, str) else one for one in names]
    return [repr(given["ranks"]), *(repr([given[name] for name in group]) for group in names)]


@pytest.fixture(scope="session", autouse=True)
def _rank_pools():
    yield
    rank_pool.close_all()


class RankRunner:
    """A pool of `world` ranks on `backend`; see rank_pool.run."""

    def __init__(self, world: int, backend: str) -> None:
        self.world = world
        self.backend = backend
        self.environment: dict[str, str] = {}  # of a pool of its own

    @property
    def device_type(self) -> str:
        return "cuda" if self.backend == "nccl" else "cpu"

    def run(self, job, *args, timeout_s: float = 120.0) -> list:
        """Every rank's result."""
        if rank_pool.shares_gpus():
            timeout_s *= 4  # a rank that waits for one of its own GPU's waits for its turn
        return rank_pool.run(
            self.world, self.backend, job, *args, timeout_s=timeout_s, environment=self.environment
        )

    def skip_without_kernel(self, kernel) -> None:
        from plans import available_kernels

        available = self.run(available_kernels)[0]
        if kernel not in available:
            names = ", ".join(known.name for known in available)
            pytest.skip(
                f"{kernel.name} is not built for this GPU or cannot run on it; there are {names}"
            )

    def skip_without_peers(self) -> None:
        from plans import peers_work

        if not all(self.run(peers_work)):
            pytest.skip("the ranks do not map each other's memory")

    def expect_no_failures(self, job, *args, timeout_s: float = 300.0, **given) -> None:
        """Runs the job with a `Failures` before these arguments: there must be none on any rank, and something must have run."""
        found = self.run(rank_pool.findings, job, args, given, timeout_s=timeout_s)
        _expect_none(job.__name__, found)


def _expect_none(name: str, results: list[tuple[int, list[str]]]) -> None:
    """`results`: each rank's number of checks, and its failures."""
    assert all(checks > 0 for checks, _ in results), f"{name} checked nothing: {results}"
    lines = [f"rank {rank}: {line}" for rank, (_, lines) in enumerate(results) for line in lines]
    assert not lines, f"{len(lines)} failures in {name}:\n" + "\n".join(lines[:40])


def _ranks_param(world: int, backend: str, *marks: pytest.MarkDecorator):
    if backend != "gloo":
        marks += (pytest.mark.gpu, *([pytest.mark.gpu2] if world > 1 else []))
    return pytest.param((world, backend), id=f"{world}-{backend}", marks=marks)


_RANKS = [_ranks_param(world, backend) for backend in ("gloo", "nccl") for world in (1, 2, 3, 4)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`ranks`: every world size on gloo and NCCL, or those that the marker `ranks` names."""
    if "ranks" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("ranks")
        params = _RANKS
        if marker:
            params = [_ranks_param(*pair) for pair in marker.args]
            for mark in (pytest.mark.long, pytest.mark.whole):
                params += [_ranks_param(*pair, mark) for pair in marker.kwargs.get(mark.name, ())]
        metafunc.parametrize("ranks", params, indirect=True)


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> RankRunner:
    """The pool to run a job on; skips where there are fewer GPUs than NCCL ranks."""
    world, backend = request.param
    if backend == "nccl" and gpu_count() < world and not rank_pool.shares_gpus():
        pytest.skip(f"{world} NCCL ranks need {world} CUDA devices, this machine has {gpu_count()}")
    return RankRunner(world, backend)


@pytest.fixture
def failures(ranks: RankRunner) -> RankRunner:
    """A test that takes this runs on every rank, with a `Failures` of its own in its place. There must be none on any."""
    return ranks


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    names = pyfuncitem._fixtureinfo.argnames
    if "failures" not in names:
        return None
    given = {name: pyfuncitem.funcargs[name] for name in names if name != "failures"}
    limit = pyfuncitem.get_closest_marker("seconds")
    seconds = limit.args[0] if limit else 300.0
    runner = pyfuncitem.funcargs["failures"]
    if pyfuncitem.get_closest_marker("peers"):
        runner.skip_without_peers()
    if "kernel" in given:
        runner.skip_without_kernel(given["kernel"])
    fresh = pyfuncitem.get_closest_marker("fresh")
    if fresh is None:
        runner.expect_no_failures(pyfuncitem.obj, timeout_s=seconds, **given)
        return True
    options = {"timeout_s": seconds, **fresh.kwargs}
    job = (rank_pool.findings, pyfuncitem.obj, (), given)
    outcomes = rank_pool.run_fresh(runner.world, runner.backend, *job, **options)
    _expect_none(pyfuncitem.name, [outcome.result() for outcome in outcomes])
    return True
