"""Layers and styles that train in fp8: their casts, their losses beside others', and what they communicate."""

import copy
import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional

import overlap_torch
from checks import Failures, message_of
from frameworks import needs_module
from layers import GatedMlp
from meshes import OVERLAP, PYTORCH, gathered_tokens
from operands import rank_device, world_name
from overlap_torch._layers import fp8 as _fp8
from overlap_torch.nn import ColumnParallelLinear, RowParallelLinear, token_slice
from parallel_layers import Form

WIDTH, HIDDEN, TOKENS, STEPS = 32, 64, 48, 50
CLOSE = 0.01  # of the loss


class OneProcess(torch.autograd.Function):
    """A linear layer in fp8 by its definition: casts with one scale each, or one for each row that a GEMM sums over."""

    @staticmethod
    def cast(tensor: torch.Tensor, dtype: torch.dtype, by_rows: bool) -> torch.Tensor:
        """The value of the cast tensor, in float64."""
        largest = tensor.abs().amax(-1, keepdim=True) if by_rows else tensor.abs().max()
        limit = 448.0 if dtype == torch.float8_e4m3fn else 57344.0
        factor = limit / largest.double().clamp(min=1e-12)
        if by_rows:
            factor = 2.0 ** factor.log2().floor()
        factor = factor.float()
        values = (tensor.float() * factor).clamp(-limit, limit).to(dtype)
        return values.double() / factor.double()

    @staticmethod
    def forward(ctx, input, weight, by_rows):
        ctx.save_for_backward(input, weight)
        ctx.by_rows = by_rows
        cast, e4m3 = OneProcess.cast, torch.float8_e4m3fn
        return (cast(input, e4m3, by_rows) @ cast(weight, e4m3, by_rows).t()).float()

    @staticmethod
    def backward(ctx, grad):
        input, weight = ctx.saved_tensors
        cast, e4m3, by_rows = OneProcess.cast, torch.float8_e4m3fn, ctx.by_rows
        kind = e4m3 if by_rows else torch.float8_e5m2
        grad_input = cast(grad, kind, by_rows) @ cast(weight.t(), e4m3, by_rows).t()
        grad_weight = cast(grad.t(), kind, by_rows) @ cast(input.t(), e4m3, by_rows).t()
        return grad_input.float(), grad_weight.float(), None


