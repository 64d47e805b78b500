"""Builds overlap_torch: one build.ninja for the op library `_C` and the modules `_plan` (planner) and `_eager` (calls).

A checkout also gets `tests/_plan_test` and `tests/_steps_test`, the tests' own.

    pip install .                              against the torch that is installed (tools/build_backend.py)
    python setup.py build_ext --inplace        the same, into the checkout (what `make build` runs)
    python setup.py build_plan                 only `_plan`, into the checkout; needs no CUDA
    python setup.py build_kernel_check         the program that checks the CUDA kernels; prints its path

Nothing is downloaded here. Environment variables: `python -m overlap_torch doctor` lists them.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import setuptools
from setuptools.command.build_ext import build_ext as setuptools_build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

from toolchain import (  # noqa: E402  (found through the path above)
    BUILD_INSTALL,
    DTYPES,
    MIN_TORCH,
    BuildError,
    Cuda,
    NoCudaError,
    find_cuda,
    find_cxx,
    gencode,
    import_torch,
    pybind11_include,
    torch_pin,
)

# The modules of the Python that runs: pybind11's planner, and the ops' short way in.
PLAN_NAME = f"_plan{sysconfig.get_config_var('EXT_SUFFIX')}"
EAGER_NAME = f"_eager{sysconfig.get_config_var('EXT_SUFFIX')}"
EXTENSIONS = {"_C": "_C.so", "_plan": PLAN_NAME, "_eager": EAGER_NAME}  # and their files
# Tests need these beyond `_plan`, and the types of `_plan`, which a build has only where
# pybind11-stubgen is installed.
PLAN_TEST_NAME = f"_plan_test{sysconfig.get_config_var('EXT_SUFFIX')}"
STEPS_TEST_NAME = "_steps_test.so"
PLAN_STUB_NAME = "_plan.pyi"
PROFILE = "overlap_torch/profiles/h200.json"
TORCH_HEADERS = "cpu/torch_headers.h"
SOURCE_HASH = "plan/source_hash.cc"
PLANNER_FOLDER = "build/plan"  # the objects that know neither torch nor CUDA, for every build
# One row for each Hopper GEMM: kernel, data types of the operand, with the stores to peers or without.
SM90_SOURCE = "csrc/kernels/gemm/gemm_instance_sm90.cu"
SM90_CHOICE = "csrc/kernels/gemm/gemm.cu"  # picks an instance, and knows the build's types
SM90_INSTANCES = [
    (kernel, dtype, peers, groups)
    for kernel, dtypes, forms, groups in (
        ("kSm90Pingpong", DTYPES, (False, True), False),
        ("kSm90Pingpong", ("bf16", "fp16"), (False, True), True),
        ("kSm90PingpongWide", DTYPES, (False, True), False),
        ("kSm90Cooperative", ("bf16", "fp16"), (False,), False),
    )
    for dtype in dtypes
    for peers in forms
]
CXX_FLAGS = "-std=c++20 -O2 -DNDEBUG -fPIC -fvisibility=hidden -Wall -Wextra -Icsrc".split()
NVCC_FLAGS = [
    *"-std=c++20 -O3 --expt-relaxed-constexpr -Icsrc".split(),
    "-DNDEBUG",  # with asserts in the kernels ptxas serialises wgmma (C7510)
    "-Xcompiler=-fPIC,-fvisibility=hidden",
]
JOB_BYTES = 3 << 30  # what the compiler of a Hopper GEMM takes


@dataclass(frozen=True)
class Edge:
    """One build step: `rule` makes `output` from `inputs`, again when `depends` change."""

    rule: str
    output: str
    inputs: list[str]
    flags: list[str]
    depends: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Precompiled:
    """Headers that the compiler reads once for many files: what these are compiled with, and depend on."""

    flags: tuple[str, ...] = ()
    depends: tuple[str, ...] = ()


NOTHING_PRECOMPILED = Precompiled()


def sources(pattern: str, folder: str = "csrc") -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(f"{folder}/{pattern}"))


def isystem(paths: Iterable[Path | str]) -> list[str]:
    return [word for path in paths for word in ("-isystem", str(path))]


def compile_edges(
    rule: str, files: Iterable[str], folder: str, flags: list[str], depends: Iterable[str] = ()
) -> list[Edge]:
    return [
        Edge(rule, f"{folder}/{f.removeprefix('csrc/')}.o", [f], flags, [*depends]) for f in files
    ]


def objects(edges: Iterable[Edge]) -> list[str]:
    """The objects of these that a link takes."""
    return [edge.output for edge in edges if edge.output.endswith(".o")]


def build_info(cuda: Cuda | None) -> str:
    """The text that torch.ops.overlap.build_info() returns, before the hash of the sources."""
    if cuda is None:
        return "cuda=none"
    lists = f"archs={','.join(cuda.archs)};dtypes={','.join(cuda.dtypes)}"
    return f"cuda={cuda.version};{lists};nccl={cuda.nccl_version}"


def planner_edges(folder: str = PLANNER_FOLDER) -> list[Edge]:
    """Plans, their steps and the planner, compiled once for `_plan` and every `_C`."""
    files = [file for part in ("plan", "steps", "planner") for file in sources(f"{part}/**/*.cc")]
    # The profile that is shipped is compiled in: the planner reads no files.
    shipped = f"{folder}/plan/shipped_profile.cc"
    profile = Edge("profile_source", shipped, [PROFILE], [], ["tools/profile_source.py"])
    # Ranks compare what they were built from, and tuned times hold for it.
    hashed = f"{folder}/{SOURCE_HASH}"
    digest = Edge("source_hash", hashed, sources("**/*.*"), [], ["tools/source_hash.py"])
    made = [Edge("cxx", f"{file}.o", [file], CXX_FLAGS) for file in (shipped, hashed)]
    return [profile, digest, *made, *compile_edges("cxx", files, folder, CXX_FLAGS)]


def module_edges(
    folder: str,
    files: list[str],
    includes: Iterable[Path | str],
    precompiled: Precompiled = NOTHING_PRECOMPILED,
) -> list[Edge]:
    """The edges that compile a module of the Python that runs."""
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        raise BuildError(f"no Python.h in {headers}: apt-get install python3-dev")
    abi = f"{folder}/{sysconfig.get_config_var('SOABI')}"
    flags = [*precompiled.flags, *CXX_FLAGS, *isystem([*includes, headers])]
    return compile_edges("cxx", files, abi, flags, precompiled.depends)


def plan_edges(folder: str = PLANNER_FOLDER) -> list[Edge]:
    """`_plan`: the planner's pybind11 module, and its stub."""
    files = [
        f"csrc/binding/python/{name}_module.cc" for name in ("plan", "planner", "steps", "proof")
    ]
    module = module_edges(folder, files, [pybind11_include()])
    inputs = objects(planner_edges(folder) + module)
    edges = [*module, Edge("link", f"{folder}/{PLAN_NAME}", inputs, [])]
    if importlib.util.find_spec("pybind11_stubgen"):
        tool = "tools/plan_stub.py"
        stub = f"{folder}/{PLAN_STUB_NAME}"
        edges.append(Edge("plan_stub", stub, [f"{folder}/{PLAN_NAME}"], [], [tool]))
    return edges


