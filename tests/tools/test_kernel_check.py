"""The CUDA kernels alone, on one GPU: tests/cuda/kernel_check, built of the objects that the library is made of.

KERNEL_CHECK names a program that was built elsewhere, as in scripts/sanitize.sh."""

import os
import subprocess
from pathlib import Path

import pytest

import setup

pytestmark = pytest.mark.gpu
TARGETS = (
    "signal peers finish reorder ring ringwide owners messages fp8 sm80 sm90pp sm90ppwide sm90coop"
).split()
LIMIT_S = 300


@pytest.fixture(scope="session")
def program() -> Path:
    if built := os.environ.get("KERNEL_CHECK"):
        return Path(built).resolve()
    try:
        return setup.build_kernel_check()
    except setup.NoCudaError as error:
        pytest.skip(f"kernel_check cannot be built: {error}")


@pytest.fixture(scope="session")
def available(program: Path) -> list[str]:
    command = [str(program), "list"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_kernel_check_names_its_targets(available: list[str]) -> None:
    assert {"signal", "peers", "finish", "reorder"} <= set(available) <= set(TARGETS)


@pytest.mark.parametrize("target", TARGETS)
def test_kernel_check(program: Path, available: list[str], target: str) -> None:
    if target not in available:
        pytest.skip(f"this build or this device does not have the kernels of {target}")
    done = subprocess.run(
        [str(program), target], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "good" in done.stdout
