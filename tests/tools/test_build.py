"""The build's rules, what a build says of itself, and what doctor makes of it."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import overlap_torch
from overlap_torch import __main__
from overlap_torch.__main__ import COMMANDS, main
from overlap_torch._tools import doctor as _doctor
from overlap_torch._tools.doctor import Findings, Gpu

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(overlap_torch.__file__).parent
sys.path.insert(0, str(ROOT / "tools"))

import source_hash  # noqa: E402  (found through the path above)
import toolchain  # noqa: E402

HOPPER = Gpu("H", (9, 0), 132, 140.0)
AMPERE = Gpu("A", (8, 0), 108, 80.0)
TURING = Gpu("T", (7, 5), 40, 16.0)


def set_alone(monkeypatch, environment: dict[str, str], *names: str) -> None:
    """Variables with these names are only those of the environment."""
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("requested", "capabilities", "archs"),
    [
        ("", [], ("sm_80", "sm_90a")),
        ("", [(9, 0)], ("sm_90a",)),
        ("", [(8, 0)], ("sm_80",)),
        ("", [(8, 9)], ("sm_80",)),
        ("", [(12, 0)], ("sm_80",)),  # runs the PTX
        ("", [(9, 0), (8, 6), (9, 0)], ("sm_80", "sm_90a")),
        ("", [(7, 5)], ("sm_80", "sm_90a")),  # runs none of them: as without a GPU
        ("sm_90a", [(8, 0)], ("sm_90a",)),
        ("90a;80", [], ("sm_80", "sm_90a")),
        (" sm_80 , sm_80 ", [(9, 0)], ("sm_80",)),
    ],
)
def test_select_archs_takes_request_then_gpus_then_all(requested, capabilities, archs):
    assert toolchain.select_archs(requested, capabilities) == archs


@pytest.mark.parametrize("requested", ["sm_70", "90", ",", "sm_80,sm_100a"])
def test_select_archs_names_what_it_takes(requested):
    with pytest.raises(toolchain.BuildError, match="sm_80, sm_90a"):
        toolchain.select_archs(requested, [])


def test_dtypes_of_hopper_gemms_are_those_asked_for_or_all():
    assert toolchain.parse_dtypes("") == ("bf16", "fp16", "e4m3", "e5m2")
    assert toolchain.parse_dtypes("e4m3; bf16") == ("bf16", "e4m3")
    with pytest.raises(toolchain.BuildError, match=r"OVERLAP_DTYPES='fp8': .*e5m2"):
        toolchain.parse_dtypes("fp8")


def test_gencode_follows_the_file_name():
    both = ["sm_80", "sm_90a"]
    sm80, sm90 = toolchain.GENCODE["sm_80"], toolchain.GENCODE["sm_90a"]
    assert toolchain.gencode("csrc/kernels/signal/signal.cu", both) == [sm80, sm90]
    assert toolchain.gencode("csrc/kernels/gemm/gemm_sm80.cu", both) == [sm80, sm90]
    assert toolchain.gencode("csrc/kernels/gemm/gemm_instance_sm90.cu", both) == [sm90]
    assert toolchain.gencode("csrc/kernels/gemm/gemm_instance_sm90.cu", ["sm_80"]) == []
    assert "compute_80]" in sm80, "newer GPUs need the PTX"


@pytest.mark.parametrize(
    ("torch_cuda", "nvcc", "reason"),
    [
        ("13.0", "13.0", None),
        ("13.0", "13.2", None),
        ("13.0", "12.8", "major versions differ"),
        ("12.8", "13.0", "major versions differ"),
        ("13.0", None, "no nvcc"),
        (None, "13.0", "torch is a build without CUDA"),
    ],
)
def test_nvcc_of_another_major_counts_as_none(torch_cuda, nvcc, reason):
    found = toolchain.nvcc_mismatch(torch_cuda, nvcc)
    assert found is None if reason is None else reason in found


def test_overlap_cuda_chooses(monkeypatch):
    monkeypatch.setenv("OVERLAP_CUDA", "0")
    with pytest.raises(toolchain.NoCudaError, match="OVERLAP_CUDA=0"):
        toolchain.find_cuda(torch)
    monkeypatch.setenv("OVERLAP_CUDA", "1")
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    with pytest.raises(toolchain.BuildError, match="OVERLAP_CUDA=1, but"):
        toolchain.find_cuda(torch)
    monkeypatch.setenv("OVERLAP_CUDA", "yes")
    with pytest.raises(toolchain.BuildError, match="'yes'"):
        toolchain.find_cuda(torch)


def test_host_headers_are_those_of_the_wheels_or_named_as_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    fake = SimpleNamespace(
        __file__=str(tmp_path / "torch/__init__.py"), version=SimpleNamespace(cuda="13.0")
    )
    with pytest.raises(toolchain.NoCudaError, match=r"no nccl\.h"):
        toolchain.host_headers(fake)
    nccl, cuda = (tmp_path / f"nvidia/{name}/include" for name in ("nccl", "cu13"))
    nccl.mkdir(parents=True)
    (nccl / "nccl.h").touch()
    with pytest.raises(toolchain.NoCudaError, match=r"no cuda_runtime_api\.h"):
        toolchain.host_headers(fake)
    cuda.mkdir(parents=True)
    (cuda / "cuda_runtime_api.h").touch()
    assert toolchain.host_headers(fake) == [nccl, cuda]

    # The toolkit's come first, as in the build with CUDA, unless they are of another major.
    toolkit = tmp_path / "toolkit"
    (toolkit / "include").mkdir(parents=True)
    (toolkit / "include/cuda_runtime_api.h").touch()
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: (toolkit / "bin/nvcc", "13.1"))
    assert toolchain.host_headers(fake) == [nccl, toolkit / "include", cuda]
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: (toolkit / "bin/nvcc", "12.8"))
    assert toolchain.host_headers(fake) == [nccl, cuda]


def test_missing_cutlass_names_the_command(monkeypatch, tmp_path):
    monkeypatch.delenv("CUTLASS_PATH", raising=False)
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(toolchain.BuildError, match="pip install --no-deps nvidia-cutlass"):
        toolchain.find_cutlass()
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path))
    with pytest.raises(toolchain.BuildError, match=r"no include/cutlass/cutlass\.h"):
        toolchain.find_cutlass()
    (tmp_path / "include/cutlass").mkdir(parents=True)
    (tmp_path / "include/cutlass/cutlass.h").touch()
    assert toolchain.find_cutlass() == tmp_path / "include"


@pytest.mark.parametrize(
    ("environment", "nvcc", "installed", "needed"),
    [
        ({}, "13.0", False, True),
        ({}, "13.0", True, False),
        ({}, "12.8", False, False),  # a build without CUDA
        ({}, None, False, False),
        ({"OVERLAP_CUDA": "0"}, "13.0", False, False),
        ({"CUTLASS_PATH": "/somewhere"}, "13.0", False, False),
    ],
)
def test_cutlass_is_asked_for_only_where_cuda_is_compiled(
    monkeypatch, environment, nvcc, installed, needed
):
    set_alone(monkeypatch, environment, "OVERLAP_CUDA", "CUTLASS_PATH")
    found = (Path("/nvcc"), nvcc) if nvcc else None
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: found)
    spec = object() if installed else None
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: spec)
    fake = SimpleNamespace(version=SimpleNamespace(cuda="13.0"), __version__="2.15.1+cu130")
    assert toolchain.needs_cutlass(fake) == needed
    assert toolchain.torch_pin(fake) == "torch==2.15.*"


def test_backend_finds_what_the_build_of_pip_hides(monkeypatch, tmp_path):
    """In pip's environment the interpreter's packages are off the path; in another Python's there is no torch."""
    pytest.importorskip("setuptools")
    backend = importlib.import_module("build_backend")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    monkeypatch.setattr(backend.site, "getsitepackages", lambda: [str(tmp_path), "/nowhere"])
    monkeypatch.setattr(backend.sys, "prefix", "/an/environment")
    monkeypatch.setattr(backend.sys, "path", ["/the/builds/own"])
    backend.show_installed()
    assert backend.sys.path == ["/the/builds/own", str(tmp_path)]

    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(toolchain.BuildError) as raised:
        toolchain.import_torch()
    for words in ("uv pip install --no-build-isolation .", "--no-isolation", "Install torch>=2.11"):
        assert words in str(raised.value)
    assert backend.missing_requirements() == []  # the build says it


