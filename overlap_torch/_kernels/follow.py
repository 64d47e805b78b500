"""Pointers through the source of a Triton kernel: the statements that store through one of its arguments, or load."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import triton.language as tl

_ATOMICS = tuple(getattr(tl, name) for name in dir(tl) if name.startswith("atomic_"))
# Calls whose result points to where their first argument does.
_PASSES = tuple(
    getattr(tl, name)
    for name in ("make_tensor_descriptor", "make_block_ptr", "advance", "multiple_of", "max_contiguous", "max_constancy",
                 "broadcast_to", "expand_dims", "reshape", "cast")
    if hasattr(tl, name)
)  # fmt: skip
_HARMLESS = tuple(
    getattr(tl, name)
    for name in ("assume", "static_assert", "static_print", "device_print", "device_assert")
    if hasattr(tl, name)
)
_LOADING = ("load", "gather")  # methods of a descriptor
_STORING = ("store",)
# The same as functions.
LOADS_BLOCK = getattr(tl, "load_tensor_descriptor", None)
STORES_BLOCK = getattr(tl, "store_tensor_descriptor", None)
_DESCRIBES = getattr(tl, "make_tensor_descriptor", None)


class Unfollowed(Exception):
    """The pass cannot follow something at a line of a source."""

    def __init__(self, source: Source, node: ast.AST, why: str) -> None:
        super().__init__(f"{source.file}:{source.line_of(node)}: {why}")


@dataclass
class Source:
    """A function's text from its ``def`` on, and the meaning of its global names.

    ``lines`` has for each line of the text the line of the file.
    """

    name: str
    file: str
    text: str
    lines: list[int]
    names: dict[str, object]

    @classmethod
    def of(cls, function: types.FunctionType) -> Source:
        """Raises ValueError if there is no source, for example if the function was typed into an interpreter."""
        try:
            lines, first = inspect.getsourcelines(function)
        except OSError:
            raise ValueError(
                f"overlap_torch.triton.aligned: the source of {function.__name__} is not available; write the kernel in a file"
            ) from None
        begin = ast.parse(textwrap.dedent("".join(lines))).body[0].lineno - 1
        closure = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        names = dict(function.__globals__) | {name: cell.cell_contents for name, cell in closure}
        return cls(
            function.__name__,
            inspect.getsourcefile(function) or "?",
            textwrap.dedent("".join(lines[begin:])),
            list(range(first + begin, first + len(lines))),
            names,
        )

    @cached_property
    def tree(self) -> ast.FunctionDef:
        return ast.parse(self.text).body[0]

    @cached_property
    def parameters(self) -> list[str]:
        return [arg.arg for arg in self.tree.args.posonlyargs + self.tree.args.args]

    @cached_property
    def locals(self) -> set[str]:
        stored = {
            node.id
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        return stored | set(self.parameters)

    def line_of(self, node: ast.AST) -> int:
        return self.lines[node.lineno - 1]

    def meaning(self, node: ast.AST) -> object:
        """The global object that a name or an attribute refers to, or None."""
        if isinstance(node, ast.Name):
            if node.id in self.locals:
                return None
            builtins = __builtins__ if isinstance(__builtins__, dict) else vars(__builtins__)
            return self.names.get(node.id, builtins.get(node.id))
        if isinstance(node, ast.Attribute):
            return getattr(self.meaning(node.value), node.attr, None)
        return None

    def calls(self, *functions: object) -> list[ast.Call]:
        """All calls of one of the functions, in the order of the text."""
        found = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Call) and among(self.meaning(node.func), functions)
        ]
        return sorted(found, key=lambda node: (node.lineno, node.col_offset))


def function_of(kernel: object) -> types.FunctionType | None:
    """The Python function below ``@triton.jit``, or None for anything else."""
    function = getattr(kernel, "fn", None)
    return function if inspect.isfunction(function) else None


def among(one: object, group: Iterable[object]) -> bool:
    """True if the object is in the list, by identity, because Triton's values overload comparison."""
    return any(one is other for other in group)


def remembers(source: Source, call: ast.Call) -> bool:
    """True if the call reads memory."""
    meaning = source.meaning(call.func)
    if isinstance(call.func, ast.Attribute) and meaning is None:
        return call.func.attr in _LOADING or call.func.attr.startswith("atomic")
    function = function_of(meaning)
    if function is None or function.__module__.startswith("triton."):
        return among(meaning, (tl.load, *filter(None, [LOADS_BLOCK]), *_ATOMICS))
    return reads(Source.of(function))


