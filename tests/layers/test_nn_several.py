"""Column-parallel layers of several outputs: as many `torch.nn.Linear`s of one input, which communicate once."""

from __future__ import annotations

import copy
import io
import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import rank_pool
from checks import Failures, message_of
from layers import fill_with_integers, integers, my_features, my_part, my_tokens
from meshes import mesh
from modes import SeesDispatches
from operands import difference, rank_device
from overlap_torch.nn import ColumnParallelLinear, RowParallelLinear, full_state_dict

# Outputs that divide, that do not, fewer features than ranks, one output; some have no bias.
CASES = (
    (12, (8, 4, 4), (True, True, True)),
    (13, (5, 3, 7), (True, False, True)),
    (2, (3, 1), (False, False)),
    (6, (5,), (True,)),
)
TOKENS = (12, 7, 1)


def integer_linears(
    in_features: int,
    out_features: Sequence[int],
    bias: Sequence[bool],
    dtype: torch.dtype = torch.float32,
) -> torch.nn.ModuleList:
    linears = torch.nn.ModuleList(
        torch.nn.Linear(in_features, size, has_bias, device=rank_device(), dtype=dtype)
        for size, has_bias in zip(out_features, bias, strict=True)
    )
    fill_with_integers(linears)
    return linears


def own_name(name: str) -> str:
    """The layer's name of a parameter that the list of whole layers calls `1.weight`."""
    number, kind = name.split(".")
    return f"{'weights' if kind == 'weight' else 'biases'}.{number}"


def whole_state(linears: torch.nn.ModuleList) -> dict[str, torch.Tensor]:
    return {own_name(name): value for name, value in linears.state_dict().items()}


def all_outputs(linears: torch.nn.ModuleList, input: torch.Tensor) -> list[torch.Tensor]:
    return [linear(input) for linear in linears]


def check_gradients(
    failures: Failures,
    layer: torch.nn.Module,
    linears: torch.nn.ModuleList,
    *where: object,
) -> None:
    for name, parameter in linears.named_parameters():
        own = layer.get_parameter(own_name(name)).grad
        if (
            parameter.grad is None
        ):  # of an output that was not used: a gather's is zeros, and a compiled layer's
            nothing = own is None or not own.to_local().any()
            failures.expect(None if nothing else f"{own}", name, "gradient", *where)
            continue
        problem = "is None"
        if own is not None:
            problem = difference(own.to_local(), my_part(parameter.grad, 0))
            alike = own.shape == parameter.shape and own.placements == (Shard(0),)
            failures.expect(None if alike else f"{own.shape}, {own.placements}", name, *where)
        failures.expect(problem, name, "gradient", *where)


def run_both(
    failures: Failures,
    run: Callable[..., tuple[torch.Tensor, ...]],
    layer: ColumnParallelLinear,
    linears: torch.nn.ModuleList,
    tokens: int,
    used: Sequence[int],
    *where: object,
) -> None:
    """Outputs and gradients of `run`, the layer in some manner, beside those of the whole linears; of the outputs `used`."""
    dtype = linears[0].weight.dtype
    for module in (layer, linears):
        module.zero_grad()
    whole = integers(tokens, 2, layer.in_features, seed=3, dtype=dtype).requires_grad_()
    cut = my_tokens if layer.sequence_parallel else torch.Tensor.detach
    own = torch.Tensor.detach if layer.gather_output else my_features
    mine = cut(whole).detach().clone().requires_grad_()
    expected = all_outputs(linears, whole)
    outputs = run(mine, tokens) if layer.sequence_parallel else run(mine)
    alike = type(outputs) is tuple and len(outputs) == len(linears)
    failures.expect(None if alike else f"{type(outputs)} of {len(outputs)}", *where)
    for i, (output, right) in enumerate(zip(outputs, expected, strict=True)):
        failures.expect(difference(output.detach(), own(right.detach())), "output", i, *where)
    gradients = [
        integers(*right.shape, seed=4 + i, dtype=dtype) for i, right in enumerate(expected)
    ]
    torch.autograd.backward([expected[i] for i in used], [gradients[i] for i in used])
    torch.autograd.backward([outputs[i] for i in used], [own(gradients[i]) for i in used])
    failures.expect(difference(mine.grad, cut(whole.grad)), "input's gradient", *where)
    check_gradients(failures, layer, linears, *where)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gather", [False, True], ids=["parts", "gathered"])