def steps_test_edges(folder: str, torch: ModuleType, cuda: Cuda | None) -> list[Edge]:
    """`_steps_test`: ops of the tests, on the executors of `_C`."""
    flags, library_flags, library_files = with_libraries(torch, cuda)
    module = torch_edges(sources("steps_test/*.cc", "tests"), folder, flags)
    changed = ("/mutate.cc.o", "/structure.cc.o")
    changes = [file for file in objects(plan_test_edges()) if file.endswith(changed)]
    inputs = objects([*module, *planner_edges()]) + changes
    library = [f"-L{folder}", "-l:_C.so", "-Wl,-rpath,$ORIGIN/../overlap_torch"]
    depends = [f"{folder}/_C.so", *library_files]
    link = Edge("link", f"{folder}/{STEPS_TEST_NAME}", inputs, [*library, *library_flags], depends)
    return [*module, link]


def plan_test_edges(folder: str = PLANNER_FOLDER) -> list[Edge]:
    """`_plan_test`: what tests ask beyond `_plan`."""
    module = module_edges(folder, sources("plan_test/*.cc", "tests"), [pybind11_include()])
    shared = [
        file for file in objects(plan_edges(folder)) if not file.endswith("/plan_module.cc.o")
    ]
    inputs = objects(planner_edges(folder) + module) + shared
    return [*module, Edge("link", f"{folder}/{PLAN_TEST_NAME}", inputs, [])]


