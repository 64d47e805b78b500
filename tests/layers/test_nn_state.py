"""Parameters of the parallel layers: how they are drawn, under which defaults, and how they are stored, loaded and put together."""

import contextlib
import io
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

import rank_pool
from checks import Failures, message_of
from frameworks import needs_module
from layers import integers
from meshes import mesh
from operands import difference, rank_device
from overlap_torch.nn import ColumnParallelLinear, RowParallelLinear, full_state_dict
from parallel_layers import SEVERAL, Form, every_kind, integer_linears


@every_kind
@pytest.mark.ranks((2, "gloo"), (3, "gloo"), (2, "nccl"))
def test_nn_state_is_drawn_as_linears(failures: Failures, kind: str) -> None:
    """A new layer's parameters: what is cut differs between ranks, the rest does not, and all lie in Linear's bounds."""
    rank, world, form = dist.get_rank(), dist.get_world_size(), Form(kind)
    torch.manual_seed(0)  # the same on every rank: the parts must be drawn apart nevertheless
    outputs = (40 * world, 20 * world)[: 2 if kind == "columns" else 1]
    layer = form.empty((60 * world, outputs, (True,) * len(outputs)), device=rank_device())
    bound = (60 * world) ** -0.5
    seen: list[torch.Tensor] = []
    for name, parameter in layer.named_parameters():
        out = outputs[int(name.partition(".")[2] or 0)]
        shape = [out, 60 * world] if parameter.dim() == 2 else [out]
        failures.equal(list(parameter.shape), shape, name)
        dim, local = form.cut_dim(name), parameter.detach().to_local()
        if dim is not None:
            shape[dim] //= world
        failures.equal(list(local.shape), shape, name)
        # Some of that many draws from a uniform distribution come near both ends.
        low, high = local.min().item(), local.max().item()
        spread = -bound <= low < -0.5 * bound and 0.5 * bound < high <= bound
        failures.expect(None if spread else f"{low} to {high}, and not to {bound}", name)
        peers = [torch.empty_like(local) for _ in range(world)]
        dist.all_gather(peers, local)
        for peer in range(world):
            alike = torch.equal(peers[peer], local)
            right = alike if dim is None or peer == rank else not alike
            failures.expect(None if right else f"alike: {alike}", name, "of rank", peer)
        repeated = any(torch.isin(local, other).float().mean() > 0.01 for other in seen)
        failures.expect("has another one's numbers" if repeated else None, name)
        seen.append(local)


def check_parts(
    failures: Failures, layer: torch.nn.Module, parts: dict[str, torch.Tensor], *where: object
) -> None:
    """The layer's state dict has these names and, on this rank, these parts."""
    state = layer.state_dict()
    failures.equal(sorted(state), sorted(parts), *where)
    for name, value in state.items():
        failures.expect(difference(value.to_local(), parts[name]), name, *where)


@every_kind
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (3, "gloo"), (2, "nccl"))
def test_nn_state_dicts_are_parts_of_linears(failures: Failures, kind: str) -> None:
    form = Form(kind)
    one = [(*size, (True,)) for size in ((12, (8,)), (13, (7,)), (7, (4,)), (2, (1,)))]
    for sizes in SEVERAL if kind == "columns" else one:
        linears = integer_linears(*sizes)
        linears[0].weight.requires_grad_(False)
        whole, parts = form.whole_state(linears), form.own_state(linears)
        layer = form.layer(linears)
        check_parts(failures, layer, parts, "from_linear", *sizes)
        for name, parameter in linears.named_parameters():
            own = layer.get_parameter(form.own_name(name))
            alike = (own.shape, own.requires_grad) == (parameter.shape, parameter.requires_grad)
            failures.expect(None if alike else f"{own.shape}, {own.requires_grad}", name, *sizes)

        # All that loads into a new layer, copied or taken over.
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        file.seek(0)
        replicated = {n: DTensor.from_local(v, mesh(), [Replicate()]) for n, v in whole.items()}
        states = {
            "DTensors": torch.load(file),
            "replicated DTensors": replicated,
            "parts": parts,
            "whole": whole,
        }
        for (what, state), assign in itertools.product(states.items(), (False, True)):
            where = ("from", what, "assigned", assign, *sizes)
            other = form.empty(sizes, device="meta" if assign else rank_device())
            before, outer = dict(state), torch.nn.ModuleDict({"inner": other})
            outer.load_state_dict({f"inner.{k}": v for k, v in state.items()}, assign=assign)
            check_parts(failures, other, parts, "in a module", *where)
            other.load_state_dict(state, assign=assign)
            check_parts(failures, other, parts, *where)
            kept = all(before[name] is state[name] for name in state)
            failures.expect(None if kept else "changed the given state dict", *where)
            for name, value in other.state_dict().items():
                failures.equal(value._spec, layer.get_parameter(name)._spec, name, *where)
                local = value.to_local()
                size = local.untyped_storage().nbytes()
                keeps = what == "whole" and assign and form.cut_dim(name) is not None
                kept = keeps and size > local.numel() * local.element_size()
                failures.expect("keeps the whole alive" if kept else None, name, *where)
        model = torch.nn.Sequential(layer, torch.nn.LayerNorm(3, device=rank_device()))
        gathered, in_model = layer.full_state_dict(), full_state_dict(model)
        names = sorted([*(f"0.{name}" for name in whole), "1.bias", "1.weight"])
        failures.equal(sorted(in_model), names, *sizes)
        for name, value in whole.items():
            plain = type(gathered[name]) is torch.Tensor
            failures.expect(None if plain else f"a {type(gathered[name])}", name, *sizes)
            failures.expect(difference(gathered[name], value), name, "gathered", *sizes)
            failures.expect(difference(in_model[f"0.{name}"], value), name, "in a model", *sizes)