def test_version_is_the_same_everywhere():
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version[1] == overlap_torch.__version__


def test_command_line_says_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        __main__.main(["--version"])
    assert not ended.value.code
    assert capsys.readouterr().out == f"overlap_torch {overlap_torch.__version__}\n"


def test_build_info_agrees_with_the_record():
    info = torch.ops.overlap.build_info()
    assert re.fullmatch(
        r"cuda=(none|\d+\.\d+;archs=[\w,]+;dtypes=[\w,]+;nccl=\d+\.\d+\.\d+);sources=[0-9a-f]{16}",
        info,
    )
    path = PACKAGE / "_build.json"
    if not path.exists():
        pytest.skip("the library was brought here without the record of its build")
    record = json.loads(path.read_text())
    assert record["build_info"] == info
    assert (record["why_no_cuda"] is not None) == info.startswith("cuda=none;")


def test_source_hash_changes_with_each_file(tmp_path):
    files = [tmp_path / name for name in ("a.cc", "b.h")]
    seen = set()
    for changed in (None, *files):
        for file in files:
            file.write_text("new" if file == changed else "old")
        source_hash.main(str(tmp_path / "hash.cc"), *map(str, files))
        seen.add((tmp_path / "hash.cc").read_text())
    assert len(seen) == 3


@pytest.mark.skipif(not shutil.which("readelf"), reason="readelf is not installed")
def test_libraries_link_neither_driver_nor_python():
    modules = [*PACKAGE.glob("_plan*.so"), *PACKAGE.glob("_eager*.so")]
    assert len(modules) >= 2
    for library in [PACKAGE / "_C.so", *modules]:
        dynamic = subprocess.run(
            ["readelf", "-d", library], capture_output=True, text=True, check=True
        )
        needed = re.findall(r"NEEDED.*\[(.+)\]", dynamic.stdout)
        assert needed and not [n for n in needed if re.match(r"libcuda\.|libpython|libnvidia-", n)]


