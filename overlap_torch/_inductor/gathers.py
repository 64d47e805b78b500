"""GEMMs that read a gathered tensor."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from overlap_torch._inductor.editing import (
    KINDS,
    WAIT,
    Editor,
    NotFused,
    WaitedFor,
    aten,
    before,
    collective_name,
    descendants,
    describe,
    erase_unused,
    is_identity,
    is_tensor,
    is_view,
    name_of,
    recat_of,
    source_of,
    value,
)
from overlap_torch._inductor.layouts import (
    Atom,
    Atoms,
    Layout,
    as_expr,
    flat,
    layout_of,
    leaves,
    regroup,
)
from overlap_torch._inductor.products import Gemm, check_dtype, keywords_of, operand_of
from overlap_torch._inductor.walks import Reached, Reader, Walk, unfollowed, walk_from

_ops = torch.ops.overlap


@dataclass(frozen=True)
class _Gather:
    """The gathered tensor, the layout of this rank's part of it, and the factor that gathering adds to dim 0."""

    node: Node
    shard: Node
    local: Layout
    ranks: Atom
    group: str


@dataclass(frozen=True)
class _ScaleGather:
    """The all-gathers of a gathered tensor's scales, one scale for each row."""

    gathers: Sequence[Node]
    shard: Node
    local: Layout  # in atoms of the gathered tensor's rows
    walk: Walk


def fuse_gather(gathers: Sequence[Node], group: str, world_size: int) -> tuple[int, Sequence[Node]]:
    """Replaces all-gathers of one shard, and the GEMMs that read them, by one op.

    Returns:
        The op's number of GEMMs, and the gathers of scales that it also replaces.

    Raises:
        NotFused: there is no such op, and the graph is as it was.
    """
    shard = gathers[0].args[0]
    ranks = Atom(as_expr(world_size), whole=True)
    local = layout_of(value(shard).shape)
    if value(shard).dim() == 0:
        raise NotFused("it gathers a tensor without dims", missed=False)
    gather = _Gather(gathers[0], shard, local, ranks, group)
    walk = walk_from(gathers, [[ranks, *local[0]], *local[1:]])
    depend = descendants(gathers)
    scales: dict[Gemm, _ScaleGather] = {}
    readers = [reader for reader in walk.readers if _is_ready(walk, gather, reader, depend, scales)]
    if not readers:
        refused = [*walk.refused, *unfollowed(walk, _is_given(shard))]
        if refused:
            raise next((error for error in refused if error.missed), refused[0])
        for node in walk.others:
            if collective_name(node) is not None and _has_gemm(node):
                raise WaitedFor(
                    f"another collective, {collective_name(node)}, is waited for between it and its GEMM"
                )
        others = ", ".join(dict.fromkeys(describe(node) for node in walk.others))
        raise NotFused(f"no GEMM reads it, but {others or 'nothing'}", missed=False)
    first, cast = _kind(readers[0], scales), readers[0].at.cast
    readers = [reader for reader in readers if _kind(reader, scales) == first]
    inside = walk.plain(cast)
    _check_cast(inside, walk, readers, cast, shard)
    of_scales = scales.get(readers[0].gemm)
    with Editor(gathers[0], value(gathers[0]).fake_mode) as editor:
        products, rest = _emit(editor, gather, readers, inside, walk, of_scales)
    for reader, product in zip(readers, products, strict=True):
        reader.gemm.node.replace_all_uses_with(product)
        reader.gemm.node.graph.erase_node(reader.gemm.node)
    own = walk.nodes(inside)
    if of_scales is not None:
        own |= of_scales.walk.nodes(of_scales.walk.plain())
    for node, replacement in rest.items():
        node.replace_all_uses_with(replacement, delete_user_cb=lambda user: user not in own)
    own = own.union(*(reader.replayed for reader in readers))
    erase_unused(node for node in reversed(gathers[0].graph.nodes) if node in own)
    return len(readers), [] if of_scales is None else of_scales.gathers


def _kind(reader: Reader, scales: dict[Gemm, _ScaleGather]) -> tuple[object, ...]:
    """The properties that GEMMs of one op have in common."""
    at, gemm = reader.at, reader.gemm
    kind = (at.cast, at.bits, leaves(reader.inner))
    if gemm.scales is None:
        return kind
    found = scales.get(gemm)
    scale = gemm.scales.left if found is None else found.shard
    return (*kind, scale, *keywords_of(gemm).values())


def _has_gemm(collective: Node) -> bool:
    """True if a GEMM reads this collective's result, or anything computed from it."""
    if not is_tensor(collective):
        return False  # several that are called together
    walk = walk_from([collective], layout_of(value(collective).shape))
    others = [node for node in walk.others if collective_name(node) is not None]
    return bool(walk.readers or walk.refused) or any(_has_gemm(node) for node in others)


