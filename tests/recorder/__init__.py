"""The executor's enqueued work, without a GPU: csrc/runtime, csrc/steps and csrc/plan over fakes of
CUDA, NCCL and the kernels.

`build` makes the program, and `cases` runs its grid: each executor in each mode, calls of different executors in a row,
calls that are refused or throw. Every case is checked for soundness. A case's text is the operations of each stream and
the operations that each one comes after, so that neither redundant waits nor the host's turns show. traces.txt holds the
texts of some cases, one for each kind of step and mode. `python -m tests.recorder --help` shows and pins.
"""

from __future__ import annotations

import difflib
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
TRACES = Path(__file__).with_name("traces.txt")
REPIN = "python -m tests.recorder --pin"
# As a build for all architectures, whatever this machine's is for.
DEFINES = ["-DOVERLAP_WITH_CUDA", "-DOVERLAP_WITH_SM80", "-DOVERLAP_WITH_SM90"]


class MissingHeadersError(Exception):
    """Why the program cannot be built here."""


def load_setup(root: Path) -> ModuleType:
    """The setup.py of the checkout at `root`, as a module."""
    spec = importlib.util.spec_from_file_location("overlap_torch_setup", root / "setup.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def build() -> Path:
    """Compiles what has changed; the program's path."""
    setup = load_setup(ROOT)
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
    edges = [
        *setup.compile_edges("cxx", setup.sources("runtime/*.cc"), folder, flags),
        *setup.compile_edges("cxx", own, folder, flags),
    ]
    inputs = setup.objects([*planner, *edges])
    program = setup.Edge("program", f"{folder}/recorder", inputs, ["-pthread"])
    setup.run_ninja(folder, [*edges, program])
    return ROOT / program.output


def cases(program: Path) -> tuple[dict[str, str], list[str]]:
    """The texts of all cases of the grid by their names, and each call that is not sound."""
    from .grid import grid

    lines = "".join(case.line() for case in grid())
    done = subprocess.run([program, "run"], input=lines.encode(), capture_output=True)
    texts, rest = {}, done.stdout
    while rest:
        head, _, rest = rest.partition(b"\n")
        name, size = head.decode().split("\t")
        texts[name], rest = rest[: int(size)].decode(), rest[int(size) :]
    violations = done.stderr.decode().splitlines()
    if done.returncode != 0 and not violations:
        violations.append(f"{program} ended with {done.returncode}")
    return texts, violations


def traces() -> dict[str, str]:
    """The pinned texts by their cases' names, which their first lines hold."""
    texts = TRACES.read_text().split("== ")[1:]
    return {text.split("\n", 1)[0]: f"== {text}" for text in texts}


def diff(old: str, new: str) -> str:
    lines = difflib.unified_diff(
        old.splitlines(), new.splitlines(), "traces.txt", "this tree", lineterm="", n=4
    )
    return "\n".join(lines)
