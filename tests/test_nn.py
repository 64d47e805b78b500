"""The layer: `torch.nn.Linear` over a group, bit for bit on integer data."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from checks import Failures
from operands import difference, rank_device, subgroup, world_name
from overlap_torch.nn import RowParallelLinear


def integers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values in -2 ... 2, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(rank_device(), dtype)


def integer_linear(
    in_features: int, out_features: int, bias: bool, dtype: torch.dtype = torch.float32
) -> torch.nn.Linear:
    linear = torch.nn.Linear(in_features, out_features, bias, device=rank_device(), dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(integers(out_features, in_features, seed=1))
        if bias:
            linear.bias.copy_(integers(out_features, seed=2))
    return linear


def my_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of the features, in the last dim."""
    return tensor.tensor_split(dist.get_world_size(), -1)[dist.get_rank()]


def check_layer(parallel: bool, dtype: torch.dtype) -> tuple[int, list[str]]:
    """Output and gradients against nn.Linear on the whole, replicated operands."""
    failures = Failures()
    # Features that divide, that do not, fewer than ranks, none.
    for in_features, out_features in ((12, 7), (13, 5), (2, 3), (24, 1), (0, 4)):
        for bias in (True, False):
            where = (in_features, out_features, "bias", bias, "parallel", parallel)
            linear = integer_linear(in_features, out_features, bias, dtype)
            layer = RowParallelLinear.from_linear(linear, input_is_parallel=parallel)
            whole = integers(2, 3, in_features, seed=3, dtype=dtype)
            reference_input = whole.clone().requires_grad_()
            mine = (my_part(whole) if parallel else whole).clone().requires_grad_()
            expected = linear(reference_input)
            output = layer(mine)
            failures.expect(difference(output.detach(), expected.detach()), *where)
            gradient = integers(2, 3, out_features, seed=4, dtype=dtype)
            expected.backward(gradient)
            output.backward(gradient)
            right = my_part(reference_input.grad) if parallel else reference_input.grad
            failures.expect(difference(mine.grad, right), "input's gradient", *where)
            right = my_part(linear.weight.grad)
            failures.expect(difference(layer.weight.grad, right), "weight's gradient", *where)
            if bias:
                right = linear.bias.grad
                failures.expect(difference(layer.bias.grad, right), "bias's gradient", *where)
    return failures.result()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parallel", [True, False], ids=["parallel", "replicated"])
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (3, "gloo"), (1, "nccl"), (2, "nccl"))
def test_nn_row_parallel_linear_is_linear(ranks, parallel, dtype):
    ranks.expect_no_failures(check_layer, parallel, dtype)


def check_initialisation() -> tuple[int, list[str]]:
    """Parameters of a new layer: weights differ between ranks, biases do not, and all lie in Linear's bounds."""
    failures = Failures()
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    layer = RowParallelLinear(60 * world, 40, device=rank_device())
    bound = (60 * world) ** -0.5
    for name, parameter in layer.named_parameters():
        inside = parameter.detach().abs().max().item() <= bound
        failures.expect(None if inside else "beyond Linear's bound", name)
        # Of that many draws from a uniform distribution some come near both ends.
        low, high = parameter.min().item(), parameter.max().item()
        spread = low < -0.5 * bound and high > 0.5 * bound
        failures.expect(None if spread else f"only {low} to {high}", name)
    shape = tuple(layer.weight.shape)
    failures.expect(None if shape == (40, 60) else f"shape {shape}", "weight")
    weights = [torch.empty_like(layer.weight.data) for _ in range(world)]
    biases = [torch.empty_like(layer.bias.data) for _ in range(world)]
    dist.all_gather(weights, layer.weight.data)
    dist.all_gather(biases, layer.bias.data)
    for peer in range(world):
        failures.expect(difference(biases[peer], layer.bias.data), "bias of rank", peer)
        alike = peer != rank and torch.equal(weights[peer], layer.weight.data)
        failures.expect("two ranks have the same weight" if alike else None, peer)
    return failures.result()


@pytest.mark.ranks((2, "gloo"), (3, "gloo"), (2, "nccl"))
def test_nn_row_parallel_linear_initialises_as_linear(ranks):
    ranks.expect_no_failures(check_initialisation)


def check_module() -> tuple[int, list[str]]:
    """What modules do: state dict, dtype, eval, no bias, groups, autocast, compile."""
    failures = Failures()
    world = dist.get_world_size()
    linear = integer_linear(12, 7, True)
    layer = RowParallelLinear.from_linear(linear)
    whole = integers(5, 12, seed=3)
    expected = linear(whole).detach()

    stored = io.BytesIO()
    torch.save(layer.state_dict(), stored)
    stored.seek(0)
    other = RowParallelLinear(12, 7, device=rank_device())
    other.load_state_dict(torch.load(stored))
    failures.expect(difference(other(my_part(whole)).detach(), expected), "state dict")

    failures.expect(
        difference(layer.double()(my_part(whole).double()).detach(), expected.double()), "double"
    )
    layer.float()
    with torch.no_grad():
        failures.expect(difference(layer.eval()(my_part(whole)), expected), "eval")

    with torch.autocast(rank_device().type, torch.bfloat16):
        output = layer(my_part(whole))
        right = functional.linear(whole, linear.weight, linear.bias)
    failures.expect(difference(output.detach(), right.detach()), "autocast")

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    failures.expect(difference(compiled(my_part(whole)).detach(), expected), "compiled")

    second = subgroup(tuple(range(world)), "second")
    for group in (None, world_name(), second):
        layer = RowParallelLinear.from_linear(linear, group=group)
        failures.expect(difference(layer(my_part(whole)).detach(), expected), "group", group)

    names = sorted(name for name, _ in RowParallelLinear(12, 7, bias=False).named_parameters())
    failures.expect(None if names == ["weight"] else f"parameters {names}", "without a bias")
    return failures.result()


@pytest.mark.ranks((2, "gloo"), (3, "gloo"), (2, "nccl"))
def test_nn_row_parallel_linear_is_a_module(ranks):
    ranks.expect_no_failures(check_module)


def layer_errors() -> list[str]:
    messages = []
    layer = RowParallelLinear(12, 7, device=rank_device())
    for features in (5, 12):
        try:
            layer(torch.ones(3, features, device=rank_device()))
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    return messages


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_nn_row_parallel_linear_names_a_wrong_input(ranks):
    for messages in ranks.run(layer_errors):
        for features, message in zip((5, 12), messages, strict=True):
            assert f"(3, {features})" in message and "6" in message, message


def learn(steps: int) -> list[float]:
    """Losses of a small training run, the layer and a plain Linear side by side: (layer, linear) by turns."""
    linear = integer_linear(8, 4, True)
    layer = RowParallelLinear.from_linear(linear)
    inputs, targets = integers(16, 8, seed=5), integers(16, 4, seed=6)
    optimizers = [torch.optim.SGD(module.parameters(), lr=2.0**-9) for module in (layer, linear)]
    losses = []
    for _ in range(steps):
        for module, optimizer, given in zip(
            (layer, linear), optimizers, (my_part(inputs), inputs), strict=True
        ):
            optimizer.zero_grad()
            loss = (module(given) - targets).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_nn_row_parallel_linear_trains_as_linear(ranks):
    results = ranks.run(learn, 20)
    assert results[0] == results[1]
    layer, linear = results[0][0::2], results[0][1::2]
    assert layer == pytest.approx(linear, rel=1e-4)
    assert layer[-1] < 0.5 * layer[0]
