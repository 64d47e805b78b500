"""Reading and writing graphs of ATen operators."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.utils._sympy.functions import FloorDiv

from overlap_torch._inductor.layouts import (
    Layout,
    as_expr,
    divide,
    flat,
    layout_of,
    moves,
    regroup,
    size_of,
)

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

WAIT = c10d.wait_tensor.default
KINDS = {  # of the collectives that ops replace
    c10d.all_reduce.default: "all_reduce",
    c10d.reduce_scatter_tensor.default: "reduce_scatter",
    c10d.all_gather_into_tensor.default: "all_gather",
}
_NAMESPACES = ("_c10d_functional", "_dtensor", "c10d_functional")
_NOT_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")
_STANDS_FOR = "overlap_torch_stands_for"  # in a node's meta: the collective whose result it has
_VIEWS = {
    aten.reshape.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
}
_SAME = {
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.expand.default,
    aten.slice.Tensor,
}
_CASTS = {torch.ops.prims.convert_element_type.default, aten._to_copy.default}


class NotFused(Exception):
    """Why a collective is not fused; ``missed`` is True if there is a GEMM beside it."""

    def __init__(self, why: str, missed: bool = True) -> None:
        super().__init__(why)
        self.why = why
        self.missed = missed


class WaitedFor(NotFused):
    """Another collective is between this one and its GEMM, so no GEMM is beside it."""

    def __init__(self, why: str) -> None:
        super().__init__(why, missed=False)


def value(node: Node) -> torch.Tensor:
    """The fake tensor of the node's result."""
    return node.meta["val"]


def is_tensor(node: Any) -> bool:
    """True if the node's result is a tensor."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def describe(node: Node) -> str:
    """An operator by its short name; other nodes in words."""
    if node.op == "placeholder":
        return "an input of the graph"
    if node.op == "output":
        return "the graph's caller"
    if node.target is WAIT:
        return "another collective"
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target._overloadpacket)
    return getattr(node.target, "__name__", str(node.target))


def collective_name(node: Node) -> str | None:
    """The name of a collective; None for other nodes."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return None
    name = target._overloadpacket.__name__
    if target.namespace not in _NAMESPACES or name in _NOT_COLLECTIVES:
        return None
    return KINDS.get(target, name)


def stand_for(output: Node, collective: Node) -> None:
    """Notes that ``output`` replaces a collective's result, for :func:`waited_for`."""
    output.meta[_STANDS_FOR] = collective_name(collective)


def is_fused(node: Node) -> bool:
    """True if the node replaces a collective's result."""
    return _STANDS_FOR in node.meta


def waited_for(node: Node) -> str | None:
    """The name of the collective whose result this is, fused or not; None for other nodes."""
    if node.target is not WAIT:
        return node.meta.get(_STANDS_FOR)
    collective = node.args[0]
    while collective.target is operator.getitem:  # one of several that are called together
        collective = collective.args[0]
    return collective_name(collective)


def name_of(dtype: torch.dtype) -> str:
    """``float32``."""
    return str(dtype).removeprefix("torch.")


def cast_dtype(node: Node) -> torch.dtype | None:
    """The dtype to which the node casts its input, if it does nothing else; None for other nodes."""
    if node.target not in _CASTS:
        return None
    source, result = value(node.args[0]), value(node)
    same = source.device == result.device and source.layout == result.layout
    return result.dtype if same else None


def is_recast(node: Node) -> bool:
    """True if the node only casts, copies, or reads each element as another dtype of the same size."""
    if not node.args or not is_tensor(node.args[0]):
        return False
    if node.target is aten.view.dtype:
        return value(node).dtype.itemsize == value(node.args[0]).dtype.itemsize
    return cast_dtype(node) is not None or is_identity(node)


def only_moves(node: Node) -> bool:
    """True if the node's result has only its inputs' numbers, in another order, dtype or multiplicity."""
    if node.target is operator.getitem or node.target in _CASTS or node.target in _SAME:
        return True
    if node.target in (aten.cat.default, aten.stack.default):
        return True
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def is_identity(node: Node) -> bool:
    """True if the node's result has its first argument's elements in their places, maybe in other memory."""
    if node.target not in _SAME or not is_tensor(node.args[0]):
        return False
    return same_shape(value(node), value(node.args[0]))