# --- finding --------------------------------------------------------------------------------------------------


def _is_ready(
    walk: Walk, gather: _Gather, reader: Reader, depend: set[Node], scales: dict[Gemm, _ScaleGather]
) -> bool:
    """True if the op can take the GEMM; if not, notes the reason. Also notes the gather of its scales."""
    gemm = reader.gemm
    other = gemm.right if reader.side == "left" else gemm.left
    try:
        if gather.ranks in leaves(reader.inner):
            raise NotFused("it is gathered along the dim that its GEMM sums over", missed=False)
        check_dtype(gemm)
        if other in depend:
            raise NotFused("its GEMM's other operand depends on it as well", missed=False)
        if gemm.bias is not None and gemm.bias in depend:
            raise NotFused("its GEMM's bias depends on it as well")
        if gemm.bias is not None and reader.side == "right":
            raise NotFused("its GEMM adds a bias along the gathered dim")
        if reader.side == "right" and _is_given(gather.shard):
            raise NotFused(
                "it gathers a weight, an input of the graph, which needs no GEMM to hide it",
                missed=False,
            )
        if gemm.scales is not None:
            _check_scales(reader, depend)
            if gemm.scales.of_rows:
                scales[gemm] = _scale_gather(gather, reader, depend)
    except NotFused as error:
        walk.refused.append(error)
        return False
    return True


def _check_scales(reader: Reader, depend: set[Node]) -> None:
    """Raises NotFused if the op cannot take the scales of a GEMM that reads the gathered tensor."""
    scales = reader.gemm.scales
    if reader.side == "right":
        raise NotFused(
            "it gathers the second operand of a GEMM with scales, as weights are, which needs no GEMM to hide it",
            missed=False,
        )
    given = [scales.right] if scales.of_rows else [scales.left, scales.right]
    if any(scale in depend for scale in given):
        raise NotFused("its GEMM's scales depend on it as well")
    if scales.of_rows and reader.replayed:
        raise NotFused("its GEMM reads a part of it, with scales of rows")


def _scale_gather(gather: _Gather, reader: Reader, depend: set[Node]) -> _ScaleGather:
    """The gather of a GEMM's scales, one for each gathered row, in the order of the rows.

    Raises:
        NotFused: the scales are made by something else.
    """
    gemm, scale = reader.gemm, reader.gemm.scales.left
    apart = NotFused("its GEMM has scales of rows, which are not gathered as the rows are")
    found = _gather_behind(scale)
    if found is None or found.kwargs or found.args[1:] != gather.node.args[1:]:
        raise apart
    shard = found.args[0]
    gathers = [user for user in shard.users if user.target is found.target]
    gathers = [user for user in gathers if user.args == found.args]
    after_them = descendants(gathers)
    given = (gather.shard, gemm.right, gemm.bias, gemm.scales.right)
    if shard in depend or any(node in after_them for node in given):
        raise apart
    inner = leaves(reader.inner)
    rows = [atom for atom in flat(gather.local) if atom not in inner]
    local = regroup(rows, [as_expr(size) for size in value(shard).shape])
    if local is None:
        raise apart
    walk = walk_from(gathers, [[gather.ranks, *local[0]], *local[1:]])
    at = walk.plain().get(scale)
    if at is None or at.bits is not None or flat(at.layout) != flat(reader.rows):
        raise apart
    return _ScaleGather(gathers, shard, local, walk)


def _gather_behind(node: Node) -> Node | None:
    """The all-gather whose result the node rearranges."""
    while is_tensor(node) and node.op == "call_function":
        if KINDS.get(node.target) == "all_gather":
            return node
        recat = recat_of(node)
        if recat is not None:
            node = recat.source
        elif node.target is WAIT or before(node, layout_of(value(node).shape)) is not None:
            node = node.args[0]
        else:
            return None
    return None


def _is_given(node: Node) -> bool:
    """True if the node is an input of the graph, at most rearranged or cast."""
    if node.target is aten.cat.default:
        return all(_is_given(part) for part in node.args[0])
    source = source_of(node)
    return node.op in ("placeholder", "get_attr") if source is None else _is_given(source)


