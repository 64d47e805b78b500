"""_plan.pyi, by which editors and type checkers know the planner's compiled module; and that module's docstrings."""

import ast
import re
import warnings
from pathlib import Path
from types import ModuleType

import pytest

import overlap_torch
from overlap_torch import _plan, plan

PACKAGE = Path(overlap_torch.__file__).parent
STUB = PACKAGE / "_plan.pyi"
PLACES = (plan, plan.files, plan.programs, plan.templates, plan.types)
PUBLIC = {
    name: getattr(place, name)
    for place in PLACES
    for name in place.__all__
    if not isinstance(getattr(place, name), ModuleType)
}
COMPILED = [name for name, member in PUBLIC.items() if getattr(_plan, name, None) is member]


def public(names) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def names_of(body: list[ast.stmt]) -> set[str]:
    """Public names that these statements declare."""
    targets = (node.target.id if isinstance(node, ast.AnnAssign) else node for node in body)
    return public(one if isinstance(one, str) else getattr(one, "name", "_") for one in targets)


@pytest.mark.skipif(not STUB.exists(), reason="pybind11-stubgen was not installed at the build")
def test_plan_stub_has_all_names_and_the_members_of_all_classes():
    assert len(COMPILED) > 20 and (PACKAGE / "py.typed").exists()
    tree = ast.parse(STUB.read_text())
    assert set(COMPILED) <= names_of(tree.body)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for name in public(classes):
        assert names_of(classes[name].body) == public(dir(getattr(_plan, name))), name


@pytest.mark.parametrize("name", [name for name, member in PUBLIC.items() if callable(member)])
def test_plan_names_are_documented(name):
    """pybind11 makes a signature of its own, and lists an enumeration's members."""
    text = PUBLIC[name].__doc__ or ""
    text = re.sub(rf"^{name}\(.*\) -> .*\n", "", text)
    text = text.split("Members:")[0].strip()
    assert len(text) >= 15, text


@pytest.mark.parametrize("place", PLACES[1:], ids=lambda place: place.__name__)
def test_plan_names_that_moved_are_found_and_deprecated(place):
    for name in place.__all__:
        with pytest.warns(
            DeprecationWarning, match=rf"plan\.{name} is deprecated, use {place.__name__}\.{name}$"
        ):
            assert getattr(plan, name) is getattr(place, name)


def test_plan_names_are_deprecated_where_they_are_imported():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        from overlap_torch.plan import row_panels
    assert row_panels is plan.templates.row_panels
    assert {one.filename for one in found} == {__file__} and not {*dir(plan)} & {"row_panels", "Op"}
    with pytest.raises(AttributeError, match="'overlap_torch.plan' has no attribute 'row_panel'"):
        _ = plan.row_panel
