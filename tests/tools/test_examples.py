"""The examples and the demo, as a user runs them, on CPU."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import overlap_torch
from frameworks import needs_transformers

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_PARENT = Path(overlap_torch.__file__).resolve().parent.parent
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2".split()


def environment_of(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a rank that a user starts in the folder."""
    path = os.pathsep.join([str(PACKAGE_PARENT), os.environ.get("PYTHONPATH", "")])
    own = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "MPLCONFIGDIR": str(folder)}
    return os.environ | own | {"PYTHONPATH": path, **more}


def run(*command: str, folder: Path, status: int = 0) -> str:
    """The command's output; fails with it if the command ends with another status. No GPU is visible to it."""
    environment = environment_of(folder, CUDA_VISIBLE_DEVICES="")
    result = subprocess.run(
        [sys.executable, *command],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert result.returncode == status, f"{result.stdout}\n{result.stderr}"
    return result.stdout + result.stderr


def test_examples_row_parallel_trains_as_the_unsharded_model(tmp_path):
    output = run(*TORCHRUN, example("01_row_parallel.py"), folder=tmp_path)
    steps = re.findall(r"^step (\d+): loss (\S+), .* (\S+), .* (\S+)$", output, re.MULTILINE)
    assert [int(step) for step, *_ in steps] == [0, 1, 2], output
    for _, loss, outputs, gradients in steps:
        assert float(loss) > 0
        # float32 outputs of about 3 and their gradients, sums over 2048 features in another order.
        assert float(outputs) < 1e-5 and float(gradients) < 1e-5, output


PUBLIC_CODE = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*.[pm]*")),
]


@pytest.mark.parametrize("path", PUBLIC_CODE, ids=lambda path: path.name)
def test_examples_use_public_names_alone(path):
    private = re.findall(r"overlap_torch(?:\.\w+)*(?:\.| import )_[a-z]\w*", path.read_text())
    assert not private


def example(name: str) -> str:
    return str(ROOT / "examples" / name)


@pytest.mark.long
def test_examples_gpt_trains_as_with_pytorchs_styles(tmp_path):
    small = "--steps 20 --width 32 --context 32 --batch 4 --compare --out plots".split()
    output = run(example("02_train_tensor_parallel.py"), "--ranks", "2", *small, folder=tmp_path)
    first, last = re.search(r"^loss (\S+) after 1 step, (\S+) after 20$", output, re.M).groups()
    assert float(last) < float(first) - 0.5, output
    # float32 sums in another order, and what twenty optimizer steps make of that.
    assert float(re.search(r"^largest difference .* (\S+)$", output, re.M)[1]) < 1e-3, output
    assert re.search(r"overlap +\[#{30}\] 20/20", output), output
    assert re.search(r"PyTorch +\[#{30}\] 20/20", output), output
    picture = (tmp_path / "plots" / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")


@needs_transformers
@pytest.mark.long
@pytest.mark.parametrize("tokens", [(), ("--sequence",)], ids=["whole", "sequence"])
def test_examples_llama_is_the_one_on_one_device(tmp_path, tokens):
    output = run(
        *TORCHRUN, example("03_transformers_llama.py"), "--layers", "2", "--width", "64", *tokens,
        folder=tmp_path,
    )  # fmt: skip
    found = re.findall(r"^(.*): largest relative difference (\S+)$", output, re.MULTILINE)
    assert [name for name, _ in found] == ["logits", "gradients", "stepped weights"], output
    assert all(float(value) < 1e-4 for _, value in found), output
    assert "generated 16 tokens: the same as on one device" in output


def test_examples_llama_names_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    with pytest.raises(SystemExit, match="pip install transformers"):
        runpy.run_path(example("03_transformers_llama.py"), run_name="__main__")


@pytest.mark.long
def test_examples_experts_results_come_back_to_their_tokens(tmp_path):
    output = run(example("04_moe.py"), "--ranks", "2", "--tokens", "40", folder=tmp_path)
    counts = re.findall(r"^rank (\d): (\d+) tokens, rows to experts \[(.*)\]$", output, re.M)
    assert [(rank, tokens) for rank, tokens, _ in counts] == [("0", "40"), ("1", "57")], output
    for _, tokens, to_experts in counts:
        rows = [int(count) for count in to_experts.split(",")]
        # Uneven, two experts a token, and none for the last expert.
        assert sum(rows) == 2 * int(tokens) and len(set(rows)) > 1 and rows[-1] == 0, output
    assert float(re.search(r"^largest relative .* (\S+)$", output, re.M)[1]) < 1e-5, output


@pytest.mark.long
def test_examples_triton_kernels_equal_their_own_sequences(tmp_path):
    small = "--rows 64 --columns 32 --inner 32".split()
    output = run(example("05_triton_kernels.py"), "--ranks", "2", *small, folder=tmp_path)
    found = dict(re.findall(r"^(.*): largest difference (\S+)$", output, re.MULTILINE))
    swiglu = float(found.pop("SwiGLU, all_gather"))
    # The values are numbers up to some hundreds, in float32.
    assert swiglu < 1e-3, output
    names = [
        "matmul, row_major, all_reduce",
        "matmul, grouped, all_reduce",
        "persistent matmul, reduce_scatter",
    ]
    assert list(found) == [*names, "experts, all_to_all"], output
    assert all(float(difference) == 0 for difference in found.values()), output


def test_examples_demo_checks_and_draws(tmp_path):
    """The demo of another op and size than the default, which tests/tools/test_without_numpy.py runs."""
    arguments = "--op allgather_gemm --m 1023 --n 512 --k 64".split()
    command = [*"-m overlap_torch demo --device cpu --out out".split(), *arguments]
    output = run(*command, folder=tmp_path)
    assert "equals the sequence, bit for bit" in output, output
    # M as the ranks cut it.
    assert "problem   allgather_gemm, M=1024 N=512 K=64" in output, output
    # The text says what a CPU shows, and what it is for; no speed-up that says nothing.
    assert "A CPU shows that results are right" in output and "speed-up" not in output, output
    assert re.search(r"us by the op: 1\.\d\dx", output), output
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
