"""Bad arguments: an error that names what was given and what is allowed, and nothing communicated."""

import functools
import re

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

import overlap_torch
from checks import Failures, check_call, message_of
from operands import Case, from_all_ranks, place, rank_device, world_name
from ops import OPS, every_op, map_tensors, tensors_of
from overlap_torch import plan as plan_module
from overlap_torch.plan import Problem
from overlap_torch.plan.types import Transport
from plans import overlapped_plans, sequential_plan

CASE = Case((24,), 16, 8, bias=True)
# Sizes that appear nowhere else in a message.
K, OTHER_K, N, OTHER_N = 113, 117, 211, 223


def bad_operands() -> dict[str, tuple[tuple, tuple[str, ...]]]:
    """name -> (input, weight and bias, parts of the message, in lower case; a | b: either)."""
    device = rank_device()
    x, w = empty(12, K), empty(N, K)
    supported = ("bfloat16", "float16|half", "float32|float")
    calls = {
        "K differs": ((empty(12, OTHER_K), w), (str(OTHER_K), str(K))),
        "K differs in three dims": ((empty(12, 2, OTHER_K), w), (str(OTHER_K), str(K))),
        "input without dims": ((empty(), w), ("[]|()", "[d0, ..., k]|[..., k]")),
        "weight of three dims": ((x, empty(2, N, K)), (f"2, {N}, {K}", "[n, k]")),
        "weight of one dim": ((x, empty(K)), (f"[{K}]|({K},)", "[n, k]")),
        "bias too long": ((x, w, empty(OTHER_N)), (str(OTHER_N), str(N))),
        "bias of two dims": ((x, w, empty(1, N)), (f"1, {N}", "[n]")),
        "bias of one element": ((x, w, empty(1)), ("[1]|(1,)", str(N))),
        "bias without dims": ((x, w, empty()), ("[]|()", str(N))),
        "weight of another dtype": ((x, w.bfloat16()), ("bfloat16", "float")),
        "input of another dtype": ((x.half(), w), ("half|float16", "float")),
        "bias of another dtype": ((x, w, empty(N).double()), ("double|float64", "float")),
        "int64": ((x.long(), w.long()), ("long|int64", *supported)),
        "int8": ((x.char(), w.char()), ("char|int8", *supported)),
        "bool": ((x.bool(), w.bool()), ("bool", *supported)),
        "complex64": ((x.cfloat(), w.cfloat()), ("complexfloat|complex64", *supported)),
        "sparse": ((x.to_sparse(), w), ("sparse",)),
        "sparse weight": ((x, w.to_sparse()), ("sparse",)),
        "input on meta": ((x.to("meta"), w), ("input is on meta", f"weight on {device.type}")),
        "weight on meta": ((x, w.to("meta")), (f"input is on {device.type}", "weight on meta")),
        "bias on meta": ((x, w, empty(N).to("meta")), (device.type, "bias on meta")),
    }
    if device.type == "cuda":
        calls |= {
            "weight on the CPU": ((x, w.cpu()), ("cuda", "cpu")),
            "input on the CPU": ((x.cpu(), w), ("cuda", "cpu")),
            "bias on the CPU": ((x, w, empty(N).cpu()), ("cuda", "cpu")),
        }
    return calls


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, device=rank_device(), dtype=dtype)


