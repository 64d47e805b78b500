"""Weights of classes of their own, such as quantized ones: PyTorch computes with them, and the report names them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import overlap_torch
from checks import Failures
from frameworks import needs
from layers import chain, integer_linear, integers, my_tokens
from meshes import OVERLAP, mesh
from operands import difference
from overlap_torch.nn import ColumnParallelLinear, RowParallelLinear


class Halved(torch.Tensor):
    """Twice what it holds: a DTensor, or this rank's part."""

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Halved:
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, dtype=held.dtype, device=held.device, requires_grad=False
        )

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.linear:
            input, weight, bias = (*args, *(kwargs or {}).values(), None)[:3]
            return function(input, weight.held * 2, bias)
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].held)
        raise NotImplementedError(f"{function} of a Halved")


def whole_model() -> torch.nn.Module:
    return chain(up=integer_linear(6, 8, True), down=integer_linear(8, 6, True))


def model(kind: str, layout: Placement) -> torch.nn.Module:
    whole = whole_model()
    if kind == "layers":
        sequence = layout.is_shard()
        whole.up = ColumnParallelLinear.from_linear(whole.up, sequence_parallel=sequence)
        whole.down = RowParallelLinear.from_linear(whole.down, sequence_parallel=sequence)
        return whole
    prepare, column, row = OVERLAP
    plan = {"up": column(input_layouts=layout), "down": row(output_layouts=layout)}
    if kind == "prepared":
        layouts = {"input_layouts": layout, "desired_input_layouts": Replicate()}
        plan |= {"up": column(), "": prepare(use_local_output=True, **layouts)}
    return parallelize_module(whole, mesh(), plan)


@pytest.mark.parametrize("how", ["of DTensors", "of this rank's part"])
@pytest.mark.parametrize("kind", ["styles", "prepared", "layers"])
@pytest.mark.ranks((2, "gloo"), (3, "gloo"), (2, "nccl"))
def test_foreign_weights_run_by_pytorch(failures: Failures, kind: str, how: str) -> None:
    for layout in (Replicate(), Shard(0)):
        given = integers(6, 6, seed=3)
        right = whole_model()(given).detach()
        mine, right = (my_tokens(part) if layout.is_shard() else part for part in (given, right))
        quantized = model(kind, layout)
        for layer in (quantized.up, quantized.down):
            half = layer.weight.detach() / 2
            held = Halved(half if how == "of DTensors" else half.to_local())
            layer.weight = torch.nn.Parameter(held, requires_grad=False)
        with torch.no_grad():
            failures.expect(difference(quantized(mine), right), kind, how, layout)
        rows = {row["layer"]: row["why"] for row in overlap_torch.report(quantized)}
        for name in ("up", "down"):
            failures.holds("Halved", rows.get(name, ""), kind, how, layout, name)


@needs("torchao", ("0.18",), "torchao")
@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
@pytest.mark.ranks((2, "gloo"))
def test_foreign_weights_of_torchao(failures: Failures, name: str) -> None:
    from torchao import quantization

    config = getattr(quantization, name)()
    torch.manual_seed(0)
    whole = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
    input = torch.randn(4, 32)
    results = []
    for kind in ("styles", "layers"):
        cut = copy.deepcopy(whole)
        if kind == "styles":
            cut = parallelize_module(cut, mesh(), {"0": OVERLAP[1](), "1": OVERLAP[2]()})
        else:
            cut[0] = ColumnParallelLinear.from_linear(whole[0])
            cut[1] = RowParallelLinear.from_linear(whole[1])
        with torch.no_grad():
            quantization.quantize_(cut, config, filter_fn=lambda each, _: hasattr(each, "weight"))
            results.append(cut(input))
    once = copy.deepcopy(whole)
    quantization.quantize_(once, config)
    failures.near(results[0], once(input), "the whole model's", name, atol=0.05)
    failures.expect(difference(results[1], results[0]), name, "layers")
