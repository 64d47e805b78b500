"""GEMMs whose product is all-reduced or reduce-scattered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from overlap_torch._inductor.editing import (
    WAIT,
    Editor,
    NotFused,
    WaitedFor,
    added_to,
    after,
    after_recat,
    arguments,
    aten,
    before,
    c10d,
    cast_dtype,
    describe,
    erase_unused,
    is_fused,
    is_tensor,
    is_view,
    name_of,
    recat_of,
    same_shape,
    source_of,
    stand_for,
    value,
    waited_for,
)
from overlap_torch._inductor.layouts import (
    Atom,
    Atoms,
    Layout,
    as_expr,
    cut,
    flat,
    layout_of,
    leaves,
)
from overlap_torch._inductor.products import (
    Gemm,
    Operand,
    call,
    check_dtype,
    operand_of,
    product_of,
)


@dataclass(frozen=True)
class _Product:
    """A GEMM, and the places of its rows and columns in the reduced tensor. Its operands may be cut to a part of the
    result."""

    gemm: Gemm
    layout: Layout
    cuts: tuple[Node, ...] = ()  # slices of its result, the last one first


@dataclass(frozen=True)
class _Sum:
    """A reduced sum of products of one shape, and the nodes that compute it from them."""

    products: list[_Product]
    inner: list[Node]


@dataclass(frozen=True)
class _Reduction:
    """A collective, and its result's layout."""

    node: Node
    kind: str  # "sum" or "avg"
    group: str
    world_size: int
    ranks: Atom  # the factor of the dim divided among the ranks; an all-reduce's layouts do not have it
    result: Layout
    waits: Sequence[Node]

    @property
    def scatters(self) -> bool:
        return self.node.target is c10d.reduce_scatter_tensor.default


def fuse_reduction(
    collective: Node, group: str, world_size: int
) -> tuple[Node, dict[str, str | int]]:
    """Replaces an all-reduce or reduce-scatter, and the GEMMs before it, by one op.

    Returns:
        The node that has the collective's result, and what the collective's row says of the op.

    Raises:
        NotFused: there is no such op, and the graph is as it was.
    """
    whole, kind = collective.args[:2]
    ranks = Atom(as_expr(world_size), whole=True)
    layout = result = layout_of(value(whole).shape)
    waits = [user for user in collective.users if user.target is WAIT]
    if collective.target is c10d.reduce_scatter_tensor.default:
        result = layout_of(value(collective).shape)
        layout = [[ranks, *result[0]], *result[1:]]
    reduction = _Reduction(collective, kind, group, world_size, ranks, result, waits)
    found = _producers(whole, layout, collective)
    _check(reduction, found.products)
    with Editor(collective, value(collective).fake_mode) as editor:
        output, bias_add, note = _emit(editor, reduction, found.products)
    stand_for(output, collective)
    for node in (collective, *waits):
        node.replace_all_uses_with(output, delete_user_cb=lambda user: user not in waits)
    if bias_add is not None:
        bias_add.node.replace_all_uses_with(output if bias_add.sum in waits else bias_add.sum)
        erase_unused([bias_add.node])
    erase_unused([*waits, collective, *found.inner])
    op = "gemm_reducescatter" if reduction.scatters else "gemm_allreduce"
    return output, {"op": op, "gemms": len(found.products), "note": note}


def _check(reduction: _Reduction, products: Sequence[_Product]) -> None:
    """Raises NotFused unless the ops can take the sum of these products."""
    if reduction.kind not in ("sum", "avg"):
        raise NotFused(f"it reduces by {reduction.kind!r}: the ops sum")
    first = cut(products[0].layout)
    if len(products) > 1 and any(product.gemm.scales is not None for product in products):
        raise NotFused(
            f"it reduces a sum of {len(products)} GEMMs with scales, of which the ops take one"
        )
    for product in products:
        check_dtype(product.gemm)
        if cut(product.layout) != first:
            raise NotFused("it reduces a sum of GEMMs whose rows and columns lie differently")
        if product.gemm.bias is not None and reduction.ranks in first[1]:
            raise NotFused("its GEMM adds a bias along the dim that is scattered")


def _emit(
    editor: Editor, reduction: _Reduction, products: Sequence[_Product]
) -> tuple[Node, _BiasAdd | None, str]:
    """The op's result in the collective's form; the addition that the op takes over; a note for the report."""
    ranks, result = reduction.ranks, reduction.result
    rows, columns = cut(products[0].layout)
    left, right = _side_by_side(editor, products)
    by_columns = ranks in columns
    bias = bias_add = None
    note = ""
    if any(product.gemm.bias is not None for product in products):
        bias, note = _whole_bias(editor, reduction, products)
    elif not by_columns and reduction.kind == "sum" and reduction.scatters:
        bias_add = _bias_behind(reduction, columns)
        bias = None if bias_add is None else bias_add.bias
        rows, columns = cut(products[0].layout)  # views before the addition may have divided them
    if by_columns:  # the product's transpose, whose rows are cut
        left, right, rows, columns = right, left, columns, rows
    order = rows
    if reduction.scatters:
        # The rows have the result's order, so that nothing is rearranged after the op.
        order = [ranks, *(atom for atom in flat(result) if atom in rows)]
    gemm = products[0].gemm
    left = _rearranged(editor, gemm, left, rows, order)
    own = [atom for atom in order if atom is not ranks]
    name = "gemm_reducescatter" if reduction.scatters else "gemm_allreduce"
    averages = reduction.kind == "avg"
    output = call(editor, name, gemm, left, right, None if averages else bias, reduction.group)
    if averages:
        output = editor.call(aten.div.Tensor, output, reduction.world_size)
        if bias is not None:
            output = editor.call(aten.add.Tensor, output, bias)
    return editor.rearrange(output, [own, columns], result), bias_add, note