class Model(torch.nn.Module):
    """An MLP, twice, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = torch.nn.ModuleList(GatedMlp(WIDTH, HIDDEN, False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(functional.layer_norm(x, (WIDTH,)))
        return x

    def whole(self, x: torch.Tensor, by_rows: bool) -> torch.Tensor:
        """The same in fp8, by its definition."""
        for block in self.blocks:
            y = functional.layer_norm(x, (WIDTH,))
            gate, up = (OneProcess.apply(y, one.weight, by_rows) for one in (block.gate, block.up))
            x = x + OneProcess.apply(functional.silu(gate) * up, block.down.weight, by_rows)
        return x


class Parallel(torch.nn.Module):
    """The same by this package's layers."""

    def __init__(self, model: Model, fp8: str | None, sequence: bool) -> None:
        super().__init__()
        keywords = {"group": world_name(), "sequence_parallel": sequence, "fp8": fp8}
        self.wide = torch.nn.ModuleList(
            ColumnParallelLinear.from_linear((block.gate, block.up), **keywords)
            for block in model.blocks
        )
        self.down = torch.nn.ModuleList(
            RowParallelLinear.from_linear(block.down, **keywords) for block in model.blocks
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for wide, down in zip(self.wide, self.down, strict=True):
            gate, up = wide(functional.layer_norm(x, (WIDTH,)))
            x = x + down(functional.silu(gate) * up)
        return x


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(11)
    target = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    inputs = [torch.randn(TOKENS, WIDTH, generator=generator) for _ in range(STEPS)]
    device = rank_device()
    return [(x.to(device), torch.tanh(x @ target).to(device)) for x in inputs]


def train(forward, parameters, part: slice) -> list[float]:
    """The loss of each step, over all tokens; `part`: those of this rank."""
    optimizer = torch.optim.SGD(parameters, lr=0.8)
    losses = []
    for x, y in batches():
        loss = (forward(x[part]) - y[part]).square().sum() / y.numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        if part != slice(None):
            dist.all_reduce(total)
        losses.append(total.item())
    return losses


def far(losses: list[float], right: list[float]) -> str | None:
    if not losses[-1] < 0.9 * losses[0]:
        return f"it does not learn: {losses[0]} to {losses[-1]}"
    apart = max(abs(a - b) / b for a, b in zip(losses, right, strict=True))
    return None if apart <= CLOSE else f"{apart:.4f} apart: {losses} beside {right}"


@pytest.mark.parametrize("fp8", ["tensorwise", "rowwise"])
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_fp8_layers_train_as_one_process_does(failures: Failures, fp8: str) -> None:
    model = Model().to(rank_device())
    one = copy.deepcopy(model)
    right = train(lambda x: one.whole(x, fp8 == "rowwise"), one.parameters(), slice(None))
    exact = copy.deepcopy(model)
    plain = Parallel(exact, None, False)
    unscaled = train(plain, plain.parameters(), slice(None))
    # fp8 must show: else nothing of this has been computed in it.
    failures.expect("as without fp8" if unscaled == right else None, fp8)
    for sequence in (False, True):
        parallel = Parallel(model, fp8, sequence)
        part = token_slice(TOKENS, group=world_name()) if sequence else slice(None)
        failures.expect(
            far(train(parallel, parallel.parameters(), part), right), fp8, f"sequence={sequence}"
        )
        failures.holds(f"fp8={fp8!r}", repr(parallel), fp8)


# Recipes whose weight's gradient is not in fp8, as torchao's rowwise_with_gw_hp.
E4M3, ROWS = (_fp8.Cast(torch.float8_e4m3fn, by_rows) for by_rows in (False, True))
OTHERS = {
    "one scale": _fp8.Recipe(E4M3, E4M3, E4M3, E4M3, None, None),
    "mixed": _fp8.Recipe(ROWS, ROWS, ROWS, E4M3, None, None, powers_of_two=True),
}


@mock.patch.dict(_fp8.RECIPES, OTHERS)
@pytest.mark.parametrize("fp8", ["tensorwise", "rowwise", *OTHERS])
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (3, "gloo"), (2, "nccl"))
def test_fp8_layers_have_their_gradients(failures: Failures, fp8: str) -> None:
    """Every layer and mode, of sizes that do not divide, with biases: forward and gradients beside one process."""
    device, generator = rank_device(), torch.Generator().manual_seed(3)
    tokens, width, features = 13, 20, 7 * dist.get_world_size() - 1
    for kind in ("column", "row"):
        sizes = (width, features) if kind == "column" else (features, width)
        linear = torch.nn.Linear(*sizes)
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        linear.to(device)
        x, upstream = (torch.randn(tokens, n, generator=generator).to(device) for n in sizes)
        weight, bias = linear.weight.detach().double(), linear.bias.detach().double()
        of_weight, of_bias = upstream.double().t() @ x.double(), upstream.double().sum(0)
        for sequence in (False, True):
            form, where = Form(kind, sequence), (fp8, kind, f"sequence={sequence}")
            layer = form.layer(torch.nn.ModuleList([linear]), group=world_name(), fp8=fp8)
            x_in = form.cut_input(x).clone().requires_grad_()
            (output,) = form.call(layer, x_in, tokens)
            output.backward(form.cut_output(upstream))
            own = {name: one.grad.to_local() for name, one in layer.named_parameters()}
            results = {
                "output": (output, form.cut_output(x.double() @ weight.t() + bias)),
                "input": (x_in.grad, form.cut_input(upstream.double() @ weight)),
                "weight": (own["weight"], form.cut_parameter("weight", of_weight)),
                "bias": (own["bias"], form.cut_parameter("bias", of_bias)),
            }
            for name, (got, right) in results.items():
                same = got.shape == right.shape
                failures.expect(None if same else f"{got.shape}, not {right.shape}", *where, name)
                if not same or right.numel() == 0:
                    continue
                # A cast to e4m3 errs by up to 1/16, one to e5m2 by up to 1/8; on average by about half of it.
                error = ((got.double() - right).norm() / right.norm()).item()
                exact = name == "bias" or (name == "weight" and fp8 in OTHERS and not sequence)
                limit = 1e-5 if exact else 0.09
                failures.expect(None if error < limit else f"error {error}", *where, name)
                least = 0.0 if exact else 1e-3  # more than float32's
                failures.expect(None if error >= least else f"not in fp8: {error}", *where, name)