def planner_module_edges(in_checkout: bool) -> list[Edge]:
    """All that is built in PLANNER_FOLDER; the tests' module for a checkout only."""
    return [*planner_edges(), *plan_edges(), *(plan_test_edges() if in_checkout else [])]


def place_planner(package: Path, in_checkout: bool) -> None:
    """Puts `_plan`, its stub if one was made, and the tests' module where they are imported from."""
    built = ROOT / PLANNER_FOLDER
    place(built / PLAN_NAME, package / PLAN_NAME)
    if (built / PLAN_STUB_NAME).exists():
        place(built / PLAN_STUB_NAME, package / PLAN_STUB_NAME)
    if in_checkout:
        place(built / PLAN_TEST_NAME, ROOT / "tests" / PLAN_TEST_NAME)


def torch_headers(torch: ModuleType) -> list[Path]:
    include = Path(torch.__file__).parent / "include"
    return [include, include / "torch/csrc/api/include"]


def link_with_torch(torch: ModuleType, libraries: Iterable[str]) -> list[str]:
    return [f"-L{Path(torch.__file__).parent / 'lib'}", *(f"-l{name}" for name in libraries)]


@functools.cache
def precompiles() -> bool:
    """True of g++, unless ccache is there, which would keep no objects that read precompiled headers."""
    version = subprocess.run([*find_cxx(), "--version"], capture_output=True, text=True).stdout
    return "Free Software Foundation" in version and not shutil.which("ccache")


def torch_precompiled(folder: str) -> Precompiled:
    """The precompiled headers of torch."""
    if not precompiles():
        return NOTHING_PRECOMPILED
    made = f"{folder}/precompiled"
    # The folder comes before -Icsrc, in which the header itself is.
    flags = (f"-I{made}", "-include", TORCH_HEADERS, "-Winvalid-pch")
    return Precompiled(flags, (f"{made}/{TORCH_HEADERS}.gch",))


def precompile_edges(folder: str, torch: ModuleType) -> list[Edge]:
    flags = [*CXX_FLAGS, *isystem(torch_headers(torch))]
    return [
        Edge("precompile", made, [f"csrc/{TORCH_HEADERS}"], flags)
        for made in torch_precompiled(folder).depends
    ]


def torch_edges(files: Iterable[str], folder: str, flags: list[str]) -> list[Edge]:
    """Compiles files that know torch."""
    precompiled = torch_precompiled(folder)
    return compile_edges("cxx", files, folder, [*precompiled.flags, *flags], precompiled.depends)


def eager_edges(folder: str, torch: ModuleType) -> list[Edge]:
    """`_eager`: the ops as functions of Python's; torch, imported first, has loaded what it needs."""
    files = [f"csrc/binding/python/{name}_module.cc" for name in ("eager", "autograd")]
    module = module_edges(folder, files, torch_headers(torch), torch_precompiled(folder))
    flags = link_with_torch(torch, ["c10", "torch_cpu", "torch_python"])
    return [*module, Edge("link", f"{folder}/{EAGER_NAME}", objects(module), flags)]


def kernel_edges(folder: str, cuda: Cuda) -> list[Edge]:
    """The CUDA kernels and what launches them; no torch."""
    flags = [*NVCC_FLAGS, *cuda.defines, *isystem([cuda.cutlass_include])]
    edges: list[Edge] = []
    for file in sources("kernels/*/*.cu"):
        if not (targets := gencode(file, cuda.archs)):
            continue
        if file == SM90_SOURCE:
            edges += sm90_edges(folder, cuda, [*flags, *targets])
            continue
        chooses = [f"-DOVERLAP_WITH_SM90_{dtype.upper()}" for dtype in cuda.dtypes]
        own = chooses if file == SM90_CHOICE else []
        edges += compile_edges("nvcc", [file], folder, [*flags, *own, *targets])
    return edges


def window_edges(folder: str, cuda: Cuda) -> list[Edge]:
    """The runtime's kernels, which read what NCCL's headers describe."""
    # Not -isystem: nvcc searches the toolkit's folder before that, which may hold another nccl.h.
    flags = [*NVCC_FLAGS, *cuda.defines, f"-I{cuda.nccl / 'include'}"]
    return [
        edge
        for file in sources("runtime/*.cu")
        for edge in compile_edges("nvcc", [file], folder, [*flags, *gencode(file, cuda.archs)])
    ]


