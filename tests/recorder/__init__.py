"""What the executor enqueues, without a GPU: csrc/runtime, csrc/steps and csrc/plan over fakes of CUDA, NCCL and the kernels.

`build` makes the program, `record` runs all its cases, and `differences` holds them against what was pinned:

- pins.json: for each family of cases, how many there are, and hashes of their texts and of their canonical forms;
- traces/: some cases' texts, to be read, and to show a difference line by line.

The text is every call in the order in which the host makes it. The canonical form is the operations of each stream and
what each of them comes behind: it stays as it is where a wait goes that others made redundant, or where the host
enqueues on two streams in another turn. `python -m tests.recorder --help` pins, shows and compares.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests/recorder"
PINS = HERE / "pins.json"
TRACES = HERE / "traces"
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
    edges = [
        *setup.planner_edges(folder),
        *setup.compile_edges("cxx", setup.sources("runtime/*.cc"), folder, flags),
        *setup.compile_edges("cxx", own, folder, flags),
    ]
    program = setup.Edge("program", f"{folder}/recorder", setup.objects(edges), ["-pthread"])
    setup.run_ninja(folder, [*edges, program])
    return root / program.output


@dataclass(frozen=True)
class Case:
    """One case's record."""

    family: str
    name: str
    text: bytes
    canonical: bytes

    @property
    def full_name(self) -> str:
        return f"{self.family}: {self.name}"


@dataclass
class Pin:
    """What is pinned of a family."""

    cases: int = 0
    text: str = ""
    canonical: str = ""


@dataclass
class Records:
    """All cases' records: what is pinned of them, the texts of those that are kept, and what no call may do."""

    pins: dict[str, Pin] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)


def cases(program: Path, violations: list[str]) -> Iterator[Case]:
    """All cases of the grid, one after the other; what the program finds unsound is added to `violations`."""
    log = program.with_suffix(".log")
    with (
        open(log, "w+") as errors,
        subprocess.Popen([program, "grid"], stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        while line := process.stdout.readline():
            family, name, text, canonical = line.decode().rstrip("\n").split("\t")
            yield Case(
                family,
                name,
                process.stdout.read(int(text)),
                process.stdout.read(int(canonical)),
            )
        code = process.wait()
        errors.seek(0)
        found = errors.read().splitlines()
    violations += found
    if code != 0 and not found:
        violations.append(f"{program} ended with {code}")


def record(program: Path, keep: frozenset[str] = frozenset()) -> Records:
    """Runs all cases. `keep`: full names of those whose texts are wanted."""
    records = Records()
    hashes: dict[str, tuple] = {}
    for case in cases(program, records.violations):
        pin = records.pins.setdefault(case.family, Pin())
        pin.cases += 1
        text, canonical = hashes.setdefault(case.family, (hashlib.sha256(), hashlib.sha256()))
        text.update(case.text)
        canonical.update(case.canonical)
        if case.full_name in keep:
            records.texts[case.full_name] = case.text.decode()
    for family, (text, canonical) in hashes.items():
        records.pins[family].text = text.hexdigest()
        records.pins[family].canonical = canonical.hexdigest()
    return records


def pinned() -> dict[str, Pin]:
    return {family: Pin(**pin) for family, pin in json.loads(PINS.read_text()).items()}


def write_pins(pins: dict[str, Pin]) -> None:
    text = json.dumps({family: asdict(pin) for family, pin in pins.items()}, indent=1)
    PINS.write_text(text + "\n")


def compare(old: dict[str, Pin], new: dict[str, Pin]) -> list[str]:
    """What differs, a line for each family."""
    lines = []
    for family in sorted(old.keys() | new.keys()):
        before, after = old.get(family), new.get(family)
        if before is None:
            lines.append(f"{family}: is new, with {after.cases} cases")
        elif after is None:
            lines.append(f"{family}: has no case any more, and had {before.cases}")
        elif before.cases != after.cases:
            lines.append(f"{family}: has {after.cases} cases, and had {before.cases}")
        elif before.canonical != after.canonical:
            lines.append(f"{family}: other operations, or in another order")
        elif before.text != after.text:
            lines.append(
                f"{family}: the text alone differs (waits that others make redundant, or the turn of streams)"
            )
    return lines


def traces() -> dict[str, Path]:
    """The traces that are kept as files, by their cases' full names, which their first lines hold."""
    named = {}
    for path in sorted(TRACES.glob("*.txt")):
        with open(path) as file:
            named[file.readline().removeprefix("== ").rstrip("\n")] = path
    return named


def trace_path(full_name: str) -> Path:
    return TRACES / (re.sub(r"[^a-z0-9]+", "-", full_name.lower()).strip("-") + ".txt")


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
    archive = ["git", "-C", str(ROOT), "archive", "--format=tar", revision, "csrc"]
    with (
        subprocess.Popen(archive, stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as tar,
    ):
        tar.extractall(tree, filter="data")
    return tree


def against(revision: str) -> Iterator[str]:
    """Differences to the executors of a commit: for each family the first case that differs, line by line."""
    old_violations: list[str] = []
    new_violations: list[str] = []
    old_program, new_program = build(checkout(revision)), build()
    shown = set()
    old_cases = cases(old_program, old_violations)
    new_cases = cases(new_program, new_violations)
    for old, new in zip(old_cases, new_cases, strict=True):
        if old.full_name != new.full_name:
            yield f"'{old.full_name}' has become '{new.full_name}': other plans are valid now"
            return
        if old.text == new.text or old.family in shown:
            continue
        shown.add(old.family)
        same = old.canonical == new.canonical
        what = "the same operations in the same order" if same else "other operations or order"
        yield f"{old.full_name}: {what}"
        yield diff(old.text.decode(), new.text.decode(), revision, "this tree")
    yield from new_violations


@functools.cache
def current() -> Records:
    """The records of this tree, with the texts of all traces; built and run once a process."""
    return record(build(), frozenset(traces()))