@pytest.mark.parametrize("sequence", [False, True], ids=["all", "sequence"])
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (3, "gloo"), (1, "nccl"), (2, "nccl"))
def test_nn_several_outputs_are_linears(
    failures: Failures, sequence: bool, gather: bool, dtype: torch.dtype
) -> None:
    for (in_features, out_features, bias), tokens in itertools.product(
        CASES, TOKENS if sequence else TOKENS[:1]
    ):
        where = (in_features, out_features, bias, "tokens", tokens)
        linears = integer_linears(in_features, out_features, bias, dtype)
        layer = ColumnParallelLinear.from_linear(
            linears, sequence_parallel=sequence, gather_output=gather
        )
        sizes = tuple(len(my_part(torch.empty(size), 0)) for size in out_features)
        failures.expect(None if layer.local_out_features == sizes else "local_out_features", *where)
        every = range(len(out_features))
        for used in (every, every[1:], every[:1]) if len(every) > 1 else (every,):
            run_both(failures, layer, layer, linears, tokens, used, *where, "used", used)


def communicated(job: Callable[[], object]) -> Counter[str]:
    """The collectives and this package's ops that a job calls, a gather by all-to-all as the gather that it is."""
    with SeesDispatches() as mode:
        job()
    calls: Counter[str] = Counter()
    for function in mode.seen:
        namespace, _, name = function.name().partition("::")
        if namespace == "overlap" or ("c10d" in namespace and name != "wait_tensor"):
            gathers = name in ("all_to_all_single", "all_gather_into_tensor")
            calls["all_gather" if gathers else name] += 1
    return calls


@pytest.mark.ranks((2, "gloo"), (3, "gloo"), (2, "nccl"))
def test_nn_several_outputs_communicate_once(failures: Failures) -> None:
    gather_gemm, scatter_gemm = {"allgather_gemm.weights": 1}, {"gemm_reducescatter": 1}
    for (in_features, out_features, bias), (sequence, gather) in itertools.product(
        CASES, itertools.product((False, True), repeat=2)
    ):
        linears = integer_linears(in_features, out_features, bias)
        layer = ColumnParallelLinear.from_linear(
            linears, sequence_parallel=sequence, gather_output=gather
        )
        tokens = 4 * dist.get_world_size()
        input = integers(4 if sequence else tokens, in_features, seed=3)
        where = (in_features, out_features, sequence, gather)
        gathered = {"all_gather": 1} if gather else {}
        forward = {**(gather_gemm if sequence else {}), **gathered}
        weights = {"all_gather": 1}  # of the input, for the weights' gradients
        backward = {**scatter_gemm, **weights} if sequence else {"gemm_allreduce": 1}
        for trains, needed in itertools.product((True, False), repeat=2):
            if not (trains or needed):
                continue
            layer.requires_grad_(trains)
            given = input.clone().requires_grad_(needed)
            outputs = []
            calls = communicated(lambda: outputs.extend(layer(given)))  # noqa: B023, called at once
            failures.expect(None if calls == forward else f"{calls}", "forward", *where)
            loss = sum(output.sum() for output in outputs)
            calls = communicated(loss.backward)
            right = dict(backward)
            if not trains:
                right.pop("all_gather", None)
            if not needed:
                right = weights if sequence else {}
            failures.expect(
                None if calls == right else f"{calls}", "backward", *where, trains, needed
            )


