"""Compares this tree's executors with the pins, or shows and pins what they enqueue; see --help."""

from __future__ import annotations

import argparse
import subprocess
import sys

from . import (
    ROOT,
    against,
    build,
    compare,
    current,
    diff,
    pinned,
    record,
    trace_path,
    traces,
    write_pins,
)


def check() -> int:
    records = current()
    lines = compare(pinned(), records.pins) + records.violations
    for name, path in traces().items():
        if (new := records.texts.get(name, "")) != path.read_text():
            lines.append(diff(path.read_text(), new, str(path.relative_to(ROOT)), "this tree"))
    print("\n".join(lines) or f"{len(records.pins)} families are as pinned")
    return 1 if lines else 0


def pin(names: list[str]) -> int:
    """Rewrites pins and traces; `names` become traces, too."""
    wanted = frozenset([*traces(), *names])
    records = record(build(), wanted)
    if records.violations:
        print("\n".join(records.violations))
        return 1
    if unknown := sorted(set(names) - records.texts.keys()):
        print(f"no such case: {unknown}; --list names all")
        return 1
    write_pins(records.pins)
    for name, path in traces().items():
        if name not in records.texts:
            path.unlink()
    for name, text in records.texts.items():
        trace_path(name).write_text(text)
    total = sum(pin.cases for pin in records.pins.values())
    print(f"pinned {total} cases in {len(records.pins)} families, {len(records.texts)} traces")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.recorder", description=__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--pin",
        nargs="*",
        metavar="CASE",
        help="pin what the executors do now, and keep these cases' traces, too",
    )
    what.add_argument("--list", action="store_true", help="the names of all cases")
    what.add_argument("--show", metavar="CASE", help="one case's machine, plans and text")
    what.add_argument("--canonical", metavar="CASE", help="the same with its canonical form")
    what.add_argument(
        "--against", metavar="COMMIT", help="what differs from a commit's executors, case by case"
    )
    what.add_argument(
        "--bench", action="store_true", help="host time of each executor's call, over the fakes"
    )
    given = parser.parse_args()
    if given.pin is not None:
        return pin(given.pin)
    if given.against:
        lines = list(against(given.against))
        print("\n".join(lines) or f"all cases are as of {given.against}")
        return 1 if lines else 0
    if given.list or given.bench or given.show or given.canonical:
        words = ["list"] if given.list else ["bench"]
        if name := given.show or given.canonical:
            words = ["show", name, *(["--canonical"] if given.canonical else [])]
        return subprocess.run([build(), *words]).returncode
    return check()


if __name__ == "__main__":
    sys.exit(main())
