"""The source of a Triton kernel, changed so that it takes its tiles by a job's table and signals or awaits their chunks.

:func:`align` finds where the kernel turns its program's number into a tile: everywhere, with one tile a program, or in the
loop of a persistent kernel. From there on the number comes from the table. The kernel's arithmetic, and so its order of
tiles, stays as it was. :mod:`overlap_torch._kernels.probe` then runs the address computation to find the tile of each number.
"""

from __future__ import annotations

import ast
import difflib
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import triton.language as tl

from overlap_torch._kernels.follow import (
    Followed,
    Source,
    Unfollowed,
    awaits_others,
    function_of,
    root,
    statements,
)


@dataclass(frozen=True)
class Alignment:
    """A kernel's source before and after.

    ``tables`` are the names of the first parameters: order, chunks, and counters or flags. ``never`` are the parameters
    that must be false, ``called`` those that are called, with their lines. ``in_order``: a turn of the loop over tiles reads
    what an earlier one left, or a program awaits another one, so programs keep their tiles. ``loops``: it has such a loop.
    ``ot`` is the name of :mod:`overlap_torch.triton`.
    """

    before: Source
    after: Source
    output: str
    input: str | None
    tile: str
    tables: tuple[str, str, str]
    never: dict[str, int]
    called: dict[str, int]
    in_order: bool
    loops: bool
    store_line: int
    ot: types.ModuleType

    def diff(self) -> str:
        """The change as a unified diff."""
        lines = [one.text.splitlines(keepends=True) for one in (self.before, self.after)]
        return "".join(difflib.unified_diff(*lines, self.before.file, "aligned", n=1))


def by_hand(input: str | None) -> str:
    """The lines that a person would write instead of the pass, for messages."""
    last = "ot.signal(counters, tl.load(tile_chunk + tile))   # after the tile's last store"
    if input is not None:
        last = (
            f"ot.wait(arrived, tl.load(tile_chunk + tile))      # before the first load of {input}"
        )
    tables = f"job.tile_order, job.tile_chunk, job.{'arrived' if input else 'counters'}"
    return (
        "\nWrite these lines by hand, as docs/kernels.md shows (import overlap_torch.triton as ot):\n"
        "    tile = ot.tile(tile_order, tl.program_id(0))      # row * columns + column, in place of the program's number\n"
        f"    {last}\n"
        f"    kernel[grid](..., {tables})"
    )


def align(source: Source, output: str, input: str | None, ot: types.ModuleType) -> Alignment:
    """Raises Unfollowed, which names the line."""
    return _Pass(source, output, input, ot).alignment()


def asking(source: Source, seen: set[object]) -> Iterator[tuple[ast.Call, str]]:
    """A function's calls of others that ask for tl.program_id, also deeper down, and their names."""
    for node in ast.walk(source.tree):
        function = isinstance(node, ast.Call) and function_of(source.meaning(node.func))
        if not function or function in seen or function.__module__.startswith("triton."):
            continue
        seen.add(function)
        inner = Source.of(function)
        if inner.calls(tl.program_id):
            yield node, inner.name
        for _, name in asking(inner, seen):
            yield node, name


