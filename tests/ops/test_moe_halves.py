"""`moe_dispatch` and `moe_combine`: order and padding of rows, traffic, sums, errors; both under the compiler; and the layer."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import overlap_torch
from checks import Failures, message_of
from operands import difference, integers, rank_device, subgroup, world_name
from overlap_torch._moe import ops
from tests.ops.test_moe import ROUTINGS, Case, ids_of


def as_dtensor(tensor: torch.Tensor) -> DTensor:
    mesh = init_device_mesh(tensor.device.type, (dist.get_world_size(),))
    return DTensor.from_local(tensor, mesh, [Shard(0)])


def whole_order(case: Case, rank: int, world: int, align: int) -> tuple[list, list[int], list[int]]:
    """The rows that this rank's experts get, as (source, token), None for padding; the ends and the counts."""
    experts = case.experts_of(world)
    first, order, ends, counts = sum(experts[:rank]), [], [], []
    chosen = [ids_of(case, r, world).tolist() for r in range(world)]
    for expert in range(first, first + experts[rank]):
        own = [
            (source, token)
            for source in range(world)
            for token, choices in enumerate(chosen[source])
            for choice in choices
            if choice == expert
        ]
        order += own + [None] * (-len(own) % align)
        ends.append(len(order))
        counts.append(len(own))
    return order, ends, counts


