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