def bad_calls(op: str) -> dict[str, tuple[tuple, tuple[str, ...]]]:
    """name -> (arguments of the op, parts of the message)."""
    world = dist.get_world_size()
    x, w = empty(12, K), empty(N, K)

    def counts(total: int) -> list[int]:
        return [total, *[0] * (world - 1)]

    calls = {}
    for name, ((input, weight, *bias), parts) in bad_operands().items():
        arguments = (input, weight, *bias)
        if op == "allgather_gemm.weights":
            arguments = (input, [w.to(input.dtype), weight], [None, *(bias or [None])])
            if weight.dtype != input.dtype:
                arguments = (input, [w.to(input), weight], [])
        elif op == "gemm_alltoall":
            arguments = (input, weight, counts(12), counts(12), *bias)
        calls[name] = (arguments, parts)
    if op == "gemm_allreduce":
        return calls
    rows = (*(() if op != "gemm_alltoall" else (counts(K), counts(K))),)
    weight = ([w], []) if op == "allgather_gemm.weights" else (w,)
    calls["no dim to cut"] = ((empty(K), *weight, *rows), ("[d0, ..., k]", f"[{K}]"))
    if op == "gemm_reducescatter" and world > 1:
        shape = (12 * world + 1, 3, K)
        parts = (f"{shape[0]}, 3, {K}", f"world size {world}", "divisible")
        calls["rows not divisible"] = ((empty(*shape), w), parts)
    if op == "allgather_gemm.weights":
        calls |= {
            "no weights": ((x, [], []), ("weights",)),
            "too few biases": ((x, [w, w, w], [None, None]), ("biases", "3", "2")),
            "too many biases": ((x, [w], [None, None]), ("biases", "1", "2")),
            "K of another weight": ((x, [w, empty(N, OTHER_K)], []), (str(K), str(OTHER_K))),
            "bias of another weight": (
                (x, [w, empty(OTHER_N, K)], [None, empty(N)]),
                (str(N), str(OTHER_N)),
            ),
        }
    if op == "gemm_alltoall":
        negative = [13, -1, *[0] * (world - 2)] if world > 1 else [-1]
        calls |= {
            "no counts": ((x, w, [], counts(12)), ("send_rows", "[]", f"{world} counts")),
            "too many counts": (
                (x, w, counts(12), [*counts(0), 7]),
                ("recv_rows", "7]", f"{world} counts"),
            ),
            "negative sends": ((x, w, negative, counts(12)), ("send_rows", "negative", "-1")),
            "negative receives": ((x, w, counts(12), negative), ("recv_rows", "negative", "-1")),
            "rows left over": ((x, w, counts(11), counts(11)), ("send_rows", "12", "11")),
        }
        mine = [12 if r == dist.get_rank() else 0 for r in range(world)]
        other = [13 if r == dist.get_rank() else 0 for r in range(world)]
        calls["other rows for itself"] = ((x, w, mine, other), ("itself 12", "expects 13"))
    return calls


def missing_parts(message: str, parts: tuple[str, ...]) -> str | None:
    if not message:
        return "did not raise"
    lower = message.lower()
    missing = [part for part in parts if not any(form in lower for form in part.split("|"))]
    return f"does not name {missing}: {message}" if missing else None


@every_op
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (3, "gloo"), (1, "nccl"), (2, "nccl"))
def test_errors_name_what_is_allowed_and_come_before_any_communication(
    failures: Failures, op: str
) -> None:
    """Bad calls on one rank alone, by turns, then good ones on all of them.

    Had a bad call communicated, the good one after it would hang or get another call's data.
    """
    for seed, (name, (arguments, parts)) in enumerate(bad_calls(op).items()):
        if dist.get_rank() == seed % dist.get_world_size():
            for call in (OPS[op].operator, OPS[op].wrapper):
                message = message_of(call, *arguments, group=world_name())
                failures.expect(missing_parts(message, parts), op, name)
        check_call(failures, CASE, "after:", name, seed=seed, op=op)


