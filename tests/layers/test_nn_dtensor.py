"""The layers' parameters as DTensors: what checkpoints, clipping, optimizers, FSDP2 and copies make of them."""

import copy
import io
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional
from torch.nn.utils import parametrize

import rank_pool
from checks import Failures
from layers import fill_with_integers, integer_linear, integers, my_part
from meshes import mesh
from operands import difference, rank_device
from overlap_torch._layers.dtensor import wrap
from overlap_torch._layers.meshes import group_mesh
from overlap_torch._layers.placements import local_parts
from overlap_torch._ops import Group
from overlap_torch.nn import ColumnParallelLinear, MoE, RowParallelLinear, full_state_dict
from overlap_torch.parallel import OverlapColwiseParallel, OverlapRowwiseParallel
from parallel_layers import Form, all_outputs, every_kind, integer_linears


class Whole(torch.nn.Module):
    """An MLP on integers, with a layer norm that every rank holds in full: `down(gate(x) * value(x) + relu(up(x)))`."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width, device=rank_device())
        self.up = torch.nn.Linear(width, hidden, device=rank_device())
        self.both = integer_linears(width, (hidden, hidden), (True, True))
        self.down = torch.nn.Linear(hidden, width, device=rank_device())
        fill_with_integers(self)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = self.norm(input)
        whole = isinstance(self.both, torch.nn.ModuleList)
        gate, value = all_outputs(self.both, x) if whole else self.both(x)
        return self.down(gate * value + functional.relu(self.up(x)))


def parallel(whole: Whole, group: Group = None, sequence: bool = False) -> Whole:
    """The same on the layers."""
    model = copy.deepcopy(whole)
    options = {"group": group, "sequence_parallel": sequence}
    model.up = ColumnParallelLinear.from_linear(whole.up, **options)
    model.both = ColumnParallelLinear.from_linear(whole.both, **options)
    model.down = RowParallelLinear.from_linear(whole.down, **options)
    return model


def own_name(name: str) -> str:
    """The parallel model's name of a parameter of the whole one's."""
    layer, _, rest = name.partition(".")
    return f"{layer}.{Form('columns').own_name(rest)}" if layer == "both" else name


def whole_state(whole: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {own_name(name): value for name, value in whole.state_dict().items()}


def check_state(
    failures: Failures, model: torch.nn.Module, whole: torch.nn.Module, *where: object
) -> None:
    state, right = full_state_dict(model), whole_state(whole)
    failures.equal(sorted(state), sorted(right), *where)
    for name, value in right.items():
        failures.expect(difference(state[name], value), name, *where)


def checkpoint(folder: str, read: Sequence[str], write: str) -> tuple[int, list[str]]:
    """Loads checkpoints into models of other values, and saves what was read."""
    failures = Failures()
    for width, hidden in ((8, 12), (7, 5)):
        whole = Whole(width, hidden)
        name = f"{width}x{hidden}"
        model = parallel(whole)
        for source in read:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            state = model.state_dict()
            dcp.load(state, checkpoint_id=f"{folder}/{source}/{name}")
            model.load_state_dict(state)
            check_state(failures, model, whole, name, "from", source)
        check_state(failures, model, whole, name, "to", write)
        dcp.save(model.state_dict(), checkpoint_id=f"{folder}/{write}/{name}")
        if dist.get_world_size() == 4:
            grid = mesh(2, 2)
            sharded = fully_shard(parallel(whole, grid["tp"]), mesh=grid["dp"])
            dcp.save(sharded.state_dict(), checkpoint_id=f"{folder}/fsdp/{name}")
    return failures.result()


def test_nn_checkpoint_is_loaded_by_other_numbers_of_ranks(tmp_path):
    for world, read, write in ((2, (), "two"), (4, ("two",), "four"), (1, ("four", "fsdp"), "one")):
        results = rank_pool.run(world, "gloo", checkpoint, str(tmp_path), read, write)
        assert all(checks > 0 and not lines for checks, lines in results), results


@pytest.mark.parametrize("name", ["SGD", "AdamW", "AdamW foreach", "AdamW fused"])
@pytest.mark.ranks((1, "gloo"), (3, "gloo"), (2, "nccl"))
def test_nn_layers_train_clipped_as_the_unsharded_model(failures: Failures, name: str) -> None:
    """Clipped steps of an optimizer, beside those of the unsharded model."""
    make = {
        "SGD": lambda of: torch.optim.SGD(of, lr=2.0**-8, momentum=0.5),
        "AdamW": lambda of: torch.optim.AdamW(of, lr=2.0**-8, eps=0.01, foreach=False),
        "AdamW foreach": lambda of: torch.optim.AdamW(of, lr=2.0**-8, eps=0.01, foreach=True),
        "AdamW fused": lambda of: torch.optim.AdamW(of, lr=2.0**-8, eps=0.01, fused=True),
    }[name]
    whole = Whole(6, 7)
    model = parallel(whole)
    models = (model, whole)
    optimizers = [make(module.parameters()) for module in models]
    input = integers(5, 6, seed=3)
    for step in range(3):
        norms = []
        for module, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            (module(input) - integers(5, 6, seed=4)).square().sum().backward()
            # The layer norm's parameters are plain tensors, equal on all ranks.
            with implicit_replication():
                norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                optimizer.step()
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        failures.near(*norms, "norms of the gradients in step", step, rtol=1e-5)
        state = full_state_dict(model)
        for key, value in whole_state(whole).items():
            failures.near(state[key], value, key, "step", step, rtol=1e-5, atol=1e-5)
    failures.alike((float(norms[0]), model.down.bias.full_tensor().tolist()))


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_nn_layers_take_a_gradient_scaler(failures: Failures) -> None:
    """A gradient that overflows on one rank makes all of them leave the step out."""
    layer = ColumnParallelLinear.from_linear(integer_linear(6, 5, True))
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler(rank_device().type, init_scale=4.0)
    last = dist.get_rank() == dist.get_world_size() - 1
    for factor, applied in ((1.0, True), (float("inf") if last else 1.0, False)):
        before = layer.weight.detach().to_local().clone()
        optimizer.zero_grad()
        scaler.scale(layer(integers(3, 6, seed=3)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        same = torch.equal(layer.weight.detach().to_local(), before)
        empty = before.numel() == 0
        failures.expect(None if empty or same != applied else f"kept: {same}", factor)


def first_two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A router to two experts."""
    ids = torch.arange(2, device=x.device).expand(len(x), 2)
    return ids, torch.ones_like(ids, dtype=x.dtype)


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_nn_weights_that_change_before_backward_are_refused(failures: Failures) -> None:
    """As autograd refuses plain ones; a weight that backward does not read may change."""
    device = rank_device()
    for layer, name, is_always_read in (
        (ColumnParallelLinear(6, 4, device=device), "weight", False),
        (RowParallelLinear(12, 4, device=device), "weight", False),
        (parallelize_module(integer_linear(6, 4, True), mesh(), OverlapColwiseParallel()), "weight", False),
        (parallelize_module(integer_linear(12, 4, True), mesh(), OverlapRowwiseParallel()), "weight", False),
        (MoE(6, 4, 4, router=first_two, device=device), "gate_up", False),
        (MoE(6, 4, 4, router=first_two, device=device), "down", True),
        (MoE(6, 4, 4, router=first_two, save="nothing", device=device), "gate_up", True),
    ):  # fmt: skip
        for needed in (False, True):
            output = layer(integers(4, 6, seed=3).requires_grad_(needed))
            with torch.no_grad():
                getattr(layer, name).mul_(2)
            if needed or is_always_read:
                failures.raises("modified by an inplace operation", output.sum().backward)
            else:
                output.sum().backward()


