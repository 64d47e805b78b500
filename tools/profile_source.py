"""Makes the shipped profile a C++ source file, `python tools/profile_source.py JSON SOURCE`: its text, and the fields that it
names, each of which is a member of the struct Profile."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(profile: str, source: str) -> None:
    text = Path(profile).read_text()
    names = list(json.loads(text))
    rows = [
        f'{{"{name}", [](Profile& p) -> ProfilePlace {{ return &p.{name}; }}}},' for name in names
    ]
    sizes = [f"sizeof(p.{name})" for name in ("source", "missing", *names)]
    lines = [
        f"// Made from {Path(profile).name} by tools/profile_source.py.",
        '#include "plan/profile.h"',
        "namespace overlap::plan {",
        "extern const char* const kShippedProfile;",
        f'const char* const kShippedProfile = R"json({text})json";',
        "std::span<const ProfileField> profile_fields() {",
        *("static constexpr ProfileField kFields[] = {", *rows, "};", "return kFields;", "}"),
        "extern Profile p;",
        f"static_assert(sizeof(p) == {' + '.join(sizes)},",
        f'"a field of Profile\'s is not in {Path(profile).name}");',
        "}  // namespace overlap::plan",
    ]
    Path(source).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