@every_op
@pytest.mark.ranks((2, "gloo"))
def test_errors_of_fakes_name_all_numbers(failures: Failures, op: str) -> None:
    """The message of the op's fake kernel names the op and every number that the real one's names."""
    for name, (arguments, _) in bad_calls(op).items():
        if "sparse" in name:
            continue  # there are no fakes of them
        with FakeTensorMode() as mode:
            fakes = map_tensors(mode.from_tensor, arguments)
            fake = message_of(OPS[op].operator, *fakes, group=world_name())
        real = message_of(OPS[op].operator, *arguments, group=world_name())
        failures.equal(fake.partition(":")[0], real.partition(":")[0], name)
        missing = set(re.findall(r"\d+", real)) - set(re.findall(r"\d+", fake))
        failures.equal(missing - {"16", "32"}, set(), "numbers of", real, "that lack in", fake)


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_errors_have_the_types_that_python_has_for_them(failures: Failures) -> None:
    x, w, group = empty(5, K), empty(N, K), world_name()
    for right, call in (
        (ValueError, lambda: overlap_torch.gemm_reducescatter(x, w, group=group)),
        (ValueError, lambda: overlap_torch.gemm_alltoall(x, w, [1, 1], [1, 1], group=group)),
        (TypeError, lambda: overlap_torch.allgather_gemm(x, w.bfloat16(), group=group)),
    ):
        with pytest.raises(Exception) as raised:
            call()
        failures.expect(None if raised.type is right else f"raised {raised.type}", right)


@every_op
@pytest.mark.ranks((1, "gloo"))
def test_errors_of_fakes_name_the_devices(failures: Failures, op: str) -> None:
    """The devices that tracing runs on: fakes of tensors on any devices, these on none."""
    arguments = OPS[op].arguments(CASE, dist.get_rank(), dist.get_world_size(), "cpu")
    with FakeTensorMode():
        for number, moved in enumerate(tensors_of(arguments)):
            mixed = map_tensors(
                lambda tensor, moved=moved: torch.empty(
                    tensor.shape, dtype=tensor.dtype, device="cuda" if tensor is moved else "cpu"
                ),
                arguments,
            )
            message = message_of(OPS[op].operator, *mixed, group=world_name())
            failures.expect(missing_parts(message, ("on cpu", "on cuda", "one device")), op, number)


def bad_biases() -> list[tuple[object, object, tuple[str, ...]]]:
    """weight, bias, parts of the message."""
    w, bias = empty(N, K), empty(N)
    several = ("none or a sequence", "tensor [n] or none")
    return [
        ([w, w], bias, (*several, "here 2", f"({N},)")),
        ([w], bias.view(1, N), (*several, "here 1", f"(1, {N})")),
        ((w, w), bias.clone().requires_grad_(), (*several, "here 2", f"({N},)")),
        (w, [bias], ("tensor [n] or none", "is a list")),
    ]


@pytest.mark.ranks((1, "gloo"), (2, "nccl"))
def test_errors_name_the_biases_that_weights_take(failures: Failures) -> None:
    for weight, bias, parts in bad_biases():
        with pytest.raises(TypeError) as raised:
            overlap_torch.allgather_gemm(empty(12, K), weight, bias)
        failures.expect(missing_parts(str(raised.value), parts), parts)


@every_op
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (2, "nccl"))
def test_errors_name_the_unknown_group(failures: Failures, op: str) -> None:
    arguments = OPS[op].arguments(CASE, *place())
    destroyed = dist.new_group()
    check_call(failures, CASE, "before the group is destroyed", group=destroyed, op=op)
    destroyed_name = destroyed.group_name
    dist.destroy_process_group(destroyed)
    for name in ("no-such-group", "", destroyed_name):
        for call in (OPS[op].operator, OPS[op].wrapper):
            message = message_of(call, *arguments, group=name)
            failures.expect(missing_parts(message, (f"'{name}'", "group")), "group", repr(name))
    for group, parts in ((7, ("int", "processgroup")), (2.5, ("float", "processgroup"))):
        message = message_of(OPS[op].wrapper, *arguments, group=group)
        failures.expect(missing_parts(message, parts), "group", group)
    check_call(failures, CASE, "after the bad groups", op=op)


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_errors_refuse_a_group_of_others(failures: Failures) -> None:
    """Groups that this rank is not in: what new_group returns there, the name, a mesh."""
    device, rank = rank_device(), dist.get_rank()
    first, mesh = dist.new_group([0]), DeviceMesh(device.type, [0])
    name, *_ = from_all_ranks(first.group_name if rank == 0 else None)
    groups = [(first, "non_group_member"), (name, f"'{name}'"), (mesh, "devicemesh")]
    layers = (overlap_torch.nn.ColumnParallelLinear, overlap_torch.nn.RowParallelLinear)
    for group, name in groups if rank != 0 else []:
        calls = {
            op: functools.partial(entry.wrapper, *entry.arguments(CASE, *place()))
            for op, entry in OPS.items()
        }
        for layer in layers:
            calls[layer.__name__] = functools.partial(layer, 8, 8, device=device)
            calls[f"{layer.__name__} on meta"] = functools.partial(layer, 8, 8, device="meta")
        calls["token_slice"] = functools.partial(overlap_torch.nn.token_slice, 8)
        calls["plan_for"] = functools.partial(plan_module.plan_for, 8, 8, 8)
        x, w = empty(8, 8).to("meta"), empty(8, 8).to("meta")
        calls["on meta"] = functools.partial(overlap_torch.gemm_reducescatter, x, w)
        for what, call in calls.items():
            error = None
            try:
                call(group=group)
            except Exception as raised:  # its type is a question too
                error = raised
            failures.expect(missing_parts(str(error or ""), (name, "group")), what, name)
            failures.equal(type(error), ValueError, what, name)
    check_call(failures, CASE, "after groups of others")


