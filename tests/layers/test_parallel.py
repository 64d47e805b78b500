"""The styles for parallelize_module: what the unsharded model computes, bit for bit on integer data."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import overlap_torch
from checks import Failures
from layers import integer_linear, integers, ops_of_a_step
from meshes import check_parameter_gradients, cut, gathered_tokens, mesh, whole_of
from operands import difference, rank_device
from overlap_torch.nn import ColumnParallelLinear, RowParallelLinear
from overlap_torch.parallel import OverlapColwiseParallel, OverlapRowwiseParallel

STYLES = (OverlapColwiseParallel, OverlapRowwiseParallel)
LAYOUTS = (Replicate(), Shard(0), Shard(1), Shard(-1))


def check_layer(
    failures: Failures,
    style: type,
    shape: tuple[int, ...],
    given: Placement,
    wanted: Placement,
    use_local_output: bool,
    distributed: bool,
    compiled: bool = False,
) -> None:
    """One Linear, one call: output, gradients and their placements."""
    in_features, out_features, *leading = shape
    where = (style.__name__, shape, given, "to", wanted, use_local_output, distributed)
    whole = integer_linear(in_features, out_features, True)
    how = style(input_layouts=given, output_layouts=wanted, use_local_output=use_local_output)
    layer = parallelize_module(copy.deepcopy(whole), mesh(), how)
    input = integers(*leading, in_features, seed=3).requires_grad_()
    expected = whole(input)
    gradient = integers(*leading, out_features, seed=4)
    expected.backward(gradient)

    mine = cut(input, given, distributed).clone().requires_grad_()
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    output = run(mine)
    placements = cut(expected, wanted, True).placements
    if use_local_output:
        failures.equal(type(output), torch.Tensor, *where)
        failures.expect(difference(output, cut(expected, wanted)), "output", *where)
    else:
        failures.equal(output.placements, placements, *where)
        failures.expect(difference(output.full_tensor(), expected), *where)
    output.backward(cut(gradient, wanted, not use_local_output))
    right = input.grad if distributed else cut(input.grad, given)
    failures.expect(difference(whole_of(mine.grad), right), "gradient of the input", *where)
    check_parameter_gradients(failures, layer, whole, *where)
    for name, parameter in layer.named_parameters():
        # Where DTensor adds the bias to features that are sharded it chooses the gradient's placement.
        if placements != (Shard(len(leading)),) or style is OverlapColwiseParallel:
            same = parameter.grad.placements == parameter.placements
            problem = None if same else f"gradient has placements {parameter.grad.placements}"
            failures.expect(problem, name, *where)


# Sizes that divide by 2 and 3, and sizes that do not; two to four dims. Two dims are checked with local outputs.
SHAPES = [(12, 6, 6, 12), (7, 5, 5, 7), (7, 5, 11), (12, 6, 2, 6, 12), (7, 5, 2, 5, 3)]


@pytest.mark.parametrize(
    ("shape", "use_local_output"),
    [(shape, local) for shape in SHAPES for local in (True, False) if len(shape) > 3 or local],
    ids=str,
)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (3, "gloo"), (2, "nccl"))
def test_parallel_layer_is_linear_in_every_layout(
    failures: Failures, style: type, use_local_output: bool, shape: tuple[int, ...]
) -> None:
    world = dist.get_world_size()
    # The last two of four dims that rows have, counted from either end.
    layouts = LAYOUTS if len(shape) < 5 else (Replicate(), Shard(2), Shard(-2), Shard(1))
    for given, wanted, distributed in itertools.product(layouts, layouts, (False, True)):
        sizes = (*shape[2:], shape[0])
        even = given.is_replicate() or sizes[given.dim] % world == 0
        if distributed or even:  # a tensor's sharded dim must be the same on every rank
            check_layer(failures, style, shape, given, wanted, use_local_output, distributed)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.ranks((2, "nccl"), long=[(2, "gloo")])
def test_parallel_layer_compiles_to_one_graph(failures: Failures, style: type) -> None:
    for given, wanted, distributed in itertools.product(
        (Replicate(), Shard(1)), (Replicate(), Shard(1), Shard(-1)), (False, True)
    ):
        torch._dynamo.reset()
        local = not distributed
        shape = (12, 6, 3, 12) if local else (7, 5, 3, 5)
        check_layer(failures, style, shape, given, wanted, local, distributed, compiled=True)


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_parallel_layer_runs_the_ops(failures: Failures) -> None:
    """The ops that run, forward and backward: results alone would not show that nothing overlaps."""
    colwise, rowwise = STYLES
    for style, layouts, distributed, forward, backward in (
        (colwise, {}, False, set(), {"gemm_allreduce"}),
        (colwise, {"input_layouts": Shard(1)}, False, {"allgather_gemm"}, {"gemm_reducescatter"}),
        (colwise, {"input_layouts": Shard(1)}, True, {"allgather_gemm"}, {"gemm_reducescatter"}),
        (colwise, {}, True, set(), set()),
        (rowwise, {}, False, {"gemm_allreduce"}, set()),
        (rowwise, {"input_layouts": Replicate()}, True, {"gemm_allreduce"}, set()),
        (rowwise, {"output_layouts": Shard(1)}, False, {"gemm_reducescatter"}, {"allgather_gemm"}),
        (rowwise, {"output_layouts": Shard(-1)}, False, set(), set()),
    ):
        layer = parallelize_module(integer_linear(6, 12, True), mesh(), style(**layouts))
        given = layouts.get("input_layouts", Replicate() if style is colwise else Shard(-1))
        input = cut(integers(2, 6, 6, seed=3), given, distributed).requires_grad_()
        _, *called = ops_of_a_step(lambda: layer(input))  # noqa: B023, called at once
        failures.equal(called, [forward, backward], style, layouts)


@pytest.mark.ranks((2, "gloo"), (3, "gloo"), (2, "nccl"))
def test_parallel_styles_replace_plain_linears_only(failures: Failures) -> None:
    """The modules that are replaced, those that the parent class handles, and the fate of frozen,
    absent and stored parameters."""

    class Scaled(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    for style in STYLES:
        column = style is OverlapColwiseParallel
        layer = parallelize_module(integer_linear(12, 6, True), mesh(), style())
        failures.expect(None if isinstance(layer, torch.nn.Linear) else "no Linear", style)
        failures.holds("Overlap", repr(layer), style)
        input = integers(4, 12, seed=3)
        mine = input if column else input.tensor_split(dist.get_world_size(), -1)[dist.get_rank()]
        copied = copy.deepcopy(layer)
        failures.expect(difference(copied(mine), layer(mine)), style, "copied")
        state = {name: value.full_tensor() for name, value in layer.state_dict().items()}
        whole = integer_linear(12, 6, True).state_dict()
        for name, value in whole.items():
            failures.expect(difference(state[name], value), style, "state", name)

        scaled = Scaled(12, 6, device=rank_device())
        scaled.load_state_dict(whole)
        replaced = parallelize_module(scaled, mesh(), style())
        failures.equal(type(replaced), Scaled, style)
        failures.near(replaced(mine), 2 * layer(mine), style, "subclass", rtol=1e-6)
        table = torch.nn.Embedding(12, 6, device=rank_device())
        embedding = parallelize_module(table, mesh(), style(input_layouts=Replicate()))
        failures.equal(type(embedding), torch.nn.Embedding, style)

        frozen = integer_linear(12, 6, False)
        frozen.weight.requires_grad_(False)
        frozen = parallelize_module(frozen, mesh(), style())
        needs = frozen.weight.requires_grad or frozen.bias is not None
        failures.expect("frozen weight asks for a gradient" if needs else None, style)
        asked = mine.clone().requires_grad_()
        frozen(asked).sum().backward()
        failures.expect(None if asked.grad is not None else "no gradient", style, "frozen")

        with torch.autocast(rank_device().type, torch.bfloat16):
            output = layer(mine)
        failures.equal(output.dtype, torch.bfloat16, style)
        own = integer_linear(12, 6, True)
        own.forward = own.forward  # as accelerate's hooks
        own = parallelize_module(own, mesh(), style())
        failures.equal(type(own), torch.nn.Linear, style, "own forward")
        failures.near(own(mine), layer(mine), style, "own forward", rtol=1e-6)

    last = OverlapRowwiseParallel(output_layouts=Shard(-1))
    with torch.autocast(rank_device().type, torch.bfloat16):
        output = parallelize_module(integer_linear(12, 6, True), mesh(), last)(
            integers(4, 12 // dist.get_world_size(), seed=3)
        )
    failures.equal(output.dtype, torch.bfloat16, "columns of a row layer")

    partial = integers(4, 12, seed=3) if dist.get_rank() == 0 else integers(4, 12, seed=3) * 0
    summed = DTensor.from_local(partial, mesh(), [Partial()])
    layer = parallelize_module(
        integer_linear(12, 6, True), mesh(), OverlapColwiseParallel(output_layouts=Replicate())
    )
    right = integer_linear(12, 6, True)(integers(4, 12, seed=3))
    failures.expect(difference(layer(summed), right), "Partial input")


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.ranks((2, "gloo"))
def test_parallel_style_refuses_what_its_parent_refuses(failures: Failures, style: type) -> None:
    failures.raises("nn.Linear", parallelize_module, torch.nn.LayerNorm(4), mesh(), style())


@pytest.mark.parametrize("brought", [Replicate(), Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.ranks((2, "gloo"), (3, "gloo"))
def test_parallel_weights_may_be_placed_otherwise(
    failures: Failures, style: type, brought: Placement
) -> None:
    """As tied weights and loaded ones are; a plain tensor must be the rank's part."""
    whole = integer_linear(6, 8, True)
    for prepared in (False, True):
        layer = parallelize_module(
            copy.deepcopy(whole),
            mesh(),
            style(input_layouts=Replicate(), output_layouts=Replicate()),
        )
        input = integers(6, 6, seed=3)
        call, mine = layer, input
        if prepared:
            call = parallelize_module(torch.nn.Sequential(layer), mesh(), gathered_tokens())
            mine = cut(input, Shard(0), True)
        parts = {name: value.to_local() for name, value in layer.named_parameters()}
        path = "0." if prepared else ""
        output = torch.func.functional_call(call, {path + k: v for k, v in parts.items()}, (mine,))
        failures.expect(difference(whole_of(output), whole(input)), "parts")
        refused = (torch.func.functional_call, call, {path + "weight": whole.weight}, mine)
        failures.raises("its weight is a plain tensor of shape (8, 6)", *refused)
        layer.weight = torch.nn.Parameter(cut(whole.weight, brought, True))
        output = call(mine)
        failures.expect(difference(whole_of(output), whole(input)), prepared)
        output.backward(torch.ones_like(output))
        whole.zero_grad()
        whole(input).backward(torch.ones(6, 8, device=input.device))
        check_parameter_gradients(failures, layer, whole, prepared)


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_parallel_layers_serve_functional_transforms(failures: Failures) -> None:
    whole, input = integer_linear(6, 4, True), integers(4, 6, seed=3)
    right = whole.weight.detach().sum(0).expand_as(input)
    tokens, features = Shard(0), Shard(1)
    for style, given, wanted in zip(STYLES, (tokens, features), (features, tokens), strict=True):
        how = style(input_layouts=given, output_layouts=wanted)
        layer = parallelize_module(copy.deepcopy(whole), mesh(), how)
        found = torch.func.grad(lambda mine, layer=layer: layer(mine).sum())(cut(input, given))
        failures.expect(difference(found, cut(right, given)), style.__name__)