def _producers(node: Node, layout: Layout, reader: Node) -> _Sum:
    """The GEMMs whose sum ``node`` is. ``layout`` is the node's layout; ``reader`` reads it."""
    gemm, why = product_of(node)
    if gemm is not None:
        _check_users(node, reader)
        return _Sum([_Product(gemm, layout)], [node])
    if why is not None:
        raise NotFused(why)
    between = waited_for(node)
    if between is not None and _has_gemm(node):
        raise WaitedFor(f"another collective, {between}, is waited for between its GEMM and it")
    recat = recat_of(node)
    if recat is not None and not recat.recasts:
        source = after_recat(recat, layout, back=True)
        return _through(node, recat.source, source, reader, recat.inner[0], recat.inner[::-1])
    if node.target is aten.add.Tensor:
        return _sum_of(node, layout, reader)
    source_node = node.args[0] if node.args and is_tensor(node.args[0]) else None
    source = None if source_node is None else before(node, layout)
    if source is not None or is_view(node):
        return _through(node, source_node, source, reader, node, ())
    dtype = cast_dtype(node)
    if dtype is not None:
        found = _through(node, source_node, layout, reader, node, ())
        if dtype == value(source_node).dtype:
            return found
        raise NotFused(
            f"it reduces in {name_of(dtype)} what its GEMM computes in {name_of(value(source_node).dtype)}"
        )
    if node.target is aten.slice.Tensor:
        return _part_of(node, layout, reader)
    if node.op == "placeholder":
        raise NotFused("it reduces an input of the graph, no GEMM's product", missed=False)
    raise NotFused(f"it reduces what {describe(node)} computes, no GEMM's product", missed=False)


def _has_gemm(result: Node) -> bool:
    """True if a collective has reduced or moved a GEMM's product; the node is its result."""
    if is_fused(result):
        return True
    collective = result.args[0]
    source = collective.args[0] if collective.args and is_tensor(collective.args[0]) else None
    if source is None:
        return False
    try:
        _producers(source, layout_of(value(source).shape), collective)
    except NotFused as error:
        return error.missed or isinstance(error, WaitedFor)
    return True


def _through(
    node: Node,
    source_node: Node,
    source: Layout | None,
    reader: Node,
    source_reader: Node,
    between: Sequence[Node],
) -> _Sum:
    """`_producers` of the input of a node that rearranges it."""
    if source is None:
        source = layout_of(value(source_node).shape)  # to see whether there is a GEMM
        found = _producers(source_node, source, source_reader)
        raise NotFused(f"{describe(node)} cuts the product of {_names(found)} across rows or ranks")
    found = _producers(source_node, source, source_reader)
    _check_users(node, reader)
    return _Sum(found.products, [node, *between, *found.inner])


def _names(found: _Sum) -> str:
    return ", ".join(dict.fromkeys(describe(product.gemm.node) for product in found.products))


def _sum_of(node: Node, layout: Layout, reader: Node) -> _Sum:
    operands = node.args[:2]
    found: list[_Sum] = []
    others: list[Node] = []
    for operand in operands if all(map(is_tensor, operands)) else ():
        try:
            found.append(_producers(operand, layout, node))
        except NotFused as error:
            if error.missed:
                raise
            others.append(operand)
    if not found:
        raise NotFused("it reduces what aten.add computes, no GEMM's product", missed=False)
    whole = all(same_shape(value(operand), value(node)) for operand in operands)
    if others or not whole or operands[0] is operands[1] or node.kwargs.get("alpha", 1) != 1:
        other = _describe_result((others or operands)[0])
        raise NotFused(f"its GEMM's product is added to the result of {other} before it is reduced")
    _check_users(node, reader)
    inner = [node]
    for part in found:
        inner += part.inner
    return _Sum([product for part in found for product in part.products], inner)


def _describe_result(node: Node) -> str:
    """As `describe`, except that a collective's result, also rearranged, is described by the collective."""
    source: Node | None = node
    while source is not None and waited_for(source) is None:
        source = source_of(source)
    if source is None:
        return describe(node)
    return f"{waited_for(source)}, which is waited for in between,"