def bad_plans() -> dict[str, tuple[list[int], tuple[str, ...]]]:
    """name -> (encoded plan, parts of the message)."""
    world, device = dist.get_world_size(), rank_device()
    good = dict(overlapped_plans(CASE, world, device.type, tile=(8, 8)))["packed 1, bands of 1"]
    code = plan_module.files.encode(good)

    def changed(**fields: object) -> list[int]:
        plan = good.copy()
        for name, value in fields.items():
            setattr(plan, name, value)
        return plan_module.files.encode(plan)

    other_world = sequential_plan(CASE, world + 5, device.type)
    other_transport = sequential_plan(CASE, world, "cuda" if device.type == "cpu" else "cpu")
    chunk = good.chunks[0]
    taken, given = (
        ("gloo", "nccl") if good.chunks[0].transport == Transport.GLOO else ("nccl", "gloo")
    )
    # The grid is 3 x 2 tiles.
    return {
        "no plan at all": ([], ("plan",)),
        "cut off": (code[:-1], ("plan",)),
        "too long": ([*code, 0], ("plan",)),
        "noise": ([-1, 2**40, 7], ("plan",)),
        "for more ranks": (plan_module.files.encode(other_world), (str(world + 5), str(world))),
        "of another transport": (plan_module.files.encode(other_transport), (given, taken)),
        "too few tiles": (changed(chunks=[type(chunk)(5, chunk.transport, 0)]), ("5 tiles", "6")),
        "too many tiles": (changed(chunks=[type(chunk)(7, chunk.transport, 0)]), ("7 tiles", "6")),
        "no chunks": (changed(chunks=[]), ("0 chunks", "1 to")),
        "tiles without size": (changed(tile_m=0), ("tile_m", "0")),
        "negative size": (changed(problem=Problem(-3, 16, 8, good.problem.dtype, world)), ("-3",)),
    }


