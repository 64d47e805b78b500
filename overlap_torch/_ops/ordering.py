"""Inductor starts this package's ops in the order of the graph, as it starts PyTorch's functional collectives.

Inductor may move any other op, by the sizes of what is alive: ranks whose parts have unlike sizes would call independent
ops in unlike orders, and each would wait for the other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch


def register_fake(name: str, fake: Callable | None = None, **where: Any) -> Any:
    """``torch.library.register_fake`` for an op that communicates. A compiler calls the fake before it orders a graph."""
    if fake is None:
        return lambda function: register_fake(name, function, **where)

    def ordered(*arguments: Any, **keywords: Any) -> Any:
        _keep_order()
        return fake(*arguments, **keywords)

    torch.library.register_fake(name, ordered, **where)
    return fake


def _keep_order() -> None:
    comms = sys.modules.get("torch._inductor.comms")
    decide = getattr(comms, "decide_global_ordering_of_comms", None)
    if decide is None or hasattr(decide, "keeps_order_of_overlap"):
        return

    def keep_order(nodes: list, *tables: Any) -> list:
        _order(nodes)
        return decide(nodes, *tables)

    keep_order.keeps_order_of_overlap = True
    comms.decide_global_ordering_of_comms = keep_order


def _order(nodes: list) -> None:
    """Each call comes after the one before it in the graph, as Inductor itself says it of collectives."""
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.utils import contains_collective

    before = None
    for node in nodes:
        op = getattr(getattr(node, "node", None), "op_overload", None)
        ours = getattr(op, "namespace", None) == "overlap"
        if ours:  # other ranks call it even if this one has no use for its part
            node.node.has_side_effects = lambda: True
        elif not contains_collective(node):
            continue
        if before is not None:
            first = next(iter(node.get_buffer_names()))
            for buffer in before.get_buffer_names():
                node.add_fake_dep(WeakDep(buffer, mutating_buf=first, is_fake=True))
        before = node
