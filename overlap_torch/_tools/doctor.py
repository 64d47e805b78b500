"""``python -m overlap_torch doctor``: what this machine and build have, which fast paths are on, and why others are off."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from overlap_torch import __version__
from overlap_torch._plan import MAX_PEERS, Profile
from overlap_torch._symm_mem import replace
from overlap_torch._text import table
from overlap_torch._tools.variables import ENVIRONMENT, environment

_PACKAGE = Path(__file__).parents[1]
_RECORD = _PACKAGE / "_build.json"
_MIN_WINDOW_NCCL = (2, 27)  # the first with symmetric windows
_MIN_TEAM_NCCL = (2, 28)  # the first that tells the peers' addresses in them


@dataclass(frozen=True)
class Gpu:
    """One visible GPU."""

    name: str
    capability: tuple[int, int]
    sm_count: int
    memory_gib: float


@dataclass(frozen=True)
class Findings:
    """The facts that the fast paths depend on."""

    cuda: str | None = None  # the build's CUDA; None: built without
    archs: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()  # of Hopper's GEMMs
    why_no_cuda: str | None = None
    gpus: tuple[Gpu, ...] = ()
    why_no_gpu: str = ""
    nccl: tuple[int, ...] | None = None  # of this torch
    gloo: bool = True
    eager: bool = True  # this Python's module is built
    peers: dict[tuple[int, int], bool] = field(default_factory=dict)
    why_no_peers: str = ""  # the setting that turns peer memory off
    peer_memory: str = ""  # the one way that a setting leaves: ipc or nccl


@dataclass(frozen=True)
class FastPath:
    """A way an op can run here: on, or off with the reason."""

    name: str
    on: bool
    detail: str


def parse_build_info(text: str) -> dict[str, str]:
    """``"cuda=13.0;archs=sm_80;nccl=2.28.9"`` as a dict."""
    return dict(part.split("=", 1) for part in text.split(";") if part)


def fast_paths(found: Findings) -> list[FastPath]:
    """Each path of the ops with its state. A pure function, so it answers for any machine."""
    gloo = "computes tiles in plan order; the process group sends chunks meanwhile"
    eager = "straight into the op, unless a mode, compiler or transform sees the call"
    if not found.eager:
        eager = (
            "_eager is not built for this Python, calls go through torch.ops: build again with it"
        )
    paths = [
        FastPath("Eager calls", found.eager, eager),
        FastPath("CPU, overlapped", found.gloo, gloo if found.gloo else "torch has no gloo"),
    ]

    without_cuda = f"built without CUDA: {found.why_no_cuda or 'no record of the reason'}"
    no_kernels = (found.cuda is None, without_cuda), (not found.gpus, found.why_no_gpu)
    hopper, ampere = found.dtypes, ("bf16", "fp16")
    kernels = (
        ("Hopper GEMM (sm_90a)", "sm_90a", hopper, "9.0", lambda gpu: gpu == (9, 0)),
        ("Ampere GEMM (sm_80)", "sm_80", ampere, "8.0 or newer", lambda gpu: gpu >= (8, 0)),
    )
    usable = False
    for name, arch, dtypes, needed, fits in kernels:
        reason = _first(
            *no_kernels,
            (arch not in found.archs, f"not in this build; OVERLAP_ARCHS={arch} compiles it"),
            (
                not any(fits(gpu.capability) for gpu in found.gpus),
                f"no GPU of compute capability {needed}",
            ),
        )
        usable |= not reason
        detail = reason or f"{', '.join(dtypes)}, aligned to 16 bytes; cuBLAS takes the rest"
        paths.append(FastPath(name, not reason, detail))

    reason = _first(
        *no_kernels,
        (found.nccl is None, "torch has no NCCL"),
        (not usable, "no GEMM kernel that signals runs here"),
        (len(found.gpus) < 2, "one GPU: nothing to communicate"),
    )
    detail = reason or "chunks sent by NCCL on a side stream while the GEMM computes"
    paths.append(FastPath("CUDA, overlapped", not reason, detail))

    nccl, apart = found.nccl or (), not all(found.peers.values())
    version = ".".join(map(str, nccl))
    reason = reason or _first(
        (nccl < _MIN_WINDOW_NCCL, f"NCCL {version} has none; 2.27 or newer is needed"),
        (apart, "not every GPU reaches every other's memory"),
    )
    detail = reason or "buffers registered, so that NCCL takes fewer SMs where the plan says so"
    paths.append(FastPath("NCCL symmetric windows", not reason, detail))

    count = len(found.gpus)
    reason = _first(
        *no_kernels,
        (not usable, "no GEMM kernel that signals runs here"),
        (not 2 <= count <= MAX_PEERS, f"{count} GPUs, it is for 2 to {MAX_PEERS} of one host"),
        (apart, "not every GPU reaches every other's memory: NCCL communicates"),
        (bool(found.why_no_peers), f"{found.why_no_peers} is set: NCCL communicates"),
    )
    stores = "the GEMM stores partial sums into peers' memory, copy engines copy rows"
    if not ("sm_90a" in found.archs and any(g.capability == (9, 0) for g in found.gpus)):
        stores = "copies and kernels beside the GEMM; only Hopper's GEMM stores partial sums itself"
    detail = reason or stores
    paths.append(FastPath("Peer memory", not reason, detail))
    paths.append(_windows_of_peers(found, reason))
    detail = reason or (
        "peer memory within each host, NCCL between them: plan.templates.hierarchical, or tune"
    )
    paths.append(FastPath("Several hosts", not reason, detail))
    return paths


def _windows_of_peers(found: Findings, why_no_peers: str) -> FastPath:
    """The second way to peer memory; ``why_no_peers`` is why there is none at all."""
    nccl = found.nccl or ()
    reason = why_no_peers or _first(
        (not nccl, "torch has no NCCL"),
        (nccl < _MIN_TEAM_NCCL, f"NCCL {'.'.join(map(str, nccl))} tells no addresses; 2.28 does"),
        (
            found.peer_memory == "ipc",
            "OVERLAP_PEER_MEMORY=ipc is set: CUDA IPC maps it, or nothing",
        ),
    )
    alone = found.peer_memory == "nccl"
    detail = (
        "by OVERLAP_PEER_MEMORY=nccl" if alone else "where a group's ranks are refused CUDA IPC"
    )
    return FastPath("Peer memory by NCCL windows", not reason, reason or detail)


def _first(*reasons: tuple[bool, str]) -> str:
    """The first reason that holds; empty if none does."""
    return next((why for holds, why in reasons if holds), "")


def links_of(topology: str) -> dict[tuple[int, int], str]:
    """The output of ``nvidia-smi topo -m`` as {(0, 1): "NV18", ...}; empty if it has no such table."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", topology)
    rows = [line.split() for line in plain.splitlines() if re.match(r"\s*GPU\d+\s", line)]
    rows = [row for row in rows if "X" in row]  # not the heading
    return {
        (i, j): row[1 + j]
        for i, row in enumerate(rows)
        for j in range(i + 1, len(rows))
        if 1 + j < len(row)
    }


