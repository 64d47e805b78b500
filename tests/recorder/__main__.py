"""Compares this tree's executors with traces.txt, or shows, pins and compares what they enqueue; see --help."""

from __future__ import annotations

import argparse
import subprocess
import sys

from . import TRACES, against, build, cases, diff, traces


def check(pin: list[str] | None) -> int:
    """Holds the traces against this tree; with `pin`, rewrites them, these cases' among them."""
    violations: list[str] = []
    wanted = [*traces(), *(pin or [])]
    texts = {
        case.full_name: case.text for case in cases(build(), violations) if case.full_name in wanted
    }
    lines = violations + [
        f"no case '{name}'; --list names all" for name in wanted if name not in texts
    ]
    if pin is not None and not violations:
        TRACES.write_text("".join(texts.values()))
    elif pin is None:
        lines += filter(
            None,
            (diff(old, texts.get(name, ""), name, "this tree") for name, old in traces().items()),
        )
    print("\n".join(lines) or f"{len(texts)} traces are as pinned")
    return 1 if lines else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.recorder", description=__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--pin",
        nargs="*",
        metavar="CASE",
        help="pin the traces as they are now, and these cases' too",
    )
    what.add_argument("--list", action="store_true", help="the names of all cases")
    what.add_argument("--show", metavar="CASE", help="one case's machine, plans and text")
    what.add_argument("--canonical", metavar="CASE", help="the same with its canonical form")
    what.add_argument(
        "--against", metavar="COMMIT", help="differences to a commit's executors, case by case"
    )
    what.add_argument(
        "--bench", action="store_true", help="host time of each executor's call, over the fakes"
    )
    given = parser.parse_args()
    if given.against:
        lines = list(against(given.against))
        print("\n".join(lines) or f"all cases are as of {given.against}")
        return 1 if lines else 0
    if given.list or given.bench or given.show or given.canonical:
        words = ["list"] if given.list else ["bench"]
        if name := given.show or given.canonical:
            words = ["show", name, *(["--canonical"] if given.canonical else [])]
        return subprocess.run([build(), *words]).returncode
    return check(given.pin)


if __name__ == "__main__":
    sys.exit(main())
