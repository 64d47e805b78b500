"""Gradients, against the derivative of what the ops mean; and autocast, as `torch.nn.functional.linear` has it."""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.nn import functional

import overlap_torch
from checks import Failures, message_of
from modes import SeesDispatches
from operands import Case, difference, integers, make_operands, place, rank_device, world_name
from ops import OPS, every_op, expected_output, map_tensors, tensors_of

CASES = [
    Case((6,), 5, 7), Case((), 9, 4), Case((2, 3), 4, 5), Case((2, 0, 3), 4, 5), Case((3,), 4, 0),
    Case((130,), 66, 40, weight_layout="n_contiguous"), Case((17,), 33, 20, input_layout="transposed"),
]  # fmt: skip


def output_gradients(op: str, outputs: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
    """Small integers, dense in neither dim; the same on every rank where the outputs are."""
    key = "replicated" if OPS[op].replicated else rank
    return [
        integers(tuple(output.shape), output.device, i, key, low=-1, high=1).to(output.dtype)
        for i, output in enumerate(outputs)
    ]


def right_gradients(
    op: str,
    case: Case,
    world: int,
    device: torch.device,
    seed: int,
    used: Sequence[int],
    rank: int | None = None,
) -> list[torch.Tensor | None]:
    """The op's meaning in float64: gradients of a rank's operands (this one's) if the outputs `used` are.

    The global function's derivative, for results that differ by rank; for a replicated one, whose gradient is the same
    everywhere, that of this rank's copy.
    """
    me = dist.get_rank() if rank is None else rank
    everybody = [
        map_tensors(
            lambda t: t.double().requires_grad_(), OPS[op].arguments(case, r, world, device, seed)
        )
        for r in range(world)
    ]
    results = OPS[op].meaning(everybody, math.inf)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for r, outputs in enumerate(results):
        if OPS[op].replicated and r != me:
            continue
        for i, gradient in enumerate(output_gradients(op, outputs, r)):
            if i in used:
                total = total + (outputs[i] * gradient).sum()
    exact = torch.autograd.grad(total, tensors_of(everybody[me]), allow_unused=True)
    return [None if part is None else part.to(case.dtype) for part in exact]


def check_gradients(failures: Failures, op: str, case: Case, device: torch.device, group) -> None:
    """Outputs and gradients of a call whose operands all ask for one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    arguments = OPS[op].arguments(case, rank, world, device)
    leaves = [leaf.requires_grad_() for leaf in tensors_of(arguments)]
    outputs = tensors_of(OPS[op].wrapper(*arguments, group=group))
    failures.expect_equal(outputs, OPS[op].expected(case, rank, world, device), op, case)
    torch.autograd.backward(outputs, output_gradients(op, outputs, rank))
    right = right_gradients(op, case, world, device, 0, range(len(outputs)))
    failures.expect_equal([leaf.grad for leaf in leaves], right, "backward", op, case)


def patterns_of_needs(count: int) -> list[tuple[bool, ...]]:
    """The operands that need a gradient: all patterns of few operands; of many each alone, all but one, and all."""
    if count <= 3:
        return [needs for needs in itertools.product((False, True), repeat=count) if any(needs)]
    alone = [tuple(i == j for j in range(count)) for i in range(count)]
    return [*alone, *(tuple(not need for need in needs) for needs in alone), (True,) * count]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@every_op
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (3, "gloo"), (1, "nccl"), (2, "nccl"))
def test_autograd_gradients_are_the_compositions(
    failures: Failures, op: str, dtype: torch.dtype
) -> None:
    device, rank, world = rank_device(), dist.get_rank(), dist.get_world_size()
    for case, bias in itertools.product(OPS[op].of(CASES), (False, True)):
        case = case.with_(dtype=dtype, bias=bias)
        operands = len(tensors_of(OPS[op].arguments(case, *place())))
        for seed, needs in enumerate(patterns_of_needs(operands)):
            arguments = OPS[op].arguments(case, *place(), seed)
            expected = OPS[op].expected(case, *place(), seed)
            leaves = tensors_of(arguments)
            for leaf, needed in zip(leaves, needs, strict=True):
                leaf.requires_grad_(needed)
            outputs = tensors_of(OPS[op].wrapper(*arguments, group=world_name()))
            failures.expect_equal(outputs, expected, op, case, "needs", needs)
            # All outputs, and of several each alone: what was not used has no gradient.
            subsets = [
                range(len(outputs)),
                *((i,) for i in range(len(outputs)) if len(outputs) > 1),
            ]
            used = [i for i in subsets[seed % len(subsets)] if outputs[i].requires_grad]
            if not used:
                continue  # the gathered input alone, which depends on no weight
            gradients = output_gradients(op, outputs, rank)
            torch.autograd.backward([outputs[i] for i in used], [gradients[i] for i in used])
            right = right_gradients(op, case, world, device, seed, used)
            for i, (leaf, needed, value) in enumerate(zip(leaves, needs, right, strict=True)):
                where = ("gradient of operand", i, op, case, "needs", needs, "used", used)
                failures.expect(difference(leaf.grad, value if needed else None), *where)


@pytest.mark.ranks((2, "gloo"))
def test_autograd_on_cpu_gathers_by_a_collective_whose_name_gloo_keeps_safely(
    failures: Failures,
) -> None:
    """Its functional all-gather has a name that two worker threads of a group free twice, once in a long while."""
    with SeesDispatches() as mode:
        for op, operand in (("allgather_gemm", 1), ("gemm_reducescatter", 1)):
            case = OPS[op].of([Case((8,), 4, 6, torch.float32)])[0]
            arguments = OPS[op].arguments(case, *place())
            leaf = tensors_of(arguments)[operand].requires_grad_()
            output = tensors_of(OPS[op].wrapper(*arguments, group=world_name()))[0]
            (gradient,) = torch.autograd.grad(output.sum(), leaf)
            assert gradient.shape == leaf.shape
    names = {function.name() for function in mode.seen}
    names = {name for name in names if name.startswith("_c10d_functional::")}
    failures.equal(names, {"_c10d_functional::all_to_all_single", "_c10d_functional::wait_tensor"})


@pytest.mark.ranks((2, "gloo"), (3, "gloo"), (2, "nccl"))
def test_autograd_allreduce_backward_does_not_communicate(failures: Failures) -> None:
    """A backward that one rank runs alone would hang, or shift the ranks' next collectives against each other."""
    device, rank, world = rank_device(), dist.get_rank(), dist.get_world_size()
    case = Case((40,), 24, 16, torch.float32, bias=True)
    for turn in range(world):
        operands = make_operands(case, *place(), turn)
        operands.input.requires_grad_()
        operands.weight.requires_grad_()
        output = overlap_torch.gemm_allreduce(operands.input, operands.weight, operands.bias)
        if rank == turn:  # nobody else ever runs a backward for this call
            output.backward(*output_gradients("gemm_allreduce", [output], rank))
            right = right_gradients("gemm_allreduce", case, world, device, turn, (0,))
            failures.expect(difference(operands.input.grad, right[0]), "turn", turn)
        again = overlap_torch.gemm_allreduce(operands.input, operands.weight, operands.bias)
        expected = expected_output(case, world, device, turn)
        failures.expect(difference(again, expected), "after turn", turn)


@every_op
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (2, "nccl"))
def test_autograd_forward_mode_raises(failures: Failures, op: str) -> None:
    """A tangent must not be lost silently, as torch.library's kernels lose it where nothing requires a gradient."""
    arguments = OPS[op].arguments(Case((4,), 3, 4, bias=True), *place())
    for call, operand in itertools.product(
        (OPS[op].wrapper, OPS[op].operator), tensors_of(arguments)
    ):

        def call_with(dual, call=call, operand=operand):
            given = map_tensors(lambda t: dual if t is operand else t, arguments)
            said = message_of(call, *given, group=world_name())
            right = said.startswith(op.partition(".")[0]) and "reverse-mode gradients only" in said
            failures.expect(None if right else f"said {said!r}", op)
            return dual

        tangent = torch.ones_like(operand)
        with forward_ad.dual_level():
            call_with(forward_ad.make_dual(operand, tangent))
        torch.func.jvp(call_with, (operand,), (tangent,))