def _nvidia_smi(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _nccl_libraries() -> list[str]:
    """The NCCL libraries that this process has loaded; there must be only one."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    return sorted(set(re.findall(r"/\S*libnccl\.so\S*", maps)))


def _record() -> dict[str, str | None]:
    return json.loads(_RECORD.read_text()) if _RECORD.exists() else {}


def find() -> Findings:
    """Collects the facts about this process's torch, GPUs and build."""
    info = parse_build_info(torch.ops.overlap.build_info())
    with_cuda = info["cuda"] != "none"
    why_no_gpu = "no driver or no GPU"
    if torch.version.cuda is None:
        why_no_gpu = "torch is a build without CUDA"
    elif "CUDA_VISIBLE_DEVICES" in os.environ:
        hidden = os.environ["CUDA_VISIBLE_DEVICES"]
        why_no_gpu = f"none is visible (CUDA_VISIBLE_DEVICES={hidden!r})"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = []
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            Gpu(
                name=properties.name,
                capability=(properties.major, properties.minor),
                sm_count=properties.multi_processor_count,
                memory_gib=properties.total_memory / 2**30,
            )
        )
    return Findings(
        cuda=info["cuda"] if with_cuda else None,
        archs=tuple(info["archs"].split(",")) if with_cuda else (),
        dtypes=tuple(info["dtypes"].split(",")) if with_cuda else (),
        why_no_cuda=_record().get("why_no_cuda"),
        gpus=tuple(gpus),
        why_no_gpu=why_no_gpu,
        nccl=torch.cuda.nccl.version() if dist.is_nccl_available() else None,
        gloo=dist.is_gloo_available(),
        eager="overlap_torch._eager" in sys.modules,
        peers={
            (i, j): torch.cuda.can_device_access_peer(i, j)
            for i in range(count)
            for j in range(count)
            if i != j
        },
        why_no_peers=_environment().get("why_no_peers", ""),
        peer_memory=_environment().get("OVERLAP_PEER_MEMORY", ""),
    )


def _environment() -> Mapping[str, str]:
    """As :func:`environment`; ``{"error": message}`` if a value has no meaning."""
    try:
        return environment()
    except ValueError as error:
        return {"error": str(error)}


def _profile() -> Profile:
    """The profile that OVERLAP_PROFILE names. If it cannot be read, the shipped one; the environment's lines show the
    error."""
    now = _environment()
    if "error" in now:
        return Profile.shipped()
    return Profile.parse(now["profile"], now["OVERLAP_PROFILE"])


