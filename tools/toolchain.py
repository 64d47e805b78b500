"""The tools of a build: compilers, targets, CUTLASS, and torch's own NCCL and CUDA runtime.

Only looks; compiles and downloads nothing. setup.py builds with what is found here.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from setuptools.errors import BaseError

ARCHS = ("sm_80", "sm_90a")
GENCODE = {
    "sm_80": "-gencode=arch=compute_80,code=[sm_80,compute_80]",  # with PTX, for newer GPUs
    "sm_90a": "-gencode=arch=compute_90a,code=sm_90a",
}
# The operand types that Hopper's GEMMs are compiled for, and their names in csrc/plan/plan.h.
DTYPES = {"bf16": "kBFloat16", "fp16": "kFloat16", "e4m3": "kFloat8E4M3", "e5m2": "kFloat8E5M2"}
MIN_TORCH = (2, 11)
BUILD_INSTALL = 'pip install "setuptools>=77,<82" ninja pybind11 pybind11-stubgen'
CUTLASS_REQUIREMENT = "nvidia-cutlass==4.2.0.0"
CUTLASS_INSTALL = f"pip install --no-deps {CUTLASS_REQUIREMENT}"


class BuildError(BaseError):
    """An input that cannot be built; the message names the remedy."""


class NoCudaError(Exception):
    """Why a build goes without CUDA."""


@dataclass(frozen=True)
class Cuda:
    """The CUDA half of a build: compiler, targets, and the libraries that torch itself loads."""

    nvcc: Path
    version: str  # of nvcc, such as "13.0"
    archs: tuple[str, ...]
    dtypes: tuple[str, ...]  # of Hopper's GEMMs
    cutlass_include: Path
    nccl: Path  # folder of torch's NCCL wheel
    nccl_version: str
    cudart: Path  # torch's libcudart.so

    @property
    def includes(self) -> list[Path]:
        """For host code. NCCL's come first: the toolkit's folder may hold another nccl.h."""
        toolkit = self.nvcc.resolve().parents[1] / "include"
        # The compiler searches /usr/include by itself; naming it would break #include_next.
        own = toolkit != Path("/usr/include") and (toolkit / "cuda_runtime_api.h").exists()
        wheel = self.cudart.parents[1] / "include"
        return [self.nccl / "include", *([toolkit] if own else []), wheel]

    @property
    def defines(self) -> list[str]:
        hopper = ["-DOVERLAP_WITH_SM90"] if "sm_90a" in self.archs else []
        return ["-DOVERLAP_WITH_CUDA", "-DOVERLAP_WITH_SM80", *hopper]


def parse_archs(text: str) -> tuple[str, ...]:
    """`80;90a` or `sm_80,sm_90a` -> ("sm_80", "sm_90a"), in the order of ARCHS."""
    names = {f"sm_{word.removeprefix('sm_')}" for word in re.split(r"[;,\s]+", text) if word}
    if not names or not names <= set(ARCHS):
        raise BuildError(f"OVERLAP_ARCHS={text!r}: give one or more of {', '.join(ARCHS)}")
    return tuple(arch for arch in ARCHS if arch in names)


def select_archs(requested: str, capabilities: Iterable[tuple[int, int]]) -> tuple[str, ...]:
    """The architectures to compile for: those asked for; else those of the GPUs at hand; without any, all.

    `capabilities` are the visible GPUs' compute capabilities. Hopper takes sm_90a; every other GPU
    from sm_80 on runs sm_80's code or PTX; older ones run no kernel of this library and count as
    none.
    """
    if requested.strip():
        return parse_archs(requested)
    usable = [capability for capability in capabilities if capability >= (8, 0)]
    wanted = {"sm_90a" if capability == (9, 0) else "sm_80" for capability in usable}
    return tuple(arch for arch in ARCHS if arch in wanted) or ARCHS


def parse_dtypes(text: str) -> tuple[str, ...]:
    """`bf16,e4m3` -> ("bf16", "e4m3"), in the order of DTYPES; empty: all."""
    names = {word for word in re.split(r"[;,\s]+", text) if word} or set(DTYPES)
    if not names <= set(DTYPES):
        raise BuildError(f"OVERLAP_DTYPES={text!r}: give one or more of {', '.join(DTYPES)}")
    return tuple(dtype for dtype in DTYPES if dtype in names)


def gencode(source: str, archs: Sequence[str]) -> list[str]:
    """nvcc's target flags for a source: `*_sm90.cu` takes sm_90a alone, the others take all of
    `archs` (the mma.sync kernel of `*_sm80.cu` runs on Hopper, too). Empty: the source has no part
    in a build for `archs`.
    """
    only_sm90 = source.endswith("_sm90.cu")
    return [GENCODE[arch] for arch in archs if not only_sm90 or arch == "sm_90a"]


def nvcc_mismatch(torch_cuda: str | None, nvcc: str | None) -> str | None:
    """Why nvcc's release (None: not found) does not serve torch's (None: CPU); None: it does."""
    if torch_cuda is None:
        return "the installed torch is a build without CUDA"
    major = torch_cuda.split(".")[0]
    if nvcc is None:
        return f"no nvcc in CUDA_HOME, on PATH or in /usr/local/cuda (CUDA {major}.x is needed)"
    if nvcc.split(".")[0] != major:
        return f"nvcc is of CUDA {nvcc} and torch of CUDA {torch_cuda}: the major versions differ"
    return None


def find_nvcc() -> tuple[Path, str] | None:
    """The CUDA compiler and its release, such as "13.0"."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    places = [Path(home, "bin/nvcc") for home in homes if home]
    if not places:
        on_path = shutil.which("nvcc")
        places = [*([Path(on_path)] if on_path else []), Path("/usr/local/cuda/bin/nvcc")]
    for place in places:
        if os.access(place, os.X_OK):
            text = subprocess.run([place, "--version"], capture_output=True, text=True).stdout
            if release := re.search(r"release (\d+\.\d+)", text):
                return place, release[1]
    return None