@pytest.mark.parametrize(("align", "order_of_sums"), [(1, "choices"), (4, "choices"), (4, "ranks")])
def test_moe_dispatch_rows_and_traffic(failures: Failures, align: int, order_of_sums: str) -> None:
    """Rows and sums bit for bit; what is sent: a token once to each rank that it visits; home a row for each route, or each visit."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sent: list[tuple[int, ...]] = []
    all_to_all = ops.all_to_all

    def recorded(whole, *rest):
        sent.append(tuple(whole.shape))
        return all_to_all(whole, *rest)

    for case in ROUTINGS:
        x = [integers((case.tokens[r], 3), rank_device(), "x", r).float() for r in range(world)]
        ids = ids_of(case, rank, world)
        order, ends, counts = whole_order(case, rank, world, align)
        right = [x[0].new_zeros(3) if who is None else x[who[0]][who[1]] for who in order]
        sent.clear()
        ops.all_to_all = recorded
        try:
            rows, route = overlap_torch.moe_dispatch(
                x[rank],
                ids,
                num_experts=case.experts_of(world),
                align=align,
                sum_order=order_of_sums,
                transport="nccl",
            )
            # Shares that no other order of the sum gives the bits of.
            shares = torch.rand(ids.shape, generator=torch.Generator().manual_seed(rank)).to(
                x[0].device
            )
            results = torch.where(rows.abs().sum(1, keepdim=True) >= 0, rows + 0.1, rows)
            output = overlap_torch.moe_combine(results, route, shares)
        finally:
            ops.all_to_all = all_to_all
        failures.expect(difference(rows, torch.stack(right) if right else x[0][:0]), "rows", case)
        failures.equal(route.offs.tolist(), ends, "offs", case)
        failures.equal(route.counts.tolist(), counts, "counts", case)
        failures.equal(route.offs.dtype, torch.int32, "offs", case)

        experts = case.experts_of(world)
        owner = torch.arange(world).repeat_interleave(torch.tensor(experts)).tolist()
        chosen = [[i for i in row if 0 <= i < sum(experts)] for row in ids.tolist()]
        visits = sum(len({owner[i] for i in row}) for row in chosen)
        came = sum(counts)
        if order_of_sums == "ranks":
            came = len({who for who in order if who is not None})
        expected = [(visits, 3), (came, 3)]
        found = [shape for shape in sent if shape[-1] == 3 and len(shape) == 2][-2:]
        if max(experts) != 2:  # counts are of that shape, too
            failures.expect(None if found == expected else f"sent {sent}", expected, case)

        owners = torch.tensor([*owner, world], device=ids.device)
        kept = (ids >= 0) & (ids < sum(experts))
        at = owners[torch.where(kept, ids, len(owner)).long()]
        total = torch.zeros_like(x[rank])
        for ranks in [range(world)] if order_of_sums == "choices" else [[r] for r in range(world)]:
            own = torch.zeros_like(total)
            for choice in range(case.choices):
                here = torch.isin(at[:, choice], torch.tensor([*ranks], device=ids.device))
                part = (x[rank] + 0.1) * shares[:, choice, None]
                own = torch.where(here[:, None], own + part, own)
            total = total + own
        failures.expect(difference(output, total), "sum", case)


def operands(requires_grad: bool) -> list[torch.Tensor]:
    """x, ids, shares, gate_up and down of four experts in all."""
    device, rank, own = rank_device(), dist.get_rank(), 4 // dist.get_world_size()
    draw = torch.Generator().manual_seed(rank)
    x, shares = torch.randn(6 + rank, 8, generator=draw), torch.rand(6 + rank, 2, generator=draw)
    ids = torch.randint(-1, 4, (6 + rank, 2), generator=draw)
    weights = torch.randn(own, 32, 8, generator=draw), torch.randn(own, 8, 16, generator=draw)
    x, shares, *weights = (
        t.to(device).requires_grad_(requires_grad) for t in (x, shares, *weights)
    )
    return [x, ids.to(device), shares, *weights]


def calls_of_operators() -> tuple[list[tuple[str, tuple]], int]:
    """Each operator's name and arguments, and the number of rows."""
    x, ids, shares, gate_up, down = operands(True)
    experts = [gate_up.shape[0]] * dist.get_world_size()
    rows, offs, counts, *route = torch.ops.overlap.moe_dispatch(
        x, ids, experts, 1, 0, 0, False, False, world_name()
    )
    rows = rows.detach().requires_grad_()
    flat, size = shares.detach().reshape(-1, 1), rows.shape[0]
    silu = ("silu", 1.0, 0.0, 0.0, True, False)
    fixed = rows.detach()
    kept = fixed.new_ones(size, gate_up.shape[1]).requires_grad_()
    home = (x.shape[0], 2, *route, False, world_name())
    products = torch.ops.overlap._moe_hidden(
        fixed, gate_up.detach(), None, None, None, offs, *silu, True
    )
    hidden, saved = products[0], products[1]
    first, experts_of = (x, rows, hidden), (None, gate_up, None, None, down, None)
    how = (offs, *silu)
    return [
        ("moe_dispatch", (x, ids, experts, 1, 0, 0, False, True, world_name())),
        ("moe_dispatch", (x, ids, experts, 1, 9, 64, False, True, world_name())),
        ("moe_combine", (rows, shares, x.shape[0], 2, *route, True, world_name())),
        ("_moe_spread", (x, 2, *route, False, world_name())),
        ("_moe_home", (rows, *route[:2], *route[3:], ids.numel(), world_name())),
        ("_moe_away", (flat, *route[:2], *route[3:], world_name())),
        ("_moe_linear", (rows, gate_up, offs)),
        ("_moe_hidden", (fixed, gate_up.detach(), None, None, None, offs, *silu, True)),
        ("_moe_hidden", (fixed, *[gate_up.detach()] * 2, None, None, offs, *silu, False)),
        ("_moe_gate", (kept, None, None, None, offs, *silu)),
        ("_moe_down", (fixed, gate_up.detach(), None, offs, shares.detach(), *home)),
        (
            "_moe_experts",
            (*first, saved, *experts_of, shares, *how, False, *home[:-1], True, home[-1]),
        ),
        (
            "_moe_experts",
            (*first, None, *experts_of, None, *how, True, *home[:-1], False, home[-1]),
        ),
        ("_moe_weight_gradient", (rows, rows, offs)),
    ], size


