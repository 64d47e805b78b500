"""A probe of an aligned kernel: it computes the same addresses without the values, and stores the tile's number instead.

So it shows, by the kernel's own arithmetic, which tile each program stores, whether that is one whole tile of the job, how
often it signals, and which rows of an input it loads. It leaves out loads and sums that only values need.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator
from dataclasses import dataclass, field

import triton
import triton.language as tl

from overlap_torch._kernels.align import Alignment
from overlap_torch._kernels.follow import (
    LOADS_BLOCK,
    STORES_BLOCK,
    Followed,
    Source,
    Unfollowed,
    among,
    bound,
    first_argument,
    function_of,
    reads,
    remembers,
    root,
    statements,
)

# Parameters of the probe, before the kernel's.
CONTEXT = ("_probe_tiles", "_probe_input", "_probe_columns", "_probe_rows")
_TILES, _INPUT, _COLUMNS, _ROWS = CONTEXT
_TILE = "_probe_tile"  # in functions that the kernel calls
DEPENDS = "where a tile of {} lies, or whether it is stored, depends on memory: {}"


@triton.jit
def take(tile_order, index, tiles):
    """As ``ot.tile``, except that numbers without a tile stay as they are; the probe reports them."""
    return tl.load(tile_order + index, mask=index < tiles, other=index)


@triton.jit
def count(counters, tile, tiles):
    """A signal or a wait of the tile; those of no tile are counted together."""
    tl.atomic_add(counters + tl.minimum(tile, tiles), 1)


@triton.jit
def block(descriptor, tile):
    """A block for the descriptor to store."""
    return tl.full(descriptor.block_shape, tile + 1, tl.int32)


@triton.jit
def _note_rows(rows, tile, first, last):
    # rows: [2 * tiles], the first and the last row that each tile's program loads.
    tl.atomic_min(rows + 2 * tile, first)
    tl.atomic_max(rows + 2 * tile + 1, last)


@triton.jit
def load(pointers, mask, base, columns, rows, tile, tiles):
    """A load through pointers to the input, whose rows have ``columns`` columns."""
    bytes = base.dtype.element_ty.primitive_bitwidth // 8
    offset = (pointers.to(tl.int64) - base.to(tl.int64)) // bytes // columns
    loaded = tl.zeros((1,), tl.int1) | mask
    offset = offset + tl.zeros((1,), tl.int64)
    first = tl.min(tl.where(loaded, offset, 1 << 30).to(tl.int32))
    last = tl.max(tl.where(loaded, offset, -1).to(tl.int32))
    if tile < tiles:
        _note_rows(rows, tile, first, last)


@triton.jit
def load_block(descriptor, places, columns, rows, tile, tiles):
    """A load of a block that begins at these places, through a descriptor of the input, whose rows have ``columns`` columns."""
    first = tl.full((), 0, tl.int64)
    last = first
    inside = tile < tiles
    for axis in tl.static_range(len(descriptor.block_shape)):
        begin = tl.full((), 0, tl.int64) + places[axis]
        end = tl.minimum(begin + descriptor.block_shape[axis], descriptor.shape[axis].to(tl.int64))
        begin = tl.maximum(begin, 0)
        inside = inside & (begin < end)
        first += begin * descriptor.strides[axis]
        last += (end - 1) * descriptor.strides[axis]
    if inside:
        _note_rows(rows, tile, (first // columns).to(tl.int32), (last // columns).to(tl.int32))


_FUNCTIONS = {f"_probe_{one.__name__}": one for one in (take, count, block, load, load_block)}


@dataclass
class Function:
    """A function of the probe, with the functions that it calls."""

    name: str
    text: str
    names: dict[str, object]
    inner: list[Function] = field(default_factory=list)


@dataclass
class Probe:
    """``constants`` are the names that the probe's addresses need, ``placing`` those of functions among them."""

    function: Function
    constants: frozenset[str]
    placing: frozenset[str]


def probe(alignment: Alignment) -> Probe:
    """Raises Unfollowed: the place of a tile depends on memory."""
    made = _Slice(alignment.after, alignment, alignment.tile, "_probe")
    tree = made.function()
    tree.args.args = [*map(ast.arg, CONTEXT), *tree.args.posonlyargs, *tree.args.args]
    tree.args.posonlyargs = []
    return Probe(made.emit(tree), frozenset(made.needed), frozenset(made.placing))


