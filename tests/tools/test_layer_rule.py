"""The layers of csrc look downward only: each folder includes what its line below allows, and nothing else. And Python's modules
import each other in no circle."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
SOURCES = sorted(p for p in CSRC.rglob("*") if p.suffix in {".h", ".cuh", ".cc", ".cu"})

STANDARD = r"[a-z0-9_]+"  # <vector>: no folder, no suffix
POSIX = r"(dlfcn|fcntl|linux/futex|pthread|unistd|sys/[a-z]+)\.h"
CUDA = r"(cuda|cublas|cooperative_groups|nvtx3|cub|mma)[a-zA-Z0-9_]*([./].+)?"
CUTLASS = r"(cutlass|cute)/.+"
NCCL = r"nccl(_device)?\.h"
TORCH = r"(torch|ATen|c10)/.+"

ALLOWED = {
    "plan": [STANDARD, r"plan/.+"],
    "steps/list": [STANDARD, r"steps/list/.+", r"plan/.+"],
    "steps/price": [STANDARD, r"steps/(list|price)/.+", r"plan/.+"],
    "steps/lower": [STANDARD, r"steps/(list|price|lower)/.+", r"plan/.+"],
    "steps/proof": [STANDARD, r"steps/.+", r"plan/.+"],
    "planner": [STANDARD, r"planner/.+", r"steps/.+", r"plan/.+"],
    "kernels": [STANDARD, CUDA, CUTLASS, r"kernels/.+", r"plan/.+"],
    "runtime": [STANDARD, POSIX, CUDA, NCCL, r"(runtime|kernels|steps|plan)/.+"],
    "cpu": [STANDARD, TORCH, r"(cpu|steps|plan)/.+"],
    **{
        f"binding/{room}": [
            STANDARD,
            POSIX,
            CUDA,
            TORCH,
            r"binding/(ops|cuda|cpu|kernels)/.+",
            r"(cpu|runtime|kernels|planner|steps|plan)/.+",
        ]
        for room in ("ops", "cuda", "cpu", "kernels")
    },
    # The op library knows no Python. `_plan` is built where there is no torch, `_eager` calls torch's ops only.
    "binding/python": [STANDARD, r"pybind11/.+", r"binding/python/.+", r"(plan|planner|steps)/.+"],
    **{
        f"binding/python/{name}": [
            STANDARD,
            TORCH,
            r"pybind11/.+",
            r"binding/(python/autograd_module|ops/nodes)\.h",  # of templates and inline functions
        ]
        for name in ("autograd_module.cc", "autograd_module.h", "eager_module.cc")
    },
}


def includes(text: str) -> list[str]:
    return re.findall(r"^[ \t]*#[ \t]*include[ \t]*[<\"]([^>\"]+)", text, re.MULTILINE)


def forbidden(name: str, text: str) -> list[str]:
    """The includes of a source, named relative to csrc, that its layer does not allow."""
    parts = name.split("/")
    rooms = ["/".join(parts[:length]) for length in range(len(parts), 0, -1)]
    allowed = next(ALLOWED[room] for room in rooms if room in ALLOWED)
    return [i for i in includes(text) if not any(re.fullmatch(pattern, i) for pattern in allowed)]


def test_layer_rule_sources_include_only_what_their_layers_may():
    """A folder without a line in the rule is an error."""
    names = {path.relative_to(CSRC).as_posix(): path for path in SOURCES}
    assert len(names) > 150
    found = {name: forbidden(name, path.read_text()) for name, path in names.items()}
    assert {name: upward for name, upward in found.items() if upward} == {}


def test_layer_rule_own_includes_exist():
    missing = [
        (path.name, include)
        for path in SOURCES
        for include in includes(path.read_text())
        if re.match(r"(plan|steps|planner|kernels|cpu|runtime|binding)/", include)
        and not (CSRC / include).exists()
    ]
    assert missing == []


# Includes that look upward from a source; those of the sources that there are look downward.
UPWARD = {
    "plan/plan.cc": "cuda_runtime.h kernels/gemm/gemm.h torch/torch.h pybind11/pybind11.h cutlass/cutlass.h "
    "../kernels/gemm/gemm.h steps/list/step.h planner/planner.h",
    "steps/list/print.cc": "steps/price/costs.h",
    "steps/price/price.cc": "steps/lower/families.h",
    "steps/lower/lower.cc": "steps/proof/proof.h planner/planner.h cuda_runtime.h runtime/group.h",
    "kernels/gemm/gemm.cu": "nccl.h ATen/ATen.h runtime/group.h",
    "cpu/run.cc": "binding/ops/groups.h runtime/group.h",
    "runtime/group.cc": "torch/library.h c10/cuda/CUDAStream.h binding/ops/ops.h pybind11/pybind11.h",
    "binding/python/plan_module.cc": "torch/extension.h runtime/group.h binding/ops/groups.h",
    "binding/python/eager_module.cc": "binding/ops/groups.h",
    "binding/ops/ops.cc": "pybind11/pybind11.h binding/python/steps_module.h",
}


@pytest.mark.parametrize("name", UPWARD)
def test_layer_rule_finds_what_looks_upward(name):
    for include in UPWARD[name].split():
        for text in (f'#include "{include}"', f"#include <vector>\n  #  include <{include}>\n"):
            assert forbidden(name, text) == [include]


PACKAGE = CSRC.parent / "overlap_torch"


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, names: set[str]) -> set[str]:
    """Modules among `names` that a module imports, at any time."""
    found = set()
    todo = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & names or {node.module}
    return found & names


def graph() -> dict[str, set[str]]:
    """Each module's imports of other modules of the package, without the package's own, which runs before all of them."""
    paths = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
    del paths[PACKAGE.name]
    trees = {name: ast.parse(path.read_text()) for name, path in paths.items()}
    return {name: imported(tree, {*trees}) for name, tree in trees.items()}


def circle(edges: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_layer_rule_package_imports_in_no_circle():
    edges = graph()
    assert len(edges) > 70
    assert edges["overlap_torch.plan"] >= {
        "overlap_torch.plan.files",
        "overlap_torch.plan._explain",
    }
    assert edges["overlap_torch.plan._library"] >= {"overlap_torch._ops"}  # within a function
    assert circle(edges) == []


def test_layer_rule_finds_a_circle():
    text = "from overlap_torch._ops import b\nif TYPE_CHECKING:\n    import c\ndef late():\n    import d\n"
    names = {"overlap_torch._ops", "overlap_torch._ops.b", "c", "d"}
    assert imported(ast.parse(text), names) == {"overlap_torch._ops.b", "d"}
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}
    assert circle({"a": {"b", "c"}, "b": {"c"}}) == []


def test_python_asks_what_an_op_moves_and_compares_no_ops():
    """A new op is a row of a table (csrc/plan/op.h), which ``problem.traits`` gives."""
    root = CSRC.parent
    sources = sorted((root / "overlap_torch").rglob("*.py"))
    found = {
        f"{path.relative_to(root)}:{node.lineno}"
        for path in sources
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators)
        for each in ast.walk(side)
        if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "Op"
    }
    assert len(sources) > 80 and not found, found