def test_parse_build_info_reads_both_forms():
    assert _doctor.parse_build_info("cuda=none") == {"cuda": "none"}
    parsed = _doctor.parse_build_info("cuda=13.0;archs=sm_80,sm_90a;dtypes=bf16;nccl=2.28.9")
    expected = {"cuda": "13.0", "archs": "sm_80,sm_90a", "dtypes": "bf16", "nccl": "2.28.9"}
    assert parsed == expected


def paths_of(**findings) -> dict[str, tuple[bool, str]]:
    return {path.name: (path.on, path.detail) for path in _doctor.fast_paths(Findings(**findings))}


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({}, ""),
        ({"NCCL_P2P_DISABLE": "0"}, ""),
        ({"NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE=1"),
        ({"NCCL_P2P_DISABLE": "1", "OVERLAP_PEERS": "1"}, ""),
        ({"NCCL_P2P_DISABLE": "1", "OVERLAP_PEERS": "0"}, "OVERLAP_PEERS=0"),
        ({"OVERLAP_PEERS": "0"}, "OVERLAP_PEERS=0"),
    ],
    ids=str,
)
def test_doctor_knows_what_forbids_peers(monkeypatch, environment, reason):
    set_alone(monkeypatch, environment, "NCCL_P2P_DISABLE", "OVERLAP_PEERS")
    assert _doctor.find().why_no_peers == reason


def test_doctor_names_values_and_variables_that_mean_nothing(monkeypatch):
    monkeypatch.setenv("OVERLAP_DEBUG", "yes")
    monkeypatch.setenv("OVERLAP_PEER", "0")
    report = _doctor.report()
    assert "OVERLAP_DEBUG is 'yes'; it must be 0 or 1" in report
    assert "OVERLAP_PEER is set, but means nothing" in report