class _Slice:
    """The statements of a function that its stores' addresses need, with the probe's forms of stores, signals and loads."""

    def __init__(
        self, source: Source, alignment: Alignment, tile: str, name: str, pointers: dict[str, frozenset[str]] | None = None
    ) -> None:  # fmt: skip
        self.source, self.alignment, self.tile, self.name = source, alignment, tile, name
        self.inner: list[Function] = []
        self.needed: set[str] = set()
        self.placing: set[str] = set()
        self._kept: set[int] = set()
        self._forms: dict[int, list[ast.stmt]] = {}
        if pointers is None:
            pointers = {
                "stores": frozenset([alignment.output]),
                "loads": frozenset(filter(None, [alignment.input])),
            }
        self.stores = Followed(source, pointers["stores"]) if pointers["stores"] else None
        self.loads = Followed(source, pointers["loads"]) if pointers["loads"] else None

    def function(self) -> ast.FunctionDef:
        tree = self.source.tree
        _OwnCalls(self.source, self.alignment.ot).visit(tree)
        for statement in statements(tree.body):
            forms = list(self._replacements(statement))
            if forms:
                self._forms[id(statement)] = forms
                for form in forms:
                    self._need(form)
        before = None  # until there are no more statements that kept ones need
        while before != (before := (len(self.needed), len(self._kept))):
            self._mark(tree.body)
        self._check(tree.body)
        body = self._build(tree.body) or [ast.Pass()]
        return ast.FunctionDef(self.name, tree.args, body, decorator_list=[], type_params=[])

    def emit(self, tree: ast.FunctionDef) -> Function:
        text = ast.unparse(ast.fix_missing_locations(tree)) + "\n"
        return Function(self.name, text, self.source.names | _FUNCTIONS, self.inner)

    # --- the other forms ------------------------------------------------------------------------------------------

    def _replacements(self, statement: ast.stmt) -> Iterator[ast.stmt]:
        if isinstance(statement, ast.Return):
            if self.name == "_probe":
                yield ast.Return(None)
            return
        ot = self.alignment.ot
        for call in _own_calls(statement):
            meaning = self.source.meaning(call.func)
            if among(meaning, (ot.signal, ot.signal_bulk, ot.wait, ot.wait_bulk)):
                yield _expression("_probe_count", call.args[0], _name(self.tile), _name(_TILES))
            stores = self.stores is not None and id(call) in self.stores.stores
            loads = self.loads is not None and id(call) in self.loads.loads
            if not stores and not loads:
                continue
            function = function_of(meaning)
            known = (tl.store, tl.load, STORES_BLOCK, LOADS_BLOCK)
            if among(meaning, known) or function is None:
                yield self._stored(call) if stores else self._loaded(call)
            else:
                yield self._helper(call, function)

    def _stored(self, call: ast.Call) -> ast.stmt:
        keywords = [one for one in call.keywords if one.arg not in ("value", "pointer", "offsets")]
        if self.source.meaning(call.func) is tl.store:
            value = ast.BinOp(_name(self.tile), ast.Add(), ast.Constant(1))
            place = first_argument(call, "pointer")
            return ast.Expr(ast.Call(call.func, [place, value, *call.args[2:]], keywords))
        descriptor, place = self._block(call)
        value = _expression("_probe_block", descriptor, _name(self.tile)).value
        return ast.Expr(
            ast.Call(ast.Attribute(descriptor, "store", ast.Load()), [place, value], [])
        )

    def _block(self, call: ast.Call) -> tuple[ast.expr, ast.expr]:
        """The descriptor of a block's store or load, and its place."""
        given = [
            *call.args,
            *(one.value for one in call.keywords if one.arg in ("desc", "offsets")),
        ]
        if self.source.meaning(call.func) is None:
            given.insert(0, call.func.value)
        return given[0], given[1]

    def _loaded(self, call: ast.Call) -> ast.stmt:
        end = [_name(_ROWS), _name(self.tile), _name(_TILES)]
        if self.source.meaning(call.func) is not tl.load:
            descriptor, places = self._block(call)
            if not isinstance(places, ast.List | ast.Tuple):
                raise Unfollowed(self.source, call, "the place of this load is no list of numbers")
            places = ast.Tuple(places.elts, ast.Load())
            return _expression("_probe_load_block", descriptor, places, _name(_COLUMNS), *end)
        given = {one.arg: one.value for one in call.keywords}
        mask = call.args[1] if len(call.args) > 1 else given.get("mask", ast.Constant(True))
        if isinstance(mask, ast.Constant) and mask.value is None:
            mask = ast.Constant(True)
        return _expression(
            "_probe_load",
            first_argument(call, "pointer"),
            mask,
            _name(_INPUT),
            _name(_COLUMNS),
            *end,
        )

    def _helper(self, call: ast.Call, function: object) -> ast.stmt:
        """A call of the called function's slice, with the arguments that the slice needs."""
        callee = Source.of(function)
        given = bound(self.source, call, callee)
        pointers = {
            kind: followed.helpers[id(call)].parameters
            if followed and id(call) in followed.helpers
            else frozenset()
            for kind, followed in (("stores", self.stores), ("loads", self.loads))
        }
        name = f"{self.name}_{callee.name}_{len(self.inner)}"
        made = _Slice(callee, self.alignment, _TILE, name, pointers)
        tree = made.function()
        for name in made.placing & given.keys():
            inner = function_of(self.source.meaning(given[name]))
            if inner is not None and reads(Source.of(inner)):
                self._depends(call, given[name])
            self.placing.add(root(given[name]))
        kept = [arg for arg in tree.args.posonlyargs + tree.args.args if arg.arg in made.needed]
        defaults = dict(
            zip(callee.parameters[::-1], [*callee.tree.args.defaults][::-1], strict=False)
        )
        # Arguments that are given come first; defaults are of the names of the callee's own module.
        kept.sort(key=lambda one: one.arg not in given)
        args = [ast.arg(one) for one in (_TILE, *CONTEXT)] + kept
        own = [defaults[one.arg] for one in kept if one.arg not in given]
        tree.args = ast.arguments([], args, kwonlyargs=[], kw_defaults=[], defaults=own)
        self.inner.append(made.emit(tree))
        arguments = [given[one.arg] for one in kept if one.arg in given]
        return _expression(name, _name(self.tile), *map(_name, CONTEXT), *arguments)

    # --- what they need -------------------------------------------------------------------------------------------

    def _need(self, node: ast.AST) -> None:
        self.needed |= {
            one.id
            for one in ast.walk(node)
            if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)
        }

    def _mark(self, body: list[ast.stmt]) -> bool:
        any_kept = False
        for statement in body:
            parts = [getattr(statement, name, []) for name in ("body", "orelse")]
            kept = any([self._mark(part) for part in parts]) or id(statement) in self._forms
            if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
                assigns = isinstance(statement, ast.Assign)
                targets = statement.targets if assigns else [statement.target]
                inside = (one for target in targets for one in ast.walk(target))
                if {one.id for one in inside if isinstance(one, ast.Name)} & self.needed:
                    self._kept.add(id(statement))
                    self._need(statement)
            elif kept and not isinstance(statement, ast.Expr | ast.Return):
                self._kept.add(id(statement))
                for name in ("test", "iter"):
                    if hasattr(statement, name):
                        self._need(getattr(statement, name))
            any_kept |= kept or id(statement) in self._kept
        return any_kept

    def _check(self, body: list[ast.stmt]) -> None:
        """Checks that no kept value comes from memory."""
        for statement in statements(body):
            checked = [*self._forms.get(id(statement), [])]
            if id(statement) in self._kept:
                checked += [
                    getattr(statement, name)
                    for name in ("value", "test", "iter")
                    if getattr(statement, name, None)
                ]
            for node in (one for part in checked for one in ast.walk(part)):
                if isinstance(node, ast.Call) and remembers(self.source, node):
                    self._depends(statement, node)
                if isinstance(node, ast.Call) and root(node.func) in self.source.parameters:
                    self.placing.add(root(node.func))

    def _depends(self, statement: ast.AST, on: ast.AST) -> None:
        raise Unfollowed(
            self.source, statement, DEPENDS.format(self.alignment.output, ast.unparse(on))
        )

    def _build(self, body: list[ast.stmt]) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        for statement in body:
            made += self._forms.get(id(statement), [])
            if id(statement) not in self._kept:
                continue
            for name in ("body", "orelse"):
                if getattr(statement, name, None):
                    setattr(statement, name, self._build(getattr(statement, name)) or [ast.Pass()])
            made.append(statement)
        return made


class _OwnCalls(ast.NodeTransformer):
    """Replaces ``ot.tile`` by the probe's form."""

    def __init__(self, source: Source, ot: types.ModuleType) -> None:
        self._source, self._ot = source, ot

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if self._source.meaning(node.func) is self._ot.tile:
            return ast.copy_location(
                _expression("_probe_take", *node.args, _name(_TILES)).value, node
            )
        return node


def _own_calls(statement: ast.stmt) -> Iterator[ast.Call]:
    """The calls of a statement, without those of the statements in it."""
    inside = [one for name in ("body", "orelse") for one in getattr(statement, name, [])]
    skipped = {id(node) for one in inside for node in ast.walk(one)}
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and id(node) not in skipped:
            yield node


def _name(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _expression(function: str, *arguments: ast.expr) -> ast.Expr:
    return ast.Expr(ast.Call(_name(function), list(arguments), []))