@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (2, "nccl"))
def test_moe_under_the_compiler_and_autocast(failures: Failures) -> None:
    """One graph, outputs and gradients as eager; opcheck of the operators; autocast."""
    found = []
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(overlap_torch.moe, fullgraph=True, backend=counter)
    for call in (overlap_torch.moe, compiled):
        given = operands(True)
        output = call(*given)
        output.square().sum().backward()
        found.append([output.detach(), *(t.grad for t in given if t.grad is not None)])
    failures.expect_equal(found[1], found[0], "compiled")
    failures.equal(len(found[0]), 5, "output and gradients")
    failures.equal(counter.frame_count, 1, "graphs")
    torch._dynamo.reset()  # where shapes of data break graphs, the operators run as they are
    broken = torch.compile(overlap_torch.moe, backend="aot_eager")(*operands(False))
    failures.expect_equal([broken], found[0][:1], "compiled with breaks")

    calls, size = calls_of_operators()
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    for name, arguments in calls:
        operator = getattr(torch.ops.overlap, name).default
        for test, result in torch.library.opcheck(
            operator, arguments, test_utils=tests, raise_exception=False
        ).items():
            failures.equal(result, "SUCCESS", test, name)

    given = operands(True)
    with FlopCounterMode(display=False) as counted:
        overlap_torch.moe(*given).sum().backward()
    # Forward, the rows' gradients and the weights' have two products of each row.
    failures.equal(counted.get_total_flops(), 3 * 2 * size * (32 * 8 + 16 * 8), "FLOP")

    given = operands(False)
    low = [t if t.dtype == torch.int64 else t.bfloat16() for t in given]
    low[2] = given[2]
    with torch.autocast(rank_device().type, torch.bfloat16):
        output = overlap_torch.moe(*given)
    failures.expect(difference(output, overlap_torch.moe(*low)), "autocast")


