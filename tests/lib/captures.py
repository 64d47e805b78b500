"""CUDA graphs of calls."""

import math
from collections.abc import Callable
from typing import TypeVar

import torch

from checks import message_of
from ops import tensors_of

Result = TypeVar("Result")


def capture(call: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of the call, and what its replays write. A call outside of the capture, on another stream, comes first."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def refill(held: object, new: object) -> None:
    """Other values in the tensors that a graph reads."""
    for tensor, other in zip(tensors_of(held), tensors_of(new), strict=True):
        tensor.copy_(other)


def replayed(graph: torch.cuda.CUDAGraph, results: Result) -> Result:
    """The results of a replay, which were NaN before. Does not wait for them."""
    for tensor in tensors_of(results):
        tensor.fill_(math.nan)
    graph.replay()
    return results


def refusal_of_capture(call: Callable[[], object]) -> str:
    """The message of a capture that nothing came before; "" if it did not fail."""

    def captured() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            call()

    torch.cuda.synchronize()
    return message_of(captured)
