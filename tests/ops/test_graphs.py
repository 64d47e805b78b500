"""CUDA graphs: captured once, replayed with other inputs, beside each other and beside plain calls."""

import gc
from functools import partial

import pytest
import torch
import torch.distributed as dist

import overlap_torch
from captures import capture, refill, refusal_of_capture, replayed
from checks import Failures, check_call
from operands import Case, Operands, difference, make_operands, place, rank_device, world_name
from ops import expected_output
from overlap_torch import plan as plan_module
from overlap_torch.plan.types import Kernel, Transport
from plans import GPU_KERNELS, chunked_plan, sequential_plan

CASE = Case((1025,), 520, 136, torch.bfloat16, bias=True)
PLANS = ["default", "sequential", "row panels", "packed", "exchange", "window"]
OTHERS = (4, 9, 2)  # seeds of replays

pytestmark = [pytest.mark.ranks((1, "nccl"), (2, "nccl"), (4, "nccl"))]


def operands_of(seed: int, case: Case = CASE) -> Operands:
    return make_operands(case, *place(), seed)


def right_of(seed: int, case: Case = CASE) -> torch.Tensor:
    return expected_output(case, dist.get_world_size(), rank_device(), seed)


def call(operands: Operands, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    return overlap_torch.gemm_allreduce(operands.input, operands.weight, operands.bias, group=group)


def set_plan_named(name: str, kernel: Kernel, group: dist.ProcessGroup | None = None) -> None:
    world = dist.get_world_size()
    if name == "sequential":
        plan_module.set_plan(sequential_plan(CASE, world, "cuda"), group=group)
    elif name != "default":
        layout = "packed" if name == "window" else name
        resources = {"comm_sms": 8, "max_ctas": 8, "window": name == "window"}
        plan = chunked_plan(CASE, world, "cuda", layout, 6, kernel, **resources)
        plan_module.set_plan(plan, group=group)


@pytest.mark.parametrize("kernel", GPU_KERNELS, ids=lambda kernel: kernel.name)
def test_graphs_replay_with_changed_inputs(failures: Failures, kernel: Kernel) -> None:
    for name in PLANS:
        set_plan_named(name, kernel)
        operands = operands_of(0)
        graph, output = capture(partial(call, operands))
        for seed in OTHERS:
            refill(vars(operands), vars(operands_of(seed)))
            found = replayed(graph, output)
            failures.expect(difference(found, right_of(seed)), name, kernel.name, "replay", seed)
            # A plain call between replays has the same plan, and other staging memory.
            failures.expect(difference(call(operands), right_of(seed)), name, "plain call", seed)
        torch.ops.overlap.clear_plans(world_name())
    overlap_torch.check()


@pytest.mark.parametrize("name", PLANS)
def test_graphs_hold_many_calls(failures: Failures, name: str) -> None:
    """Ten calls in one graph, each on the result of the one before: replays back to back, without a wait in between."""
    world = dist.get_world_size()
    set_plan_named(name, Kernel.LIBRARY)
    operands = [operands_of(seed) for seed in range(10)]

    def calls() -> tuple[list[torch.Tensor], torch.Tensor]:
        outputs = [call(mine) for mine in operands]
        # Whatever calls leave behind for each other would show in a sum over all of them.
        return outputs, torch.stack([output.float() for output in outputs]).sum(0)

    graph, (outputs, total) = capture(calls)
    for _ in range(5):
        replayed(graph, total)
    rights = [right_of(seed) for seed in range(10)]
    failures.expect_equal(outputs, rights, name, "call", "of", world)
    failures.expect(difference(total, torch.stack([r.float() for r in rights]).sum(0)), name, "sum")
    torch.ops.overlap.clear_plans(world_name())


@pytest.mark.parametrize("name", PLANS)
def test_graphs_do_not_share_memory(failures: Failures, name: str) -> None:
    """Graphs own their staging memory and counters: two of them and plain calls, on three streams, by turns.

    Over peers a group's calls share memory, so that the streams have to wait for each other."""
    set_plan_named(name, Kernel.LIBRARY)
    operands = [operands_of(seed) for seed in range(3)]
    graphs, outputs = zip(*(capture(partial(call, mine)) for mine in operands[:2]), strict=True)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    plan = plan_module.plan_for(CASE.m, CASE.n, CASE.k, CASE.dtype)
    shared = plan.chunks[0].transport == Transport.PEER
    for turn in range(10):
        torch.cuda.synchronize()
        for output in outputs:
            output.fill_(float("nan"))
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        # The same order on every rank: communication is matched by it.
        with torch.cuda.stream(streams[0]):
            graphs[0].replay()
        if shared:
            torch.cuda.current_stream().wait_stream(streams[0])
        plain = call(operands[2])
        if shared:
            streams[1].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams[1]):
            graphs[1].replay()
        torch.cuda.synchronize()
        failures.expect(difference(plain, right_of(2)), name, "plain call", turn)
        for index, output in enumerate(outputs):
            failures.expect(difference(output, right_of(index)), name, "graph", index, turn)
    torch.ops.overlap.clear_plans(world_name())


