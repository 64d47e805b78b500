"""Layers that are made under a default device or dtype, or by accelerate's `init_empty_weights`: what they are given holds."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist

from checks import Failures
from frameworks import needs_module
from layers import integers
from operands import difference, rank_device
from overlap_torch.nn import ColumnParallelLinear, RowParallelLinear

KINDS = {
    "column": lambda **options: ColumnParallelLinear(6, 8, **options),
    "columns": lambda **options: ColumnParallelLinear(6, [8, 4], [True, False], **options),
    "row": lambda **options: RowParallelLinear(6, 8, **options),
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def drawn(kind: str, **options: object) -> list[torch.Tensor]:
    torch.manual_seed(1)
    layer = KINDS[kind](**options)
    return [parameter.to_local().detach() for parameter in layer.parameters()]


@contextlib.contextmanager
def defaults(device: str | None, dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with contextlib.nullcontext() if device is None else torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_nn_layers_take_what_they_are_given(failures: Failures, kind: str) -> None:
    """Given a device and a dtype, a layer has the bits that it has without defaults; else it takes the defaults."""
    own = rank_device()
    plain = {dtype: drawn(kind, device=own, dtype=dtype) for dtype in DTYPES}
    # Not drawn in another dtype: a wider one has digits that a narrower one has not.
    for dtype in DTYPES:
        for parameter, narrow in itertools.product(plain[dtype], DTYPES):
            if torch.finfo(narrow).eps > torch.finfo(dtype).eps:
                same = torch.equal(parameter, parameter.to(narrow).to(dtype))
                failures.expect(f"has {narrow}'s digits" if same else None, kind, dtype)
    devices = {None, "meta", "cpu", own.type}
    for device, dtype, given_device, given in itertools.product(
        devices, DTYPES, (None, own), (None, *DTYPES)
    ):
        where = (kind, "defaults", device, dtype, "given", given_device, given)
        with defaults(device, dtype):
            parameters = drawn(kind, device=given_device, dtype=given)
        place = given_device or torch.device(device or "cpu")
        for parameter, right in zip(parameters, plain[given or dtype], strict=True):
            if place.type == own.type:
                failures.expect(difference(parameter, right), *where)
            else:
                alike = (parameter.device.type, parameter.dtype) == (place.type, right.dtype)
                failures.expect(None if alike else f"{parameter.device} {parameter.dtype}", *where)


@needs_module("accelerate")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_nn_layers_are_made_empty(failures: Failures, kind: str) -> None:
    from accelerate import init_empty_weights

    own = rank_device()
    with init_empty_weights():
        layer = KINDS[kind](device=own)
        copied = ColumnParallelLinear.from_linear(torch.nn.Linear(6, 8))
    for parameter in (*layer.parameters(), *copied.parameters()):
        failures.expect(None if parameter.is_meta else f"on {parameter.device}", kind)
    layer.to_empty(device=own)
    torch.manual_seed(1)
    layer.reset_parameters()
    for parameter, right in zip(layer.parameters(), drawn(kind, device=own), strict=True):
        failures.expect(difference(parameter.to_local().detach(), right), kind)
    features = 6 if kind != "row" else 6 // dist.get_world_size()
    layer(integers(2, features, seed=3))
