"""The executor's enqueued work, without a GPU: csrc/runtime, csrc/steps and csrc/plan over fakes of CUDA, NCCL and the
kernels.

`build` makes the program, and `cases` runs its grid: each executor in each mode, calls of different executors in a row,
calls that are refused or throw. Every case is checked for soundness. A case's text is the operations of each stream and
the operations that each one comes after; traces.txt holds the texts of some, one for each kind of step and mode.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRACES = Path(__file__).with_name("traces.txt")
# As a build for all architectures, whatever this machine's is for.
DEFINES = ["-DOVERLAP_WITH_CUDA", "-DOVERLAP_WITH_SM80", "-DOVERLAP_WITH_SM90"]


class MissingHeadersError(Exception):
    """Why the program cannot be built here."""


def build() -> Path:
    """Compiles what has changed; the program's path."""
    import setup
    import toolchain

    try:
        includes = toolchain.host_headers(toolchain.import_torch())
    except toolchain.NoCudaError as error:
        raise MissingHeadersError(str(error)) from error
    folder = "build/recorder"
    flags = [*setup.CXX_FLAGS, *DEFINES, *setup.isystem(includes)]
    own = sorted(str(path.relative_to(ROOT)) for path in Path(__file__).parent.glob("*.cc"))
    planner = setup.planner_edges()
    setup.run_ninja(setup.PLANNER_FOLDER, planner)
    edges = setup.compile_edges("cxx", [*setup.sources("runtime/*.cc"), *own], folder, flags)
    inputs = setup.objects([*planner, *edges])
    program = setup.Edge("program", f"{folder}/recorder", inputs, ["-pthread"])
    setup.run_ninja(folder, [*edges, program])
    return ROOT / program.output


def by_name(text: str) -> dict[str, str]:
    """The texts of cases by their names, which their first lines hold."""
    return {one.split("\n", 1)[0]: f"== {one}" for one in text.split("== ")[1:]}


def cases(program: Path) -> tuple[dict[str, str], list[str]]:
    """The texts of all cases of the grid by their names, and each call that is not sound."""
    from .grid import grid

    done = subprocess.run([program], input="".join(grid()), capture_output=True, text=True)
    violations = done.stderr.splitlines()
    if done.returncode != 0 and not violations:
        violations.append(f"{program} ended with {done.returncode}")
    return by_name(done.stdout), violations