@pytest.mark.parametrize(
    ("there", "why"),
    [
        ([], "there is no _C.so"),
        (
            ["_C.so", "_plan.cpython-27-other.so"],
            f"there is no _plan for Python 3.{sys.version_info.minor}",
        ),
    ],
)
def test_checkout_that_is_not_built_says_what_to_do(tmp_path, there, why):
    """As where `pip install .` was run, and Python is started in the checkout."""
    unbuilt = tmp_path / "overlap_torch"
    shutil.copytree(ROOT / "overlap_torch", unbuilt, ignore=shutil.ignore_patterns("*.so"))
    for name in there:
        (unbuilt / name).touch()
    command = [sys.executable, "-m", "overlap_torch", "doctor"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    assert f"not built in {unbuilt}: {why}" in ran.stderr, ran.stderr
    assert "another folder" in ran.stderr and "make build" in ran.stderr


HOPPERS = {
    "cuda": "13.0",
    "archs": ("sm_80", "sm_90a"),
    "gpus": (HOPPER, HOPPER),
    "nccl": (2, 28, 9),
    "peers": {(0, 1): True, (1, 0): True},
}
AMPERES = HOPPERS | {"archs": ("sm_80",), "gpus": (AMPERE, AMPERE)}


def test_doctor_turns_all_paths_on_for_two_linked_hoppers():
    paths = paths_of(**HOPPERS)
    assert all(on for on, _ in paths.values()), paths


def test_doctor_has_peer_memory_on_without_hopper():
    """Gathers by copy engines, direct plans and stripes need no kernel of Hopper's."""
    on, detail = paths_of(**AMPERES)["Peer memory"]
    assert on
    assert "only Hopper's GEMM" in detail


@pytest.mark.parametrize(
    ("findings", "path", "reason"),
    [
        ({"gloo": False}, "CPU, overlapped", "gloo"),
        ({"eager": False}, "Eager calls", "_eager is not built for this Python"),
        ({"why_no_cuda": "no nvcc"}, "CUDA, overlapped", "built without CUDA: no nvcc"),
        ({"cuda": "13.0", "why_no_gpu": "no driver"}, "Hopper GEMM (sm_90a)", "no driver"),
        (HOPPERS | {"archs": ("sm_80",)}, "Hopper GEMM (sm_90a)", "OVERLAP_ARCHS=sm_90a"),
        (AMPERES | {"archs": ("sm_80", "sm_90a")}, "Hopper GEMM (sm_90a)", "capability 9.0"),
        (AMPERES | {"gpus": (TURING, TURING)}, "CUDA, overlapped", "no GEMM kernel"),
        (AMPERES | {"gpus": (AMPERE,)}, "CUDA, overlapped", "one GPU"),
        (AMPERES | {"nccl": (2, 26, 2)}, "NCCL symmetric windows", "2.26.2"),
        (AMPERES | {"peers": {(0, 1): True, (1, 0): False}}, "NCCL symmetric windows", "reaches"),
        (AMPERES | {"gpus": (TURING, TURING)}, "Peer memory", "no GEMM kernel"),
        (HOPPERS | {"gpus": (HOPPER,) * 9}, "Peer memory", "9 GPUs"),
        (HOPPERS | {"peers": {(0, 1): True, (1, 0): False}}, "Peer memory", "reaches"),
        (HOPPERS | {"gpus": (HOPPER,) * 9}, "Several hosts", "9 GPUs"),
        (HOPPERS | {"why_no_peers": "NCCL_P2P_DISABLE=1"}, "Peer memory", "NCCL_P2P_DISABLE=1 is set: NCCL communicates"),
        (HOPPERS | {"why_no_peers": "OVERLAP_PEERS=0"}, "Peer memory by NCCL windows", "OVERLAP_PEERS=0 is set"),
        (HOPPERS | {"nccl": (2, 27, 7)}, "Peer memory by NCCL windows", "NCCL 2.27.7 tells no addresses"),
        (HOPPERS | {"peer_memory": "ipc"}, "Peer memory by NCCL windows", "OVERLAP_PEER_MEMORY=ipc is set"),
    ],
)  # fmt: skip
def test_doctor_says_why_a_path_is_off(findings, path, reason):
    on, detail = paths_of(**findings)[path]
    assert not on
    assert reason in detail


def test_doctor_reads_the_topology_table():
    table = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-31
GPU1\tNV18\t X \tPHB\tSYS\t0-31
GPU2\tSYS\tPHB\t X \tSYS\t0-31
NIC0\tPIX\tSYS\tSYS\t X

Legend:
  X    = Self
"""
    assert _doctor.links_of(table) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "PHB"}
    assert _doctor.links_of("") == {}


@pytest.mark.parametrize("hidden", [False, True])
def test_doctor_command_reports_every_section(hidden, capsys):
    if hidden:  # the process itself may have seen GPUs
        command = [sys.executable, "-m", "overlap_torch", "doctor"]
        env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=120
        )
        assert done.returncode == 0, done.stderr
        said = done.stdout
    else:
        assert main(["doctor"]) == 0
        said = capsys.readouterr().out
    for section in ("Software", "Build", "GPUs", "Links", "Profile", "Fast paths", "Environment"):
        assert f"\n{section}" in f"\n{said}"
    assert f"  overlap_torch {overlap_torch.__version__}, {PACKAGE}" in said.splitlines()
    assert torch.ops.overlap.build_info() in said
    assert torch.__version__ in said and "NCCL" in said and "nvcc" in said
    assert all(variable.name in said for variable in _doctor.ENVIRONMENT)
    assert re.search(r"^  on   CPU, overlapped", said, re.MULTILINE)
    if hidden:
        assert re.search(r"^  off  CUDA, overlapped: ", said, re.MULTILINE)
        off = re.findall(r"^\s*off\s+(.*)$", said, re.MULTILINE)
        assert len(off) >= 2 and all(": " in reason for reason in off), said


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("OVERLAP_TUNE", "x", "every op raises: overlap_torch: OVERLAP_TUNE is 'x'; it must be 0 or 1"),
        ("OVERLAP_VLLM", "yes", "OVERLAP_VLLM is 'yes', allowed are 0, 1"),
        ("OVERLAP_MOE_ROWS", "0", "OVERLAP_MOE_ROWS is '0', allowed are 1 or more"),
        ("MAX_JOBS", "x", "MAX_JOBS is 'x', allowed are 1 or more"),
        ("OVERLAP_CACHE", "/anywhere", ""),
        ("OVERLAP_LOG", "plans", ""),
    ],
)  # fmt: skip
def test_doctor_says_which_variable_has_no_meaning(name, value, said, monkeypatch):
    monkeypatch.setenv(name, value)
    warned = [line for line in _doctor._environment_lines() if line.startswith("WARNING")]
    assert warned[:1] == ([f"WARNING: {said}"] if said else [])


@pytest.mark.parametrize(
    "command", ["demo", "explain --machine h200", "tune --shapes 8x8x8", "bench --op all"]
)
def test_commands_refuse_a_variable_without_meaning(command, monkeypatch, capsys):
    monkeypatch.setenv("OVERLAP_TUNE", "x")
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--device", "cpu"])
    assert ended.value.code == 2
    assert "OVERLAP_TUNE is 'x'; it must be 0 or 1" in capsys.readouterr().err


def test_import_takes_variables_without_meaning():
    """So that the doctor can say which."""
    done = subprocess.run(
        [sys.executable, "-c", "import overlap_torch"], env=os.environ | {"OVERLAP_TUNE": "x"}, cwd=ROOT
    )  # fmt: skip
    assert done.returncode == 0


def test_command_line_names_its_commands(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for command, meaning in COMMANDS.items():
        assert re.search(f"^{command} +{re.escape(meaning)}$", said, re.MULTILINE), command
