"""No function is longer than 80 lines; no class of the package or of csrc is longer than 300, none of their files
than 500."""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST = 80
MOST_OF_CLASS = 300
MOST_OF_FILE = 500


def cpp_functions(text: str) -> Iterator[tuple[str, int]]:
    """Names and lengths of a C++ file's functions, as clang-format lays them out: a lone brace ends what the last line as
    far to the left began."""
    begins: dict[int, tuple[int, str]] = {}  # number and line, by indentation
    for number, line in enumerate(text.splitlines()):
        code = line.lstrip()
        indentation = len(line) - len(code)
        if code == "}" and indentation in begins:
            begin, head = begins[indentation]
            name = re.search(r"([~\w]+)\(", head)
            yield name[1] if name else head.strip(), number - begin + 1
        elif code and not code.startswith(("}", "#", "//")):
            begins[indentation] = (number, line)


# Comments, texts and the preprocessor's lines; a quote between digits begins no text.
NO_CODE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\])*"|(?<!\w)'(?:\\.|[^'\\])+'"""
    r"""|^[ \t]*\#(?:\\\n|[^\n])*""",
    re.DOTALL | re.MULTILINE,
)
CPP_CLASS = re.compile(
    r"(?<!enum )\b(?:class|struct|union)\b\s*(?:alignas\(.*?\)\s*)?([\w:]*)[^()]*$", re.DOTALL
)


def blank(pattern: str | re.Pattern, text: str) -> str:
    """The text without what matches, but with all its lines."""
    return re.sub(pattern, lambda match: "\n" * match[0].count("\n"), text)


def cpp_classes(text: str) -> Iterator[tuple[str, int]]:
    """Names and lengths of a C++ file's classes, structs and unions, from the word to the closing brace."""
    code = blank(NO_CODE, text)
    opened: list[tuple[str, int] | None] = []  # of each brace, the class that it opens
    begin = 0
    for sign in re.finditer("[{};]", code):
        if sign[0] == "{":
            head, whole = code[begin : sign.start()], ""
            while head != whole:  # arguments of templates, from the inner ones on
                head, whole = blank("<[^<>]*>", head), head
            found = CPP_CLASS.search(head)
            line = code.count("\n", 0, sign.start())
            opened.append((found[1], line - head.count("\n", found.start())) if found else None)
        elif sign[0] == "}" and (of_class := opened.pop()):
            yield of_class[0], code.count("\n", 0, sign.start()) - of_class[1] + 1
        begin = sign.end()
    assert not opened


FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def python_parts(text: str, kinds: type) -> Iterator[tuple[str, int]]:
    """Names and lengths of a Python file's functions or classes, without docstrings, also those of a class's methods."""
    documented = FUNCTIONS | ast.ClassDef
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, kinds):
            docs = [
                inner.body[0]
                for inner in (ast.walk(node) if isinstance(node, ast.ClassDef) else [node])
                if isinstance(inner, documented) and ast.get_docstring(inner) is not None
            ]
            doc = sum(first.end_lineno - first.lineno + 1 for first in docs)
            yield node.name, node.end_lineno - node.lineno + 1 - doc


def tracked(folder: str, *suffixes: str) -> list[str]:
    names = subprocess.run(
        ["git", "ls-files", *(f"{folder}*{suffix}" for suffix in suffixes)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return [name for name in names.splitlines() if (ROOT / name).exists()]


def test_sizes_of_functions():
    readers = [
        (cpp_functions, tracked("csrc", ".cc", ".h", ".cu", ".cuh")),
        (partial(python_parts, kinds=FUNCTIONS), tracked("", ".py")),
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
    assert not long


def test_sizes_of_files_and_classes():
    files = [name for name in tracked("overlap_torch/", ".py")]
    assert len(files) > 80
    sources = tracked("csrc/", ".cc", ".h", ".cu", ".cuh")
    assert len(sources) > 150
    lines = {name: (ROOT / name).read_text().count("\n") for name in (*files, *sources)}
    assert not {name for name, count in lines.items() if count > MOST_OF_FILE}
    readers = [(files, partial(python_parts, kinds=ast.ClassDef), 80), (sources, cpp_classes, 400)]
    long = set()
    for names, classes, least in readers:
        found = [(name, *each) for name in names for each in classes((ROOT / name).read_text())]
        assert len(found) > least
        long |= {(name, each) for name, each, count in found if count > MOST_OF_CLASS}
    assert not long


def test_sizes_of_cpp_counts_lines_of_functions():
    inner = "class B {\n  B()\n      : a{1} {\n    if (g({1})) {\n      h();\n    }\n  }\n};\n"
    text = (
        f"namespace a {{\nint f() {{\n  // }}\n#define OPEN {{\n\n}}\n{inner}}}  // namespace a\n"
    )
    assert list(cpp_functions(text)) == [("f", 5), ("g", 3), ("B", 6)]


def test_sizes_of_python_leave_docstrings_out_and_count_a_class_with_its_methods():
    text = 'def f():\n    """One.\n\n    Two."""\n    return 1\nclass A:\n    async def g(self): pass\n'
    assert sorted(python_parts(text, FUNCTIONS)) == [("f", 2), ("g", 1)]
    text = 'class A:\n    """One."""\n\n    def f(self):\n        """Two."""\n        return 1\n'
    assert list(python_parts(text, ast.ClassDef)) == [("A", 4)]


def test_sizes_of_cpp_classes_count_braces_of_code():
    text = (
        "#include <a>\n#define OPEN {\ntemplate <class T, class U = V<T>>\nstruct A\n    : B<T> {\n"
        "  // }\n  char a = '}';\n  int b = 1'000;  /* }\n} */\n public:\n  struct C { int d[2] = {}; };\n"
        '  std::string e = "}\\"}";\n  enum class F { kG };\n  T h(class I j) {\n    return {};\n  }\n};\n'
        "union alignas(16) K {\n};\nclass L;\n"
    )
    assert list(cpp_classes(text)) == [("C", 1), ("A", 14), ("K", 2)]
