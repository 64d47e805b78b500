"""_plan.pyi, by which editors and type checkers know the planner's compiled module; and that module's docstrings."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import overlap_torch
from overlap_torch import _plan, plan

PACKAGE = Path(overlap_torch.__file__).parent
STUB = ast.parse((PACKAGE / "_plan.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
FUNCTIONS = {node.name: node for node in STUB.body if isinstance(node, ast.FunctionDef)}
MEMBERS = {
    name: [*getattr(_plan, name).__members__]
    for name in CLASSES
    if hasattr(getattr(_plan, name, None), "__members__")
}
COMPILED = [name for name in plan.__all__ if getattr(_plan, name, None) is getattr(plan, name)]


def public(names) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def declared(name: str) -> set[str]:
    """Public members of a class in the stub, its base's too."""
    members: set[str] = set()
    for node in CLASSES[name].body:
        members.add(node.target.id if isinstance(node, ast.AnnAssign) else node.name)
    for base in CLASSES[name].bases:
        members |= declared(base.id)
    return public(members)


def parameters(function: ast.FunctionDef) -> list[tuple[str, bool]]:
    """Names, and which have a default; without `self`."""
    names = [argument.arg for argument in function.args.args]
    required = len(names) - len(function.args.defaults)
    both = [(name, i >= required) for i, name in enumerate(names)]
    return [pair for pair in both if pair[0] != "self"]


def bound_parameters(function) -> list[tuple[str, bool]]:
    """The same as pybind11 writes it: `name: type = default`, and no type or default here has a comma outside of brackets."""
    if inspect.isfunction(function):  # added in Python
        given = inspect.signature(function).parameters.values()
        positional = [one for one in given if one.kind == one.POSITIONAL_OR_KEYWORD]
        return [(one.name, one.default is not one.empty) for one in positional[1:]]
    signature = function.__doc__.splitlines()[0]
    signature = signature[signature.index("(") + 1 : signature.rindex(") -> ")]
    while signature != (flat := re.sub(r"\([^()]*\)|\[[^\[\]]*\]|<[^<>]*>", "", signature)):
        signature = flat
    parts = [part.strip() for part in signature.split(",") if part.strip()]
    both = [(part.split(":")[0], "=" in part) for part in parts]
    return [pair for pair in both if pair[0] != "self"]


def test_plan_stub_has_all_that_the_package_exports():
    assert len(COMPILED) > 20
    constants = {node.target.id for node in STUB.body if isinstance(node, ast.AnnAssign)}
    assert set(COMPILED) <= {*CLASSES, *FUNCTIONS, *constants}
    assert (PACKAGE / "py.typed").exists()


@pytest.mark.parametrize("name", sorted(public(CLASSES)))
def test_plan_stub_classes_have_the_members_of_the_bound_ones(name):
    bound = getattr(_plan, name)
    assert declared(name) == public(dir(bound))
    for node in CLASSES[name].body:
        method = isinstance(node, ast.FunctionDef) and not node.decorator_list
        if method and node.name != "__hash__":
            assert parameters(node) == bound_parameters(getattr(bound, node.name)), node.name


def stub_fields(node: ast.ClassDef) -> list[tuple[str, str]]:
    """Fields and their types, in the order of the stub: plain ones and properties that can be set or are of a frozen class."""
    fields = []
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and not one.target.id.startswith("_"):
            fields.append((one.target.id, ast.unparse(one.annotation)))
        elif isinstance(one, ast.FunctionDef) and "property" in map(
            ast.unparse, one.decorator_list
        ):
            fields.append((one.name, ast.unparse(one.returns)))
    return fields


LISTED = [name for name in CLASSES if hasattr(getattr(_plan, name, None), "__fields__")]


@pytest.mark.parametrize("name", LISTED)
def test_plan_stub_has_each_field_with_its_type(name):
    """A field is declared once, in csrc/plan/plan_fields.h; the stub has a line for each."""
    expected = {
        field: f"tuple[{kind[0].__name__}, ...]" if isinstance(kind, tuple) else kind.__name__
        for field, kind in getattr(_plan, name).__fields__.items()
    }
    declared = dict(stub_fields(CLASSES[name]))
    assert {field: declared.get(field) for field in expected} == expected


@pytest.mark.parametrize("name", ["Machine", "BandRun", "Chunk", "Resources"])
def test_plan_stub_constructors_take_all_fields_in_order(name):
    (function,) = [one for one in CLASSES[name].body if getattr(one, "name", "") == "__init__"]
    given = [(one.arg, ast.unparse(one.annotation)) for one in function.args.args[1:]]
    fields = getattr(_plan, name).__fields__
    assert given == [(field, kind.__name__) for field, kind in fields.items()]
    bound = getattr(_plan, name)
    needed = function.args.args[1 : len(given) + 1 - len(function.args.defaults)]
    item = bound(*(1 for _ in needed))
    for argument, default in zip(reversed(given), reversed(function.args.defaults), strict=False):
        if not (isinstance(default, ast.Constant) and default.value is ...):  # `...`: some member
            assert getattr(item, argument[0]) == ast.literal_eval(default), argument


@pytest.mark.parametrize("name", [name for name in CLASSES if name in MEMBERS])
def test_plan_stub_enumerations_have_each_member_in_order(name):
    names = [node.target.id for node in CLASSES[name].body if isinstance(node, ast.AnnAssign)]
    assert names == ["__members__", *MEMBERS[name]]


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_plan_stub_functions_take_what_the_bound_ones_take(name):
    assert parameters(FUNCTIONS[name]) == bound_parameters(getattr(_plan, name))


@pytest.mark.parametrize("name", [name for name in plan.__all__ if callable(getattr(plan, name))])
def test_plan_names_are_documented(name):
    """pybind11 makes a signature of its own, and lists an enumeration's members."""
    text = getattr(plan, name).__doc__ or ""
    text = re.sub(rf"^{name}\(.*\) -> .*\n", "", text)
    text = text.split("Members:")[0].strip()
    assert len(text) >= 15, text