def test_graphs_keep_what_they_were_captured_with(failures: Failures) -> None:
    """A graph keeps the plan and the staging it was captured with, whatever the table and the group do later."""
    operands = operands_of(0)
    set_plan_named("packed", Kernel.LIBRARY)
    graph, output = capture(partial(call, operands))
    torch.ops.overlap.clear_plans(world_name())
    for name in ("window", "exchange", "row panels", "sequential"):
        set_plan_named(name, Kernel.LIBRARY)
        # A larger problem makes the group's own staging memory grow.
        larger = CASE.with_(leading=(4100,))
        big = make_operands(larger, *place(), 1)
        if name == "window":
            plan = chunked_plan(
                larger, dist.get_world_size(), "cuda", "packed", 6, window=True, max_ctas=8
            )
            plan_module.set_plan(plan)
        failures.expect(difference(call(big), right_of(1, larger)), name, "larger")
        gc.collect()
        torch.cuda.empty_cache()
        refill(vars(operands), vars(operands_of(5)))
        failures.expect(difference(replayed(graph, output), right_of(5)), "replay after", name)
    torch.ops.overlap.clear_plans(world_name())


@pytest.mark.ranks((2, "nccl"), (4, "nccl"))  # a group of one has no communicator to make
def test_graphs_refuse_a_first_call_and_name_the_warm_up(failures: Failures) -> None:
    """A new group's first call, captured; afterwards the group must be usable."""
    group = dist.new_group()
    operands = operands_of(0)
    message = refusal_of_capture(partial(call, operands, group))
    failures.says(message, ("warm-up", "capture"))
    check_call(failures, CASE, "after the refused capture", group=group)
    graph, output = capture(partial(call, operands, group))
    found = replayed(graph, output)
    failures.expect(difference(found, right_of(0)), "captured after the warm-up")


def test_graphs_and_groups_end_in_any_order(failures: Failures) -> None:
    """Groups that end before the graphs that hold their communicators: neither end may wait for the other."""
    for turn in range(2):
        group = dist.new_group()
        operands = operands_of(turn)
        set_plan_named(("packed", "window")[turn], Kernel.LIBRARY, group)
        graph, output = capture(partial(call, operands, group))
        failures.expect(difference(replayed(graph, output), right_of(turn)), "replay", turn)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        check_call(failures, CASE, "in another group", turn, seed=turn)
        del graph, output
        gc.collect()
        torch.cuda.synchronize()
        check_call(failures, CASE, "after the graph", turn, seed=turn)


def test_graphs_hold_forward_and_backward(failures: Failures) -> None:
    """Forward and backward in one graph."""
    operands = operands_of(0)
    operands.input.requires_grad_()
    operands.weight.requires_grad_()
    gradient = torch.ones(CASE.m, CASE.n, dtype=CASE.dtype, device=rank_device())
    gradient[1:] = 0  # keeps the weight's gradient exact

    def step() -> tuple[torch.Tensor, ...]:
        output = call(operands)
        return output, *torch.autograd.grad(output, (operands.input, operands.weight), gradient)

    graph, (output, of_input, of_weight) = capture(step)
    with torch.no_grad():
        refill(vars(operands), vars(operands_of(3)))
    graph.replay()
    torch.cuda.synchronize()
    failures.expect(difference(output, right_of(3)), "output")
    right = torch.zeros_like(of_input)
    right[0] = operands.weight.detach().double().sum(0).to(CASE.dtype)
    failures.expect(difference(of_input, right), "gradient of input")
    right = operands.input.detach()[:1].expand(CASE.n, CASE.k)
    failures.expect(difference(of_weight, right), "gradient of weight")