def find_cutlass() -> Path:
    """CUTLASS's include folder: CUTLASS_PATH, or the nvidia-cutlass package's."""
    if given := os.environ.get("CUTLASS_PATH"):
        include = Path(given, "include")
        if not (include / "cutlass/cutlass.h").exists():
            raise BuildError(f"CUTLASS_PATH={given}: no include/cutlass/cutlass.h there")
        return include
    spec = importlib.util.find_spec("cutlass_library")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        include = Path(folder, "source/include")
        if (include / "cutlass/cutlass.h").exists():
            return include
    raise BuildError(
        f"nvcc is here but CUTLASS's headers are not: run `{CUTLASS_INSTALL}`, or set CUTLASS_PATH "
        "to a CUTLASS 4.x checkout, or OVERLAP_CUDA=0 to build without CUDA"
    )


def needs_cutlass(torch: ModuleType) -> bool:
    """True if a build compiles CUDA kernels and CUTLASS's headers are not here."""
    release = (find_nvcc() or (None, None))[1]
    if os.environ.get("OVERLAP_CUDA") == "0" or nvcc_mismatch(torch.version.cuda, release):
        return False
    return not os.environ.get("CUTLASS_PATH") and not importlib.util.find_spec("cutlass_library")


def torch_pin(torch: ModuleType) -> str:
    """A build's requirement where it runs: the release of torch whose C++ it was compiled with."""
    major, minor = torch.__version__.split(".")[:2]
    return f"torch=={major}.{minor}.*"


def import_torch() -> ModuleType:
    """The torch that is installed, if it is new enough."""
    try:
        with warnings.catch_warnings():
            # Nothing here needs NumPy, which a fresh environment lacks: torch's word about it would open every build.
            warnings.filterwarnings("ignore", "Failed to initialize NumPy")
            import torch
    except ImportError as error:
        raise BuildError(
            f"torch cannot be imported by {sys.executable} ({error}). overlap_torch is built against "
            "the torch that it will run with. Install torch>=2.11 first, then `pip install .`. If "
            "torch is installed, the tool at work (uv, build, ...) hides it: run "
            f"`{BUILD_INSTALL}` (where nvcc is used, also `{CUTLASS_INSTALL}`), then "
            "`pip install --no-build-isolation .` (or `uv pip install --no-build-isolation .`, or "
            "`python -m build --no-isolation`)"
        ) from error
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < MIN_TORCH:
        raise BuildError(f"torch {torch.__version__} is installed; torch>=2.11 is needed")
    return torch