def same_shape(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if the shapes are equal for any value of the symbols."""
    return same_sizes(one.shape, other.shape)


def same_sizes(one: Sequence[int | torch.SymInt], other: Sequence[int | torch.SymInt]) -> bool:
    return len(one) == len(other) and all(
        as_expr(a) == as_expr(b) for a, b in zip(one, other, strict=True)
    )


def only_user(node: Node) -> Node | None:
    """The node's reader; None unless there is exactly one."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def added_to(total: Node, shape: Sequence[int | torch.SymInt]) -> Node | None:
    """The tensor of this shape that the only reader of ``total`` adds to it."""
    user = only_user(total)
    if user is None or user.target is not aten.add.Tensor or user.kwargs.get("alpha", 1) != 1:
        return None
    other = user.args[1] if user.args[0] is total else user.args[0]
    fits = (
        is_tensor(other)
        and other is not total
        and same_sizes(value(other).shape, shape)
        and value(other).dtype == value(total).dtype
    )
    return other if fits else None


def erase_unused(nodes: Iterable[Node]) -> None:
    """Erases the nodes that nothing reads, in the given order: readers come first."""
    for node in nodes:
        if not node.users:
            node.graph.erase_node(node)


def is_view(node: Node) -> bool:
    """True if the node only splits and merges dims."""
    return node.target in _VIEWS


def permutation(node: Node) -> list[int] | None:
    """For each dim of the result the dim of the input; None for nodes that do not permute."""
    if node.target not in (aten.permute.default, aten.transpose.int, aten.t.default):
        return None
    count = value(node).dim()
    order = list(range(count))
    if node.target is aten.permute.default:
        return [dim % count for dim in node.args[1]]
    if node.target is aten.transpose.int:
        first, second = (dim % count for dim in node.args[1:3])
        order[first], order[second] = second, first
        return order
    return order[::-1]


@dataclass(frozen=True)
class Recat:
    """A tensor cut along one dim into equal parts, which are put after each other along another one."""

    source: Node
    result: Node
    count: int
    cut_dim: int
    cat_dim: int
    inner: tuple[Node, ...]  # the cut, its parts and their recasts, which nobody else reads
    recasts: tuple[Node, ...]  # of the first part, one after the other; the other parts' are alike


def recat_of(cat: Node) -> Recat | None:
    """The rearrangement that a ``cat`` is a part of, if there is one."""
    if cat.target is not aten.cat.default or not isinstance(cat.args[0], list | tuple):
        return None
    chains = [_recasts_before(part, cat) for part in cat.args[0]]
    if len(chains) < 2 or any(chain is None for chain in chains):
        return None
    parts, recasts = [chain[0] for chain in chains], [chain[1:] for chain in chains]
    split = parts[0].args[0]
    if split.target not in (aten.split.Tensor, aten.split_with_sizes.default):
        return None
    whole = [part.args == (split, i) for i, part in enumerate(parts)]
    alike = [list(map(_call_of, each)) == list(map(_call_of, recasts[0])) for each in recasts]
    if not all(whole) or not all(alike) or len(split.users) != len(parts):
        return None
    if len(split.meta["val"]) != len(parts):
        return None
    if not all(same_shape(value(part), value(parts[0])) for part in parts):
        return None
    count = value(split.args[0]).dim()
    cut_dim = arguments(split)["dim"] % count
    cat_dim = arguments(cat)["dim"] % count
    inner = (split, *parts, *(node for each in recasts for node in each))
    return Recat(split.args[0], cat, len(parts), cut_dim, cat_dim, inner, tuple(recasts[0]))


def _recasts_before(node: Any, reader: Node) -> list[Node] | None:
    """A part of a tensor and its recasts up to ``node``, each read only by the next; None if it is no such part."""
    chain: list[Node] = []
    while isinstance(node, Node) and list(node.users) == [reader]:
        chain.insert(0, node)
        if node.target is operator.getitem:
            return chain
        if not is_recast(node):
            return None
        node, reader = node.args[0], node
    return None


def _call_of(node: Node) -> tuple[Any, ...]:
    """The node's call, apart from its tensor."""
    return (node.target, node.args[1:], node.kwargs)


def arguments(node: Node) -> dict[str, Any]:
    """An operator's arguments by their names; None for one that is neither given nor has a default."""
    found = {}
    for i, argument in enumerate(node.target._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        given = node.kwargs.get(argument.name, default)
        found[argument.name] = node.args[i] if i < len(node.args) else given
    return found


def after(node: Node, layout: Layout, back: bool = False) -> Layout | None:
    """The layout of a view's, a permutation's or an identity's result, given that of its input; None for other nodes.

    ``back``: the layout of the input, given that of the result.
    """
    if is_identity(node):
        return layout
    order = permutation(node)
    if order is not None:
        order = [order.index(dim) for dim in range(len(order))] if back else order
        return [layout[dim] for dim in order]
    if is_view(node):
        shape = value(node.args[0] if back else node).shape
        return regroup(flat(layout), [as_expr(size) for size in shape])
    return None


def before(node: Node, layout: Layout) -> Layout | None:
    """The layout of the input of a view, a permutation or an identity, given that of its result; None for other nodes."""
    return after(node, layout, back=True)


def source_of(node: Node) -> Node | None:
    """The tensor whose numbers the node only rearranges or casts; None for other nodes."""
    if node.op != "call_function" or not node.args or not is_tensor(node.args[0]):
        return None
    keeps = cast_dtype(node) is not None or before(node, layout_of(value(node).shape)) is not None
    return node.args[0] if keeps else None


def after_recat(recat: Recat, layout: Layout, back: bool = False) -> Layout | None:
    """The layout of the result, given that of the tensor that is cut; with ``back`` the other way round.

    One dim's outer factor, the number of parts, moves before another dim's factors. None if that dim does not divide.
    """
    from_dim, to_dim = (recat.cut_dim, recat.cat_dim)[:: -1 if back else 1]
    parts_count = sympy.Integer(recat.count)
    rest = divide(size_of(flat([layout[from_dim]])), parts_count)
    parts = None if rest is None else regroup(layout[from_dim], [parts_count, rest])
    if parts is None:
        return None
    result = list(layout)
    result[from_dim] = parts[1]
    result[to_dim] = parts[0] + result[to_dim]
    return result


def descendants(roots: Sequence[Node]) -> set[Node]:
    """The nodes that depend on one of these, and these."""
    found = set(roots)
    waiting = list(roots)
    while waiting:
        for user in waiting.pop().users:
            if user not in found:
                found.add(user)
                waiting.append(user)
    return found


_TORCH = os.path.dirname(torch.__file__) + os.sep
_STYLES = os.path.join("", "transformers", "distributed", "")  # Hugging Face's own, of tp_plan
_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*(\n +(?!File ")(?P<code>[^\n]+))?'
)


def source_line(node: Node) -> str:
    """``file:line: code`` of the model's innermost line, not PyTorch's or a style's; empty if the compiler knows none."""
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    own = [
        frame
        for frame in frames
        if not frame["file"].startswith(_TORCH) and _STYLES not in frame["file"]
    ] or frames
    if not own:
        return ""
    code = f": {own[-1]['code'].strip()}" if own[-1]["code"] else ""
    return f"{own[-1]['file']}:{own[-1]['line']}{code}"


def module_path(node: Node) -> str:
    """The path in the model of the module whose forward or backward made the node; empty if it is unknown."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = [path for path, *_ in stack.values()]
    # Dynamo writes it like this: L['self']._modules['blocks'][0].down
    path = re.sub(r"^[LG]\['\w+'\]\.?", r"", paths[-1]) if paths else ""
    return (
        re.sub(r"(?:\._modules)?\['?(\w+)'?\]", r".\1", path).replace("_modules.", "").lstrip(".")
    )


def forget_intermediate_sizes(graph: Graph) -> None:
    """Computes sizes of intermediate results from the inputs' sizes, so that they need no intermediate result."""
    for node in list(graph.nodes):
        if node.target is not aten.sym_size.int or node.args[0].op == "placeholder":
            continue
        known, size = None, node.meta["val"]
        with suppress(NotFused), Editor(node, value(node.args[0]).fake_mode) as editor:
            known = editor.size(size.node.expr if isinstance(size, torch.SymInt) else as_expr(size))
        if known is None:
            continue
        if isinstance(known, int):
            for user in list(node.users):
                arguments = (user.args, user.kwargs)
                user.args, user.kwargs = torch.fx.map_arg(
                    arguments, lambda arg, known=known, node=node: known if arg is node else arg
                )
        else:
            node.replace_all_uses_with(known)
        graph.erase_node(node)


class Editor:
    """Inserts nodes before a node of the graph, with their values and that node's source."""

    def __init__(self, place: Node, fake_mode: FakeTensorMode) -> None:
        self.graph = place.graph
        self.place = place
        self.fake_mode = fake_mode
        self.made: list[Node] = []
        # as_strided reads memory, not dims: a result must have the memory layout of the result that it replaces.
        self._reads_memory = any(
            node.target is aten.as_strided.default for node in place.graph.nodes
        )

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A new node."""
        with self.graph.inserting_before(self.place):
            node = self.graph.call_function(target, args, kwargs)
        values = torch.fx.map_arg((args, kwargs), lambda operand: operand.meta["val"])
        with self.fake_mode:
            node.meta["val"] = target(*values[0], **values[1])
        if "stack_trace" in self.place.meta:
            node.meta["stack_trace"] = self.place.meta["stack_trace"]
        self.made.append(node)
        return node

    def __enter__(self) -> Editor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Removes the new nodes, which nothing else reads yet, if the op cannot be made."""
        if kind is not None and issubclass(kind, NotFused):
            for node in reversed(self.made):
                self.graph.erase_node(node)

    def rearrange(self, node: Node, source: Layout, target: Layout) -> Node:
        """The node's tensor, whose layout is ``source``, in another layout."""
        source, target = [flat([dim]) for dim in source], [flat([dim]) for dim in target]
        blocks, order = moves(source, target)
        if order != list(range(len(order))):
            node = self._reshape(node, [size_of(block) for block in blocks])
            node = self.call(aten.permute.default, node, order)
        node = self._reshape(node, [size_of(dim) for dim in target])
        if self._reads_memory and not value(node).is_contiguous():
            return self.call(aten.clone.default, node, memory_format=torch.contiguous_format)
        return node

    def transposed(self, matrix: Node) -> Node:
        """[N, K] of [K, N]."""
        if permutation(matrix) == [1, 0]:
            return matrix.args[0]
        return self.call(aten.permute.default, matrix, [1, 0])

    def _reshape(self, node: Node, sizes: Sequence[sympy.Expr]) -> Node:
        if [as_expr(size) for size in value(node).shape] == list(sizes):
            return node
        return self.call(aten.reshape.default, node, [self.size(size) for size in sizes])

    def size(self, expr: sympy.Expr) -> Any:
        """An integer, or a node that computes it."""
        if expr.is_Integer:
            return int(expr)
        if expr.is_Symbol:
            return self._symbol(expr)
        numerator, denominator = sympy.fraction(sympy.together(expr))
        if denominator != 1:
            return self.call(operator.floordiv, self.size(numerator), self.size(denominator))
        if isinstance(expr, FloorDiv):
            return self.call(operator.floordiv, *(self.size(part) for part in expr.args))
        if expr.is_Pow and expr.exp.is_Integer:
            return self._folded(operator.mul, [expr.base] * int(expr.exp))
        if expr.is_Mul or expr.is_Add:
            return self._folded(operator.mul if expr.is_Mul else operator.add, expr.args)
        raise NotFused(f"a size is {expr}, which the pass cannot compute")

    def _folded(self, function: Any, parts: Sequence[sympy.Expr]) -> Node:
        result = self.size(parts[0])
        for part in parts[1:]:
            result = self.call(function, result, self.size(part))
        return result

    def _symbol(self, symbol: sympy.Symbol) -> Node:
        for node in self.graph.nodes:
            if node is self.place:
                break
            known = node.meta.get("val")
            if isinstance(known, torch.SymInt) and known.node.expr == symbol:
                return node
            if isinstance(known, torch.Tensor) and node.op == "placeholder":
                for dim, size in enumerate(known.shape):
                    if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                        return self.call(aten.sym_size.int, node, dim)
        raise NotFused(f"a size is {symbol}, which no input of the graph has")
