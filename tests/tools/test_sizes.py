"""No function is longer than 80 lines, but tables; no class of the package is longer than 300, no file of it or of csrc than 500."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST = 80
MOST_OF_CLASS = 300
MOST_OF_FILE = 500
# Functions that list entries, one after the other, are no clearer in pieces.
TABLES = {
    ("csrc/binding/python/plan_module.cc", "bind_plan"),
    ("benchmarks/cli.py", "_parser"),
}
# A list of fields is one, too.
LISTS = {"csrc/plan/plan_fields.h"}

# Comments, strings, characters and preprocessor's lines, in which braces stand for nothing.
_NO_CODE = re.compile(
    r"""//[^\n]* | /\*.*?\*/
    | R"(?P<end>[^(\n]*)\(.*?\)(?P=end)" | "(?:\\.|[^"\\\n])*" | (?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+'
    | ^[ \t]*\#(?:\\\n|[^\n])*""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
_SCOPE = re.compile(
    r"(?:typedef|static|inline|export)?\s*(?:namespace|class|struct|enum|union|extern)\b"
)


def _without_template(head: str) -> str:
    """The text before a brace, without template parameters."""
    head = head.strip()
    while head.startswith("template"):
        depth = 0
        for at, sign in enumerate(head):  # noqa: B007
            depth += (sign == "<") - (sign == ">")
            if sign == ">" and depth == 0:
                break
        head = head[at + 1 :].strip()
    return head


def cpp_functions(text: str) -> Iterator[tuple[str, int]]:
    """Names and lengths of the functions that a C++ file defines, those in classes too."""
    text = _NO_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    heads: list[str | None] = []  # of the open braces; None: of a scope
    begins: list[int] = []
    begin = 0
    for found in re.finditer(r"[{};]", text):
        if found[0] == "{":
            head = text[begin : found.start()]
            is_scope = _SCOPE.match(_without_template(head))
            heads.append(None if is_scope else _without_template(head))
            begins.append(begin + len(head) - len(head.lstrip()))
        elif found[0] == "}":
            assert heads, (
                f"line {text.count(chr(10), 0, found.start()) + 1} closes what is not open"
            )
            head, at = heads.pop(), begins.pop()
            # A member's initialiser in front of a constructor's body leaves the body without a name.
            is_function = head is not None and ("(" in head or head == "" or head.startswith(","))
            if is_function and all(outer is None for outer in heads):
                name = re.search(r"([~\w:]+)\s*\(", head)
                lines = text.count("\n", at, found.start()) + 1
                yield name[1] if name else "a constructor", lines
        begin = found.end()
    assert not heads, "a brace stays open"


def python_parts(text: str) -> Iterator[tuple[ast.AST, int]]:
    """The functions and classes of a Python file, and their lengths without docstrings, a class's with its methods'."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, kinds):
            inner = ast.walk(node) if isinstance(node, ast.ClassDef) else [node]
            documented = [
                one.body[0] for one in inner
                if isinstance(one, kinds) and ast.get_docstring(one) is not None
            ]  # fmt: skip
            doc = sum(first.end_lineno - first.lineno + 1 for first in documented)
            yield node, node.end_lineno - node.lineno + 1 - doc


def python_functions(text: str) -> Iterator[tuple[str, int]]:
    for node, lines in python_parts(text):
        if not isinstance(node, ast.ClassDef):
            yield node.name, lines


def python_classes(text: str) -> Iterator[tuple[str, int]]:
    for node, lines in python_parts(text):
        if isinstance(node, ast.ClassDef):
            yield node.name, lines


def tracked(folder: str, *suffixes: str) -> list[str]:
    names = subprocess.run(
        ["git", "ls-files", *(f"{folder}*{suffix}" for suffix in suffixes)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return [name for name in names.splitlines() if (ROOT / name).exists()]


def test_sizes_of_functions():
    readers = [
        (cpp_functions, tracked("csrc", ".cc", ".h", ".cu", ".cuh")),
        (python_functions, tracked("", ".py")),
    ]
    long, seen = set(), 0
    for functions, files in readers:
        assert len(files) > 100
        for file in files:
            for name, lines in functions((ROOT / file).read_text()):
                seen += 1
                if lines > MOST:
                    long.add((file, name))
    assert seen > 3000
    assert long == TABLES


def test_sizes_of_files_and_classes_of_the_package():
    files = [name for name in tracked("overlap_torch/", ".py")]
    texts = {name: (ROOT / name).read_text() for name in files}
    assert len(texts) > 80
    sources = tracked("csrc/", ".cc", ".h", ".cu", ".cuh")
    assert len(sources) > 150
    lines = {name: (ROOT / name).read_text().count("\n") for name in (*files, *sources)}
    assert {name for name, count in lines.items() if count > MOST_OF_FILE} == LISTS
    classes = {
        (name, each): count for name, text in texts.items() for each, count in python_classes(text)
    }
    assert len(classes) > 80
    assert {each: count for each, count in classes.items() if count > MOST_OF_CLASS} == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("int f() { return 1; }\n", [("f", 1)]),
        ("namespace a {\nclass B {\n  void f() const {\n    g({1, 2});\n  }\n};\n}\n", [("f", 3)]),
        ("template <class T, class U = V<W>>\nstatic T g(U u)\n{\n}\n", [("g", 4)]),
        ('void f() {\n  // }\n  use("}", \'{\', R"x(}}}\n)x");\n}\n', [("f", 5)]),
        ("#define OPEN {\nconstexpr int kAll[] = {1'000,\n 2};\nvoid f() {\n}\n", [("f", 2)]),
        ("struct A {\n  A() : b{1}, c{2} {\n    go();\n  }\n};\n", [("A", 1), ("a constructor", 1), ("a constructor", 3)]),
        ("void f() {\n  struct In {\n    int g() { return 1; }\n  };\n}\n", [("f", 5)]),
    ],
)  # fmt: skip
def test_sizes_of_cpp_counts_lines_of_functions(text, expected):
    assert list(cpp_functions(text)) == expected


@pytest.mark.parametrize("text", ["void f() {\n", "}\n"])
def test_sizes_of_cpp_refuses_braces_that_do_not_match(text):
    with pytest.raises(AssertionError, match="open"):
        list(cpp_functions(text))


def test_sizes_of_python_leaves_docstrings_out():
    text = 'def f():\n    """One.\n\n    Two."""\n    return 1\nclass A:\n    async def g(self): pass\n'
    assert sorted(python_functions(text)) == [("f", 2), ("g", 1)]


def test_sizes_of_python_count_a_class_with_its_methods():
    text = 'class A:\n    """One."""\n\n    def f(self):\n        """Two."""\n        return 1\n'
    assert list(python_classes(text)) == [("A", 4)]
