"""All rearrangements of a gathered tensor, and the GEMMs that read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from overlap_torch._inductor.editing import (
    WAIT,
    NotFused,
    Recat,
    after,
    after_recat,
    arguments,
    aten,
    describe,
    is_identity,
    is_recast,
    is_tensor,
    only_moves,
    only_user,
    permutation,
    recat_of,
    value,
)
from overlap_torch._inductor.layouts import Atoms, Layout, as_expr
from overlap_torch._inductor.products import Gemm, product_of


@dataclass(frozen=True)
class Reached:
    """A rearrangement of the gathered tensor, maybe cast. ``bits``: the dtype with which its elements are reinterpreted."""

    node: Node
    layout: Layout
    cast: torch.dtype | None = None
    bits: torch.dtype | None = None


@dataclass(frozen=True)
class Reader:
    """A GEMM that reads it. ``rows`` are the atoms of the dim that is kept, ``inner`` those of the summed dim."""

    gemm: Gemm
    side: str  # "left" or "right": which operand
    at: Reached  # the rearrangement from which it is read
    rows: Layout  # the dims that become the GEMM's rows (on the right: its columns)
    inner: Atoms
    replayed: tuple[Node, ...] = ()  # the nodes between: slices, and the nodes after them


@dataclass
class Walk:
    """All rearrangements of a gathered tensor."""

    reached: dict[Node, Reached] = field(default_factory=dict)
    # The nodes within a Recat, by its result.
    between: dict[Node, Sequence[Node]] = field(default_factory=dict)
    readers: list[Reader] = field(default_factory=list)
    refused: list[NotFused] = field(default_factory=list)  # why GEMMs that read it cannot be fused
    others: list[Node] = field(default_factory=list)  # who else reads it

    def plain(self, cast: torch.dtype | None = None) -> dict[Node, Reached]:
        """The nodes that are not cast, or cast to this dtype."""
        return {node: at for node, at in self.reached.items() if at.cast in (None, cast)}

    def nodes(self, inside: Iterable[Node]) -> set[Node]:
        """These rearrangements and the nodes within them."""
        return {*inside, *(node for result in inside for node in self.between.get(result, ()))}


def walk_from(collectives: Sequence[Node], layout: Layout) -> Walk:
    """All rearrangements of these collectives' result, which has this layout."""
    waits = [user for node in collectives for user in node.users if user.target is WAIT]
    waiting = [*collectives, *waits]
    walk = Walk({root: Reached(root, layout) for root in waiting})
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
    return walk


def _step(at: Reached, user: Node) -> tuple[Reached | None, Sequence[Node]]:
    """The rearrangement reached through a user, if it is one, and the nodes on the way there."""
    if user.target in (aten.split.Tensor, aten.split_with_sizes.default):
        recat = _recat_behind(user)
        layout = None if recat is None else after_recat(recat, at.layout)
        reached: Reached | None = None if layout is None else replace(at, layout=layout)
        for recast in () if recat is None else recat.recasts:
            reached = None if reached is None else _recast(reached, recast)
        if reached is not None:
            return replace(reached, node=recat.result), recat.inner
        return None, ()
    if not user.args or user.args[0] is not at.node:
        return None, ()
    if is_recast(user):
        return _recast(at, user), ()
    layout = after(user, at.layout)
    return (None if layout is None else replace(at, node=user, layout=layout)), ()


def _recast(at: Reached, node: Node) -> Reached | None:
    """The rearrangement reached through a cast, a copy or a view of another dtype; None if the op cannot gather it."""
    dtype = value(node).dtype
    if dtype == value(node.args[0]).dtype:
        return replace(at, node=node)
    if node.target is aten.view.dtype:  # fp8 may travel as bytes
        return replace(at, node=node, bits=dtype) if at.cast is None else None
    casts = at.cast is None and at.bits is None
    return replace(at, node=node, cast=dtype) if casts else None


def _recat_behind(split: Node) -> Recat | None:
    node = next(iter(split.users), None)
    while node is not None and node.target is not aten.cat.default:
        node = only_user(node)
    recat = None if node is None else recat_of(node)
    return recat if recat is not None and recat.inner[0] is split else None


def unfollowed(walk: Walk, is_given: bool) -> Iterator[NotFused]:
    """Why products are not fused that read the gathered tensor through nodes that only move data, but in ways that no op takes.

    ``is_given``: what is gathered is an input of the graph. As a second operand it is a weight, and no product is missed.
    """
    for first in walk.others:
        waiting, seen = [first] if only_moves(first) else [], {first}
        while waiting:
            node = waiting.pop()
            for user in node.users:
                if user in seen:
                    continue
                seen.add(user)
                gemm, why = product_of(user)
                operands = user.args[:2] if gemm is None else (gemm.left, gemm.right)
                if (gemm is not None or why is not None) and node in operands:
                    yield NotFused(
                        f"its GEMM, {describe(user)}, reads it through {describe(first)}, which the pass does not follow",
                        missed=not (is_given and node is operands[1]),
                    )
                elif only_moves(user):
                    waiting.append(user)


def _read(walk: Walk, at: Reached, node: Node, user: Node, replayed: tuple[Node, ...]) -> bool:
    """Notes GEMMs that read ``node``, which ``replayed`` computes from the reached rearrangement; False if this user is no
    GEMM."""
    gemm, why = product_of(user)
    sides = [side for side in ("left", "right") if gemm is not None and getattr(gemm, side) is node]
    scales = gemm is not None and gemm.scales is not None and not sides and node is not gemm.bias
    if scales:
        why = "it gathers scales of a GEMM's operand, which is not fused with them"
    elif gemm is not None and len(sides) != 1:
        why = "its GEMM reads it on both sides, or as its bias"
    elif replayed and sides == ["right"]:
        why = "its GEMM reads a part of it as the second operand"
    if why is not None:
        walk.refused.append(NotFused(why, missed=not scales))
        return False
    if gemm is not None:
        dims = at.layout
        if replayed:
            walk.readers.append(Reader(gemm, "left", at, dims[:-1], dims[-1], replayed))
        else:
            rows, inner = (0, 1) if sides == ["left"] else (1, 0)
            walk.readers.append(Reader(gemm, sides[0], at, [dims[rows]], dims[inner]))
        return True
    if not _keeps_last_dim(node, user, started=bool(replayed)):
        return False
    found = False
    for reader in user.users:
        found |= _read(walk, at, user, reader, (*replayed, user))
    return found


def _keeps_last_dim(node: Node, user: Node, started: bool) -> bool:
    """True if the node takes a part of the rows, or rearranges them after such a node, without changing the last dim."""
    if not user.args or user.args[0] is not node or value(node).dim() < 2:
        return False
    count = value(node).dim()
    if user.target is aten.slice.Tensor:
        return arguments(user)["dim"] % count != count - 1
    if not started or not is_tensor(user) or value(user).dim() < 2:
        return False
    if as_expr(value(user).shape[-1]) != as_expr(value(node).shape[-1]):
        return False
    if is_identity(user) or user.target in (aten.reshape.default, aten.view.default):
        return True
    order = permutation(user)
    return order is not None and order[-1] == count - 1