def _part_of(node: Node, layout: Layout, reader: Node) -> _Sum:
    """The product of slices that equals a slice of rows or columns of a GEMM's product."""
    source = node.args[0]
    found = _producers(source, layout_of(value(source).shape), node)
    product = found.products[0]
    if source not in (product.gemm.node, *product.cuts[:1]):
        raise NotFused("aten.slice cuts its GEMM's product after a change of shape or a sum")
    if product.gemm.bias is not None:
        raise NotFused("aten.slice cuts its GEMM's product with a bias")
    _check_users(node, reader)
    return _Sum([_Product(product.gemm, layout, (node, *product.cuts))], [node, *found.inner])


def _check_users(node: Node, reader: Node) -> None:
    others = [user for user in node.users if user is not reader]
    if others:
        names = ", ".join(dict.fromkeys(describe(user) for user in others))
        raise NotFused(
            f"its GEMM's product is also read by {names}, and the op returns none that is not reduced"
        )


def _side_by_side(editor: Editor, products: Sequence[_Product]) -> tuple[Operand, Operand]:
    """One GEMM's operands [M, K] and [N, K], whose product is the sum of all."""
    pairs = [_part_operands(editor, product) for product in products]
    if len(pairs) == 1:
        return pairs[0]
    lefts = [left.matrix for left, _ in pairs]
    rights = [editor.transposed(right.matrix) for _, right in pairs]
    left = editor.call(aten.cat.default, lefts, 1)
    right = editor.transposed(editor.call(aten.cat.default, rights, 0))
    return Operand(left, None), Operand(right, None)


def _part_operands(editor: Editor, product: _Product) -> tuple[Operand, Operand]:
    """The operands of the reduced part of the product."""
    gemm = product.gemm
    operands = [operand_of(editor, gemm, side) for side in ("left", "right")]
    for part in reversed(product.cuts):
        side, bounds = arguments(part)["dim"] % 2, part.args[2:]
        matrix, scale = operands[side].matrix, operands[side].scale
        if gemm.scales is not None and gemm.scales.of_rows:
            scale = editor.call(aten.slice.Tensor, scale, 0, *bounds)
        matrix = editor.call(aten.slice.Tensor, matrix, 0, *bounds)
        operands[side] = Operand(matrix, scale)
    return operands[0], operands[1]


def _rearranged(editor: Editor, gemm: Gemm, operand: Operand, rows: Atoms, order: Atoms) -> Operand:
    """An operand, whose rows are these atoms, with its rows in another order."""
    k = layout_of([value(operand.matrix).shape[1]])
    scale = operand.scale
    if gemm.scales is not None and gemm.scales.of_rows:
        scale = editor.rearrange(scale, [rows, []], [order, []])
    return Operand(editor.rearrange(operand.matrix, [rows, *k], [order, *k]), scale)


# --- the bias -------------------------------------------------------------------------------------------------


def _whole_bias(
    editor: Editor, reduction: _Reduction, products: Sequence[_Product]
) -> tuple[Node, str]:
    """The result of the collective on the biases that each rank adds before it."""
    partial = [product.gemm.bias for product in products if product.gemm.bias is not None]
    replicated = [_replicated_part(bias, reduction.world_size) for bias in partial]
    known = reduction.kind == "sum" and None not in replicated
    total, *others = replicated if known else partial
    for bias in others:
        total = editor.call(aten.add.Tensor, total, bias)
    if known:
        return total, ""
    reduced = editor.call(c10d.all_reduce.default, total, reduction.kind, reduction.group)
    note = "its bias, which every rank adds, is reduced by an all-reduce of its own"
    return editor.call(WAIT, reduced), note


def _replicated_part(bias: Node, world_size: int) -> Node | None:
    """``b`` where the bias is ``b / world_size`` and ``b`` a DTensor's: its sum over the ranks is ``b``.

    DTensor adds a replicated bias to partial products in this way.
    """
    if bias.target is not aten.div.Tensor or bias.args[1] != world_size:
        return None
    origin = source = bias.args[0]
    while (inner := source_of(origin)) is not None:
        origin = inner
    return source if getattr(origin.meta.get("desc"), "attr", None) == "_local_tensor" else None


@dataclass(frozen=True)
class _BiasAdd:
    node: Node
    sum: Node  # what it adds to
    bias: Node


def _bias_behind(reduction: _Reduction, columns: Atoms) -> _BiasAdd | None:
    """The addition of a bias [N] to a reduce-scatter's rows, if nothing else reads them.

    An all-reduce's stays in the graph: a rank may add its own to the rows that it sends to all, and each rank's may differ.
    """
    if len(reduction.waits) != 1 or len(reduction.node.users) != 1:
        return None
    node, layout = reduction.waits[0], reduction.result
    while True:
        if len(node.users) != 1 or layout is None:
            return None
        (user,) = node.users
        if user.target is aten.add.Tensor:
            break
        if after(user, layout) is None or user.args[0] is not node:
            return None
        node, layout = user, after(user, layout)
    bias = added_to(node, value(node).shape[-1:])
    if bias is None or not layout or leaves(layout[-1]) != leaves(columns):
        return None
    return _BiasAdd(user, node, bias)