@pytest.mark.ranks((1, "gloo"), (1, "nccl"))
def test_moe_second_order(failures: Failures) -> None:
    """First and second derivatives for each place of the shares, one weight and a pair, with biases."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 3), (3, 2), (2, 4, 3), (2, 3, 2), (2, 4), (2, 3)]
    inputs = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(rank_device())
        for shape in shapes
    ]
    ids = torch.tensor([[0, 1], [-1, 1], [1, 1]], device=rank_device())

    for place, pair, biases, save in [
        ("output", False, 0, "rows"),
        ("output", True, 1, "gate_up"),
        ("hidden", False, 1, "nothing"),
        ("input", False, 0, "rows"),
        ("hidden", False, 2, "rows"),
        ("output", False, 2, "nothing"),
        ("input", False, 2, "rows"),
    ]:

        def function(x, shares, gate_up, down, *given, place=place, pair=pair, save=save):
            gate_up = [part.contiguous() for part in gate_up.chunk(2, 1)] if pair else gate_up
            named = dict(zip(("gate_up_bias", "down_bias"), given, strict=False))
            how = {"shares_on": place, "save": save, "group": single_rank_group(), **named}
            return overlap_torch.moe(x, ids, shares, gate_up, down, **how)

        given = [each.clone().requires_grad_() for each in inputs[: 4 + biases]]
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # an operator without gradients warns
            for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
                failures.equal(check(function, given), True, check.__name__, place, pair, biases)


def to_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


WRONG = [
    (ValueError, "same leading dims", {"ids": lambda ids: ids[:-1]}),
    (TypeError, "int32 or int64", {"ids": torch.Tensor.double}),
    (TypeError, "takes x in bfloat16", {"x": torch.Tensor.long}),
    (ValueError, "shape of topk_ids", {"shares": lambda shares: shares[:, :1]}),
    (ValueError, "takes gate_up of shape", {"gate_up": lambda weight: weight[:, :-2]}),
    (TypeError, "down in torch.float32, x's dtype", {"down": torch.Tensor.double}),
    (ValueError, "meta tensors have no values", {"x": to_meta, "ids": to_meta}),
    (ValueError, "num_experts is 0", {"num_experts": 0}),
    (ValueError, "takes gate_up of shape (9", {"num_experts": [9]}),
    (ValueError, "an activation is one of", {"activation": "swish"}),
    (ValueError, "shares_on is", {"shares_on": "results"}),
    (ValueError, 'save is "rows"', {"save": "all"}),
    (ValueError, 'only "rows" with', {"save": "nothing", "shares_on": "input"}),
    (ValueError, "sum_order is", {"sum_order": "any"}),
    (TypeError, "interleaved is True or False", {"interleaved": "yes"}),
    (TypeError, "max_rows must be an integer", {"max_tokens": 99, "max_rows": 16.5}),
    (ValueError, "transport is None", {"transport": "gloo"}),
    (ValueError, "are given together", {"max_rows": 8}),
    (ValueError, "more than max_tokens=5", {"max_rows": 8, "max_tokens": 5}),
    (
        ValueError,
        "more than 1073741824",
        {"transport": "peer", "max_rows": 8, "max_tokens": 1 << 27},
    ),
    (ValueError, "a list of e tensors", {"gate_up": lambda weight: []}),
    (ValueError, "of one shape [N, K]", {"gate_up": lambda w: [w[0], w[1, 2:]]}),
    (TypeError, "holds a NoneType", {"gate_up": lambda weight: [None, None]}),
    (TypeError, "gate_up_bias must be a tensor", {"gate_up_bias": (1.0, 2.0)}),
    (TypeError, "call it with gate_up.to_dense()", {"gate_up": torch.Tensor.to_sparse}),
    (TypeError, "call it with x.to_local()", {"x": as_dtensor}),
    (TypeError, "call it with down.to_local()", {"down": as_dtensor}),
    (ValueError, "but its shape is ()", {"down": torch.Tensor.sum}),
    (TypeError, "an overlap_torch.Gate, but it is a function", {"activation": lambda: None}),
    (TypeError, "num_experts must be an integer, but it is a float", {"num_experts": 4.0}),
    (TypeError, "number of experts must be an integer, but it is a float", {"num_experts": [2.0]}),
    (ValueError, "for one gate_up", {"gate_up": lambda w: w.chunk(2, 1), "interleaved": True}),
]


@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (2, "nccl"))
def test_moe_errors_come_before_anything_is_sent(failures: Failures) -> None:
    """Each on every rank, before anything is sent: the group goes on. A rank alone that raises is named to the others."""
    world = dist.get_world_size()
    names = ["x", "ids", "shares", "gate_up", "down"]
    for kind, text, changes in WRONG:
        given, keywords = operands(False), {}
        for name, change in changes.items():
            if name in names:
                given[names.index(name)] = change(given[names.index(name)])
            elif isinstance(change, list):
                keywords[name] = change * world
            else:
                keywords[name] = change
        try:
            overlap_torch.moe(*given, **keywords)
            failures.expect("nothing was raised", text)
        except (ValueError, TypeError) as error:
            right = type(error) is kind and text in str(error)
            failures.expect(None if right else f"{error!r}", text)
    limits = {"max_tokens": 9, "max_rows": 1, "transport": "nccl"}
    failures.raises("more than max_rows=1.", overlap_torch.moe, *operands(False), **limits)
    x, ids, *others = operands(False)  # all rows to the first rank, and none to the others
    given = (x, torch.zeros_like(ids), *others)
    failures.raises("rank 0: its experts got", overlap_torch.moe, *given, **limits)
    rows, route = overlap_torch.moe_dispatch(*operands(False)[:2], num_experts=4)
    message = message_of(overlap_torch.moe_combine, torch.cat([rows, rows[:1]]), route)
    if rows.shape[0] > 0:
        failures.holds(f"R = {rows.shape[0]} rows", message)
    for text, given in (
        ("the Route that moe_dispatch returned, but got a Tensor", (rows, route.offs)),
        ("results must be a tensor, but it is a NoneType", (None, route)),
        ("but they are on meta", (rows.to("meta"), route)),
        ("topk_weights must be a tensor, but it is a list", (rows, route, [1.0])),
    ):
        failures.raises(text, overlap_torch.moe_combine, *given)
    for text, gate in (
        ("limit=7.0 and offset=0.0", {"limit": 7.0}),
        ("offset=1.0", {"offset": 1.0}),
    ):
        failures.raises(text, overlap_torch.Gate, gated=False, **gate)
    failures.expect(None if overlap_torch.moe(*operands(False)).isfinite().all() else "not finite")


@pytest.mark.ranks((2, "gloo"))
def test_moe_backward_keeps_what_save_says(failures: Failures) -> None:
    """Numbers of floats that autograd saves, besides operands and routes: R rows of H = 8 and products of 2I = 32."""
    given = operands(True)
    ids, held = given[1], {tensor.data_ptr() for tensor in given}
    rows = overlap_torch.moe_dispatch(given[0].detach(), ids, num_experts=4)[0].shape[0]
    for save, expected in (("rows", 40 * rows), ("gate_up", 32 * rows), ("nothing", 0)):
        saved: dict[int, int] = {}

        def note(tensor: torch.Tensor, saved=saved) -> torch.Tensor:
            if tensor.is_floating_point() and tensor.data_ptr() not in held:
                saved[tensor.data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            overlap_torch.moe(*given, save=save)
        failures.equal(sum(saved.values()), expected, save)


@pytest.mark.ranks((2, "gloo"))
def test_moe_ranks_that_differ_all_raise(failures: Failures) -> None:
    x, ids, *_ = operands(False)
    x = x[:, : 8 - dist.get_rank()]
    message = message_of(overlap_torch.moe_dispatch, x, ids, num_experts=4)
    failures.says(message, ("all-to-all of rows of [8]", "[7]"))
    given = operands(True)
    output = overlap_torch.moe(*given, save=("rows", "gate_up")[dist.get_rank()])
    message = message_of(torch.autograd.grad, output.sum(), given[0])
    failures.says(message, ("all-to-all of results of [8]", "all-to-all of rows of [8]"))
    failures.expect(None if overlap_torch.moe(*operands(False)).isfinite().all() else "not finite")


def routed(experts: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    shares, ids = x[..., :experts].softmax(-1).topk(2)
    return ids, shares


@pytest.mark.parametrize("experts", [4, 5])
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (4, "gloo"), (2, "nccl"))
def test_moe_layer_is_the_whole_layer(failures: Failures, experts: int) -> None:
    """The layer beside the same layer on this rank only: outputs, gradients, state dicts, the router and a shared expert."""
    rank, world = dist.get_rank(), dist.get_world_size()
    device, router = rank_device(), functools.partial(routed, experts)
    sizes = {"bias": True, "router": router, "shared": torch.nn.Identity(), "device": device}
    layer = overlap_torch.nn.MoE(8, 16, experts, **sizes, dtype=torch.float64)
    for name, parameter in layer.named_parameters():
        right = isinstance(parameter, DTensor) and parameter.placements == (Shard(0),)
        failures.expect(None if right and parameter.shape[0] == experts else str(parameter), name)
    whole = overlap_torch.nn.full_state_dict(layer)
    alone = overlap_torch.nn.MoE(
        8, 16, experts, group=single_rank_group(), **sizes, dtype=torch.float64
    )
    alone.load_state_dict(whole)
    failures.expect(None if whole["down"].unique().numel() > experts * 100 else "drawn alike")
    again = overlap_torch.nn.MoE(8, 16, experts, **sizes, dtype=torch.float64)
    again.load_state_dict(whole)
    local = {name: value.to_local() for name, value in again.state_dict().items()}
    again.load_state_dict(local)
    again.load_state_dict(layer.state_dict())
    everybody = [
        torch.randn(2, 3 + r, 8, generator=torch.Generator().manual_seed(r), dtype=torch.float64)
        for r in range(world)
    ]
    outputs = [alone(x.to(device)) for x in everybody]
    sum(output.square().sum() for output in outputs).backward()
    output = again(everybody[rank].to(device))
    output.square().sum().backward()
    expected = {"output": outputs[rank].detach()}
    found = {"output": output.detach()}
    for name, parameter in alone.named_parameters():
        begin = sum(whole[name][: -(-experts // world) * rank].shape[:1])
        own = getattr(again, name).grad.to_local()
        expected[name] = parameter.grad.to_local()[begin : begin + own.shape[0]]
        found[name] = own
    for name, right in expected.items():
        failures.near(found[name], right, name, rtol=1e-12, atol=1e-12)
    zero = torch.zeros(1)
    failures.raises("x only with one", again, everybody[rank].to(device), zero, zero)


@pytest.mark.ranks((4, "gloo"))
def test_moe_layer_under_fsdp_and_checkpointing(failures: Failures) -> None:
    """Two by two ranks: gradients summed over two steps are those of the plain layer, averaged over data parallel ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    rank = dist.get_rank()
    made = {"router": functools.partial(routed, 4), "group": mesh["ep"], "dtype": torch.float64}
    plain, cut = (overlap_torch.nn.MoE(8, 16, 4, **made) for _ in range(2))
    cut.load_state_dict(plain.state_dict())
    fully_shard(cut, mesh=mesh["dp"])
    cut.load_state_dict(
        {name: value + 1 for name, value in overlap_torch.nn.full_state_dict(plain).items()}
    )
    for name, value in overlap_torch.nn.full_state_dict(plain).items():
        failures.expect(difference(getattr(cut, name).full_tensor(), value + 1), "loaded", name)
    cut.load_state_dict(overlap_torch.nn.full_state_dict(plain))
    drawn = torch.randn(
        4, 2, 5, 8, generator=torch.Generator().manual_seed(rank), dtype=torch.float64
    )
    for reentrant, x in zip((False, True), drawn, strict=False):
        for layer in (plain, lambda x, r=reentrant: checkpoint(cut, x, use_reentrant=r)):
            layer(x.clone().requires_grad_()).square().sum().backward()
    own = slice(rank % 2 * 2, rank % 2 * 2 + 2)
    for name, parameter in plain.named_parameters():
        right = parameter.grad.to_local()
        dist.all_reduce(right, group=mesh["dp"].get_group())
        found = getattr(cut, name).grad.full_tensor()[own]
        failures.near(found, right / 2, name, rtol=1e-12, atol=1e-12)


