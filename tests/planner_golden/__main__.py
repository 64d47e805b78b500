"""Compares the planner with what was pinned, pins it anew, or prints all that it weighs, for a diff."""

from __future__ import annotations

import argparse
import sys

from . import SAMPLE, compare, families, pinned, pins, sample, text, write_pins


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planner_golden", description=__doc__)
    parser.add_argument("--pin", action="store_true", help="pin what the planner does now")
    parser.add_argument("--dump", action="store_true", help="print every candidate of every family")
    parser.add_argument("--exact", action="store_true", help="print times with all their bits")
    given = parser.parse_args()
    if given.dump or given.exact:
        for family, name, op, scaled in families():
            print(f"== {family}\n{text(name, op, scaled, given.exact)}", end="")
        return 0
    new = pins()
    if given.pin:
        write_pins(new)
        SAMPLE.write_text(sample())
        total = sum(pin["candidates"] for pin in new.values())
        print(f"pinned {total} candidates in {len(new)} families")
        return 0
    found = compare(pinned(), new)
    print("\n".join(found) or f"{len(new)} families are as pinned")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
