"""Writes the stub of the planner's compiled module by pybind11-stubgen, from the signatures and docstrings that pybind11 makes.

    python tools/plan_stub.py MODULE STUB

A generator that fails costs the stub, not the build.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

# overlap_torch.plan._explain and overlap_torch.plan._picture give Plan these methods.
METHODS = """class Plan:
    def explain(
        self,
        machine: Machine | None = None,
        *,
        rank: int = 0,
        send_rows: collections.abc.Sequence[int] = (),
        receive_rows: collections.abc.Sequence[int] = (),
    ) -> Explanation: ...
    def plot(
        self,
        path: str | os.PathLike[str],
        machine: Machine | None = None,
        *,
        send_rows: collections.abc.Sequence[collections.abc.Sequence[int]] = (),
    ) -> None: ...
"""
IMPORTS = "import collections.abc\nimport os\nfrom overlap_torch.plan._explain import Explanation\n"


def generate(module: Path) -> str:
    """The stub's text. The module is imported by itself: it needs neither the package nor torch."""
    from pybind11_stubgen import main

    name = module.name.split(".")[0]
    sys.path.insert(0, str(module.resolve().parent))
    with tempfile.TemporaryDirectory() as folder:
        # A default such as <Op.GEMM_ALLREDUCE: 0> becomes an ellipsis.
        main([name, "--ignore-invalid-expressions", ".*", "--output-dir", folder])
        text = Path(folder, f"{name}.pyi").read_text()
    text = text.replace("import collections.abc\n", IMPORTS, 1)
    return text.replace("class Plan:\n", METHODS, 1)


if __name__ == "__main__":
    made, stub = map(Path, sys.argv[1:])
    try:
        stub.write_text(generate(made))
    except Exception as error:
        print(f"no stub of {made.name}: {error!r}", file=sys.stderr)
