"""The parallel layers: `torch.nn.Linear` over a group, bit for bit on integer data."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional

from checks import Failures, message_of
from layers import integer_linear, integers, my_features, my_part, my_tokens, ops_called
from operands import difference, rank_device, subgroup, world_name
from overlap_torch.nn import ColumnParallelLinear, RowParallelLinear, token_slice

# Features that divide, that do not, fewer than ranks, one, none.
FEATURES = ((12, 8), (13, 5), (2, 3), (24, 1), (0, 4), (4, 0))
# Tokens that divide, that do not, fewer than ranks, none.
TOKENS = (12, 7, 1, 0)


def check_gradients(
    failures: Failures, layer: torch.nn.Module, linear: torch.nn.Linear, *where: object
) -> None:
    """The layer's parameter gradients are its parts of the whole layer's."""
    dims = {"weight": 0, "bias": 0} if isinstance(layer, ColumnParallelLinear) else {"weight": 1}
    for name, parameter in linear.named_parameters():
        right = my_part(parameter.grad, dims[name]) if name in dims else parameter.grad
        placement = Shard(dims[name]) if name in dims else Replicate()
        own = getattr(layer, name).grad
        problem = "has none" if own is None else difference(own.to_local(), right)
        failures.expect(problem, name, "gradient", *where)
        alike = own.shape == parameter.shape and own.placements == (placement,)
        failures.expect(None if alike else f"{own.shape}, {own.placements}", name, *where)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parallel", [True, False], ids=["parallel", "replicated"])
@pytest.mark.parametrize("sequence", [False, True], ids=["all", "sequence"])
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (3, "gloo"), (1, "nccl"), (2, "nccl"))
def test_nn_row_parallel_linear_is_linear(
    failures: Failures, sequence: bool, parallel: bool, dtype: torch.dtype
) -> None:
    """Output and gradients of the row layer against nn.Linear on the whole, replicated operands."""
    for (in_features, out_features), tokens, bias in itertools.product(
        FEATURES, TOKENS if sequence else TOKENS[:1], (True, False)
    ):
        where = (in_features, out_features, "bias", bias, "tokens", tokens)
        linear = integer_linear(in_features, out_features, bias, dtype)
        layer = RowParallelLinear.from_linear(
            linear, sequence_parallel=sequence, input_is_parallel=parallel
        )
        whole = integers(tokens, 2, in_features, seed=3, dtype=dtype).requires_grad_()
        mine = (my_features(whole) if parallel else whole).detach().clone().requires_grad_()
        cut = my_tokens if sequence else torch.Tensor.detach
        expected, output = linear(whole), layer(mine)
        failures.expect(difference(output.detach(), cut(expected.detach())), *where)
        gradient = integers(tokens, 2, out_features, seed=4, dtype=dtype)
        expected.backward(gradient)
        output.backward(cut(gradient))
        right = my_features(whole.grad) if parallel else whole.grad
        failures.expect(difference(mine.grad, right), "input's gradient", *where)
        check_gradients(failures, layer, linear, *where)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gather", [False, True], ids=["parts", "gathered"])
@pytest.mark.parametrize("sequence", [False, True], ids=["all", "sequence"])
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (3, "gloo"), (1, "nccl"), (2, "nccl"))
def test_nn_column_parallel_linear_is_linear(
    failures: Failures, sequence: bool, gather: bool, dtype: torch.dtype
) -> None:
    """Output and gradients of the column layer against nn.Linear on the whole, replicated operands."""
    for (in_features, out_features), tokens, bias in itertools.product(
        FEATURES, TOKENS if sequence else TOKENS[:1], (True, False)
    ):
        where = (in_features, out_features, "bias", bias, "tokens", tokens)
        linear = integer_linear(in_features, out_features, bias, dtype)
        layer = ColumnParallelLinear.from_linear(
            linear, sequence_parallel=sequence, gather_output=gather
        )
        whole = integers(tokens, 2, in_features, seed=3, dtype=dtype).requires_grad_()
        cut = my_tokens if sequence else torch.Tensor.detach
        mine = cut(whole).detach().clone().requires_grad_()
        own = torch.Tensor.detach if gather else my_features
        expected, output = linear(whole), layer(mine, tokens) if sequence else layer(mine)
        failures.expect(difference(output.detach(), own(expected.detach())), *where)
        gradient = integers(tokens, 2, out_features, seed=4, dtype=dtype)
        expected.backward(gradient)
        output.backward(own(gradient))
        failures.expect(difference(mine.grad, cut(whole.grad)), "input's gradient", *where)
        check_gradients(failures, layer, linear, *where)


@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (3, "gloo"), (2, "nccl"))
def test_nn_column_parallel_linear_takes_equal_shards_without_tokens(failures: Failures) -> None:
    """Without `tokens` every rank has as many; and token_slice is the cut of any number."""
    linear = integer_linear(6, 8, True)
    layer = ColumnParallelLinear.from_linear(linear, sequence_parallel=True)
    whole = integers(3 * dist.get_world_size(), 6, seed=3)
    output = layer(my_tokens(whole))
    failures.expect(difference(output.detach(), my_features(linear(whole).detach())), "tokens=None")
    for tokens in (0, 1, 2, 3, 7, 12):
        rows = torch.arange(tokens)
        failures.expect(difference(rows[token_slice(tokens)], my_tokens(rows)), tokens)


class Mlp(torch.nn.Module):
    def __init__(self, up: torch.nn.Linear, down: torch.nn.Linear, sequence: bool) -> None:
        super().__init__()
        self.sequence = sequence
        self.up = ColumnParallelLinear.from_linear(up, sequence_parallel=sequence)
        self.down = RowParallelLinear.from_linear(down, sequence_parallel=sequence)

    def forward(self, input: torch.Tensor, tokens: int) -> torch.Tensor:
        hidden = self.up(input, tokens) if self.sequence else self.up(input)
        return self.down(functional.relu(hidden))


@pytest.mark.parametrize("sequence", [False, True], ids=["all", "sequence"])
@pytest.mark.ranks((2, "gloo"), (2, "nccl"), long=[(3, "gloo")])
def test_nn_pair_of_layers_is_an_mlp(failures: Failures, sequence: bool) -> None:
    """The pair of layers, eager and compiled with symbolic sizes, by the same graph for several numbers of tokens."""
    up, down = integer_linear(6, 13, True), integer_linear(13, 7, True)
    cut = my_tokens if sequence else torch.Tensor.detach
    torch._dynamo.reset()
    mlp = Mlp(up, down, sequence)
    compiled = torch.compile(mlp, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens, run in itertools.product((12, 7, 5), (mlp, compiled)):
        for parameter in (*mlp.parameters(), *up.parameters(), *down.parameters()):
            parameter.grad = None
        whole = integers(tokens, 6, seed=3).requires_grad_()
        mine = cut(whole).detach().clone().requires_grad_()
        expected, output = down(functional.relu(up(whole))), run(mine, tokens)
        where = (tokens, "eager" if run is mlp else "compiled")
        failures.expect(difference(output.detach(), cut(expected.detach())), *where)
        gradient = integers(tokens, 7, seed=4)
        expected.backward(gradient)
        output.backward(cut(gradient))
        failures.expect(difference(mine.grad, cut(whole.grad)), "input's gradient", *where)
        check_gradients(failures, mlp.up, up, "up", *where)
        check_gradients(failures, mlp.down, down, "down", *where)


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_nn_layers_run_the_ops(failures: Failures) -> None:
    """The ops that run, forward and backward: results alone would not show that nothing overlaps."""
    for kind, sequence, forward, backward in (
        (ColumnParallelLinear, False, set(), {"gemm_allreduce"}),
        (ColumnParallelLinear, True, {"allgather_gemm"}, {"gemm_reducescatter"}),
        (RowParallelLinear, False, {"gemm_allreduce"}, set()),
        (RowParallelLinear, True, {"gemm_reducescatter"}, {"allgather_gemm"}),
    ):
        layer = kind.from_linear(integer_linear(6, 12, True), sequence_parallel=sequence)
        input = integers(6, 6, seed=3)
        input = my_features(input) if kind is RowParallelLinear else input
        input.requires_grad_()
        outputs = []
        called = ops_called(lambda: outputs.append(layer(input).sum()))  # noqa: B023, called at once
        failures.expect(None if called == forward else f"ran {called}", kind, "forward", sequence)
        called = ops_called(outputs[0].backward)
        failures.expect(None if called == backward else f"ran {called}", kind, "backward", sequence)


@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (2, "nccl"))
def test_nn_layers_give_gradients_to_those_that_ask(failures: Failures) -> None:
    """Gradients come out for those that ask, whoever else asks."""
    kinds = (ColumnParallelLinear, RowParallelLinear)
    for kind, sequence, needs in itertools.product(
        kinds, (False, True), itertools.product((False, True), repeat=3)
    ):
        linear = integer_linear(6, 8, True)
        column = kind is ColumnParallelLinear
        layer = kind.from_linear(linear, sequence_parallel=sequence)
        whole = integers(6, 6, seed=3)
        mine = whole if column else my_features(whole)
        mine = (my_tokens(mine) if sequence and column else mine).detach().clone()
        tensors = {"input": mine, "weight": layer.weight, "bias": layer.bias}
        for tensor, needed in zip(tensors.values(), needs, strict=True):
            tensor.requires_grad_(needed)
        output = layer(mine, 6) if sequence and column else layer(mine)
        if any(needs):
            output.sum().backward()
        for (name, tensor), needed in zip(tensors.items(), needs, strict=True):
            wrong = (tensor.grad is not None) != needed
            failures.expect(
                f"gradient of {name}: {tensor.grad}" if wrong else None, kind, sequence, needs
            )


@pytest.mark.ranks((2, "gloo"), (2, "nccl"), long=[(3, "gloo")])
def test_nn_layers_are_modules(failures: Failures) -> None:
    """The behaviour of modules: dtype, eval, no bias, groups, autocast, compile."""
    world = dist.get_world_size()
    linear = integer_linear(12, 7, True)
    whole = integers(5, 12, seed=3)
    expected = linear(whole).detach()
    second = subgroup(tuple(range(world)), "second")
    for kind in (RowParallelLinear, ColumnParallelLinear):
        column = kind is ColumnParallelLinear
        mine = whole if column else my_features(whole)
        own = my_features if column else torch.Tensor.detach
        right = own(expected)
        layer = kind.from_linear(linear)
        output = layer.double()(mine.double()).detach()
        failures.expect(difference(output, right.double()), kind, "double")
        layer.float()
        with torch.no_grad():
            failures.expect(difference(layer.eval()(mine), right), kind, "eval")

        with torch.autocast(rank_device().type, torch.bfloat16):
            output = layer(mine)
            cast = own(functional.linear(whole, linear.weight, linear.bias).detach())
        failures.expect(difference(output.detach(), cast), kind, "autocast")
        output.sum().backward()
        failures.expect(
            None if layer.weight.grad.dtype == torch.float32 else "dtype", kind, "autocast"
        )

        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        failures.expect(difference(compiled(mine).detach(), right), kind, "compiled")
        with torch.autocast(rank_device().type, torch.bfloat16):
            failures.expect(difference(compiled(mine).detach(), cast), kind, "compiled autocast")

        for group in (None, world_name(), second):
            layer = kind.from_linear(linear, group=group)
            failures.expect(difference(layer(mine).detach(), right), kind, "group", group)

        names = sorted(name for name, _ in kind(12, 7, bias=False).named_parameters())
        failures.expect(
            None if names == ["weight"] else f"parameters {names}", kind, "without a bias"
        )


def layer_errors() -> dict[str, str]:
    device = rank_device()
    row, column = (
        RowParallelLinear(12, 7, device=device),
        ColumnParallelLinear(12, 7, device=device),
    )
    sequence = ColumnParallelLinear(12, 7, sequence_parallel=True, device=device)
    messages = {f"features {n}": message_of(row, torch.ones(3, n, device=device)) for n in (5, 12)}
    messages["column features"] = message_of(column, torch.ones(3, 6, device=device))
    messages["tokens"] = message_of(sequence, torch.ones(3, 12, device=device), 17)
    messages["needless tokens"] = message_of(column, torch.ones(3, 12, device=device), 6)
    messages["no tokens"] = message_of(sequence, torch.ones(12, device=device))
    return messages


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_nn_layers_name_what_is_wrong(ranks):
    for rank, messages in enumerate(ranks.run(layer_errors)):
        assert "(3, 5)" in messages["features 5"] and " 6 " in messages["features 5"]
        assert "(3, 12)" in messages["features 12"] and " 6 " in messages["features 12"]
        assert "(3, 6)" in messages["column features"] and " 12 " in messages["column features"]
        assert "17" in messages["tokens"] and f"holds {9 - rank}" in messages["tokens"]
        assert "sequence_parallel" in messages["needless tokens"]
        assert "tokens" in messages["no tokens"]
