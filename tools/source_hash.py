"""Makes a hash of source files a C++ source file: `python tools/source_hash.py OUTPUT FILE ...` defines overlap::plan::kSourceHash."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path


def main(output: str, *files: str) -> None:
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file}\n".encode() + Path(file).read_bytes())
    Path(output).write_text(
        "// Made by tools/source_hash.py of the sources in csrc.\n"
        "#include <cstdint>\n\n"
        "namespace overlap::plan {\n"
        "extern const uint64_t kSourceHash;\n"
        f"const uint64_t kSourceHash = 0x{digest.hexdigest()[:16]};\n"
        "}  // namespace overlap::plan\n"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
