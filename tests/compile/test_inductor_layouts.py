"""Layouts follow tensors through views and permutations: what they say is where the elements are."""

import math

import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch.fx.experimental.proxy_tensor import make_fx

from overlap_torch._inductor.editing import after, before
from overlap_torch._inductor.layouts import Layout, cut, flat, layout_of, leaves, moves, regroup

PRIMES = (2, 3, 5, 2, 3)


@st.composite
def chains(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[str, tuple[int, ...]]]]:
    """A shape, and views and permutations of it in a row."""
    shape = tuple(draw(st.lists(st.sampled_from((1, 2, 3, 4, 6)), min_size=1, max_size=4)))
    steps: list[tuple[str, tuple[int, ...]]] = []
    current = shape
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            order = tuple(draw(st.permutations(range(len(current)))))
            steps.append(("permute", order))
            current = tuple(current[dim] for dim in order)
        else:
            current = draw(st.sampled_from(_views(math.prod(current))))
            steps.append(("reshape", current))
    return shape, steps


def _views(elements: int) -> list[tuple[int, ...]]:
    """Shapes of `elements` elements, of up to three dims."""
    divisors = [n for n in range(1, elements + 1) if elements % n == 0]
    pairs = [(n, elements // n) for n in divisors]
    triples = [(n, m, rest // m) for n, rest in pairs for m in divisors if rest % m == 0]
    return [(elements,), *pairs, *triples]


def _placed(tensor: torch.Tensor, source: Layout, target: Layout) -> torch.Tensor:
    """The tensor, whose own layout is the source, as the target's layout says it is."""
    first, last = flat(source), flat(target)
    order = [first.index(atom) for atom in last]
    tensor = tensor.reshape([int(atom.size) for atom in first]).permute(order)
    return tensor.reshape([math.prod(int(atom.size) for atom in leaves(dim)) for dim in target])


@settings(max_examples=25)
@given(chains())
def test_layouts_say_where_elements_are(chain):
    shape, steps = chain
    tensor = torch.arange(math.prod(shape)).reshape(shape)

    def function(x: torch.Tensor) -> torch.Tensor:
        for name, argument in steps:
            x = getattr(x, name)(argument)
        return x.clone()

    graph = make_fx(function, tracing_mode="fake")(tensor)
    view_to_reshape(graph)
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    layout = source = layout_of(shape)
    followed: list[Layout] = []
    for node in nodes:
        layout = after(node, layout)
        if layout is None:
            break  # a view that cuts across
        followed.append(layout)
    else:
        assert torch.equal(_placed(tensor, source, layout), function(tensor))
    # Back again from where it came to: the same atoms in their places.
    for node, reached in list(zip(nodes, followed, strict=False))[::-1]:
        at = nodes.index(node)
        origin = source if at == 0 else followed[at - 1]
        assert cut(before(node, reached)) == cut(origin)


@given(st.permutations(range(len(PRIMES))))
def test_layouts_move_in_the_fewest_blocks(order):
    (source,) = regroup(layout_of([math.prod(PRIMES)])[0], [sympy.Integer(math.prod(PRIMES))])
    parts = regroup(source, [sympy.Integer(size) for size in PRIMES])
    atoms = flat(parts)
    target = [[atoms[place] for place in order]]
    blocks, moved = moves([atoms], target)
    assert [atom for block in blocks for atom in block] == atoms
    assert [atom for place in moved for atom in blocks[place]] == target[0]
    breaks = sum(after != before + 1 for before, after in zip(order, order[1:], strict=False))
    assert len(blocks) == breaks + 1


def test_layouts_refuse_views_that_cut_across():
    rows, columns = layout_of([6, 8])
    assert regroup([*rows, *columns], [sympy.Integer(16), sympy.Integer(3)]) is None
    assert rows[0].parts is None and columns[0].parts is None  # nothing is cut by a failure
    assert regroup([*rows, *columns], [sympy.Integer(12), sympy.Integer(4)]) is not None
    assert [atom.size for atom in leaves(columns)] == [2, 4]
