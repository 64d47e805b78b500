"""Pins traces.txt, and shows what this tree's executor enqueues."""

from __future__ import annotations

import argparse
import sys

from . import TRACES, build, cases, traces


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.recorder", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    pinned = "pin the traces as they are now, and these cases' too"
    what.add_argument("--pin", nargs="*", metavar="CASE", help=pinned)
    what.add_argument("--list", action="store_true", help="the names of all cases")
    what.add_argument("--show", metavar="CASE", help="one case's text")
    given = parser.parse_args()
    texts, violations = cases(build())
    if given.list:
        print(*texts, sep="\n")
        return 0
    wanted = [given.show] if given.show else [*traces(), *given.pin]
    lines = [f"no case '{name}'; --list names all" for name in wanted if name not in texts]
    if given.show and not lines:
        print(texts[given.show], end="")
    elif not lines and not violations:
        TRACES.write_text("".join(text for name, text in texts.items() if name in wanted))
    print("\n".join(violations + lines), file=sys.stderr)
    return 1 if violations or lines else 0


if __name__ == "__main__":
    sys.exit(main())