@pytest.mark.ranks((2, "gloo"), (2, "nccl"), long=[(3, "gloo")])
def test_nn_several_outputs_in_other_manners(failures: Failures) -> None:
    """Compiled with several numbers of tokens, checkpointed, under autocast, and in float64."""
    for (in_features, out_features, bias), (sequence, gather) in (
        ((5, (6, 12), (True, True)), (True, False)),  # parts of one size on 2 and 3 ranks
        ((7, (5, 3, 1), (True, False, True)), (False, False)),
        ((7, (5, 3, 1), (True, False, True)), (True, True)),
    ):
        linears = integer_linears(in_features, out_features, bias)
        options = {"sequence_parallel": sequence, "gather_output": gather}
        layer = ColumnParallelLinear.from_linear(linears, **options)
        every = range(len(out_features))
        where = (in_features, out_features, *options.values())

        def checkpointed(*arguments):
            return checkpoint(layer, *arguments, use_reentrant=False)  # noqa: B023

        run_both(failures, checkpointed, layer, linears, 5, every, *where, "checkpointed")
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        for tokens in (12, 7):
            run_both(failures, compiled, layer, linears, tokens, every, *where, "compiled")
        run_both(failures, compiled, layer, linears, 7, every[:1], *where, "compiled, one used")

        # Small integers are exact in bfloat16 too.
        halves = copy.deepcopy(linears).bfloat16()
        whole = integers(4, in_features, seed=3)
        mine = (my_tokens(whole) if sequence else whole).clone().requires_grad_()
        layer.zero_grad()
        with torch.autocast(rank_device().type, torch.bfloat16):
            outputs = layer(mine, 4) if sequence else layer(mine)
        own = torch.Tensor.detach if gather else my_features
        for output, right in zip(outputs, all_outputs(halves, whole.bfloat16()), strict=True):
            failures.expect(difference(output.detach(), own(right.detach())), "autocast", *where)
        sum(output.sum() for output in outputs).backward()
        dtypes = {mine.grad.dtype, *(parameter.grad.dtype for parameter in layer.parameters())}
        failures.expect(None if dtypes == {torch.float32} else f"{dtypes}", "autocast", *where)
        layer.double()
        doubles = copy.deepcopy(linears).double()
        run_both(failures, layer, layer, doubles, 5, every, *where, "double")