def sm90_edges(folder: str, cuda: Cuda, flags: list[str]) -> list[Edge]:
    """The Hopper GEMMs of this build's data types: one source, compiled for each row of the table."""
    edges = []
    for kernel, dtype, peers, groups in SM90_INSTANCES:
        if dtype in cuda.dtypes:
            row = {"KERNEL": kernel, "DTYPE": DTYPES[dtype]}
            row |= {"PEERS": str(peers).lower(), "GROUPS": str(groups).lower()}
            name = f"{kernel}_{dtype}{'_peers' if peers else ''}{'_groups' if groups else ''}"
            output = f"{folder}/kernels/gemm/{name}_sm90.o"
            defines = [f"-DOVERLAP_INSTANCE_{key}={value}" for key, value in row.items()]
            edges.append(Edge("nvcc", output, [SM90_SOURCE], [*flags, *defines]))
    return edges


def with_libraries(torch: ModuleType, cuda: Cuda | None) -> tuple[list[str], list[str], list[str]]:
    """The flags that compile and link what knows torch, and CUDA if there is; and the files of libraries."""
    flags = list(CXX_FLAGS)
    libraries = ["c10", "torch_cpu"]
    library_files: list[str] = []
    homes = ["torch/lib", "nvidia/nccl/lib"]
    if cuda:
        flags += [*cuda.defines, *isystem(cuda.includes)]
        libraries += ["c10_cuda", "torch_cuda"]
        library_files = [str(cuda.cudart), str(cuda.nccl / "lib/libnccl.so.2")]
        homes += [f"nvidia/{cuda.cudart.parents[1].name}/lib"]
    flags += [f'-DOVERLAP_BUILD_INFO="{build_info(cuda)}"', *isystem(torch_headers(torch))]
    link_flags = [
        "-Wl,-z,defs",  # a missing function fails here, not at import
        # torch, imported first, has loaded these already; the rpath serves whoever loads _C alone.
        f"-Wl,-rpath,{':'.join(f'$ORIGIN/../{home}' for home in homes)}",
        *link_with_torch(torch, libraries),
        *library_files,
    ]
    return flags, link_flags, library_files


def op_edges(folder: str, torch: ModuleType, cuda: Cuda | None) -> list[Edge]:
    """`_C`: the bindings; with CUDA also kernels and runtime."""
    edges: list[Edge] = []
    bindings = [file for file in sources("binding/*/*.cc") if "/python/" not in file]
    bindings += sources("cpu/*.cc")
    if cuda is None:
        bindings = [file for file in bindings if not file.endswith("_cuda.cc")]
    else:
        edges += kernel_edges(folder, cuda)
        runtime_flags = [*CXX_FLAGS, *cuda.defines, *isystem(cuda.includes)]
        edges += compile_edges("cxx", sources("runtime/*.cc"), folder, runtime_flags)
        edges += window_edges(folder, cuda)
    flags, link_flags, library_files = with_libraries(torch, cuda)
    edges += torch_edges(bindings, folder, flags)
    inputs = objects(edges + planner_edges())
    return [*edges, Edge("link", f"{folder}/_C.so", inputs, link_flags, library_files)]


def kernel_check_edges(folder: str, cuda: Cuda) -> list[Edge]:
    """The program that checks the kernels alone, of the objects that `_C` is made of."""
    file = "tests/cuda/kernel_check.cu"
    includes = isystem([cuda.cutlass_include])
    flags = [*NVCC_FLAGS, *cuda.defines, *includes, *gencode(file, cuda.archs)]
    edges = [
        *kernel_edges(folder, cuda),
        *compile_edges("nvcc", [file], folder, flags),
    ]
    home = Path(cuda.cudart).parent
    link_flags = [str(cuda.cudart), f"-Wl,-rpath,{home}", "-pthread", "-ldl"]
    return [
        *edges,
        Edge("program", f"{folder}/kernel_check", objects(edges + planner_edges()), link_flags),
    ]