@pytest.mark.ranks((2, "gloo"))
def test_fp8_casts_an_input_once_for_several_weights(failures: Failures) -> None:
    """An input is cast once for q, k and v, forward; and one gather brings it."""
    layer = ColumnParallelLinear(
        16, [8, 4, 4], group=world_name(), sequence_parallel=True, fp8="rowwise"
    )
    layer.to(rank_device())
    x = torch.randn(6, 16, device=rank_device())
    with mock.patch.object(_fp8, "scaled", wraps=_fp8.scaled) as casts:
        layer(x)
    shapes = [tuple(call.args[0].shape) for call in casts.call_args_list]
    failures.equal(shapes.count((6, 16)), 1, "casts")
    failures.holds("float8_e4m3fn row_wise to float32", str(overlap_torch.report()), "report")


@pytest.mark.ranks((2, "gloo"))
def test_fp8_names_of_recipes_are_checked(failures: Failures) -> None:
    for kind in (ColumnParallelLinear, RowParallelLinear):
        said = message_of(kind, 8, 8, group=world_name(), fp8="blockwise", device="meta")
        failures.says(said, ("'blockwise'", "'tensorwise'", "'rowwise'"), kind.__name__)
    layer = ColumnParallelLinear(8, 8, group=world_name(), fp8="rowwise")
    state = layer.state_dict()
    other = ColumnParallelLinear(8, 8, group=world_name())
    other.load_state_dict(state)  # parameters are the same
    same = torch.equal(other.weight.to_local(), layer.weight.to_local())
    failures.expect(None if same else "other weights", "state_dict")
    copied = copy.deepcopy(layer)
    failures.equal(copied.fp8, "rowwise", "deepcopy")


# --- torchao --------------------------------------------------------------------------------------------------


def with_torchao(model: Model, config, ours: bool) -> torch.nn.Module:
    """Float8Linear layers with styles, tokens cut outside of the blocks."""
    from torchao.float8.float8_linear import Float8Linear

    model = copy.deepcopy(model).to(rank_device())
    prepare, column, row = OVERLAP if ours else PYTORCH
    mesh = init_device_mesh(rank_device().type, (dist.get_world_size(),))
    for block in model.blocks:
        for name in ("gate", "up", "down"):
            setattr(block, name, Float8Linear.from_float(getattr(block, name), config))
        styles = {
            "": gathered_tokens(prepare, use_local_output=ours),
            "gate": column(),
            "up": column(),
            "down": row(output_layouts=Shard(0)),
        }
        parallelize_module(block, mesh, styles)
    return model


@needs_module("torchao")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_fp8_styles_take_torchao_layers(failures: Failures, recipe: str) -> None:
    from torchao.float8.config import Float8LinearConfig

    config = Float8LinearConfig.from_recipe_name(recipe)
    if rank_device().type == "cpu":
        config = dataclasses.replace(config, emulate=True)
    model = Model()
    part = token_slice(TOKENS, group=world_name())
    ours = with_torchao(model, config, True)
    kinds = {type(module).__name__ for module in ours.modules()}
    failures.holds("OverlapColwiseLinear", kinds, recipe)
    losses = train(ours, ours.parameters(), part)
    if recipe == "tensorwise":  # PyTorch's styles gather scales of rows as if they were one
        theirs = with_torchao(model, config, False)
        right = train(theirs, theirs.parameters(), part)
    else:
        one = copy.deepcopy(model).to(rank_device())
        right = train(lambda x: one.whole(x, True), one.parameters(), slice(None))
    failures.expect(far(losses, right), recipe)