@every_op
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_autograd_records_only_where_asked(failures: Failures, op: str) -> None:
    """For wrapper and operator: what the first output says of itself, in each mode."""
    arguments = OPS[op].arguments(Case((4,), 3, 4), *place())
    for weight in tensors_of(arguments)[1:]:
        weight.requires_grad_()
    detached = map_tensors(torch.Tensor.detach, arguments)
    for call in (OPS[op].wrapper, OPS[op].operator):

        def output(operands, call=call):
            return tensors_of(call(*operands, group=world_name()))[0]

        modes = [output(arguments).requires_grad]
        with torch.no_grad():
            modes.append(output(arguments).requires_grad)
        with torch.inference_mode():
            modes.append(output(arguments).is_inference())
        modes.append(output(detached).requires_grad)
        failures.equal(modes, [True, False, True, False], call)


@every_op
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (2, "nccl"))
def test_autograd_of_one_operand_at_a_time(failures: Failures, op: str) -> None:
    """A backward for each operand, of other gradients each: nothing that one of them communicated serves another."""
    case = Case((4,), 3, 4, torch.float32, bias=True)
    rank, world = place()[:2]
    arguments = map_tensors(torch.Tensor.requires_grad_, OPS[op].arguments(case, *place()))
    leaves = tensors_of(arguments)
    outputs = tensors_of(OPS[op].wrapper(*arguments, group=world_name()))
    grads = output_gradients(op, outputs, rank)
    right = right_gradients(op, case, world, rank_device(), 0, range(len(outputs)))
    for i, leaf in enumerate(leaves):
        pairs = [pair for pair in zip(outputs, grads, strict=True) if pair[0].requires_grad]
        used, by = zip(*((output, (i + 2) * grad) for output, grad in pairs), strict=True)
        (found,) = torch.autograd.grad(used, leaf, by, retain_graph=True)
        failures.expect(difference(found, (i + 2) * right[i]), op, "operand", i)


