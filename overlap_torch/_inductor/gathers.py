"""GEMMs that read what an all-gather has gathered."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from overlap_torch._inductor.editing import (
    WAIT,
    Editor,
    Gemm,
    NotFused,
    Recat,
    WaitedFor,
    after,
    after_recat,
    argument,
    aten,
    before,
    cast_dtype,
    check_dtype,
    collective_name,
    descendants,
    describe,
    gemm_of,
    is_identity,
    is_tensor,
    is_view,
    name_of,
    other_product,
    permutation,
    recat_of,
    value,
)
from overlap_torch._inductor.layouts import Atom, Atoms, Layout, as_expr, flat, layout_of, leaves

_ops = torch.ops.overlap


@dataclass(frozen=True)
class _Gather:
    """What is gathered, how this rank's part of it lies, and the factor that gathering adds to dim 0."""

    shard: Node
    local: Layout
    ranks: Atom
    group: str


@dataclass(frozen=True)
class _Reached:
    """A rearrangement of the gathered tensor, maybe cast."""

    node: Node
    layout: Layout
    cast: torch.dtype | None


@dataclass(frozen=True)
class _Reader:
    """A GEMM that reads it: ``rows`` and ``inner`` are the atoms of the dim that is kept and of the one that is summed."""

    gemm: Gemm
    side: str  # "left" or "right": which operand
    at: _Reached  # the rearrangement from which it is read
    rows: Layout  # the dims that become the GEMM's rows (on the right: its columns)
    inner: Atoms
    replayed: tuple[Node, ...] = ()  # what is between: slices, and what follows them


@dataclass
class _Walk:
    """All that is made of a gathered tensor by rearranging it."""

    reached: dict[Node, _Reached] = field(default_factory=dict)
    # The nodes within a Recat, by its result.
    between: dict[Node, Sequence[Node]] = field(default_factory=dict)
    readers: list[_Reader] = field(default_factory=list)
    refused: list[NotFused] = field(default_factory=list)  # why GEMMs that read it cannot be fused
    others: list[Node] = field(default_factory=list)  # who else reads it


def fuse_gather(gathers: Sequence[Node], group: str, world_size: int) -> int:
    """Puts one op in the place of all-gathers of one shard and the GEMMs that read them; returns how many GEMMs.

    Raises:
        NotFused: there is no such op, and the graph is as it was.
    """
    shard = gathers[0].args[0]
    ranks = Atom(as_expr(world_size), whole=True)
    local = layout_of(value(shard).shape)
    if value(shard).dim() == 0:
        raise NotFused("it gathers a tensor without dims", missed=False)
    gather = _Gather(shard, local, ranks, group)
    roots = [*gathers, *(user for node in gathers for user in node.users if user.target is WAIT)]
    walk = _Walk()
    for root in roots:
        walk.reached[root] = _Reached(root, [[ranks, *local[0]], *local[1:]], None)
    _walk(walk, roots)
    depend = descendants(gathers)
    readers = [reader for reader in walk.readers if _is_ready(walk, reader, ranks, depend, shard)]
    if not readers:
        if walk.refused:
            raise walk.refused[0]
        for node in walk.others:
            if collective_name(node) is not None and _has_gemm(node):
                raise WaitedFor(
                    f"another collective, {collective_name(node)}, is waited for between it and its GEMM"
                )
        others = ", ".join(dict.fromkeys(describe(node) for node in walk.others))
        raise NotFused(f"no GEMM reads it, but {others or 'nothing'}", missed=False)
    cast, inner = readers[0].at.cast, leaves(readers[0].inner)
    readers = [
        reader for reader in readers if reader.at.cast == cast and leaves(reader.inner) == inner
    ]
    inside = {
        node: reached for node, reached in walk.reached.items() if reached.cast in (None, cast)
    }
    _check_cast(inside, walk, readers, cast, shard)
    editor = Editor(gathers[0], value(gathers[0]).fake_mode)
    try:
        products, rest = _emit(editor, gather, readers, inside, walk)
    except NotFused:
        editor.undo()
        raise
    for reader, product in zip(readers, products, strict=True):
        reader.gemm.node.replace_all_uses_with(product)
        reader.gemm.node.graph.erase_node(reader.gemm.node)
    own = _own(inside, walk)
    for node, replacement in rest.items():
        node.replace_all_uses_with(replacement, delete_user_cb=lambda user: user not in own)
    replayed = [node for reader in readers for node in reader.replayed]
    _erase_unused({*own, *replayed}, gathers[0])
    return len(readers)


def _has_gemm(collective: Node) -> bool:
    """Whether a GEMM reads what this collective makes, or what others make of that."""
    roots = [collective, *(user for user in collective.users if user.target is WAIT)]
    walk = _Walk()
    for root in roots:
        if not is_tensor(root):
            return False  # several that are called together
        walk.reached[root] = _Reached(root, layout_of(value(root).shape), None)
    _walk(walk, roots)
    others = [node for node in walk.others if collective_name(node) is not None]
    return bool(walk.readers or walk.refused) or any(_has_gemm(node) for node in others)


