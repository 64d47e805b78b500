"""``python -m overlap_torch {doctor,demo,explain,tune,bench}``; each command takes ``--help``. ``--version`` prints the version."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from overlap_torch import __version__

COMMANDS = {
    "doctor": "shows what this machine and build have, and which fast paths are on",
    "demo": "runs an op on all GPUs, or on two CPU ranks: check, times, timeline",
    "explain": "shows a problem's plan: its steps, their memory and times, and why it was chosen",
    "tune": "measures plans, and keeps the times for programs that call overlap_torch.tune",
    "bench": "times each op, or a transformer block, against its GEMMs and collectives in sequence",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command with the rest of the arguments; returns its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m overlap_torch",
        description="Tensor-parallel GEMMs beside their communication. Each command takes --help.",
        epilog="\n".join(f"{name:10}{meaning}" for name, meaning in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"overlap_torch {__version__}")
    parser.add_argument("command", choices=list(COMMANDS))
    command = parser.parse_args(argv[:1]).command
    # Imported here: a command needs only what it uses.
    module = "_tune.command" if command == "tune" else f"_tools.{command}"
    return importlib.import_module(f"overlap_torch.{module}").main(argv[1:])


if __name__ == "__main__":
    sys.exit(main())
