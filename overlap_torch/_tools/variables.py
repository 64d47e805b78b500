"""The environment variables: all of them, and the values that the ops read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Variable:
    """An environment variable: its type, its default, and its effect."""

    name: str
    type: str
    default: str
    meaning: str

    def fault(self) -> str:
        """The fault of its value now, among allowed words or as a count; other types are checked where they are read."""
        value, words = os.environ.get(self.name), self.type.split(", ")
        counts = self.type in ("rows", "number")
        if value is None or value in words or not counts and len(words) == 1:
            return ""
        if counts and value.isdecimal() and int(value) > 0:
            return ""
        return f"{self.name} is {value!r}, allowed are {'1 or more' if counts else self.type}"


ENVIRONMENT = (
    Variable("OVERLAP_DEBUG", "0, 1", "0", "ranks compare problem and plan at every call"),
    Variable("OVERLAP_TIMEOUT_S", "seconds", "the group's", "deadline of every wait"),
    Variable(
        "OVERLAP_ON_FAILURE",
        "raise, abort",
        "raise",
        "abort: a failed call ends the process, so that no wrong result leaves it",
    ),
    Variable(
        "OVERLAP_PLANS",
        "0, 1",
        "1",
        "0: ops run PyTorch's GEMM and then its collective; the same on all ranks",
    ),
    Variable(
        "OVERLAP_PEERS",
        "0, 1",
        "1; 0 if NCCL_P2P_DISABLE=1",
        "0: NCCL carries everything, nothing goes through peers' memory",
    ),
    Variable(
        "OVERLAP_PEER_MEMORY",
        "ipc, nccl",
        "ipc, and nccl where it is refused",
        "maps peers' memory only by this way: CUDA IPC, or NCCL's symmetric windows; the same on all ranks",
    ),
    Variable(
        "OVERLAP_HOST_ID",
        "any text",
        "the boot's number",
        "for tests: ranks with other texts are on other hosts",
    ),
    Variable(
        "OVERLAP_LOG",
        "none, plans",
        "none",
        "plans: each new problem's plan, or why it has none, on the stderr of its group's rank 0",
    ),
    Variable(
        "OVERLAP_INVARIANCE",
        "none, batch, world",
        "none",
        "batch: a sum's row has the same bits whatever the other rows; world: and on any number of ranks; invariance= decides for a call",
    ),
    Variable(
        "OVERLAP_VLLM",
        "0, 1",
        "0",
        "1: vLLM's row-parallel layers run gemm_allreduce, its experts moe",
    ),
    Variable(
        "OVERLAP_SGLANG",
        "0, 1",
        "0",
        "1: SGLang's row-parallel layers run gemm_allreduce or gemm_reducescatter, its experts moe",
    ),
    Variable(
        "OVERLAP_MOE_ROWS",
        "rows",
        "all that may come",
        "in vLLM and SGLang: room for rows of a rank's experts in a graph; more rows are an error",
    ),
    Variable(
        "OVERLAP_TUNE",
        "0, 1",
        "0",
        "1: overlap_torch.tune at each problem's first call, from the cache or by measuring",
    ),
    Variable(
        "OVERLAP_CACHE",
        "folder",
        "overlap_torch in the user's cache folder",
        "where tune keeps measured times",
    ),
    Variable(
        "OVERLAP_PROFILE",
        "file",
        "the shipped h200",
        "times and rates of this machine, as JSON; the same numbers on all ranks",
    ),
    Variable("OVERLAP_CUDA", "0, 1", "if possible", "build: 0: without CUDA; 1: fail without it"),
    Variable("OVERLAP_ARCHS", "sm_80,sm_90a", "the GPUs', else all", "build: the CUDA targets"),
    Variable(
        "OVERLAP_DTYPES",
        "bf16,fp16,e4m3,e5m2",
        "all",
        "build: the operand types that Hopper's GEMMs are compiled for",
    ),
    Variable("CUTLASS_PATH", "folder", "nvidia-cutlass", "build: a CUTLASS 4.x checkout"),
    Variable("CUDA_HOME", "folder", "nvcc on PATH", "build: the CUDA toolkit"),
    Variable("CXX", "command", "g++", "build: the C++ compiler"),
    Variable("MAX_JOBS", "number", "cores, as memory goes", "build: compilers at a time"),
)


def environment() -> Mapping[str, str]:
    """The values that the ops read from their variables; raises ValueError, with one line, if a value has no meaning."""
    try:
        return torch.ops.overlap.environment()
    except ValueError as error:
        raise ValueError(str(error).split("\n")[0]) from None