def _own(inside: dict[Node, _Reached], walk: _Walk) -> set[Node]:
    """The rearrangements and the nodes within them."""
    return {*inside, *(node for result in inside for node in walk.between.get(result, ()))}


def _erase_unused(nodes: set[Node], place: Node) -> None:
    for node in reversed(place.graph.nodes):
        if node in nodes and not node.users:
            node.graph.erase_node(node)


# --- finding --------------------------------------------------------------------------------------------------


def _walk(walk: _Walk, roots: Sequence[Node]) -> None:
    waiting = list(roots)
    while waiting:
        at = walk.reached[waiting.pop(0)]
        for user in at.node.users:
            if user in walk.reached:
                continue
            reached, between = _step(at, user)
            if reached is not None:
                walk.reached[reached.node] = reached
                walk.between[reached.node] = between
                waiting.append(reached.node)
            elif not _read(walk, at, at.node, user, ()):
                walk.others.append(user)


def _step(at: _Reached, user: Node) -> tuple[_Reached | None, Sequence[Node]]:
    """What a user makes of it, if that is a rearrangement; and the nodes on the way there."""
    if user.target in (aten.split.Tensor, aten.split_with_sizes.default):
        recat = _recat_behind(user)
        layout = None if recat is None else after_recat(recat, at.layout)
        if layout is not None:
            return _Reached(recat.result, layout, at.cast), recat.inner
        return None, ()
    if not user.args or user.args[0] is not at.node:
        return None, ()
    dtype = cast_dtype(user)
    if dtype is not None:
        same = dtype == value(at.node).dtype
        if at.cast is None or same:
            return _Reached(user, at.layout, at.cast if same else dtype), ()
        return None, ()
    layout = after(user, at.layout)
    return (None if layout is None else _Reached(user, layout, at.cast)), ()


def _recat_behind(split: Node) -> Recat | None:
    parts = list(split.users)
    if not parts or len(parts[0].users) != 1:
        return None
    recat = recat_of(next(iter(parts[0].users)))
    return recat if recat is not None and recat.inner[0] is split else None


def _read(walk: _Walk, at: _Reached, node: Node, user: Node, replayed: tuple[Node, ...]) -> bool:
    """Notes GEMMs that read ``node``, which ``replayed`` makes of what was reached; False if this user is none."""
    why = other_product(user)
    if why is not None:
        walk.refused.append(NotFused(why))
        return False
    gemm = gemm_of(user)
    if gemm is not None:
        sides = [side for side in ("left", "right") if getattr(gemm, side) is node]
        if len(sides) != 1:
            walk.refused.append(NotFused("its GEMM reads it on both sides, or as its bias"))
            return False
        if replayed and sides == ["right"]:
            walk.refused.append(NotFused("its GEMM reads a part of it as the second operand"))
            return False
        dims = at.layout
        if replayed:
            walk.readers.append(_Reader(gemm, "left", at, dims[:-1], dims[-1], replayed))
        else:
            rows, inner = (0, 1) if sides == ["left"] else (1, 0)
            walk.readers.append(_Reader(gemm, sides[0], at, [dims[rows]], dims[inner]))
        return True
    if user.target is aten.view.dtype:  # how fp8 is gathered
        walk.refused += _products_behind(user)
        return False
    if not _keeps_last_dim(node, user, started=bool(replayed)):
        return False
    found = False
    for reader in user.users:
        found |= _read(walk, at, user, reader, (*replayed, user))
    return found


def _products_behind(node: Node) -> list[NotFused]:
    """Why the products that read it through views cannot be fused."""
    found: list[NotFused] = []
    for user in node.users:
        why = other_product(user)
        if why is not None:
            found.append(NotFused(why))
        elif is_identity(user) or is_view(user) or permutation(user) is not None:
            found += _products_behind(user)
    return found


def _keeps_last_dim(node: Node, user: Node, started: bool) -> bool:
    """Whether it takes a part of the rows, or rearranges them behind such a node, and leaves the last dim as it is."""
    if not user.args or user.args[0] is not node or value(node).dim() < 2:
        return False
    count = value(node).dim()
    if user.target is aten.slice.Tensor:
        return argument(user, 1, "dim", 0) % count != count - 1
    if not started or value(user).dim() < 2:
        return False
    if as_expr(value(user).shape[-1]) != as_expr(value(node).shape[-1]):
        return False
    if is_identity(user) or is_view(user):
        return user.target in (aten.reshape.default, aten.view.default) or is_identity(user)
    order = permutation(user)
    return order is not None and order[-1] == count - 1


def _is_ready(walk: _Walk, reader: _Reader, ranks: Atom, depend: set[Node], shard: Node) -> bool:
    """Whether the op can have the GEMM; if not, why is noted."""
    gemm = reader.gemm
    other = gemm.right if reader.side == "left" else gemm.left
    try:
        if ranks in leaves(reader.inner):
            raise NotFused("it is gathered along the dim that its GEMM sums over", missed=False)
        check_dtype(gemm)
        if other in depend:
            raise NotFused("its GEMM's other operand depends on it as well", missed=False)
        if gemm.bias is not None and gemm.bias in depend:
            raise NotFused("its GEMM's bias depends on it as well")
        if gemm.bias is not None and reader.side == "right":
            raise NotFused("its GEMM adds a bias along the gathered dim")
        if reader.side == "right" and _is_given(shard):
            raise NotFused(
                "it gathers a weight, an input of the graph, which needs no GEMM to hide it",
                missed=False,
            )
    except NotFused as error:
        walk.refused.append(error)
        return False
    return True