def reads(source: Source) -> bool:
    """True if a function reads memory."""
    return any(
        remembers(source, node) for node in ast.walk(source.tree) if isinstance(node, ast.Call)
    )


def awaits_others(source: Source) -> bool:
    """True if a loop turns until another program has written something; one that takes a free lock does not count."""
    for loop in (node for node in ast.walk(source.tree) if isinstance(node, ast.While)):
        tested = {node.id for node in ast.walk(loop.test) if isinstance(node, ast.Name)}
        changed = [
            statement.value
            for statement in statements(loop.body)
            if isinstance(statement, ast.Assign)
            and tested & {getattr(target, "id", None) for target in statement.targets}
        ]
        for call in (node for part in (loop.test, *changed) for node in ast.walk(part)):
            if not isinstance(call, ast.Call) or not remembers(source, call):
                continue
            swaps = source.meaning(call.func) is tl.atomic_cas and len(call.args) > 2
            if not swaps or ast.dump(call.args[1]) == ast.dump(call.args[2]):
                return True
    calls = (node for node in ast.walk(source.tree) if isinstance(node, ast.Call))
    functions = {function_of(source.meaning(call.func)) for call in calls} - {None}
    own = (one for one in functions if not one.__module__.startswith("triton."))
    return any(awaits_others(Source.of(function)) for function in own)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        for name in ("body", "orelse"):
            yield from statements(getattr(statement, name, []))


def bound(source: Source, call: ast.Call, callee: Source) -> dict[str, ast.expr]:
    """The arguments of the call by the callee's names for them."""
    if any(isinstance(one, ast.Starred) for one in call.args) or any(
        one.arg is None for one in call.keywords
    ):
        raise Unfollowed(source, call, f"{callee.name} is called with * or ** arguments")
    arguments = dict(zip(callee.parameters, call.args, strict=False))
    return arguments | {one.arg: one.value for one in call.keywords}