class _Edits:
    """Changes of a text at places that the syntax tree names."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._lines = [line.encode() for line in source.text.splitlines()]
        self._replaced: list[tuple[int, int, int, int, int, str]] = []
        self._inserted: dict[int, list[str]] = {}

    def replace(self, node: ast.AST, text: str) -> None:
        place = (node.lineno - 1, node.col_offset, node.end_lineno - 1, node.end_col_offset)
        self._put(*place, text)

    def before(self, node: ast.AST, text: str) -> None:
        place = (node.lineno - 1, node.col_offset)
        self._put(*place, *place, text)

    def _put(self, first: int, begin: int, last: int, end: int, text: str) -> None:
        # Texts at one place stay in the order in which they came.
        self._replaced.append((first, begin, last, end, len(self._replaced), text))

    def insert(self, node: ast.stmt, text: str, after: bool = False) -> None:
        """Puts a line before or after a statement, or beside it where it shares its line with another one."""
        first, last = self._lines[node.lineno - 1], self._lines[node.end_lineno - 1]
        indent, rest = first[: node.col_offset], last[node.end_col_offset :].strip()
        if after and rest and not rest.startswith(b"#"):
            end = node.end_col_offset
            self._put(node.end_lineno - 1, end, node.end_lineno - 1, end, f"; {text}")
        elif not after and indent.strip():
            self.before(node, f"{text}; ")
        else:
            start = first[: len(first) - len(first.lstrip())].decode()
            place = node.end_lineno if after else node.lineno - 1
            self._inserted.setdefault(place, []).append(start + text)

    def applied(self) -> tuple[str, list[int]]:
        """The new text, and the line of the file of each of its lines."""
        lines = list(self._lines)
        for first, begin, last, end, _, text in sorted(self._replaced, reverse=True):
            joined = lines[first][:begin] + text.encode() + lines[last][end:]
            # The lines between stay as empty ones, so that the others keep their numbers.
            lines[first : last + 1] = [joined] + [b""] * (last - first)
        texts, numbers = [], []
        for place in range(len(lines) + 1):
            known = self._source.lines[min(place, len(lines) - 1)]
            for text in self._inserted.get(place, []):
                texts.append(text)
                numbers.append(known)
            if place < len(lines):
                texts.append(lines[place].decode())
                numbers.append(known)
        return "\n".join(texts) + "\n", numbers


class _Pass:
    def __init__(
        self, source: Source, output: str, input: str | None, ot: types.ModuleType
    ) -> None:
        self.source, self.output, self.input, self.module = source, output, input, ot
        self.tree = source.tree
        self.edits = _Edits(source)
        used = {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}
        self._used = used | source.locals
        self.parents = {
            id(child): node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }
        self.tile = self._fresh("tile")
        last = "counters" if input is None else "arrived"
        self.tables = tuple(self._fresh(name) for name in ("tile_order", "tile_chunk", last))
        known = source.names.get("ot") is ot and "ot" not in source.locals
        self.ot = "ot" if known else self._fresh("ot", source.names)
        self.never: dict[str, int] = {}
        self.called: dict[str, int] = {}
        self.in_order = False

    def _fresh(self, name: str, taken: dict[str, object] | None = None) -> str:
        names, number = self._used | set(taken or ()), 0
        while (found := f"{name}_{number}" if number else name) in names:
            number += 1
        return found

    def _refuse(self, node: ast.AST, why: str) -> None:
        raise Unfollowed(self.source, node, why)

    def _check_parameters(self) -> None:
        """The interpreter cannot launch such a kernel, aligned or not; a compiled one takes arguments in any way."""
        only = self.tree.args.posonlyargs + self.tree.args.kwonlyargs
        if only and self.module._INTERPRETED.value:
            kind, sign = ("positional", "/") if self.tree.args.posonlyargs else ("keyword", "*")
            self._refuse(
                only[0],
                f"{only[0].arg} is {kind}-only, which Triton's interpreter cannot pass: delete the {sign}",
            )

    def alignment(self) -> Alignment:
        self._check_parameters()
        for name in filter(None, (self.output, self.input)):
            if name not in self.source.parameters:
                known = ", ".join(self.source.parameters)
                self._refuse(
                    self.tree, f"{name} is no argument of {self.source.name}, allowed are {known}"
                )
        followed = Followed(self.source, frozenset([self.output]))
        if not followed.stores:
            self._refuse(self.tree, f"no store through {self.output} is found")
        loaded = Followed(self.source, frozenset(filter(None, [self.input])))
        if self.input and not loaded.loads:
            self._refuse(self.tree, f"no load through {self.input} is found")
        if loaded.unknown is not None:
            node, what = loaded.unknown
            self._refuse(node, f"the rows of {what.format(self.input)} are unknown")
        self._look_into_functions()
        scope = self._loop()
        if scope is None:
            scope = self.tree
            self._one_tile_a_program()
        self.in_order |= awaits_others(self.source)
        calls = [*followed.stores.values(), *loaded.loads.values()]
        outside = [one for one in calls if scope not in self._around(one)]
        if outside:
            self._refuse(outside[0], "this is outside of the loop over tiles")
        given = f"({self.tables[2]}, {self._chunk(scope)})"
        if self.input is None:
            signal = "signal_bulk" if followed.bulk else "signal"
            storing = {id(one) for call in followed.stores.values() for one in self._around(call)}
            last = [statement for statement in scope.body if id(statement) in storing][-1]
            self.edits.insert(last, f"{self.ot}.{signal}{given}", after=True)
        else:
            wait = "wait_bulk" if loaded.bulk else "wait"
            self._insert_first(scope, f"{self.ot}.{wait}{given}")
        first = (self.tree.args.posonlyargs + self.tree.args.args)[0]
        self.edits.before(first, ", ".join(self.tables) + ", ")
        text, lines = self.edits.applied()
        names = self.source.names | {self.ot: self.module}
        try:
            after = Source(self.source.name, self.source.file, text, lines, names)
            ast.parse(text)
        except SyntaxError:
            self._refuse(self.tree, "its statements are written in a form that cannot be changed")
        line = self.source.line_of(max(followed.stores.values(), key=lambda call: call.lineno))
        return Alignment(
            before=self.source,
            after=after,
            output=self.output,
            input=self.input,
            tile=self.tile,
            tables=self.tables,
            never=self.never,
            called=self.called,
            in_order=self.in_order,
            loops=scope is not self.tree,
            store_line=line,
            ot=self.module,
        )

    def _look_into_functions(self) -> None:
        """Checks that no function that the kernel calls reads the program's number; those among its arguments are looked into at
        a launch."""
        for call, name in asking(self.source, set()):
            self._refuse(call, f"{name}, which is called here, asks for tl.program_id itself")
        for node in ast.walk(self.tree):
            name = root(node.func) if isinstance(node, ast.Call) else None
            if name in self.source.parameters:
                self.called[name] = self.source.line_of(node)

    # --- where a program's number becomes a tile ------------------------------------------------------------------

    def _axis(self, call: ast.Call) -> int:
        given = call.args[0] if call.args else call.keywords[0].value
        if not isinstance(given, ast.Constant) or given.value not in (0, 1, 2):
            self._refuse(call, "the axis of tl.program_id is no number")
        return given.value

    def _numbers(self) -> list[ast.Call]:
        calls = self.source.calls(tl.program_id)
        if not calls:
            self._refuse(self.tree, f"{self.source.name} has no tl.program_id")
        return calls

    def _one_tile_a_program(self) -> None:
        """The table is read once, for all axes of the grid together."""
        calls = self._numbers()
        axes = max(self._axis(call) for call in calls)
        function = ast.unparse(calls[0].func)
        module = function.rpartition(".")[0] or f"{self.ot}.tl"
        counts = [f"{module}.num_programs({axis})" for axis in range(axes)]
        index = f"{function}({axes})"
        for axis in reversed(range(axes)):
            inner = f"({index})" if axis < axes - 1 else index
            index = f"{function}({axis}) + {counts[axis]} * {inner}"
        self._insert_first(self.tree, f"{self.tile} = {self.ot}.tile({self.tables[0]}, {index})")
        for call in calls:
            axis = self._axis(call)
            text = self.tile
            for count in counts[:axis]:
                text = f"{text} // {count}"
            if axis < axes:
                text = f"{text} % {counts[axis]}"
            self.edits.replace(call, f"({text})" if axes else text)

    def _raw(self) -> dict[str, str]:
        """The names that a program's number on axis 0 is assigned to, each with the cast that it went through."""
        found: dict[str, str] = {}
        for name, value in _assigned(self.tree.body):
            cast = self._cast(value, found)
            if cast is not None:
                found[name] = cast
        return found

    def _cast(self, node: ast.expr, raw: dict[str, str]) -> str | None:
        """The cast of a program's number on axis 0, "" for none; None for other expressions."""
        match node:
            case ast.Name(name):
                return raw.get(name)
            case ast.Call(ast.Attribute(inner, "to"), [kind], []):
                return None if self._cast(inner, raw) is None else f".to({ast.unparse(kind)})"
            case ast.Call(function):
                number = self.source.meaning(function) is tl.program_id and self._axis(node) == 0
                return "" if number else None
        return None

    def _loop(self) -> ast.For | ast.While | None:
        """The loop over a persistent kernel's tiles, changed, if it has one."""
        raw = self._raw()
        fors = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.For) and self._begins_at(node, raw)
        ]
        whiles = [
            (node, step)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.While)
            for step in node.body
            if _added(step)[0] in raw
        ]
        if len(fors) + len(whiles) > 1:
            node = (fors + [one for one, _ in whiles])[1]
            self._refuse(node, "there are two loops over tiles")
        if not fors and not whiles:
            return None
        for call in self._numbers():
            if self._axis(call):
                self._refuse(call, "there is a loop over tiles, and the grid has another axis")
        loop = fors[0] if fors else whiles[0][0]
        counts = self._for(loop, raw) if fors else self._while(*whiles[0], raw)
        self.in_order = self._carries(loop, raw, counts)
        return loop

    def _carries(self, loop: ast.For | ast.While, raw: Iterable[str], counts: set[str]) -> bool:
        """True if a turn reads what an earlier turn left, or the program's number, other than by the counters."""
        inside = set(map(id, statements(loop.body)))
        outside = [
            one for one in statements(self.tree.body) if id(one) not in inside and one is not loop
        ]
        asks = {id(call) for call in self._numbers()}
        before, numbers = set(self.source.parameters), set(raw)
        for statement in outside:
            made = _names(statement, ast.Store)
            before |= made
            if made and (
                _names(statement, ast.Load) & numbers
                or any(id(one) in asks for one in ast.walk(statement))
            ):
                numbers |= made
        body = [*loop.body, loop.test] if isinstance(loop, ast.While) else loop.body
        read = set().union(*(_names(one, ast.Load) for one in body))
        left = before & set().union(*(_names(one, ast.Store) for one in loop.body))
        called = any(id(one) in asks for part in loop.body for one in ast.walk(part))
        return called or bool(read & (numbers | left) - counts)

    def _begins_at(self, node: ast.For, raw: dict[str, str]) -> bool:
        """True for ``for tile in range(pid, tiles, programs)``."""
        call = node.iter
        ranges = isinstance(call, ast.Call) and self.source.meaning(call.func) in (range, tl.range)
        if not ranges or not isinstance(node.target, ast.Name) or _step(call) is None:
            return False
        return self._cast(call.args[0], raw) is not None

    def _for(self, loop: ast.For, raw: dict[str, str]) -> set[str]:
        """The names of its counters."""
        self._keywords(loop)
        name, step = loop.target.id, ast.dump(_step(loop.iter))
        cast = self._cast(loop.iter.args[0], raw)
        self._insert_first(loop, f"{self.tile} = {self.ot}.tile({self.tables[0]}, {name}){cast}")
        self._insert_first(loop, f"{name} = {self.tile}")
        # A second counter beside the loop's: it begins one step before the program's number, and grows by one step a turn.
        trailing: set[str] = set()
        for node in statements(self.tree.body):
            match node:
                case ast.Assign([ast.Name(count), *_], ast.BinOp(ast.Name(start), ast.Sub(), by)):
                    if start in raw and ast.dump(by) == step:
                        trailing.add(count)
        added = map(_added, loop.body)
        counts = {count for count, by in added if count in trailing and ast.dump(by) == step}
        for node in self._reads(loop.body, counts):
            self.edits.replace(node, f"{self.ot}.tile({self.tables[0]}, {node.id}){cast}")
        return {name, *counts}

    def _while(self, loop: ast.While, step: ast.stmt, raw: dict[str, str]) -> set[str]:
        """The name of its counter."""
        name = _added(step)[0]
        cast = raw[name]
        self._insert_first(loop, f"{self.tile} = {self.ot}.tile({self.tables[0]}, {name}){cast}")
        for node in self._reads(loop.body, {name}):
            if node.lineno > step.end_lineno:
                self._refuse(node, f"{name} is read after it was increased")
            self.edits.replace(node, self.tile)
        return {name}

    def _reads(self, body: list[ast.stmt], names: set[str]) -> list[ast.Name]:
        """The places that read one of the names, except to increase it."""
        return [
            node
            for statement in statements(body)
            if _added(statement)[0] not in names
            for node in ast.walk(statement)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names
            if self._statement(node) is statement
        ]

    def _keywords(self, loop: ast.For) -> None:
        """Unflattens loops: Triton does not pipeline a flattened loop with a barrier, and its loads would come before their
        wait."""
        for keyword in loop.iter.keywords:
            value = keyword.value
            if keyword.arg == "flatten":
                self.edits.replace(value, "False")
            elif keyword.arg != "warp_specialize":
                continue
            elif isinstance(value, ast.Name) and value.id in self.source.parameters:
                self.never[value.id] = self.source.line_of(loop)
            elif not isinstance(value, ast.Constant) or value.value:
                self._refuse(
                    loop,
                    "a loop of specialized warps cannot signal, as no barrier is for all threads there",
                )

    # --- what is inserted -----------------------------------------------------------------------------------------

    def _around(self, node: ast.AST) -> list[ast.AST]:
        found = []
        while (node := self.parents.get(id(node))) is not None:
            found.append(node)
        return found

    def _statement(self, node: ast.AST) -> ast.stmt:
        return next(one for one in [node, *self._around(node)] if isinstance(one, ast.stmt))

    def _chunk(self, scope: ast.FunctionDef | ast.For | ast.While) -> str:
        """The name of the tile's chunk, which is loaded early, so that no signal waits for it."""
        known = self.source.names.get("tl") is tl and "tl" not in self.source.locals
        load = "tl.load" if known else f"{self.ot}.tl.load"
        chunk = self._fresh("chunk")
        self._insert_first(scope, f"{chunk} = {load}({self.tables[1]} + {self.tile})")
        return chunk

    def _insert_first(self, scope: ast.FunctionDef | ast.For | ast.While, text: str) -> None:
        documented = scope is self.tree and ast.get_docstring(scope) is not None
        first = scope.body[1 if documented and len(scope.body) > 1 else 0]
        if first.lineno == scope.lineno:
            self._refuse(first, "the loop's body is on the loop's own line")
        self.edits.insert(first, text)