@pytest.mark.parametrize(("width", "hidden"), [(6, 8), (6, 7)])
@pytest.mark.parametrize("sequence", [False, True], ids=["all", "sequence"])
@pytest.mark.ranks((4, "gloo"), (4, "nccl"))
def test_nn_layers_work_beside_fsdp(
    failures: Failures, sequence: bool, width: int, hidden: int
) -> None:
    """FSDP2 over dp, the layers over tp: a step, state dicts of the whole, and parameters drawn in place."""
    torch.manual_seed(0)  # the same on every rank: the parts must be drawn apart nevertheless
    grid = mesh(2, dist.get_world_size() // 2)
    whole = Whole(width, hidden)
    whole.norm = torch.nn.Identity()
    model = parallel(whole, grid["tp"], sequence)
    fully_shard(model, mesh=grid["dp"])
    check_state(failures, model, whole, "sharded")
    rows = integers(8, width, seed=3)
    mine = rows.chunk(2)[grid.get_local_rank("dp")]
    if sequence:
        mine = mine.chunk(2)[grid.get_local_rank("tp")]
    (whole(rows).sum() / 2).backward()  # FSDP averages over dp
    model(mine).sum().backward()
    right = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1e9)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor()
    failures.near(norm, right, "norm", rtol=1e-6)
    for module in (model, whole):
        torch.optim.SGD(module.parameters(), lr=2.0**-4).step()
    check_state(failures, model, whole, "after a step")
    loaded = integer_linears(width, (hidden, hidden), (True, True))
    model.both.load_state_dict(Form("columns").whole_state(loaded))
    whole.both.load_state_dict(loaded.state_dict())
    check_state(failures, model, whole, "loaded")
    for layer in (model.up, model.both, model.down):
        layer.reset_parameters()
    drawn = full_state_dict(model)
    both = torch.cat([drawn["both.weights.0"], drawn["both.weights.1"]])
    for name, weight in (
        ("up", drawn["up.weight"]),
        ("down", drawn["down.weight"]),
        ("both", both),
    ):
        distinct = weight.unique().numel()
        failures.equal(distinct, weight.numel(), "drawn", name)
    failures.alike({name: value.tolist() for name, value in drawn.items()}, "drawn")