@every_op
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (2, "nccl"))
def test_autograd_refuses_what_is_gone(failures: Failures, op: str) -> None:
    """A second backward, and one whose operand was changed in place, as PyTorch's own operators refuse them."""
    arguments = OPS[op].arguments(Case((4,), 3, 4, torch.float32), *place())
    arguments = map_tensors(torch.Tensor.requires_grad_, arguments)

    def backward(output: torch.Tensor) -> str:
        return message_of(output.backward, torch.ones_like(output))

    def output() -> torch.Tensor:
        return tensors_of(OPS[op].wrapper(*arguments, group=world_name()))[0]

    once = output()
    failures.equal(backward(once), "", op)
    failures.holds("backward through the graph a second time", backward(once), op)
    changed = output()
    with torch.no_grad():
        tensors_of(arguments)[1].add_(1)
    failures.holds("modified by an inplace operation", backward(changed), op)


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("enabled", [True, False], ids=["on", "off"])
@every_op
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (1, "nccl"), (2, "nccl"))
def test_autocast_casts_as_linear_does(
    failures: Failures, op: str, enabled: bool, target: torch.dtype
) -> None:
    device, rank, world = rank_device(), dist.get_rank(), dist.get_world_size()
    # The gradients of input, weights and biases.
    given = [
        (torch.float32, torch.float32, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.float16, torch.bfloat16),
        (torch.float64, torch.float64, torch.float64),
    ]
    for seed, dtypes in enumerate(given):
        if not enabled and len(set(dtypes)) > 1:
            continue  # without autocast such a mixture is an error: test_errors.py
        # Exact in the narrowest of the dtypes.
        case = Case((20,), 12, 16, torch.bfloat16, bias=True)
        arguments = OPS[op].arguments(case, *place(), seed)
        input, *others = tensors_of(arguments)
        cast = {input: dtypes[0]} | {tensor: dtypes[3 - tensor.dim()] for tensor in others}
        cast = {tensor: tensor.to(dtype).requires_grad_() for tensor, dtype in cast.items()}
        arguments = map_tensors(cast.get, arguments)
        leaves = tensors_of(arguments)
        expected = OPS[op].expected(case, *place(), seed)
        right = right_gradients(op, case, world, device, seed, range(len(expected)))
        for call in (OPS[op].operator, OPS[op].wrapper):
            where = (op, dtypes, "autocast", enabled)
            with torch.autocast(device.type, target, enabled=enabled):
                dtype = functional.linear(leaves[0], leaves[1]).dtype
                outputs = tensors_of(call(*arguments, group=world_name()))
            failures.expect_equal(outputs, [value.to(dtype) for value in expected], *where)
            for leaf in leaves:
                leaf.grad = None
            torch.autograd.backward(outputs, output_gradients(op, outputs, rank))
            for i, (leaf, value) in enumerate(zip(leaves, right, strict=True)):
                problem = difference(leaf.grad, value.to(leaf.dtype))
                failures.expect(problem, "gradient of operand", i, *where)