@pytest.mark.ranks((1, "gloo"), (2, "gloo"))
def test_parallel_inputs_that_no_layer_takes_are_named(failures: Failures) -> None:
    layers = [
        parallelize_module(integer_linear(6, 8, True), mesh(), style(input_layouts=Shard(2)))
        for style in STYLES
    ]
    for layer in layers:
        failures.raises("cuts dim 2, but the tensor has 2 dims", layer, torch.ones(2, 6))
    for layer in (*layers, ColumnParallelLinear(6, 8), RowParallelLinear(6, 8)):
        failures.raises("features], but its input is a NoneType", layer, None)
        failures.raises("features], but its input is a number", layer, torch.ones(()))
    for kind in (ColumnParallelLinear, RowParallelLinear):
        named = {"weight": torch.ones(9, 7)}
        shape = (4, 6) if kind is ColumnParallelLinear else (4, 6 // dist.get_world_size())
        call = (torch.func.functional_call, kind(6, 8), named, torch.ones(shape))
        failures.raises("its weight is a plain tensor of shape (9, 7)", *call)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.ranks((2, "gloo"))
def test_parallel_infers_from_inputs_with_gradients(failures: Failures, style: type) -> None:
    whole = integer_linear(6, 8, True)
    layer = parallelize_module(copy.deepcopy(whole), mesh(), style(output_layouts=Replicate()))
    for given in (Replicate(), Shard(0), Shard(1)):
        input = cut(integers(4, 6, seed=3), given, True).requires_grad_()
        with torch.inference_mode():
            output = layer(input)
        failures.expect(difference(output, whole(input.full_tensor())), given)


def test_parallel_is_imported_when_asked_for():
    assert overlap_torch.parallel.OverlapColwiseParallel is OverlapColwiseParallel
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = overlap_torch.nothing_of_the_kind