def single_rank_group() -> dist.ProcessGroup:
    groups = [subgroup((rank,)) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


@pytest.mark.ranks((1, "gloo"))
def test_moe_refuses_tangents(failures: Failures) -> None:
    """In forward mode, of every operand; none is left out in silence. And transforms of torch.func."""
    x, ids, shares, *weights = operands(False)

    def halves(x, ids, shares):
        rows, route = overlap_torch.moe_dispatch(x, ids, num_experts=weights[0].shape[0])
        return overlap_torch.moe_combine(rows, route, shares)

    for call, given in (
        (overlap_torch.moe, [x, ids, shares, *weights]),
        (halves, [x, ids, shares]),
    ):
        for place, tensor in enumerate(given):
            if tensor.dtype == torch.int64:
                continue
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(tensor, torch.ones_like(tensor))
                operands_with_one = [*given[:place], dual, *given[place + 1 :]]
                failures.raises("has a tangent", call, *operands_with_one)
        for transform in (torch.vmap, torch.func.grad):
            one = (lambda x: call(x, *given[1:]).sum(), x[None] if transform is torch.vmap else x)  # noqa: B023
            failures.raises("takes no transform of torch.func", transform(one[0]), one[1])
    rows, route = overlap_torch.moe_dispatch(x, ids, num_experts=weights[0].shape[0])
    of_rows = torch.func.grad(lambda rows: overlap_torch.moe_combine(rows, route).sum())
    failures.raises("takes no transform of torch.func", of_rows, rows)

    tokens = torch.ones(2, 16, dtype=torch.bfloat16), ids[:2].clamp(min=0), shares[:2]
    weights = [torch.ones(4, *of).to(torch.float8_e4m3fn) for of in ((32, 16), (16, 16))]
    scales = [torch.ones(weight.shape[:2]) for weight in weights]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(scales[1], scales[1])
        call = functools.partial(overlap_torch.moe, scale_gate_up=scales[0], scale_down=dual)
        failures.raises("has a tangent", call, *tokens, *weights)
