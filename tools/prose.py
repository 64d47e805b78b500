"""`python tools/prose.py [FILE...]` names the comments and docstrings with a sentence that has no subject.

A sentence that begins with one of ``WORDS`` makes its reader guess the noun that it is about. The files are those that git
knows, unless some are named.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

WORDS = ("Of", "What", "Whose", "That", "Those", "Whether", "Nor", "Which")
CPP = (".h", ".cc", ".cu", ".cuh")
HASHED = ("Makefile", ".sh", ".toml", ".yaml", ".yml", ".ci/run")
# A line, a point or colon, or the mark of a list stands before a sentence.
BEGIN = re.compile(
    rf"(?:^[\s#/*\-]*|[.:!?][\"')`]*\s+)({'|'.join(WORDS)})\b(?![\w(:<])", re.MULTILINE
)
CPP_TOKEN = re.compile(
    r'R"(?P<mark>\w*)\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\''
    r"|(?P<comment>//[^\n]*|/\*.*?\*/)",
    re.DOTALL,
)


def python_texts(source: str) -> Iterator[tuple[int, str]]:
    """The first line and the text of each comment and docstring."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield node.body[0].lineno, text


def cpp_texts(source: str) -> Iterator[tuple[int, str]]:
    for found in CPP_TOKEN.finditer(source):
        if found["comment"]:
            yield source.count("\n", 0, found.start()) + 1, found["comment"]


def hashed_texts(source: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(source.splitlines(), 1):
        found = re.search(r"(?:^|\s)(#.*)", line)
        if found:
            yield number, found[1]


def faults(name: str, source: str) -> list[tuple[int, str]]:
    """The line and the beginning of each sentence without a subject in a file of this name."""
    readers = ((CPP, cpp_texts), ((".py",), python_texts), (HASHED, hashed_texts))
    texts = next((reader for ends, reader in readers if name.endswith(ends)), lambda _: ())
    found = [
        (first + text.count("\n", 0, match.start(1)), text[match.start(1) :].split("\n")[0][:60])
        for first, text in texts(source)
        for match in BEGIN.finditer(text)
    ]
    return sorted(found)


def main(names: list[str]) -> int:
    if not names:
        listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True)
        names = listed.stdout.splitlines()
    count = 0
    for name in names:
        if name.endswith((*CPP, ".py", *HASHED)):
            for line, sentence in faults(name, Path(name).read_text(encoding="utf-8")):
                print(f"{name}:{line}: begins without its subject: {sentence}")
                count += 1
    if count:
        print(
            f"{count} sentences: begin each with its subject, a noun that the reader can point at"
        )
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
