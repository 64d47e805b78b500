"""Serving frameworks with the plug-ins: modules that stand in for theirs, and what both frameworks' layers have in common."""

import contextlib
import operator
import os
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import overlap_torch_plugins
from layers import integers, my_features
from modes import Observer

N, K, ROWS = 6, 8, 5


class SeesOps(Observer, TorchDispatchMode):
    """Names of this package's ops, each with the invariance that the call asks for."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        space, _, name = function._overloadpacket._qualified_op_name.partition("::")
        if space == "overlap":
            invariance = (kwargs or {}).get("invariance")
            self.seen.append(f"{name} {invariance}" if invariance else name)
        return function(*args, **(kwargs or {}))


def ops_of(job) -> tuple[Any, list[str]]:
    """The job's result, and the ops of this package that it calls."""
    with SeesOps() as mode:
        return job(), mode.seen


@contextlib.contextmanager
def installed(version: str, members: dict[str, dict[str, Any]]) -> Iterator[dict[str, ModuleType]]:
    """As if a framework of this version, with these modules and their members, were installed. Other modules imported meanwhile stay."""
    made: dict[str, ModuleType] = {}
    for name in members:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            each = ".".join(parts[:end])
            made.setdefault(each, ModuleType(each)).__path__ = []
    for name, each in made.items():
        vars(each).update(members.get(name, {}))
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(made[parent], own, each)
    sys.modules.update(made)
    try:
        with mock.patch.object(metadata, "version", lambda name: version):
            yield made
    finally:
        for name in made:
            del sys.modules[name]


def changed(defaults: dict[str, Any], changes: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**{key: changes.get(key, value) for key, value in defaults.items()})


@contextlib.contextmanager
def set_to(context: Any, values: dict[str, Any]) -> Iterator[None]:
    """Attributes of the context, by dotted names, have these values."""
    with contextlib.ExitStack() as stack:
        for path, value in values.items():
            parent, _, name = path.rpartition(".")
            place = operator.attrgetter(parent)(context)
            stack.enter_context(mock.patch.object(place, name, value))
        yield


class Group:
    """As both frameworks' GroupCoordinator."""

    def __init__(self) -> None:
        self.device_group = dist.group.WORLD
        self.world_size, self.rank_in_group = dist.get_world_size(), dist.get_rank()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.as_subclass(torch.Tensor).clone()
        dist.all_reduce(tensor)
        return tensor

    def reduce_scatter_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        dist.reduce_scatter_tensor(output, input.as_subclass(torch.Tensor))


class Turned(Group):
    """A group in which ranks have each other's places."""

    def __init__(self) -> None:
        super().__init__()
        self.rank_in_group = 1 - self.rank_in_group


# --- row-parallel layers --------------------------------------------------------------------------------------


class Weight(nn.Parameter):
    """As frameworks' parameters: a subclass whose results would be of the subclass, too."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})


class Unquantized:
    def create_weights(self, layer, input_size_per_partition, output_partition_sizes, **others):
        whole = integers(sum(output_partition_sizes), layer.input_size, seed=1)
        layer.weight = Weight(my_features(whole), requires_grad=False)

    def apply(self, layer, x, bias=None):
        return functional.linear(x, layer.weight, bias)


class Quantized(Unquantized):
    """A type other than the method of layers without quantization."""


class QuantConfig:
    def get_quant_method(self, layer, prefix):
        return Quantized()


QUANTIZED = {"quant_config": QuantConfig()}
# Cases of row-parallel layers: a layer's options; keywords of a call, and with a dot settings of the framework; the result, and
# whether it is an op's. Results are sums, parts of sums, or rows of sums.
LAYERS = [
    ({}, {}, "sum", True),
    ({"bias": False}, {}, "sum", True),
    ({"input_is_parallel": False}, {}, "sum", True),
    ({"skip_bias_add": True}, {}, "sum", True),
    (QUANTIZED, {}, "sum", False),
    ({"reduce_results": False, "bias": False}, {}, "part", False),
]


class StandIn(nn.Module):
    """As both frameworks' RowParallelLinear, with what a layer of theirs has; ``ranks`` is its rank and the number of ranks."""

    def __init__(self, ranks: tuple[int, int], input_size: int, output_size: int, **given) -> None:
        super().__init__()
        self.tp_rank, self.tp_size = ranks
        self.input_size, self.output_size = input_size, output_size
        self.input_size_per_partition = input_size // self.tp_size
        self.input_is_parallel = given.get("input_is_parallel", True)
        self.skip_bias_add = given.get("skip_bias_add", False)
        self.reduce_results = given.get("reduce_results", True)
        self.quant_method = Quantized() if "quant_config" in given else Unquantized()
        self.quant_method.create_weights(self, self.input_size_per_partition, [output_size])
        bias = integers(output_size, seed=2) if given.get("bias", True) else None
        self.bias = None if bias is None else Weight(bias, requires_grad=False)
        self.left = self.bias if self.skip_bias_add else None

    def term(self, input_: torch.Tensor, product: Any = None) -> torch.Tensor:
        """This rank's term of the sum."""
        part = input_ if self.input_is_parallel else my_features(input_).contiguous()
        fused = self.bias if self.tp_rank == 0 and not self.skip_bias_add else None
        return (product or self.quant_method.apply)(self, part, fused)


def linear_names(group: Group) -> dict[str, Any]:
    """The names that both frameworks' modules of linear layers import."""
    return {
        "Parameter": nn.Parameter,
        "WEIGHT_LOADER_V2_SUPPORTED": [],
        "divide": operator.floordiv,
        "set_weight_attrs": lambda *arguments: None,
        "tensor_model_parallel_all_reduce": group.all_reduce,
        "split_tensor_along_last_dim": lambda tensor, num_partitions: tensor.chunk(
            num_partitions, -1
        ),
    }


def plug_in(failures, name: str, registered: Callable[[], Any], right: Any) -> None:
    """Nothing is registered before the variable is 1, and everything once by two calls of the plug-in."""
    plugin = getattr(overlap_torch_plugins, name)
    plugin()
    failures.expect(str(registered()) if registered() else None, name, "without the variable")
    with mock.patch.dict(os.environ, {f"OVERLAP_{name.upper()}": "1"}):
        plugin()
        plugin()
    failures.equal(registered(), right, name, "registered")
