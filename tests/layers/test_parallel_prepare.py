"""OverlapPrepareModuleInput: what the unsharded module computes, bit for bit on integers, with one gather."""

import contextlib
import copy
import itertools
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import meshes
from checks import Failures, message_of
from grids import where_each_pair_meets
from layers import Linears, fill_with_integers, integers
from operands import difference, rank_device
from overlap_torch._layers.fp8 import RECIPES
from rank_pool import whole_grids
from traffic import Traffic, traffic_of


class Reader(Linears):
    """Three readers of an input, called as `how` says. It calls view() on what it has of them, as models do."""

    def __init__(self, how: str = "in order") -> None:
        super().__init__(q=(6, 12), k=(6, 12, False), v=(6, 12), o=(12, 6))
        self.how = how
        fill_with_integers(self)

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (each.view(-1, each.shape[-1]) for each in self.mixed(x, other))
        output = self.o((q * k + v).view(*x.shape[:-1], -1))
        return output.view(-1, 6).view(output.shape)

    def mixed(
        self, x: torch.Tensor, other: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        how = self.how
        if how == "another order":
            v, k = self.v(x), self.k(x)
            return self.q(x), k, v
        if how == "twice":
            return self.q(x) + 2 * self.q(x), self.k(x), self.v(x)
        if how == "changed output":
            q = self.q(x)
            q.mul_(3)
            return q + self.q(x), self.k(x), self.v(x)
        if how == "another tensor":
            return self.q(x), self.k(2 * x), self.v(x)
        if how == "not at all":
            q = self.q(x)
            return q, q, 2 * q
        if how == "in place":
            q = self.q(x)
            x = x.mul_(2) if not x.requires_grad else x * 2
            return q, self.k(x), self.v(x)
        if how == "viewed":
            return self.q(x), self.k(x.view(-1, 6)).view(*x.shape[:-1], -1), self.v(x)
        if how == "no gradient":
            with torch.no_grad():
                k = self.k(x)
            return self.q(x), k, self.v(x)
        if how == "other input":
            return self.q(x), self.k(other), self.v(other)
        return self.q(x), self.k(x), self.v(x)


class Around(torch.nn.Module):
    """A module around the one that compiles and checkpoints more than it."""

    def __init__(self, inner: torch.nn.Module, checkpointed: bool = False) -> None:
        super().__init__()
        self.inner, self.checkpointed = inner, checkpointed

    def forward(self, x: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            return 2 * checkpoint(self.inner, x, use_reentrant=False, **others)
        return 2 * self.inner(x, **others)


def parallel(
    module: torch.nn.Module,
    given: Placement,
    local: bool,
    ranks: DeviceMesh | None = None,
    **options: object,
) -> torch.nn.Module:
    prepare, column, row = meshes.OVERLAP
    layouts = {"input_layouts": (given,), "desired_input_layouts": (Replicate(),), **options}
    plan = {
        "": prepare(use_local_output=local, **layouts),
        **{name: column() for name in ("q", "k", "v")},
        "o": row(output_layouts=given),
    }
    return parallelize_module(copy.deepcopy(module), ranks or meshes.mesh(), plan)


def check_against_whole(
    failures: Failures,
    module: torch.nn.Module,
    model: torch.nn.Module,
    run: Callable[..., torch.Tensor],
    given: Placement,
    distributed: bool,
    shape: tuple[int, ...],
    *where: object,
    other: bool = False,
    gathers: int | None = None,
) -> None:
    """Output and gradients of `run(model)` are those of the unsharded module; `gathers` in forward, as many scatters."""
    input = integers(*shape, 6, seed=3).requires_grad_()
    others = {"other": integers(*shape, 6, seed=5)} if other else {}
    expected = Around(module)(input, **others)
    gradient = integers(*expected.shape, seed=4)
    expected.backward(gradient)
    mine = meshes.cut(input, given, distributed).clone().requires_grad_()
    parts = {name: meshes.cut(value, given) for name, value in others.items()}
    # The counter is a dispatch mode, beneath which PyTorch 2.14 does not compile.
    counted = contextlib.nullcontext if gathers is None else Traffic
    with counted() as forward:
        output = run(mine, **parts)
    failures.expect(difference(output, meshes.cut(expected, given)), "output", *where)
    with counted() as backward:
        output.backward(meshes.cut(gradient, given))
    right = input.grad if distributed else meshes.cut(input.grad, given)
    failures.expect(difference(meshes.whole_of(mine.grad), right), "input's gradient", *where)
    meshes.check_parameter_gradients(failures, model, module, *where)
    if gathers is not None:
        counts = (forward.calls["all-gather"], backward.calls["reduce-scatter"])
        failures.equal(counts, (gathers, gathers), "traffic", *where)


@pytest.mark.parametrize("how", ["eager", "checkpointed"])
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (3, "gloo"), (2, "nccl"))
def test_parallel_prepared_input_is_gathered_once(failures: Failures, how: str) -> None:
    if dist.get_world_size() == 1 and how == "eager":
        how = "checkpointed"  # one rank gathers nothing
    check_layouts(failures, how)


@pytest.mark.ranks((2, "gloo"), (2, "nccl"), long=[(3, "gloo")], whole=[(1, "gloo")])
def test_parallel_prepared_input_is_gathered_once_by_compiled_code(failures: Failures) -> None:
    check_layouts(failures, "compiled")


def check_layouts(failures: Failures, how: str) -> None:
    kinds = ((False, (6, 12)), (True, (6, 12)), (True, (7, 5)))
    checkpoints = (False, True) if how == "compiled" else (how == "checkpointed",)
    points = list(itertools.product((Shard(0), Shard(1)), (False, True), kinds, checkpoints))
    if how == "compiled" and not whole_grids():
        points = [points[place] for place in where_each_pair_meets(points)]
    for given, local, (distributed, shape), checkpointed in points:
        torch._dynamo.reset()
        module = Reader()
        model = parallel(module, given, local)
        run = Around(model, checkpointed)
        if how == "compiled":
            run = torch.compile(run, fullgraph=True, backend="aot_eager")
        gathers = 1 if how == "eager" else None
        where = (given, local, distributed, shape, checkpointed)
        check_against_whole(
            failures, module, model, run, given, distributed, shape, *where, gathers=gathers
        )
        ahead = [reader.ahead for reader in (model.q, model.k, model.v)]
        failures.equal(ahead, [None] * 3, how, *where)


@pytest.mark.ranks((2, "gloo"), (3, "gloo"), (2, "nccl"))
def test_parallel_prepared_input_serves_readers_however_they_are_called(failures: Failures) -> None:
    """Readers called in every way; each with one gather, and one reduce-scatter where the input is a DTensor."""
    hows = ("in order", "another order", "twice", "changed output", "another tensor", "not at all")
    for how in (*hows, "in place", "viewed", "no gradient"):
        for local in (False, True):
            module = Reader(how)
            model = parallel(module, Shard(1), local)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                check_against_whole(
                    failures, module, model, Around(model), Shard(1), False, (2, 12), how, local,
                    gathers=None if local else 1,
                )  # fmt: skip
            for mode in (torch.no_grad, torch.inference_mode):
                with mode(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    input = integers(2, 12, 6, seed=3)
                    expected = meshes.cut(module(input.clone()), Shard(1))
                    found = model(meshes.cut(input, Shard(1)))
                    failures.expect(difference(found, expected), how, local, mode.__name__)


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_parallel_prepares_several_inputs(failures: Failures) -> None:
    """Keyword inputs, several gathered inputs, and readers by name."""
    keywords = {
        "input_layouts": (Shard(1),),
        "input_kwarg_layouts": {"other": Shard(1)},
        "desired_input_kwarg_layouts": {"other": Replicate()},
    }
    for readers in (None, ["q"], []):
        module = Reader("other input")
        model = parallel(module, Shard(1), False, readers=readers, **keywords)
        check_against_whole(
            failures, module, model, Around(model), Shard(1), False, (2, 12), readers, other=True
        )
    message = message_of(parallel, Reader(), Shard(1), False, readers=["nobody"])
    failures.says(message, ("'nobody'", "q, k, v, o"))
    model = parallel(Reader(), Shard(1), False)
    failures.holds("2 positional inputs", message_of(model, integers(2, 6, 6, seed=3), None))


class Routed(Reader):
    """A part that is no layer of ours reads the input too: its gradient is whole, or a part of a sum."""

    def mixed(self, x, other):
        routes = meshes.whole_of(x).sum(-1, keepdim=True)
        if self.how == "partial" and isinstance(x, DTensor):
            routes = x.to_local(grad_placements=[Partial()]).sum(-1, keepdim=True)
        return self.q(x) + routes, self.k(x), self.v(x)


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_parallel_prepared_input_has_other_readers(failures: Failures) -> None:
    for how, local in (("replicated", False), ("replicated", True), ("partial", False)):
        module = Routed(how)
        model = parallel(module, Shard(1), local)
        # A replicated reader's features are cut after it: each rank's gradient is a part, summed here.
        input = integers(2, 6, 6, seed=3)
        mine = meshes.cut(input, Shard(1)).requires_grad_()
        input.requires_grad_()
        q, k, v = module.mixed(input, None)
        q.sum().backward()
        prepared, _ = next(iter(model._forward_pre_hooks.values()))(model, (mine,), {})
        own = model.mixed(prepared[0], None)[0]
        failures.expect(
            difference(
                own, q.detach().chunk(len(meshes.mesh().mesh), -1)[meshes.mesh().get_local_rank()]
            ),
            how,
        )
        grads = traffic_of(lambda: own.sum().backward())  # noqa: B023, called at once
        if how == "partial":
            right = meshes.cut(input.grad, Shard(1))
        else:  # what the routes send back is this rank's features' alone, and taken as every rank's
            share = torch.full_like(input, 12 / len(meshes.mesh().mesh))
            products = input.grad - 12
            right = meshes.cut(products + share, Shard(1))
        failures.expect(difference(mine.grad, right), how, local, "gradient")
        failures.equal(grads.calls["reduce-scatter"], 1, how, local)


class Cubed(Linears):
    """A reader of the input, and something else that reads it."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.q(x), x**3


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_parallel_prepared_input_has_a_second_derivative_by_other_readers(
    failures: Failures,
) -> None:
    plan = {"": meshes.gathered_tokens(use_local_output=True), "q": meshes.OVERLAP[1]()}
    model = parallelize_module(Cubed(q=(6, 4, False)), meshes.mesh(), plan)
    whole_input = integers(4, 6, seed=3)
    mine = meshes.cut(whole_input, Shard(0)).clone().requires_grad_()
    _, cubes = model(mine)
    (first,) = torch.autograd.grad(cubes.sum(), mine, create_graph=True)
    failures.expect(difference(first, 3 * mine.detach() ** 2), "first")
    (second,) = torch.autograd.grad(first.sum(), mine)
    failures.expect(difference(second, 6 * mine), "second")


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_parallel_prepared_input_is_read_ahead_by_layers_that_fit(failures: Failures) -> None:
    """A reader with hooks on its gradients, of other features or with another recipe computes its output itself."""
    changes = {
        "hook": lambda reader: reader.register_full_backward_hook(lambda *_: None),
        "pre-hook": lambda reader: reader.register_full_backward_pre_hook(lambda *_: None),
        "features": lambda reader: setattr(reader, "in_features", 5),
        "recipe": lambda reader: setattr(
            reader, "place", reader.place._replace(recipe=RECIPES["rowwise"])
        ),
    }
    for name, change in changes.items():
        model = parallel(Reader(), Shard(1), True)
        change(model.k)
        prepare = next(iter(model._forward_pre_hooks.values()))
        prepare(model, (meshes.cut(integers(2, 6, 6, seed=3), Shard(1)),), {})
        ahead = [reader.ahead is not None for reader in (model.q, model.k, model.v)]
        failures.equal(ahead, [True, False, True], name)


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_parallel_prepared_input_does_not_outlive_its_readers(failures: Failures) -> None:
    """The gathered tensor and what was computed ahead end with the forward, also with one that raises."""
    seen: list[weakref.ref] = []

    class Watching(Reader):
        def mixed(self, x, other):
            seen.append(weakref.ref(x))
            if self.how == "raises":
                raise KeyError("on purpose")
            return super().mixed(x, other)

    for how in ("in order", "not at all", "raises"):
        for grad in (False, True):
            model = parallel(Watching(how), Shard(1), True)
            for parameter in model.parameters():
                parameter.requires_grad_(False)
            input = meshes.cut(integers(2, 6, 6, seed=3), Shard(1)).requires_grad_(grad)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    output = model(input)
                except KeyError:
                    output = None
            ahead = [reader.ahead for reader in (model.q, model.k, model.v)]
            failures.equal(ahead, [None] * 3, how, grad)
            failures.expect("lives on" if seen[-1]() is not None else None, how, grad)
            messages = [str(one.message) for one in caught if "readers=" in str(one.message)]
            named = ["k, v" in message for message in messages]
            right = [True] if how == "not at all" else []
            failures.equal(named, right, how, grad)
            del output


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_parallel_prepared_input_follows_autocast(failures: Failures) -> None:
    device_type = rank_device().type
    module = Reader()
    model = parallel(module, Shard(1), False)
    input = integers(2, 12, 6, seed=3).requires_grad_()
    mine = meshes.cut(input, Shard(1)).requires_grad_()
    with torch.autocast(device_type, torch.bfloat16):
        expected, output = module(input), model(mine)
    failures.equal(output.dtype, torch.bfloat16)
    # Sums of two ranks' rounded parts: a unit in the last place of bfloat16.
    right = meshes.cut(expected, Shard(1)).detach()
    failures.near(output.detach(), right, "output", rtol=2.0**-7, atol=2.0)
    gradient = integers(*expected.shape, seed=4).to(torch.bfloat16)
    expected.backward(gradient)
    output.backward(meshes.cut(gradient, Shard(1)))
    right = meshes.cut(input.grad, Shard(1))
    failures.near(mine.grad, right, "input's gradient", rtol=0.05, atol=2.0)
    # Readers under another autocast than the module compute for themselves.
    with torch.autocast(device_type, torch.bfloat16):
        x = next(iter(model._forward_pre_hooks.values()))(model, (mine.detach(),), {})[0][0]
        with torch.autocast(device_type, enabled=False):
            single = model.q(x)
    failures.equal(single.dtype, torch.float32, "without")


class Probe(torch.nn.Module):
    """Returns its input as it got it."""

    def forward(self, x: object, y: object = None) -> tuple[object, object]:
        return x, y


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_parallel_prepares_other_layouts_as_pytorch_does(failures: Failures) -> None:
    """An input without a reader is prepared as PrepareModuleInput does."""
    layouts = (Replicate(), Shard(0), Shard(1), Shard(-1))
    for given, desired, local in itertools.product(layouts, layouts, (False, True)):
        results = []
        for style in (meshes.PYTORCH[0], meshes.OVERLAP[0]):
            prepare = style(
                input_layouts=(given, None),
                desired_input_layouts=(desired, None),
                use_local_output=local,
            )
            input = meshes.cut(integers(6, 12, 6, seed=3), given).requires_grad_()
            x, y = parallelize_module(Probe(), meshes.mesh(), prepare)(input, "something")
            gradient = integers(*x.shape, seed=4)
            x.backward(
                gradient if local else distribute_tensor(gradient, meshes.mesh(), x.placements)
            )
            placements = x.placements if isinstance(x, DTensor) else None
            results.append((placements, y, meshes.whole_of(x.detach()), input.grad))
        (*kinds, right, grad), (*other_kinds, found, found_grad) = results
        where = (given, "to", desired, local)
        failures.equal(kinds, other_kinds, *where)
        failures.expect(difference(found, right), *where)
        failures.expect(difference(found_grad, grad), "gradient", *where)


@pytest.mark.parametrize("layers", [("",), ("k", "")], ids=["module", "reader"])
@pytest.mark.ranks((4, "gloo"), (4, "nccl"))
def test_parallel_prepared_input_works_beside_fsdp(
    failures: Failures, layers: tuple[str, ...]
) -> None:
    """FSDP2 over dp, of the module or of a reader too: the gradients are means over dp."""
    grid = meshes.mesh(2, dist.get_world_size() // 2)
    module = Reader()
    model = parallel(module, Shard(1), False, grid["tp"])
    for name in layers:
        fully_shard(model.get_submodule(name), mesh=grid["dp"])
    input = integers(4, 12, 6, seed=3)
    module(input).sum().backward()
    mine = input.chunk(2)[grid.get_local_rank("dp")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(distribute_tensor(mine, grid["tp"], [Shard(1)]).to_local()).sum().backward()
    for (name, own), true in zip(model.named_parameters(), module.parameters(), strict=True):
        failures.expect(difference(2 * own.grad.full_tensor(), true.grad), name, layers)


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_parallel_prepared_input_changed_behind_its_readers_is_refused(failures: Failures) -> None:
    """Backward raises if the input has been changed after its readers, or forward before that."""

    class Changing(Reader):
        def mixed(self, x, other):
            found = super().mixed(x, other)
            x.mul_(2)
            return found

    def step(given: Placement, local: bool) -> None:
        model = parallel(Changing(), given, local)
        input = meshes.cut(integers(6, 12, 6, seed=3), given).requires_grad_()
        model(2 * input).sum().backward()

    for given, local in itertools.product((Shard(0), Shard(1)), (False, True)):
        failures.holds("inplace", message_of(step, given, local), given, local)


@pytest.mark.ranks((2, "gloo"))
def test_parallel_prepared_input_changed_in_place_is_refused_when_compiled(
    failures: Failures,
) -> None:
    model = parallel(Reader("in place"), Shard(1), False)
    run = torch.compile(Around(model), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        said = message_of(run, meshes.cut(integers(2, 6, 6, seed=3), Shard(1)))
    failures.expect(None if said else "no error")
