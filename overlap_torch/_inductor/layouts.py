"""How views and permutations rearrange a tensor, as lists of factors.

A dim is a product of atoms, the outermost first; a layout is a list of dims. Views cut and merge dims, permutations move
atoms, and neither changes what an atom is. So a tensor that a collective cuts between ranks can be followed to the rows or
columns of a GEMM, whatever spelling a model uses: the ranks are one of the atoms. Sizes may be symbolic.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._sympy.functions import FloorDiv

Size = int | torch.SymInt


def as_expr(size: Size) -> sympy.Expr:
    """A size as an expression, in which a division without remainder is a fraction."""
    if isinstance(size, int):
        return sympy.Integer(size)
    shape_env = size.node.shape_env

    def quotient(dividend: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr:
        if dividend.is_Integer or not divisor.is_Integer:
            return FloorDiv(dividend, divisor)
        # (s + 1) // 2, the size of the first of two chunks, is s / 2 if s is even.
        dividend_of_even = dividend - dividend.as_coeff_Add()[0] % divisor
        rest = shape_env.create_symintnode(dividend_of_even, hint=None) % int(divisor)
        if statically_known_true(rest == 0):
            return dividend_of_even / divisor
        return FloorDiv(dividend, divisor)

    return size.node.expr.replace(FloorDiv, quotient)


def divide(dividend: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr | None:
    """The quotient, if the division has no remainder for any value of the symbols; else None."""
    quotient = sympy.cancel(dividend / divisor)
    if quotient.is_Rational:
        return quotient if quotient.is_Integer else None
    _, denominator = sympy.fraction(sympy.together(quotient))
    return quotient if denominator.is_Integer else None


class Atom:
    """A factor of a dim; ``whole`` is True if it must not be split, as for the ranks of a group."""

    __slots__ = ("parts", "size", "whole")

    def __init__(self, size: sympy.Expr, whole: bool = False) -> None:
        self.size = size
        self.whole = whole
        self.parts: tuple[Atom, Atom] | None = None

    def __repr__(self) -> str:
        return f"<{self.size}>"


Atoms = list[Atom]
Layout = list[Atoms]


def leaves(atoms: Iterable[Atom]) -> Atoms:
    """The atoms; an atom that a view has split is replaced by its parts."""
    found: Atoms = []
    for atom in atoms:
        found += [atom] if atom.parts is None else leaves(atom.parts)
    return found


def cut(layout: Layout) -> Layout:
    """`leaves` of every dim."""
    return [leaves(dim) for dim in layout]


def flat(layout: Layout) -> Atoms:
    """The atoms of all dims, in order."""
    return [atom for dim in layout for atom in leaves(dim)]


def size_of(atoms: Iterable[Atom]) -> sympy.Expr:
    """The product of the atoms' sizes."""
    return sympy.prod([atom.size for atom in atoms], start=sympy.Integer(1))


def layout_of(shape: Sequence[Size]) -> Layout:
    """A layout with one atom for each dim; a dim of size 1 has none."""
    sizes = [as_expr(size) for size in shape]
    return [[] if size == 1 else [Atom(size)] for size in sizes]


def regroup(atoms: Iterable[Atom], sizes: Sequence[sympy.Expr]) -> Layout | None:
    """The atoms as dims of these sizes. An atom is split if a dim ends within it; None if it does not divide."""
    waiting = leaves(atoms)[::-1]
    if any(size == 0 for size in sizes) or any(atom.size == 0 for atom in waiting):
        return None
    cuts: list[tuple[Atom, tuple[Atom, Atom]]] = []
    layout: Layout = []
    for size in sizes:
        dim: Atoms = []
        while size != 1:
            if not waiting:
                return None
            atom = waiting.pop()
            rest = divide(size, atom.size)
            if rest is not None:
                dim.append(atom)
                size = rest
                continue
            rest = divide(atom.size, size)
            if rest is None or atom.whole:
                return None
            parts = (Atom(size), Atom(rest))
            cuts.append((atom, parts))
            dim.append(parts[0])
            waiting.append(parts[1])
            size = sympy.Integer(1)
        layout.append(dim)
    if waiting:
        return None
    for atom, parts in cuts:
        atom.parts = parts
    return cut(layout)


def moves(source: Layout, target: Layout) -> tuple[list[Atoms], list[int]]:
    """Blocks of atoms in the source's order, as few as possible, and their order in the target."""
    before, after = flat(source), flat(target)
    places = {atom: i for i, atom in enumerate(before)}
    runs: list[Atoms] = []
    for atom in after:
        if runs and places[atom] == places[runs[-1][-1]] + 1:
            runs[-1].append(atom)
        else:
            runs.append([atom])
    blocks = sorted(runs, key=lambda run: places[run[0]])
    order = [next(i for i, block in enumerate(blocks) if block is run) for run in runs]
    return blocks, order