def _step(call: ast.Call) -> ast.expr | None:
    named = (one.value for one in call.keywords if one.arg == "step" and len(call.args) == 2)
    return call.args[2] if len(call.args) == 3 else next(named, None)


def _added(node: ast.stmt) -> tuple[str, ast.expr] | tuple[None, None]:
    """The name and the step of ``name += step`` or ``name = name + step``; None twice for other statements."""
    match node:
        case ast.AugAssign(ast.Name(name), ast.Add(), step):
            return name, step
        case ast.Assign([ast.Name(name), *_], ast.BinOp(ast.Name(left), ast.Add(), step)):
            if name == left:
                return name, step
    return None, None


def _assigned(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    """Each name that is assigned alone or in a row of names, and its value."""
    for node in statements(body):
        match node:
            case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)):
                pairs = list(zip(targets, values, strict=False))
            case ast.Assign([target], value) | ast.AnnAssign(target, _, ast.expr() as value):
                pairs = [(target, value)]
            case _:
                continue
        yield from ((one.id, value) for one, value in pairs if isinstance(one, ast.Name))


def _names(node: ast.AST, context: type) -> set[str]:
    """The names that are read or, with ast.Store, assigned in a node."""
    return {
        one.id
        for one in ast.walk(node)
        if isinstance(one, ast.Name) and isinstance(one.ctx, context)
    }