def profile_lines(profile: Profile, gpus: Sequence[str]) -> list[str]:
    """The planner's profile, and the fields that it lacks. A pure function, as :func:`fast_paths`."""
    by = f"by {profile.made_by}" if profile.made_by else ""
    made = ", ".join(filter(None, (by, profile.made_at)))
    lines = [
        f"name      {profile.name}",
        f"from      {profile.source}",
        f"made      {made or 'not known how or when'}",
        f"measured  on {profile.gpu or 'a GPU that it does not name'}",
    ]
    if profile.note:
        lines.append(f"note      {profile.note}")
    groups: dict[str, list[str]] = {}
    for name in Profile.fields():
        groups.setdefault(name.split(".")[0], []).append(name)
    lacks: list[str] = []
    for group, names in groups.items():
        missing = [name for name in names if name in profile.missing]
        lacks += [f"all of {group}"] if missing == names else missing
    shipped = Profile.shipped().name
    lines.append(
        f"lacks     {', '.join(lacks)}: as in the shipped profile '{shipped}'"
        if lacks
        else "complete"
    )
    others = sorted({gpu for gpu in gpus if gpu != profile.gpu})
    if profile.gpu and others:
        lines.append(
            f"WARNING: the profile is for {profile.gpu}; it only guesses times on {', '.join(others)}"
        )
    return lines


def _software_lines(found: Findings) -> list[str]:
    driver = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
    nccl = ".".join(map(str, found.nccl)) if found.nccl else "none"
    lines = [
        f"overlap_torch {__version__}, {_PACKAGE}",
        f"Python {platform.python_version()}, {platform.platform()}",
        f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}, "
        f"NVIDIA driver {driver or 'none'}",
        f"NCCL {nccl}",
    ]
    libraries = _nccl_libraries()
    lines += [f"  {library}" for library in libraries]
    if len(libraries) > 1:
        lines.append("  WARNING: two NCCL libraries in one process; only torch's should be there")
    return lines


def _build_lines() -> list[str]:
    record = _record()
    lines = [f"build_info  {torch.ops.overlap.build_info()}"]
    lines += [f"{key:11} {record[key]}" for key in ("cxx", "nvcc", "cutlass") if record.get(key)]
    if not record:
        lines.append(f"no record of the build ({_RECORD.name} is not beside the library)")
    elif record["build_info"] != torch.ops.overlap.build_info():
        lines.append(f"WARNING: the record is of another build: {record['build_info']}")
    elif record["torch"] != torch.__version__:
        lines.append(f"WARNING: built against torch {record['torch']}; rebuild for this one")
    if record.get("why_no_cuda"):
        lines.append(f"WITHOUT CUDA: {record['why_no_cuda']}")
    return lines


def _link_lines(found: Findings) -> list[str]:
    # nvidia-smi counts all GPUs of the machine: its table fits only if none is hidden.
    links = {} if "CUDA_VISIBLE_DEVICES" in os.environ else links_of(_nvidia_smi("topo", "-m"))
    lines = []
    for (i, j), reaches in sorted(found.peers.items()):
        if i < j:
            both = reaches and found.peers[j, i]
            link = f", {links[i, j]}" if (i, j) in links else ""
            lines.append(f"{i} - {j}: {'peer access' if both else 'no peer access'}{link}")
    return lines or ["none: fewer than two GPUs"]


def _environment_lines() -> list[str]:
    rows = [("name", "type", "default", "now", "meaning")]
    rows += [
        (v.name, v.type, v.default, os.environ.get(v.name, "-"), v.meaning) for v in ENVIRONMENT
    ]
    lines = table(rows)
    if error := _environment().get("error"):
        lines.append(f"WARNING: every op raises: {error}")
    lines += [f"WARNING: {fault}" for v in ENVIRONMENT if (fault := v.fault())]
    known = {v.name for v in ENVIRONMENT}
    lines += [
        f"WARNING: {name} is set, but means nothing; the variables are those above"
        for name in sorted(os.environ)
        if name.startswith("OVERLAP_")
        and not name.startswith("OVERLAP_TEST_")
        and name not in known
    ]
    return lines


def report() -> str:
    """The whole report as text."""
    found = find()
    paths = [
        f"{'on ' if path.on else 'off'}  {path.name}: {path.detail}" for path in fast_paths(found)
    ]
    gpus = [
        f"{i}: {gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}, "
        f"{gpu.sm_count} SMs, {gpu.memory_gib:.0f} GiB"
        for i, gpu in enumerate(found.gpus)
    ]
    sections = {
        "Software": _software_lines(found),
        "Build": _build_lines(),
        "GPUs": gpus or [f"none: {found.why_no_gpu}"],
        "Links": _link_lines(found),
        "Profile (the planner's times and rates)": profile_lines(
            _profile(), [gpu.name for gpu in found.gpus]
        ),
        "Fast paths (all other calls run the unfused composition)": paths,
        "Replacements of PyTorch's ops": replace.lines(),
        "Environment": _environment_lines(),
    }
    return "\n\n".join(
        "\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections.items()
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report; returns the exit status."""
    argparse.ArgumentParser(
        prog="python -m overlap_torch doctor",
        description="Shows what this machine and build have, which fast paths are on, why others are off, and all "
        "environment variables.",
    ).parse_args(argv)
    print(report())
    return 0
