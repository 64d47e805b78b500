"""The package where NumPy is not installed: torch does not need it, so neither does what runs on torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from checks import Failures
from overlap_torch._ops.group import broadcast_integers
from tests.tools.test_examples import run

ROOT = Path(__file__).resolve().parents[2]
LAYERS = """
import sys
import torch
import torch.distributed as dist
import overlap_torch
from overlap_torch._tools.launch import Ranks, launch

def work(folder):
    torch.manual_seed(dist.get_rank())
    layer = overlap_torch.nn.RowParallelLinear(6, 4)
    layer(torch.ones(3, 3)).sum().backward()
    state = overlap_torch.nn.full_state_dict(layer)
    state = {name: value.tolist() for name, value in state.items()}
    torch.save({**state, "numpy": "numpy" in sys.modules}, f"{folder}/rank{dist.get_rank()}.pt")

if __name__ == "__main__":
    launch(Ranks(2, "cpu"), work, sys.argv[1])
"""


@pytest.fixture
def without_numpy(tmp_path, monkeypatch):
    """Hides NumPy from the processes that a test starts, and from theirs."""
    hidden = tmp_path / "hidden" / "numpy"
    hidden.mkdir(parents=True)
    error = 'raise ModuleNotFoundError("No module named \'numpy\'", name="numpy")\n'
    (hidden / "__init__.py").write_text(error)
    monkeypatch.setenv("PYTHONPATH", str(hidden.parent))


@pytest.mark.long
def test_layers_do_without_numpy(without_numpy, tmp_path):
    import torch

    (tmp_path / "layers.py").write_text(LAYERS)
    run("layers.py", str(tmp_path), folder=tmp_path)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    assert first["numpy"] is False
    assert first == second, "the ranks drew the same layer, whatever their seeds"
    assert len(first["weight"]) == 4 and len(first["weight"][0]) == 6


def test_builds_do_not_speak_of_numpy(without_numpy):
    code = f"import sys; sys.path.append({str(ROOT / 'tools')!r}); import toolchain; toolchain.import_torch()"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "NumPy" not in said.stderr, said.stderr


@pytest.mark.long
def test_demo_does_without_numpy(without_numpy, tmp_path):
    output = run("-m", "overlap_torch", "demo", "--device", "cpu", folder=tmp_path)
    assert "bit for bit" in output, output
    assert "no picture" in output, "it needs matplotlib, and that needs NumPy"
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1}


@pytest.mark.ranks((1, "gloo"), (3, "gloo"), (2, "nccl"))
def test_integers_of_rank_0_reach_every_rank(failures: Failures) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    last_first = dist.new_group([world - 1, 0]) if world > 1 else None
    own = [2**40 + rank, -7] if rank == 0 else [rank] * (3 * rank)
    failures.equal(broadcast_integers(own, dist.group.WORLD), [2**40, -7])
    failures.equal(broadcast_integers([], dist.group.WORLD), [])
    # A group's ranks are in the order of the whole group's, whatever that of new_group's list.
    if last_first is not None and rank in (0, world - 1):
        failures.equal(broadcast_integers(own, last_first.group_name), [2**40, -7], "in a pair")