def derivatives(
    outputs: Sequence[torch.Tensor],
    factors: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    vectors: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """The Hessian of sum(factors * outputs ** 2) times vectors, and the derivative of that."""
    squares = [output.square() for output in outputs]
    first = torch.autograd.grad(squares, leaves, factors, create_graph=True)
    by = [*leaves, *factors]
    second = torch.autograd.grad(first, by, vectors, create_graph=True)
    again = [*vectors, *(factor.detach() for factor in factors)]
    return [*second, *torch.autograd.grad(second, by, again)]


def penalty(outputs: Sequence[torch.Tensor], weights: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The gradients of the squared norm of a loss's gradients."""
    first = torch.autograd.grad(
        sum(output.pow(3).sum() for output in outputs), weights, create_graph=True
    )
    return torch.autograd.grad(sum(grad.square().sum() for grad in first), weights)


def asking(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("sequence", [False, True], ids=["all", "sequence"])
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (3, "gloo"), (2, "nccl"))
def test_nn_several_outputs_have_second_derivatives(failures: Failures, sequence: bool) -> None:
    """Derivatives of derivatives, by this rank's parts in the parameters' places; and torch.func's transforms."""
    for (in_features, out_features, bias), gather in itertools.product(CASES, (False, True)):
        where = (in_features, out_features, bias, "gathered", gather)
        linears = integer_linears(in_features, out_features, bias, torch.float64)
        layer = ColumnParallelLinear.from_linear(
            linears, sequence_parallel=sequence, gather_output=gather
        )
        own = torch.Tensor.detach if gather else my_features
        cut = my_tokens if sequence else torch.Tensor.detach
        tokens = 7
        shapes = [(tokens, in_features), *(p.shape for p in linears.parameters())]
        shapes += [(tokens, size) for size in out_features]
        whole = [integers(*s, seed=i, dtype=torch.float64) for i, s in enumerate(shapes)]
        vectors = [integers(*s, seed=50 + i, dtype=torch.float64) for i, s in enumerate(shapes)]
        names = [name for name, _ in linears.named_parameters()]
        count = 1 + len(names)
        vectors = vectors[:count]
        cuts = [cut, *[lambda t: my_part(t, 0)] * len(names), *[own] * len(out_features)]

        def of_whole(input, *parameters):
            given = dict(zip(names, parameters, strict=True))  # noqa: B023
            return [
                functional.linear(input, given[f"{i}.weight"], given.get(f"{i}.bias"))
                for i in range(len(out_features))  # noqa: B023
            ]

        def of_layer(input, *parameters):
            given = dict(zip(map(own_name, names), parameters, strict=True))  # noqa: B023
            arguments = (input, 7) if sequence else (input,)
            return torch.func.functional_call(layer, given, arguments)  # noqa: B023

        operands = asking(whole)
        right = derivatives(
            of_whole(*operands[:count]), operands[count:], operands[:count], vectors
        )
        parts = asking([cut(tensor) for cut, tensor in zip(cuts, whole, strict=True)])
        got = derivatives(
            of_layer(*parts[:count]),
            parts[count:],
            parts[:count],
            [cut(vector) for cut, vector in zip(cuts, vectors, strict=False)],
        )
        for i, (value, exact) in enumerate(zip(got, right, strict=True)):
            exact = cuts[i % len(cuts)](exact.detach())
            failures.expect(difference(value.detach(), exact), "by", i, *where)

        def loss(function, *given):
            outputs = function(*given[:count])  # noqa: B023
            return sum(
                (factor * output.square()).sum()
                for factor, output in zip(given[count:], outputs, strict=True)  # noqa: B023
            )

        places = tuple(range(count))
        parts = [part.detach() for part in parts]
        got = torch.func.grad(lambda *t: loss(of_layer, *t), places)(*parts)
        right = torch.autograd.grad(loss(of_whole, *operands), operands[:count], create_graph=True)
        for i, (value, exact) in enumerate(zip(got, right, strict=True)):
            exact = cuts[i](exact.detach())
            failures.expect(difference(value, exact), "torch.func.grad by", i, *where)
        (twice,) = torch.autograd.grad(right[0].square().sum(), operands[0])
        by_input = torch.func.grad(lambda *t: loss(of_layer, *t))
        got = torch.func.grad(lambda *t: by_input(*t).square().sum())(*parts)  # noqa: B023
        failures.expect(difference(got, cut(twice)), "grad of grad", *where)
        batch = torch.stack([parts[0], 2 * parts[0]], dim=-1)
        got = torch.func.vmap(lambda t: of_layer(t, *parts[1:count]), -1)(batch)  # noqa: B023
        for i, value in enumerate(got):
            for j in range(2):
                exact = of_layer(batch[..., j], *parts[1:count])[i]
                failures.expect(difference(value[j], exact), "vmap", i, j, *where)

        # By the DTensors themselves.
        given = (cut(whole[0]), tokens) if sequence else (whole[0],)
        got = penalty(layer(*given), list(layer.weights))
        right = penalty(all_outputs(linears, whole[0]), [linear.weight for linear in linears])
        for i, (value, exact) in enumerate(zip(got, right, strict=True)):
            failures.expect(difference(value.full_tensor(), exact), "penalty by", i, *where)


@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (2, "nccl"))
def test_nn_several_outputs_give_gradients_to_those_that_ask(failures: Failures) -> None:
    """Gradients come out for those that ask, whoever else asks."""
    for sequence, needs in itertools.product((False, True), itertools.product((0, 1), repeat=5)):
        linears = integer_linears(6, (5, 3), (True, True))
        layer = ColumnParallelLinear.from_linear(linears, sequence_parallel=sequence)
        whole = integers(6, 6, seed=3)
        mine = (my_tokens(whole) if sequence else whole).clone()
        for tensor, needed in zip((mine, *layer.parameters()), needs, strict=True):
            tensor.requires_grad_(bool(needed))
        outputs = layer(mine, 6) if sequence else layer(mine)
        if any(needs):
            sum(output.sum() for output in outputs).backward()
        got = [tensor.grad is not None for tensor in (mine, *layer.parameters())]
        failures.expect(None if got == list(map(bool, needs)) else f"{got}", sequence, needs)


def my_state(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: my_part(value, 0).clone() for name, value in whole.items()}


def check_state(layer: torch.nn.Module, parts: dict[str, torch.Tensor]) -> str | None:
    """The fault of the names and the parts in the layer's state dict."""
    state = layer.state_dict()
    if sorted(state) != sorted(parts):
        return f"names {sorted(state)}"
    problems = [difference(value.to_local(), parts[name]) for name, value in state.items()]
    return next(filter(None, problems), None)


class Doubled(torch.nn.Module):
    """A parametrization whose result lies elsewhere than the parameter."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight.redistribute(placements=[Replicate()])


@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (3, "gloo"), (2, "nccl"))
def test_nn_several_weights_are_stored_as_linears(failures: Failures) -> None:
    """Names, and what loads, copies, converts and puts together."""
    for in_features, out_features, bias in CASES:
        where = (in_features, out_features, bias)
        linears = integer_linears(in_features, out_features, bias)
        linears[0].weight.requires_grad_(False)
        whole = whole_state(linears)
        parts = my_state(whole)
        layer = ColumnParallelLinear.from_linear(linears).eval()
        failures.expect(check_state(layer, parts), "from_linear", *where)
        asks = [parameter.requires_grad for parameter in layer.weights]
        right = [linear.weight.requires_grad for linear in linears]
        failures.expect(None if asks == right else f"{asks}", "requires_grad", *where)
        states = {
            "DTensors": layer.state_dict(),
            "replicated": {
                name: DTensor.from_local(value, mesh(), [Replicate()])
                for name, value in whole.items()
            },
            "parts": parts,
            "whole": whole,
        }
        for (what, state), assign in itertools.product(states.items(), (False, True)):
            device = "meta" if assign else rank_device()
            other = ColumnParallelLinear(in_features, out_features, bias, device=device)
            outer = torch.nn.ModuleDict({"inner": other})
            before = dict(state)
            outer.load_state_dict({f"inner.{k}": v for k, v in state.items()}, assign=assign)
            other.load_state_dict(state, assign=assign)
            kept = all(before[name] is state[name] for name in state)
            failures.expect(None if kept else "changed the given state dict", what, *where)
            failures.expect(check_state(other, parts), what, "assigned", assign, *where)

        gathered = full_state_dict(torch.nn.Sequential(layer))
        for name, value in whole.items():
            failures.expect(difference(gathered[f"0.{name}"], value), "full", name, *where)
            failures.expect(difference(layer.full_state_dict()[name], value), name, *where)

        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        meta = ColumnParallelLinear(in_features, list(out_features), list(bias), device="meta")
        meta.to_empty(device=rank_device()).load_state_dict(whole)
        moved = copy.deepcopy(layer).double().float()
        for what, other in {
            "deepcopy": copy.deepcopy(layer),
            "pickled": torch.load(file, weights_only=False),
            "meta": meta,
            "converted": moved,
        }.items():
            failures.expect(check_state(other, parts), what, *where)
            same = all(
                one._spec == two._spec
                for one, two in zip(other.parameters(), layer.parameters(), strict=True)
            )
            failures.expect(None if same else "other specs", what, *where)

        parametrize.register_parametrization(moved.weights, "0", Doubled())
        input = integers(4, in_features, seed=3)
        expected = functional.linear(input, 2 * linears[0].weight, linears[0].bias)
        output = moved(input)[0]
        failures.expect(
            difference(output.detach(), my_features(expected).detach()), "parametrized", *where
        )
    layer = ColumnParallelLinear(6, (4, 2), bias=False)
    names = [name for name, _ in layer.named_parameters()]
    fine = names == ["weights.0", "weights.1"] and layer.biases is None
    failures.expect(None if fine else f"{names}", "without biases")
    text = repr(ColumnParallelLinear(6, (4, 2), bias=(True, False), device="meta"))
    fine = "out_features=(4, 2), bias=[True, False]" in text and "out_features=(4, 2)" in text
    failures.expect(None if fine else text, "repr")


@pytest.mark.ranks((1, "gloo"), (3, "gloo"), (2, "nccl"))
def test_nn_several_weights_are_drawn_as_linears(failures: Failures) -> None:
    """All parameters lie in Linear's bounds, and no two are alike, nor those of two ranks."""
    torch.manual_seed(0)  # the same on every rank: the parts must be drawn apart nevertheless
    world = dist.get_world_size()
    layer = ColumnParallelLinear(60, (40 * world, 40 * world), device=rank_device())
    bound = 60**-0.5
    drawn = [p.detach().to_local() for p in layer.parameters()]
    for i, local in enumerate(drawn):
        low, high = local.min().item(), local.max().item()
        # Some of that many draws from a uniform distribution come near both ends.
        fine = -bound <= low < -0.8 * bound and 0.8 * bound < high <= bound
        failures.expect(None if fine else f"{low} to {high}", i)
    numbers = torch.cat([local.flatten() for local in drawn])
    every = [torch.empty_like(numbers) for _ in range(world)]
    dist.all_gather(every, numbers)
    # Some of that many float32 may be alike by chance.
    distinct = torch.cat(every).unique().numel() / torch.cat(every).numel()
    failures.expect(None if distinct > 0.99 else f"{distinct} are distinct")


class Gated(torch.nn.Module):
    """`down(gate(input) * up(input))`, unsharded or on the layers."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.both = integer_linears(width, (hidden, hidden), (True, True))
        self.down = torch.nn.Linear(hidden, width, device=rank_device())
        fill_with_integers(self.down)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if isinstance(self.both, torch.nn.ModuleList):
            gate, up = all_outputs(self.both, input)
        else:
            gate, up = self.both(input)
        return self.down(gate * up)

    def parallel(self, **options: object) -> Gated:
        model = copy.deepcopy(self)
        model.both = ColumnParallelLinear.from_linear(self.both, **options)
        model.down = RowParallelLinear.from_linear(self.down, **options)
        return model


def check_full(failures: Failures, model: Gated, whole: Gated, *where: object) -> None:
    state = full_state_dict(model)
    right = {f"both.{name}": value for name, value in whole_state(whole.both).items()}
    right |= {f"down.{name}": value for name, value in whole.down.state_dict().items()}
    names = sorted(state) == sorted(right)
    failures.expect(None if names else f"{sorted(state)}", *where)
    for name, value in right.items():
        failures.expect(difference(state[name], value), name, *where)


def checkpoint_to(folder: str, load: bool) -> tuple[int, list[str]]:
    failures = Failures()
    for width, hidden in ((8, 12), (7, 5)):
        whole = Gated(width, hidden)
        model = whole.parallel()
        name = f"{folder}/{width}x{hidden}"
        if not load:
            dcp.save(model.state_dict(), checkpoint_id=name)
        else:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            state = model.state_dict()
            dcp.load(state, checkpoint_id=name)
            model.load_state_dict(state)
        check_full(failures, model, whole, name)
    return failures.result()


def test_nn_several_weights_are_loaded_by_other_numbers_of_ranks(tmp_path):
    for world, load in ((2, False), (3, True), (1, True)):
        results = rank_pool.run(world, "gloo", checkpoint_to, str(tmp_path), load)
        assert all(checks > 0 and not lines for checks, lines in results), results


def check_fsdp(sequence: bool, width: int, hidden: int) -> tuple[int, list[str]]:
    """FSDP2 over dp, the layers over tp: a step, state dicts of the whole, loading and drawing in place."""
    failures = Failures()
    grid = mesh(2, dist.get_world_size() // 2)
    whole = Gated(width, hidden)
    model = whole.parallel(group=grid["tp"], sequence_parallel=sequence)
    fully_shard(model, mesh=grid["dp"])
    check_full(failures, model, whole, "sharded")
    rows = integers(8, width, seed=3)
    mine = rows.chunk(2)[grid.get_local_rank("dp")]
    if sequence:
        mine = mine.chunk(2)[grid.get_local_rank("tp")]
    (whole(rows).sum() / 2).backward()  # FSDP averages over dp
    model(mine).sum().backward()
    for module in (model, whole):
        torch.optim.SGD(module.parameters(), lr=2.0**-4).step()
    check_full(failures, model, whole, "after a step")
    loaded = integer_linears(width, (hidden, hidden), (True, True))
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.add_(1)
    model.both.load_state_dict(whole_state(loaded))
    whole.both.load_state_dict(loaded.state_dict())
    check_full(failures, model, whole, "loaded")
    model.both.reset_parameters()
    drawn = full_state_dict(model)
    both = torch.cat([drawn["both.weights.0"], drawn["both.weights.1"]])
    distinct = both.unique().numel()
    failures.expect(None if distinct == both.numel() else f"{distinct} distinct", "drawn")
    return failures.result()


@pytest.mark.parametrize("sequence", [False, True], ids=["all", "sequence"])
@pytest.mark.ranks((4, "gloo"), (4, "nccl"))
def test_nn_several_weights_work_beside_fsdp(ranks, sequence):
    ranks.expect_no_failures(check_fsdp, sequence, 6, 8)
    ranks.expect_no_failures(check_fsdp, sequence, 6, 7)


def errors() -> dict[str, str]:
    linears = [torch.nn.Linear(size, 4, device="meta") for size in (6, 8)]
    make = ColumnParallelLinear
    layer = make(6, (4, 2), device=rank_device())
    return {
        "empty": message_of(make, 6, []),
        "no linears": message_of(make.from_linear, []),
        "zero": message_of(make, 6, (4, 0)),
        "negative": message_of(make, 6, [4, -2]),
        "not a number": message_of(make, 6, ("q", 4)),
        "biases": message_of(make, 6, (4, 2), (True,)),
        "biases of one": message_of(make, 6, 4, (True, False)),
        "in_features": message_of(make.from_linear, linears),
        "row": message_of(RowParallelLinear, 6, (4, 2)),
        "input": message_of(layer, torch.ones(3, 5, device=rank_device())),
        "tokens": message_of(layer, torch.ones(3, 6, device=rank_device()), 3),
        "shape": message_of(
            layer.load_state_dict, {**layer.state_dict(), "weights.1": torch.zeros(5, 7)}
        ),
    }


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_nn_several_outputs_name_what_is_wrong(ranks):
    for messages in ranks.run(errors):
        for name in ("empty", "no linears"):
            assert "one number or more" in messages[name] and "[]" in messages[name]
        assert "positive" in messages["zero"] and "(4, 0)" in messages["zero"]
        assert "positive" in messages["negative"] and "[4, -2]" in messages["negative"]
        assert "sequence of ints" in messages["not a number"] and "'q'" in messages["not a number"]
        assert "(True,)" in messages["biases"] and "(4, 2)" in messages["biases"]
        assert "out_features=4" in messages["biases of one"]
        assert "[6, 8]" in messages["in_features"]
        assert "integer" in messages["row"]
        assert "(3, 5)" in messages["input"]
        assert "sequence_parallel" in messages["tokens"]
        assert "size mismatch for weights.1" in messages["shape"]
