"""Prints what this tree's executor enqueues in cases, by default in all; or pins it in traces.txt."""

import argparse
import sys

from . import TRACES, build, by_name, cases

parser = argparse.ArgumentParser(prog="python -m tests.recorder", description=__doc__)
parser.add_argument("case", nargs="*")
parser.add_argument("--pin", action="store_true", help="pin the pinned cases anew, and these, too")
given = parser.parse_args()
texts, violations = cases(build())
wanted = {*by_name(TRACES.read_text()), *given.case} if given.pin else {*(given.case or texts)}
faults = [*violations, *(f"no case '{name}'" for name in wanted - texts.keys())]
text = "".join(text for name, text in texts.items() if name in wanted)
if not given.pin:
    print(text, end="")
elif not faults:
    TRACES.write_text(text)
sys.exit("\n".join(faults) or None)