def root(node: ast.AST) -> str | None:
    """The name at the beginning of attributes and subscripts."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return getattr(node, "id", None)


def first_argument(call: ast.Call, *names: str) -> ast.expr:
    """The first argument, by place or by one of the names."""
    return (
        call.args[0] if call.args else next(one.value for one in call.keywords if one.arg in names)
    )


@dataclass
class Followed:
    """Where a function stores and loads through some of its arguments.

    ``stores`` and ``loads`` are calls of ``tl.store`` and ``tl.load``, of methods of a descriptor, and of functions that
    store or load. ``helpers`` has these functions by the call's node. ``whole`` are the parameters that point to the argument's
    first element (None: all). ``unknown`` names something whose rows cannot be known.
    """

    source: Source
    parameters: frozenset[str]
    depth: int = 0
    stores: dict[int, ast.Call] = field(default_factory=dict)
    loads: dict[int, ast.Call] = field(default_factory=dict)
    helpers: dict[int, Followed] = field(default_factory=dict)
    bulk: bool = False
    whole: frozenset[str] | None = None
    unknown: tuple[ast.Call, str] | None = None
    returns: bool = False

    def __post_init__(self) -> None:
        # For each assigned name: True if it points to the argument, None if that depends on the branch taken.
        self._state: dict[str, bool | None] = dict.fromkeys(self.parameters, True)
        kept = self.parameters if self.whole is None else self.whole
        self.whole = kept - {
            node.id
            for node in ast.walk(self.source.tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        self._walk(self.source.tree.body)

    def _refuse(self, node: ast.AST, why: str) -> None:
        names = " and ".join(sorted(self.parameters))
        raise Unfollowed(self.source, node, why.format(names))

    def _walk(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.If):
            self._points(node.test)
            self._branches(node.body, node.orelse)
        elif isinstance(node, ast.For | ast.While):
            self._points(node.iter if isinstance(node, ast.For) else node.test)
            for _ in range(2):  # the second time with the first time's assignments
                self._branches(node.body, [])
            self._walk(node.orelse)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            self._assign(node)
        elif isinstance(node, ast.Return):
            if node.value is not None and self._points(node.value):
                self.returns = True
        else:
            for child in ast.iter_child_nodes(node):
                self._points(child)

    def _branches(self, first: list[ast.stmt], second: list[ast.stmt]) -> None:
        before, ends = self._state, []
        for body in (first, second):
            self._state = dict(before)
            self._walk(body)
            ends.append(self._state)
        one, other = ends
        self._state = one | other
        for name in one.keys() & other.keys():
            if one[name] != other[name]:
                self._state[name] = None

    def _assign(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> None:
        points = node.value is not None and self._points(node.value)
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Name):
                if isinstance(node, ast.AugAssign):
                    points = points or bool(self._state.get(target.id))
                self._state[target.id] = points
            elif points:
                self._refuse(node, "{} is aliased: a pointer to it is one of several values")

    def _points(self, node: ast.AST) -> bool:
        """Tells if the expression's value points into the argument's memory, and notes its calls."""
        if isinstance(node, ast.Name):
            points = self._state.get(node.id, False)
            if points is None:
                self._refuse(node, "{} is aliased: " + f"{node.id} points to it or elsewhere")
            return points
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.IfExp):
            self._points(node.test)
            ways = [self._points(node.body), self._points(node.orelse)]
            if ways[0] != ways[1]:
                self._refuse(node, "{} is aliased: one of two pointers is chosen here")
            return ways[0]
        children = [self._points(child) for child in ast.iter_child_nodes(node)]
        if not any(children):
            return False
        if isinstance(node, ast.Tuple | ast.List | ast.Dict | ast.Set):
            self._refuse(node, "{} is aliased: a pointer to it is one of several values")
        return isinstance(node, ast.BinOp | ast.Subscript | ast.Starred)

    def _call(self, node: ast.Call) -> bool:
        method = isinstance(node.func, ast.Attribute) and self.source.meaning(node.func) is None
        owner = method and self._points(node.func.value)
        given = [self._points(one) for one in (*node.args, *(one.value for one in node.keywords))]
        if owner:
            return self._method(node)
        if method and node.func.attr == "to" and id(node.func.value) in self.loads:
            (kind,) = node.args[:1] or [None]
            if isinstance(kind, ast.Call) and self.source.meaning(kind.func) is tl.pointer_type:
                self._refuse(
                    node,
                    "{} has the pointers of several outputs; a job has one, of which they may be rows",
                )
        if not any(given):
            return False
        callee = self.source.meaning(node.func)
        if among(callee, _ATOMICS):
            self._refuse(
                node, "several programs may add to a tile of {}: an atomic, as of a split K"
            )
        if among(callee, (tl.store, STORES_BLOCK)):
            self._note(self.stores, node)
            self.bulk |= callee is not tl.store
        elif among(callee, (tl.load, LOADS_BLOCK)):
            self._note(self.loads, node)
            self.bulk |= callee is not tl.load
        elif function_of(callee) is not None and not among(callee, _PASSES):
            return self._helper(node, function_of(callee))
        elif among(callee, _PASSES):
            if callee is tl.make_block_ptr:
                self.unknown = node, "a block pointer to {}"
            elif callee is _DESCRIBES and not self._is_whole(first_argument(node, "base")):
                self.unknown = node, "a descriptor that does not begin at {}"
            return True
        elif callee is not isinstance and not among(callee, _HARMLESS):
            text = ast.unparse(node.func)
            self._refuse(
                node, f"a pointer to {{}} is passed to {text}, which is no @triton.jit function"
            )
        return False

    def _method(self, node: ast.Call) -> bool:
        name = node.func.attr
        if name in _STORING + _LOADING:
            self._note(self.stores if name in _STORING else self.loads, node)
            self.bulk = True
            return False
        if name.startswith("atomic"):
            self._refuse(
                node, "several programs may add to a tile of {}: an atomic, as of a split K"
            )
        if name not in ("to", "reshape", "broadcast_to", "expand_dims"):
            self._refuse(node, f"a pointer to {{}} is passed to .{name}, which is unknown")
        return True

    def _helper(self, node: ast.Call, function: types.FunctionType) -> bool:
        if self.depth > 8:
            self._refuse(node, "{} is passed on by functions that call each other")
        callee = Source.of(function)
        given = bound(self.source, node, callee)
        pointers = frozenset(name for name, one in given.items() if self._points(one))
        followed = self.helpers.get(id(node))
        if followed is None or followed.parameters != pointers:
            whole = frozenset(name for name in pointers if self._is_whole(given[name]))
            followed = Followed(callee, pointers, self.depth + 1, whole=whole)
        self.helpers[id(node)] = followed
        self.bulk |= followed.bulk
        if followed.unknown is not None:
            self.unknown = node, followed.unknown[1]
        for mine, its in ((self.stores, followed.stores), (self.loads, followed.loads)):
            if its:
                self._note(mine, node)
        return followed.returns

    def _is_whole(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id in self.whole

    def _note(self, found: dict[int, ast.Call], node: ast.Call) -> None:
        found[id(node)] = node
