"""Makes a text file a C++ source file: `python tools/embed.py TEXT SOURCE SYMBOL` defines overlap::plan::SYMBOL."""

from __future__ import annotations

import sys
from pathlib import Path

DELIMITER = "embedded"


def main(text: str, source: str, symbol: str) -> None:
    content = Path(text).read_text()
    if f'){DELIMITER}"' in content:
        raise ValueError(f"{text} holds the end of the raw string that it would be written as")
    Path(source).write_text(
        f"// Made from {Path(text).name} by tools/embed.py.\n"
        "namespace overlap::plan {\n"
        f"extern const char* const {symbol};\n"
        f'const char* const {symbol} = R"{DELIMITER}({content}){DELIMITER}";\n'
        "}  // namespace overlap::plan\n"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
