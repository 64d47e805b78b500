"""tools/prose.py finds each sentence without a subject, in comments and docstrings and nowhere else."""

import importlib.util
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("prose", Path(__file__).parents[2] / "tools/prose.py")
prose = importlib.util.module_from_spec(spec)
spec.loader.exec_module(prose)

PYTHON = '''\
"""What a module does."""
x = "Of a text that is no comment"  # Those of x
# The first part. Which is told again.
# A sentence that goes on, of which
# That is the rest.


def f():
    """The value of f.

    - Whose item is this.
    Nor is this line.
    """
    return """What it returns."""
'''
CPP = """\
// Whether it is.
int a = 0;  // The number. Of a.
/* The first line.
 * That line. */
const char* text = "// What no comment is";
const char* raw = R"raw(
// Nor this
)raw";
int of = 1;  // Ofs and `What` and What_is(x) are words of their own
char quote = '"';  // Which
"""
HASHED = """\
# Of the targets.
all: one  # what goes on
	echo '#That'
"""


@pytest.mark.parametrize(
    "name, source, lines",
    [
        ("a.py", PYTHON, [1, 2, 3, 5, 11, 12]),
        ("a.cc", CPP, [1, 2, 4, 10]),
        ("Makefile", HASHED, [1]),
        ("a.md", "Of a page.\n", []),
    ],
)
def test_prose_names_the_lines_without_a_subject(name, source, lines):
    assert [line for line, _ in prose.faults(name, source)] == lines


@pytest.mark.parametrize("source, status", [("# Of it.\n", 1), ("# The value of it.\n", 0)])
def test_prose_fails_where_it_finds_something(tmp_path, capsys, source, status):
    file = tmp_path / "a.py"
    file.write_text(source, encoding="utf-8")
    assert prose.main([str(file)]) == status
    assert (f"{file}:1: begins without its subject: Of it." in capsys.readouterr().out) == status