def rule_commands(cuda: Cuda | None) -> dict[str, list[str]]:
    """Each rule's command; ninja fills in $flags, $in and $out."""
    ccache = shutil.which("ccache")
    cached = [ccache] if ccache else []
    compile_ = "-MD -MF $out.d $flags -c $in -o $out".split()
    rules = {
        "cxx": [*cached, *find_cxx(), *compile_],
        "precompile": [*find_cxx(), *"-x c++-header".split(), *compile_],
        "link": [*find_cxx(), *"-shared $in $flags -o $out".split()],
        "program": [*find_cxx(), *"$in $flags -o $out".split()],
        "profile_source": [sys.executable, *"tools/profile_source.py $in $out".split()],
        "source_hash": [sys.executable, *"tools/source_hash.py $out $in".split()],
        "plan_stub": [sys.executable, *"tools/plan_stub.py $in $out".split()],
    }
    if cuda:
        rules["nvcc"] = [*cached, str(cuda.nvcc), "-ccbin", find_cxx()[0], *compile_]
    return rules


def ninja_text(folder: str, edges: Sequence[Edge], rules: dict[str, list[str]]) -> str:
    def joined(paths: Iterable[str]) -> str:
        return " ".join(re.sub(r"([$ :])", r"$\1", path) for path in paths)

    # builddir: each folder's log is its own, so that one build does not forget another's.
    lines = ["ninja_required_version = 1.5", f"builddir = {joined([folder])}"]
    for rule, command in rules.items():
        words = [word if word.startswith("$") else shlex.quote(word) for word in command]
        lines += [f"rule {rule}", f"  command = {' '.join(words)}", f"  description = {rule} $out"]
        if "-MD" in command:
            lines += ["  depfile = $out.d", "  deps = gcc"]
    for edge in edges:
        inputs = joined(edge.inputs) + (f" | {joined(edge.depends)}" if edge.depends else "")
        lines += [f"build {joined([edge.output])}: {edge.rule} {inputs}"]
        lines += [f"  flags = {shlex.join(edge.flags).replace('$', '$$')}"]
    return "\n".join(lines) + "\n"


def job_count() -> int:
    """MAX_JOBS, or all cores as far as memory goes."""
    if given := os.environ.get("MAX_JOBS"):
        if not given.isdecimal() or int(given) < 1:
            raise BuildError(
                f"MAX_JOBS is {given!r}, allowed are whole numbers from 1: compilers at a time"
            )
        return int(given)
    available = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    by_memory = int(available[1]) * 1024 // JOB_BYTES if available else 1
    return max(1, min(len(os.sched_getaffinity(0)), by_memory))


def run_ninja(folder: str, edges: Sequence[Edge], cuda: Cuda | None = None) -> None:
    """Compiles what has changed."""
    ninja = [sys.executable, "-m", "ninja"]
    if not importlib.util.find_spec("ninja"):
        ninja = [shutil.which("ninja") or ""]
    if not ninja[0]:
        raise BuildError(f"ninja is missing: {BUILD_INSTALL}")
    script = Path(folder, "build.ninja")
    (ROOT / folder).mkdir(parents=True, exist_ok=True)
    (ROOT / script).write_text(ninja_text(folder, edges, rule_commands(cuda)))
    # Objects do not depend on where the checkout lies, so that ccache serves other checkouts too.
    env = {"CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1", **os.environ}
    command = [*ninja, "-f", str(script), "-j", str(job_count())]
    if subprocess.run(command, cwd=ROOT, env=env).returncode:
        raise BuildError("compilation failed; the compiler's messages are above")


def place(source: Path, destination: Path) -> None:
    """Copies by renaming: a process that has the old library loaded keeps it whole."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    fresh = destination.with_name(f"{destination.name}.new")
    shutil.copy2(source, fresh)
    fresh.replace(destination)


def announce_no_cuda(reason: str) -> None:
    """Says it on stderr, and on the terminal when pip has taken stderr away."""
    bar = "*" * 100
    text = (
        f"\n{bar}\n  overlap_torch is built WITHOUT CUDA: {reason}.\n"
        "  CUDA tensors will take the unfused composition. OVERLAP_CUDA=1 makes this an error;\n"
        f"  `python -m overlap_torch doctor` tells what a build holds.\n{bar}\n"
    )
    print(text, file=sys.stderr, flush=True)
    if not sys.stderr.isatty():
        try:
            with open("/dev/tty", "w") as terminal:
                print(text, file=terminal)
        except OSError:  # no terminal: nobody watches
            pass


def build_record(torch: ModuleType, cuda: Cuda | None, why_no_cuda: str | None) -> str:
    """The doctor's facts about the build, as JSON."""
    compiler = subprocess.run([*find_cxx(), "--version"], capture_output=True, text=True).stdout
    sources = re.search(r"0x(\w+)", (ROOT / PLANNER_FOLDER / SOURCE_HASH).read_text())[1]
    record = {
        "build_info": f"{build_info(cuda)};sources={sources}",
        "torch": torch.__version__,
        "why_no_cuda": why_no_cuda,
        "cxx": compiler.split("\n")[0],
        "nvcc": f"{cuda.nvcc} ({cuda.version})" if cuda else None,
        "cutlass": str(cuda.cutlass_include) if cuda else None,
    }
    return json.dumps(record, indent=2) + "\n"


