"""The examples and the demo, as a user runs them, on CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch

import overlap_torch

ROOT = Path(__file__).resolve().parent.parent
PACKAGE_PARENT = Path(overlap_torch.__file__).resolve().parent.parent


def run(*command: str, folder: Path) -> str:
    """The command's output; fails with it if the command does. No GPU is visible to it."""
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "MPLCONFIGDIR": str(folder),
        "PYTHONPATH": os.pathsep.join([str(PACKAGE_PARENT), os.environ.get("PYTHONPATH", "")]),
    }
    result = subprocess.run(
        [sys.executable, *command],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout + result.stderr


def test_examples_row_parallel_trains_as_the_unsharded_model(tmp_path):
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    output = run(*torchrun, str(ROOT / "examples" / "01_row_parallel.py"), folder=tmp_path)
    steps = re.findall(r"^step (\d+): loss (\S+), .*difference .* (\S+)$", output, re.MULTILINE)
    assert [int(step) for step, _, _ in steps] == [0, 1, 2], output
    for _, loss, difference in steps:
        assert float(loss) > 0
        # float32 outputs of about 0.3, sums over 2048 features in another order.
        assert float(difference) < 1e-5, output


def test_examples_demo_checks_and_draws(tmp_path):
    output = run("-m", "overlap_torch", "demo", "--device", "cpu", "--out", "out", folder=tmp_path)
    assert "bit-exact" in output, output
    assert re.search(r"speed-up \d+\.\d+x", output), output
    picture = (tmp_path / "out" / "timeline.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    trace = json.loads((tmp_path / "out" / "trace.json").read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in events} == {0, 1}, "both ranks are in the trace"
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in events)
    # Each rank shows communication of several chunks.
    for rank in (0, 1):
        chunks = {event["name"] for event in events if event["pid"] == rank}
        assert len(chunks) >= 3, chunks


def test_examples_doctor_says_what_was_found(tmp_path):
    output = run("-m", "overlap_torch", "doctor", folder=tmp_path)
    assert torch.__version__ in output
    for found in ("NCCL", "nvcc", "GPUs", "Links", "Fast paths", "Environment"):
        assert found in output, f"{found} is not in\n{output}"
    # Nothing is visible, so every fast path but the CPU's is off, and says why.
    assert re.search(r"^\s*on\s+CPU", output, re.MULTILINE), output
    off = re.findall(r"^\s*off\s+(.*)$", output, re.MULTILINE)
    assert len(off) >= 2 and all(": " in reason for reason in off), output