@pytest.mark.ranks((1, "gloo"))
def test_nn_several_outputs_without_biases_and_as_text(failures: Failures) -> None:
    layer = ColumnParallelLinear(6, (4, 2), bias=False)
    names = [name for name, _ in layer.named_parameters()]
    fine = names == ["weights.0", "weights.1"] and layer.biases is None
    failures.expect(None if fine else f"{names}", "without biases")
    text = repr(ColumnParallelLinear(6, (4, 2), bias=(True, False), device="meta"))
    failures.holds("out_features=(4, 2), bias=[True, False]", text, "repr")


class Counted(torch.nn.Module):
    calls = 0

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        Counted.calls += 1
        return weight


@pytest.mark.ranks((1, "gloo"))
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_nn_text_computes_no_weight(failures: Failures, kind: type) -> None:
    """A parametrization may communicate, and one rank alone may print the model."""
    layer = kind(6, 4)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", Counted(), unsafe=True)
    before = Counted.calls
    failures.holds("bias=True", repr(layer), "repr")
    failures.equal(Counted.calls, before, "computed the weight")


@pytest.mark.ranks((1, "gloo"))
def test_nn_recipe_of_fp8_may_change(failures: Failures) -> None:
    layer = ColumnParallelLinear(32, 32, bias=False, dtype=torch.bfloat16)
    x = torch.randn(32, 32, dtype=torch.bfloat16)
    plain = layer(x)
    layer.fp8 = "rowwise"
    failures.expect("as before" if torch.equal(layer(x), plain) else None, "rowwise")
    failures.raises("nonsense", setattr, layer, "fp8", "nonsense")
    layer.fp8 = None
    failures.expect_equal(layer(x), plain, "None again")


def pickled_state(kind: str) -> bytes:
    file = io.BytesIO()
    torch.save(Form(kind).layer(integer_linears(12, (8,), (True,))).state_dict(), file)
    return file.getvalue()


def load_of_another(kind: str, state: bytes) -> str:
    layer = Form(kind).empty((12, (8,), (True,)), device=rank_device())
    return message_of(layer.load_state_dict, torch.load(io.BytesIO(state), weights_only=False))


@every_kind
def test_nn_state_dicts_of_another_rank_are_refused(kind):
    states = rank_pool.run(2, "gloo", pickled_state, kind)
    own, other = rank_pool.run(2, "gloo", load_of_another, kind, states[0])
    assert own == "" and "pickled by another rank" in other
    for world in (1, 3):
        for message in rank_pool.run(world, "gloo", load_of_another, kind, states[0]):
            assert (
                "another number of ranks" in message and "torch.distributed.checkpoint" in message
            )


@every_kind
@pytest.mark.ranks((2, "gloo"), (3, "gloo"), (2, "nccl"))
def test_nn_state_dicts_load_without_communication(failures: Failures, kind: str) -> None:
    """Rank 0 saves and loads while the others do not: that communicates nothing, or it would hang."""
    form, linears = Form(kind), integer_linears(13, (7,), (True,))
    layer = form.layer(linears)
    if dist.get_rank() == 0:
        for state in (layer.state_dict(), form.own_state(linears), form.whole_state(linears)):
            layer.load_state_dict(state)
    wrong = {form.own_name("0.weight"): torch.zeros(5, 4), form.own_name("0.bias"): torch.zeros(7)}
    failures.holds("size mismatch for weight", message_of(layer.load_state_dict, wrong))


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
        failures.expect(difference(parameter.to_local(), right), kind)
    features = 6 if kind != "row" else 6 // dist.get_world_size()
    layer(integers(2, features, seed=3))