def find_cuda(torch: ModuleType) -> Cuda:
    """The CUDA half of the build, as OVERLAP_CUDA wants it; NoCudaError: there is none."""
    mode = os.environ.get("OVERLAP_CUDA", "")
    if mode not in ("", "0", "1"):
        raise BuildError(f"OVERLAP_CUDA={mode!r}: 0 (without), 1 (or fail) or unset (if possible)")
    if mode == "0":
        raise NoCudaError("OVERLAP_CUDA=0 asked for it")
    try:
        return _find_cuda(torch)
    except NoCudaError as error:
        if mode == "1":
            raise BuildError(f"OVERLAP_CUDA=1, but {error}") from error
        raise


def _find_cuda(torch: ModuleType) -> Cuda:
    nvcc, release = find_nvcc() or (Path(), None)
    if reason := nvcc_mismatch(torch.version.cuda, release):
        raise NoCudaError(reason)
    site = Path(torch.__file__).parents[1]
    nccl = site / "nvidia/nccl"
    header = nccl / "include/nccl.h"
    if not (header.exists() and (nccl / "lib/libnccl.so.2").exists()):
        raise NoCudaError(f"torch's NCCL wheel is not in {nccl}")
    cudart_name = f"libcudart.so.{release.split('.')[0]}"
    cudart = sorted(site.glob(f"nvidia/*/lib/{cudart_name}"))
    if not cudart:
        raise NoCudaError(f"torch's CUDA runtime wheel ({cudart_name}) is not in {site}/nvidia")
    numbers = dict(re.findall(r"#define NCCL_(MAJOR|MINOR|PATCH) +(\d+)", header.read_text()))
    gpus = range(torch.cuda.device_count())
    return Cuda(
        nvcc=nvcc,
        version=release,
        archs=select_archs(
            os.environ.get("OVERLAP_ARCHS", ""), [torch.cuda.get_device_capability(i) for i in gpus]
        ),
        dtypes=parse_dtypes(os.environ.get("OVERLAP_DTYPES", "")),
        cutlass_include=find_cutlass(),
        nccl=nccl,
        nccl_version=".".join(numbers[part] for part in ("MAJOR", "MINOR", "PATCH")),
        cudart=cudart[0],
    )


def host_headers(torch: ModuleType) -> list[Path]:
    """Folders of CUDA's and NCCL's headers, as `Cuda.includes` has them but without an nvcc.

    NoCudaError: what is missing.
    """
    site = Path(torch.__file__).parents[1]
    nccl = site / "nvidia/nccl/include"
    if not (nccl / "nccl.h").exists():
        raise NoCudaError(f"no nccl.h in {nccl}: torch's NCCL wheel has it")
    places = sorted(path.parent for path in site.glob("nvidia/*/include/cuda_runtime_api.h"))
    nvcc, release = find_nvcc() or (Path(), None)
    toolkit = nvcc.resolve().parents[1] / "include" if release else Path("/usr/include")
    fits = nvcc_mismatch(torch.version.cuda, release) is None
    if fits and toolkit != Path("/usr/include") and (toolkit / "cuda_runtime_api.h").exists():
        places.insert(0, toolkit)
    if not places:
        raise NoCudaError(f"no cuda_runtime_api.h in {site}/nvidia or an nvcc's toolkit")
    return [nccl, *places]


def find_cxx() -> list[str]:
    """The C++ compiler's command: CXX, or g++."""
    cxx = shlex.split(os.environ.get("CXX") or "g++")
    if not shutil.which(cxx[0]):
        raise BuildError(f"no C++ compiler {cxx[0]}: apt-get install build-essential, or set CXX")
    return cxx


def pybind11_include() -> Path:
    """pybind11's headers: the package's, or the copy that torch brings."""
    for package in ("pybind11", "torch"):
        spec = importlib.util.find_spec(package)
        include = Path(spec.origin).parent / "include" if spec and spec.origin else None
        if include and (include / "pybind11/pybind11.h").exists():
            return include
    raise BuildError(f"pybind11's headers are missing: {BUILD_INSTALL}")