class Doubled(torch.nn.Module):
    """A parametrization whose result lies elsewhere than the parameter."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight.redistribute(placements=[Replicate()])


@every_kind
@pytest.mark.ranks((1, "gloo"), (3, "gloo"), (2, "nccl"))
def test_nn_parameters_are_copied_and_converted(failures: Failures, kind: str) -> None:
    """The parameters' fate when modules are copied, pickled, tied, converted, and made on no device."""
    form, sizes = Form(kind), (7, (5,), (True,))
    linears = integer_linears(*sizes)
    layer = form.layer(linears)
    input = integers(4, 7, seed=3)
    mine = form.cut_input(input)
    weight = form.own_name("0.weight")

    def output(module: torch.nn.Module, given: torch.Tensor = mine) -> torch.Tensor:
        return form.call(module, given, 4)[0]

    right = output(layer).detach()
    spec = layer.get_parameter(weight)._spec

    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    meta = form.empty(sizes, device="meta").to_empty(device=rank_device())
    meta.reset_parameters()
    meta.load_state_dict(form.whole_state(linears))
    # As on a machine whose group has GPUs, before the tensors are put on the CPU.
    elsewhere = form.empty(sizes, device="meta")
    other_device = "cuda" if rank_device().type == "cpu" else "cpu"
    for name, parameter in list(elsewhere.named_parameters()):
        other_mesh = group_mesh(elsewhere.group, other_device)
        other = wrap(parameter.to_local(), other_mesh, parameter.placements, parameter.shape)
        owner, _, own = name.rpartition(".")
        setattr(elsewhere.get_submodule(owner), own, torch.nn.Parameter(other))
    elsewhere = elsewhere.to_empty(device=rank_device())
    elsewhere.load_state_dict(form.whole_state(linears))
    tied = form.empty(sizes).to(rank_device())
    for name, parameter in layer.named_parameters():
        owner, _, own = name.rpartition(".")
        setattr(tied.get_submodule(owner), own, parameter)
    for what, other in {
        "deepcopy": copy.deepcopy(layer),
        "pickled": torch.load(file, weights_only=False),
        "meta": meta,
        "meta of another device": elsewhere,
        "tied": tied,
    }.items():
        failures.expect(difference(output(other), right), what)
        own = other.get_parameter(weight)
        failures.equal(own._spec, spec, what)
        layer.zero_grad()
        output(other).sum().backward()
        failures.expect(None if own.grad is not None else "no gradient", what)
    own = layer.get_parameter(weight)
    failures.expect(None if own.grad is not None else "no gradient", "tied")
    output(tied).sum().backward()
    doubled = own.grad.to_local().clone()
    layer.zero_grad()
    output(layer).sum().backward()
    failures.expect(difference(doubled, 2 * own.grad.to_local()), "gradients added")

    converted = copy.deepcopy(layer).double()
    failures.expect(difference(output(converted, mine.double()), right.double()), "double")
    parameter = converted.get_parameter(weight)
    dtypes = (parameter.dtype, parameter.grad.dtype, own.dtype)
    failures.equal(dtypes, (torch.float64, torch.float64, torch.float32), "double")

    halved = copy.deepcopy(layer)
    owner, _, name = weight.rpartition(".")
    parametrize.register_parametrization(halved.get_submodule(owner), name, Doubled())
    twice = functional.linear(input, 2 * linears[0].weight, linears[0].bias).detach()
    failures.expect(difference(output(halved), form.cut_output(twice)), "parametrized")
    with torch.no_grad():
        failures.expect(difference(output(halved), form.cut_output(twice)), "no gradients")

    parts = {name: 2 * value.to_local() for name, value in layer.state_dict().items()}
    found = output(lambda given: torch.func.functional_call(layer, parts, (given,)))
    failures.expect(difference(found, 2 * right), "functional_call with parts")


@pytest.mark.ranks((1, "gloo"), (3, "gloo"), (2, "nccl"))
def test_nn_parameters_serve_functional_transforms(failures: Failures) -> None:
    linear = integer_linear(7, 5, True, torch.float64)
    layer = ColumnParallelLinear.from_linear(linear)
    input = integers(4, 7, seed=3, dtype=torch.float64)

    def outputs(given: torch.Tensor) -> torch.Tensor:
        return functional.linear(given, *local_parts(layer.weight, layer.bias)).sum()

    right = my_part(linear.weight.detach(), 0).sum(0).expand_as(input)
    failures.expect(difference(torch.func.grad(outputs)(input), right), "torch.func.grad")


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.ranks((2, "gloo"))
def test_nn_parts_of_frozen_parameters_ask_for_no_gradient(failures: Failures, name: str) -> None:
    layer = ColumnParallelLinear.from_linear(integer_linear(7, 5, True))
    layer.get_parameter(name).requires_grad_(False)
    asked = [part.requires_grad for part in local_parts(layer.weight, layer.bias)]
    failures.equal(asked, [name != "weight", name != "bias"])