def _is_given(node: Node) -> bool:
    """Whether it is an input of the graph, rearranged or cast at most."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], Node):
        same = cast_dtype(node) is not None
        if not same and before(node, layout_of(value(node).shape)) is None:
            return False
        node = node.args[0]
    return node.op in ("placeholder", "get_attr")


def _check_cast(
    inside: dict[Node, _Reached],
    walk: _Walk,
    readers: Sequence[_Reader],
    cast: torch.dtype | None,
    shard: Node,
) -> None:
    """Raises NotFused where the op would have to gather more, or twice, because of a cast behind the gather."""
    if cast is None:
        return
    dtype = value(shard).dtype
    if cast.itemsize > dtype.itemsize:
        raise NotFused(
            f"it is gathered in {name_of(dtype)} and its GEMM is in {name_of(cast)}: the op would gather more bytes"
        )
    own = _own(inside, walk) | {reader.gemm.node for reader in readers}
    own |= {node for reader in readers for node in reader.replayed}
    for node, reached in inside.items():
        for user in node.users:
            if reached.cast is None and user not in own:
                raise NotFused(
                    f"its GEMM is in {name_of(cast)}, but {describe(user)} reads it in {name_of(dtype)}"
                )


# --- the op ---------------------------------------------------------------------------------------------------


def _emit(
    editor: Editor,
    gather: _Gather,
    readers: Sequence[_Reader],
    inside: dict[Node, _Reached],
    walk: _Walk,
) -> tuple[list[Node], dict[Node, Node]]:
    """Each GEMM's product, and what others read in the place of the gathered tensor's rearrangements."""
    rows, inner = flat(readers[0].rows), leaves(readers[0].inner)
    # Ranks outermost; what follows them keeps its place behind them, so that a gathered dim is a view of the result.
    place = rows.index(gather.ranks)
    order = rows[place:] + rows[:place]
    shard, cast = gather.shard, readers[0].at.cast
    if cast is not None:
        shard = editor.call(torch.ops.prims.convert_element_type.default, shard, cast)
    input = editor.rearrange(shard, gather.local, [order[1:], inner])
    weights, biases = [], []
    for reader in readers:
        gemm = reader.gemm
        weights.append(editor.transposed(gemm.right) if reader.side == "left" else gemm.left)
        biases.append(gemm.bias)
    if len(readers) == 1:
        op = _ops.allgather_gemm.default
        results = editor.call(op, input, weights[0], biases[0], group=gather.group)
        outputs = [editor.call(operator.getitem, results, 0)]
    else:
        if all(bias is None for bias in biases):
            biases = []
        op = _ops.allgather_gemm.weights
        results = editor.call(op, input, weights, biases, group=gather.group)
        several = editor.call(operator.getitem, results, 0)
        outputs = [editor.call(operator.getitem, several, i) for i in range(len(readers))]
    products = [
        _product(editor, reader, output, order)
        for reader, output in zip(readers, outputs, strict=True)
    ]
    fused = {reader.gemm.node for reader in readers}
    own = _own(inside, walk) | fused
    dead = _dead(readers, fused)
    rest: dict[Node, Node] = {}
    gathered = None
    for node, reached in inside.items():
        if all(user in own or user in dead for user in node.users):
            continue
        if gathered is None:
            gathered = editor.call(operator.getitem, results, 1)
        rest[node] = editor.rearrange(gathered, [order, inner], reached.layout)
    return products, rest


def _dead(readers: Sequence[_Reader], fused: set[Node]) -> set[Node]:
    """What nobody reads once the GEMMs are fused, of what leads to them."""
    dead: set[Node] = set()
    for reader in readers:
        for node in reversed(reader.replayed):
            if all(user in fused or user in dead for user in node.users):
                dead.add(node)
    return dead


def _product(editor: Editor, reader: _Reader, output: Node, order: Atoms) -> Node:
    """The GEMM's result of the op's output, whose rows are in this order."""
    columns = layout_of([value(output).shape[-1]])
    source = [order, *columns]
    if not reader.replayed:
        target = [*reader.rows, *columns] if reader.side == "left" else [*columns, *reader.rows]
        return editor.rearrange(output, source, target)
    result = editor.rearrange(output, source, [*reader.rows, *columns])
    n = value(output).shape[-1]
    n = n if isinstance(n, int) else editor.size(as_expr(n))
    for node in reader.replayed:
        if is_identity(node):
            continue
        args = list(node.args[1:])
        if is_view(node):
            args = [[*args[0][:-1], n]]
        result = editor.call(node.target, result, *args, **node.kwargs)
    return result