def _check_cast(
    inside: dict[Node, Reached],
    walk: Walk,
    readers: Sequence[Reader],
    cast: torch.dtype | None,
    shard: Node,
) -> None:
    """Raises NotFused where the op would have to gather more, or twice, because of a cast after the gather."""
    if cast is None:
        return
    dtype = value(shard).dtype
    if cast.itemsize > dtype.itemsize:
        raise NotFused(
            f"it is gathered in {name_of(dtype)} and its GEMM is in {name_of(cast)}: the op would gather more bytes"
        )
    own = walk.nodes(inside) | {reader.gemm.node for reader in readers}
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
    readers: Sequence[Reader],
    inside: dict[Node, Reached],
    walk: Walk,
    of_scales: _ScaleGather | None,
) -> tuple[list[Node], dict[Node, Node]]:
    """Each GEMM's product, and the replacements of the rearrangements of the gathered tensor, and of its scales, for other
    readers."""
    rows, inner = flat(readers[0].rows), leaves(readers[0].inner)
    # Ranks are outermost, and all else keeps its order after them, so that a gathered dim is a view of the result.
    place = rows.index(gather.ranks)
    order = rows[place:] + rows[:place]
    shard = _as_read(editor, gather.shard, readers[0].at)
    input = editor.rearrange(shard, gather.local, [order[1:], inner])
    scale = None
    if of_scales is not None:
        scale = editor.rearrange(of_scales.shard, of_scales.local, [order[1:], []])
    results, outputs = _call(editor, gather.group, readers, input, scale)
    products = [
        _product(editor, reader, output, order)
        for reader, output in zip(readers, outputs, strict=True)
    ]
    unread = walk.nodes(inside) | _dead(readers)
    rest = _rest(editor, inside, unread, results, 1, [order, inner])
    if of_scales is not None:
        inside = of_scales.walk.plain()
        unread |= of_scales.walk.nodes(inside)
        rest |= _rest(editor, inside, unread, results, 2, [order, []])
    return products, rest


def _as_read(editor: Editor, shard: Node, at: Reached) -> Node:
    """The shard in the dtype in which GEMMs read the gathered tensor."""
    if at.cast is not None:
        return editor.call(torch.ops.prims.convert_element_type.default, shard, at.cast)
    if at.bits is None or at.bits == value(shard).dtype:
        return shard
    if shard.target is aten.view.dtype and value(shard.args[0]).dtype == at.bits:
        return shard.args[0]
    return editor.call(aten.view.dtype, shard, at.bits)


def _call(
    editor: Editor, group: str, readers: Sequence[Reader], input: Node, scale: Node | None
) -> tuple[Node, list[Node]]:
    """The op, and its output for each GEMM; ``scale``: the scale of the input's rows, if the GEMMs have one."""
    weights, biases, scales = [], [], []
    for reader in readers:
        gemm = reader.gemm
        if reader.side == "left":
            operand = operand_of(editor, gemm, "right")
            weights.append(operand.matrix)
            scales.append(operand.scale)
        else:
            weights.append(gemm.left)
        biases.append(gemm.bias)
    several = len(readers) > 1
    if several and all(bias is None for bias in biases):
        biases = []
    operands = [input, weights, biases] if several else [input, weights[0], biases[0]]
    keywords = {"group": group}
    op = _ops.allgather_gemm.weights if several else _ops.allgather_gemm.default
    gemm = readers[0].gemm
    if gemm.scales is not None:
        op = _ops.allgather_gemm.scaled_weights if several else _ops.allgather_gemm.scaled
        # This rank's number is for all rows, as in the GEMM.
        keywords["shared_scale_input"] = not gemm.scales.of_rows
        keywords |= keywords_of(gemm)
        scale = gemm.scales.left if scale is None else scale
        operands[2:2] = [scale, scales if several else scales[0]]
    results = editor.call(op, *operands, **keywords)
    first = editor.call(operator.getitem, results, 0)
    if not several:
        return results, [first]
    return results, [editor.call(operator.getitem, first, i) for i in range(len(readers))]


def _rest(
    editor: Editor,
    inside: dict[Node, Reached],
    unread: set[Node],
    results: Node,
    index: int,
    layout: Layout,
) -> dict[Node, Node]:
    """The rearrangements that nodes other than ``unread`` read, made from one of the op's results, which has this layout."""
    rest: dict[Node, Node] = {}
    gathered: dict[torch.dtype, Node] = {}
    for node, reached in inside.items():
        if all(user in unread for user in node.users):
            continue
        if not gathered:
            result = editor.call(operator.getitem, results, index)
            gathered[value(result).dtype] = result
        dtype = value(node).dtype
        if dtype not in gathered:
            first = next(iter(gathered.values()))
            gathered[dtype] = editor.call(aten.view.dtype, first, dtype)
        rest[node] = editor.rearrange(gathered[dtype], layout, reached.layout)
    return rest


def _dead(readers: Sequence[Reader]) -> set[Node]:
    """The GEMMs, and the nodes on the way to them that nothing reads after the GEMMs are fused."""
    dead = {reader.gemm.node for reader in readers}
    for reader in readers:
        for node in reversed(reader.replayed):
            if all(user in dead for user in node.users):
                dead.add(node)
    return dead


def _product(editor: Editor, reader: Reader, output: Node, order: Atoms) -> Node:
    """The GEMM's result from the op's output, whose rows are in this order."""
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
