"""What the executor enqueues, without a GPU: csrc/runtime, csrc/steps and csrc/plan over fakes of CUDA, NCCL and the kernels.

`build` makes the program, and `cases` runs its grid: each executor in each mode, calls of different executors in a row,
calls that are refused or throw. Every case is checked for soundness. traces.txt holds the texts of some cases, one for
each kind of step and mode; a text is every call in the order in which the host makes it. The canonical form is the
operations of each stream and the operations that each one comes after: it stays as it is where a wait goes that others
make redundant. `python -m tests.recorder --help` shows, pins and compares.
"""

from __future__ import annotations

import difflib
import importlib.util
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
TRACES = ROOT / "tests/recorder/traces.txt"
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


def build(root: Path = ROOT) -> Path:
    """Compiles what has changed in the checkout at `root`; the program's path."""
    setup = load_setup(root)
    import toolchain

    try:
        includes = toolchain.host_headers(toolchain.import_torch())
    except toolchain.NoCudaError as error:
        raise MissingHeadersError(str(error)) from error
    folder = "build/recorder"
    flags = [*setup.CXX_FLAGS, *DEFINES, *setup.isystem(includes)]
    own = sorted(str(path.relative_to(root)) for path in root.glob("tests/recorder/*.cc"))
    planner = setup.planner_edges()
    setup.run_ninja(setup.PLANNER_FOLDER, planner)
    edges = [
        *setup.compile_edges("cxx", setup.sources("runtime/*.cc"), folder, flags),
        *setup.compile_edges("cxx", own, folder, flags),
    ]
    inputs = setup.objects([*planner, *edges])
    program = setup.Edge("program", f"{folder}/recorder", inputs, ["-pthread"])
    setup.run_ninja(folder, [*edges, program])
    return root / program.output


@dataclass(frozen=True)
class Case:
    """One case's record."""

    family: str
    name: str
    text: str
    canonical: str

    @property
    def full_name(self) -> str:
        return f"{self.family}: {self.name}"


def cases(program: Path, violations: list[str]) -> Iterator[Case]:
    """All cases of the grid, one after the other; `violations` gets each call that is not sound."""
    log = program.with_suffix(".log")
    with (
        open(log, "w+") as errors,
        subprocess.Popen([program, "grid"], stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        while line := process.stdout.readline():
            family, name, *sizes = line.decode().rstrip("\n").split("\t")
            text, canonical = (process.stdout.read(int(size)).decode() for size in sizes)
            yield Case(family, name, text, canonical)
        code = process.wait()
        errors.seek(0)
        found = errors.read().splitlines()
    violations += found
    if code != 0 and not found:
        violations.append(f"{program} ended with {code}")


def traces() -> dict[str, str]:
    """The pinned texts by their cases' full names, which their first lines hold."""
    texts = TRACES.read_text().split("== ")[1:]
    return {text.split("\n", 1)[0]: f"== {text}" for text in texts}


def diff(old: str, new: str, old_name: str, new_name: str) -> str:
    lines = difflib.unified_diff(
        old.splitlines(), new.splitlines(), old_name, new_name, lineterm="", n=4
    )
    return "\n".join(lines)


def checkout(revision: str) -> Path:
    """A folder with csrc/ as of a commit, and this tree's recorder and build."""
    tree = ROOT / "build/recorder-of" / revision.replace("/", "-")
    shutil.rmtree(tree / "csrc", ignore_errors=True)
    for name in ("tools", "tests/recorder"):
        shutil.rmtree(tree / name, ignore_errors=True)
        shutil.copytree(ROOT / name, tree / name)
    shutil.copy(ROOT / "setup.py", tree)
    shutil.copytree(
        ROOT / "overlap_torch/profiles", tree / "overlap_torch/profiles", dirs_exist_ok=True
    )
    archive = ["git", "-C", str(ROOT), "archive", "--format=tar", revision, "csrc"]
    with (
        subprocess.Popen(archive, stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as tar,
    ):
        tar.extractall(tree, filter="data")
    return tree


def against(revision: str) -> Iterator[str]:
    """Differences to the executors of a commit: for each family the first case that differs, line by line."""
    violations: list[str] = []
    old_program, new_program = build(checkout(revision)), build()
    shown = set()
    for old, new in zip(cases(old_program, []), cases(new_program, violations), strict=True):
        if old.full_name != new.full_name:
            yield f"'{old.full_name}' has become '{new.full_name}': other plans are valid now"
            return
        if old.text == new.text or old.family in shown:
            continue
        shown.add(old.family)
        same = old.canonical == new.canonical
        what = "the same operations in the same order" if same else "other operations or order"
        yield f"{old.full_name}: {what}"
        yield diff(old.text, new.text, revision, "this tree")
    yield from violations