@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (2, "nccl"))
def test_errors_say_what_is_wrong_with_a_plan(failures: Failures) -> None:
    for name, (code, parts) in bad_plans().items():
        message = message_of(torch.ops.overlap.set_plan, code, rank_device(), world_name())
        failures.expect(missing_parts(message, parts), name)
        # Refused plans leave nothing behind: neither an entry nor a half-changed table.
        check_call(failures, CASE, "after a bad plan:", name)


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_errors_of_the_other_operators(failures: Failures) -> None:
    ops, device, name = torch.ops.overlap, rank_device(), world_name()
    calls = [
        ("unknown op", lambda: ops.plan_for("gemm_nothing", 8, 8, 8, torch.float32, device, name),
         ("gemm_nothing", "gemm_allreduce")),
        ("int plan", lambda: ops.plan_for("gemm_allreduce", 8, 8, 8, torch.int32, device, name),
         ("int", "bfloat16", "float16", "float32")),
        ("negative M", lambda: ops.plan_for("gemm_allreduce", -8, 8, 8, torch.float32, device, name),
         ("-8",)),
        ("unknown group's plan", lambda: ops.clear_plans("nobody"), ("'nobody'",)),
        ("unknown group's memory", lambda: ops.memory("nobody"), ("'nobody'",)),
        ("negative delay", lambda: ops.delay_side_stream(-5), ("-5",)),
    ]  # fmt: skip
    for what, call, parts in calls:
        failures.expect(missing_parts(message_of(call), parts), what)
        check_call(failures, CASE, "after:", what)


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_errors_name_arguments_of_other_types(failures: Failures) -> None:
    """Values that no schema takes raise no assertion inside PyTorch, and no AttributeError."""
    ot, device = overlap_torch, rank_device()
    x, w = torch.ones(2, 3, device=device), torch.ones(4, 3, device=device)
    q, counts = torch.ones(1, 4, 2, 8, device=device), torch.tensor([1, 1])
    ids = torch.zeros(2, 1, dtype=torch.int64, device=device)
    for said, call, *arguments in (
        ("input must be a tensor, but it is a NoneType", ot.gemm_allreduce, None, w),
        ("bias must be a tensor or None, but it is a float", ot.gemm_allreduce, x, w, 1.0),
        ("layout torch.sparse_coo: call it with input.to_dense()", ot.gemm_allreduce, x.to_sparse(), w),
        ("weight must be a tensor [N, K] or a seq", ot.allgather_gemm, x, None),
        ("weights must be a list, each a tensor, but it is a list with str", ot.allgather_gemm, x, "w"),
        ("send_rows must be a list, each a number, but it is a Tensor", ot.gemm_alltoall, x, w, counts, counts),
        ("send_rows must be a list, each a number, but it is a list with float", ot.gemm_alltoall, x, w, [1.0], [1]),
        ("partial must be a tensor", ot.allreduce_rmsnorm, None, x, w[0]),
        ("k must be a tensor", ot.context_parallel_attention, q, None, q),
        ("topk_ids must be a tensor", ot.moe, x, None, ids, w, w),
        ("moe: down must be a tensor or a list", ot.moe, x, ids, ids.float(), w[None], None),
        ("total must be an integer, but it is a str", ot.token_positions, "4"),
        ("tokens must be 0 or more, but it is -4", ot.nn.token_slice, -4),
        ("in_features must be 0 or more, but it is -6", ot.nn.RowParallelLinear, -6, 8),
        ("out_features must be an integer, but it is a float", ot.nn.ColumnParallelLinear, 6, 8.0),
        ("hidden_size must be an integer, but it is a str", ot.nn.MoE, "8", 4, 2),
        ("from_linear takes torch.nn.Linear, but it is a Conv1d", ot.nn.RowParallelLinear.from_linear, torch.nn.Conv1d(2, 2, 1)),
        ("from_linear takes torch.nn.Linear, but it is a NoneType", ot.nn.ColumnParallelLinear.from_linear, None),
        ("full_state_dict takes a module, but it is a str", ot.nn.full_state_dict, "model"),
        ("report takes a module or None, but it is a str", ot.report, "model"),
        ("tune takes plan.types.Problem, several of them, but got a int", ot.tune, 3),
        ("set_plan takes a plan.types.Plan, but it is a dict", ot.plan.set_plan, {}),
        ("tokens must be an integer", ot.nn.ColumnParallelLinear(3, 8, sequence_parallel=True), x, 4.0),
    ):  # fmt: skip
        failures.raises(said, call, *arguments)
    check_call(failures, CASE, "after arguments of other types")


@pytest.mark.ranks((1, "gloo"))
@pytest.mark.fresh()
def test_errors_without_a_process_group_name_the_remedy(failures: Failures) -> None:
    dist.destroy_process_group()
    message = message_of(overlap_torch.gemm_allreduce, torch.ones(2, 3), torch.ones(4, 3))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    failures.expect(missing_parts(message, ("init_process_group",)))