class build_ext(setuptools_build_ext):
    """Builds the extensions and puts them, with a record of the build, into the package."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join("overlap_torch", EXTENSIONS[fullname.rpartition(".")[2]])

    def run(self) -> None:
        torch = import_torch()
        cuda = reason = None
        try:
            cuda = find_cuda(torch)
        except NoCudaError as error:
            reason = str(error)
            announce_no_cuda(reason)
        folder = f"build/torch-{torch.__version__}-{'cuda' if cuda else 'cpu'}"
        in_checkout = bool(self.inplace or self.editable_mode)
        run_ninja(PLANNER_FOLDER, planner_module_edges(in_checkout))
        edges = [
            *precompile_edges(folder, torch),
            *eager_edges(folder, torch),
            *op_edges(folder, torch, cuda),
        ]
        if in_checkout:
            edges += steps_test_edges(folder, torch, cuda)
        run_ninja(folder, edges, cuda)
        built = ROOT / folder
        (built / "_build.json").write_text(build_record(torch, cuda, reason))
        package = (ROOT if in_checkout else Path(self.build_lib)) / "overlap_torch"
        place_planner(package, in_checkout)
        for name in (EXTENSIONS["_C"], EAGER_NAME, "_build.json"):
            place(built / name, package / name)
        if in_checkout:
            place(built / STEPS_TEST_NAME, ROOT / "tests" / STEPS_TEST_NAME)


def requirement() -> str:
    """The metadata's requirement of torch. A source distribution holds for all releases, a build for one."""
    try:
        return torch_pin(import_torch())
    except BuildError:
        return f"torch>={'.'.join(map(str, MIN_TORCH))}"


def build_plan() -> None:
    """Builds only `_plan` and the tests' `_plan_test`, into the checkout."""
    run_ninja(PLANNER_FOLDER, planner_module_edges(in_checkout=True))
    place_planner(ROOT / "overlap_torch", in_checkout=True)


def build_kernel_check() -> Path:
    """Builds the program that checks the kernels; its path."""
    torch = import_torch()
    cuda = find_cuda(torch)
    folder = f"build/torch-{torch.__version__}-cuda"
    run_ninja(PLANNER_FOLDER, planner_edges())
    run_ninja(folder, kernel_check_edges(folder, cuda), cuda)
    return ROOT / folder / "kernel_check"


# By any setuptools: these need no metadata.
COMMANDS: dict[str, Callable[[], Path | None]] = {
    "build_plan": build_plan,
    "build_kernel_check": build_kernel_check,
}


def main() -> None:
    if len(sys.argv) == 2 and sys.argv[1] in COMMANDS:
        if (program := COMMANDS[sys.argv[1]]()) is not None:
            print(program)
        return
    if int(setuptools.__version__.split(".")[0]) < 77:
        raise BuildError(f"setuptools {setuptools.__version__} is too old: {BUILD_INSTALL}")
    setuptools.setup(
        install_requires=[requirement()],
        packages=[
            *setuptools.find_packages(include=["overlap_torch", "overlap_torch.*"]),
            "overlap_torch.benchmarks",
        ],
        py_modules=["overlap_torch_plugins"],
        package_dir={"overlap_torch": "overlap_torch", "overlap_torch.benchmarks": "benchmarks"},
        package_data={
            "overlap_torch": ["py.typed", "profiles/*.json", "include/overlap/*.cuh"],
            "overlap_torch.benchmarks": ["*.json"],
        },
        # No sources: build_ext finds them by the conventions above.
        ext_modules=[setuptools.Extension(f"overlap_torch.{name}", []) for name in EXTENSIONS],
        cmdclass={"build_ext": build_ext},
    )


if __name__ == "__main__":
    try:
        main()
    except BuildError as error:
        sys.exit(f"error: {error}")
