"""Pipelines of tensor-parallel stages by every schedule of PyTorch's, some of which compute weights' gradients later."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import overlap_torch
from checks import Failures, close
from layers import Linears, fill_with_integers, integers
from meshes import gathered_tokens, mesh, whole_of
from operands import difference, rank_device
from overlap_torch.nn import ColumnParallelLinear, RowParallelLinear
from overlap_torch.parallel import OverlapColwiseParallel, OverlapRowwiseParallel
from traffic import Traffic

FEATURES, MICROBATCHES, TOKENS = 6, 4, 6

# Stages of a rank, and how they lie.
SCHEDULES = {
    "GPipe": (1, "loop"),
    "1F1B": (1, "loop"),
    "LoopedBFS": (2, "loop"),
    "Interleaved1F1B": (2, "loop"),
    "InterleavedZeroBubble": (2, "loop"),
    "ZBVZeroBubble": (2, "v"),
    "DualPipeV": (2, "v"),
}

KINDS = (
    "styles",
    "styles, sequence",
    "prepared, sequence",
    "layers",
    "layers, sequence",
    "fp8 layers",
    "fp8 layers, sequence",
)


class Gated(Linears):
    """A stage, whose outputs and gradients stay small integers; `reads_up` False: nobody uses a second layer's output."""

    def __init__(self, reads_up: bool = True) -> None:
        wide = (FEATURES, 2 * FEATURES)
        super().__init__(gate=wide, up=(*wide, False), down=wide[::-1])
        self.reads_up = reads_up

    def gate_and_up(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.gate(input), self.up(input)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_and_up(input)
        hidden = gate.clamp_(0, 1)  # in place
        if self.reads_up:
            hidden = hidden + up.clamp(-1, 1)
        return self.down(hidden).clamp(-2, 2)


class GatedLayers(Gated):
    """`Gated` with one layer for gate and up."""

    def gate_and_up(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.gate(input)


def parallel(kind: str, stage: Gated, tp: DeviceMesh) -> torch.nn.Module:
    """The stage over the ranks of the mesh."""
    sequence = kind.endswith("sequence")
    if "layers" in kind:
        options = {
            "group": tp,
            "sequence_parallel": sequence,
            "fp8": "tensorwise" if "fp8" in kind else None,
        }
        layers = GatedLayers(stage.reads_up)
        layers.gate = ColumnParallelLinear.from_linear([stage.gate, stage.up], **options)
        layers.up = None
        layers.down = RowParallelLinear.from_linear(stage.down, **options)
        return layers
    layout = Shard(0) if sequence else Replicate()
    plan = {"down": OverlapRowwiseParallel(output_layouts=layout)}
    for name in ("gate", "up"):
        prepared = Replicate() if "prepared" in kind else layout
        plan[name] = OverlapColwiseParallel(input_layouts=prepared)
    if "prepared" in kind:
        plan[""] = gathered_tokens(use_local_output=True)
    return parallelize_module(stage, tp, plan)


def whole_stage(number: int, reads_up: bool = True) -> Gated:
    stage = Gated(reads_up)
    fill_with_integers(stage)
    with torch.no_grad():  # another one at each place
        stage.gate.weight.copy_(stage.gate.weight.roll(number, 0))
    return stage


def own_tokens(kind: str, whole: torch.Tensor, tp: DeviceMesh) -> torch.Tensor:
    """This rank's tokens of [microbatches, tokens, features]."""
    if not kind.endswith("sequence"):
        return whole
    return whole.chunk(tp.size(), 1)[tp.get_local_rank()]


def parameters(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Gradients, by names that all kinds have."""
    names = {"gate.weights.0": "gate.weight", "gate.weights.1": "up.weight"}
    names["gate.biases.0"] = "gate.bias"
    found = {}
    for name, parameter in module.named_parameters():
        grad = parameter.grad
        grad = torch.zeros_like(parameter) if grad is None else grad
        found[names.get(name, name)] = whole_of(grad)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.ranks((4, "gloo"), (4, "nccl"))
def test_pipeline_of_parallel_stages(failures: Failures, schedule: str, kind: str) -> None:
    """The stages' gradients are those of all stages one behind the other, on the whole tensors; fp8's of the same layers."""
    grid = mesh(2, 2)
    pp, tp = grid["dp"], grid["tp"]
    per_rank, style = SCHEDULES[schedule]
    count = per_rank * pp.size()
    ranks = generate_stage_to_rank_mapping(pp.size(), count, style)
    mine = [number for number, rank in ranks.items() if rank == pp.get_local_rank()]
    input = integers(MICROBATCHES, TOKENS, FEATURES, seed=3)
    target = integers(MICROBATCHES, TOKENS, FEATURES, seed=4)

    right = [whole_stage(number) for number in range(count)]
    parts = [input, target]
    if "fp8" in kind:
        right = [parallel(kind, stage, tp) for stage in right]
        parts = [own_tokens(kind, part, tp) for part in parts]
    for value, wanted in zip(*parts, strict=True):
        for stage in right:
            value = stage(value)
        (value * wanted).sum().backward()

    modules = {number: parallel(kind, whole_stage(number), tp) for number in mine}
    own_input, own_target = (own_tokens(kind, part, tp).flatten(0, 1) for part in (input, target))
    example = own_input.chunk(MICROBATCHES)[0]
    stages = [
        pipelining.PipelineStage(
            modules[number],
            number,
            count,
            rank_device(),
            input_args=example,
            output_args=example,
            group=pp.get_group(),
        )
        for number in mine
    ]
    pipeline = getattr(pipelining, f"Schedule{schedule}")(
        stages if per_rank > 1 else stages[0],
        n_microbatches=MICROBATCHES,
        loss_fn=lambda output, wanted: (output * wanted).sum(),
        scale_grads=False,
    )
    with contextlib.ExitStack() as stack:
        # Gloo cannot send to itself, as the first contact of V-shaped schedules does.
        if rank_device().type == "cpu":
            first_contact = (pipelining.PipelineStage, "_get_init_p2p_neighbors_ops")
            stack.enter_context(mock.patch.object(*first_contact, return_value=[]))
        pipeline.step(
            *([own_input] if 0 in mine else []), target=own_target if count - 1 in mine else None
        )
    for number, module in modules.items():
        grads = parameters(module)
        for parameter, grad in parameters(right[number]).items():
            # Schedules add microbatches up in different orders, and fp8's sums are not exact.
            compare = close if "fp8" in kind else difference
            failures.expect(compare(grads[parameter], grad), "stage", number, parameter)
            nothing = None if grad.abs().sum() > 0 else "zeros are expected"
            failures.expect(nothing, "stage", number, parameter)


class Exchange(torch.nn.Module):
    """An op as a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(integers(4, FEATURES, seed=1))
        self.bias = torch.nn.Parameter(integers(4, seed=2))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        counts = [input.shape[0] // dist.get_world_size()] * dist.get_world_size()
        return overlap_torch.gemm_alltoall(input, self.weight, counts, counts, self.bias)


@pytest.mark.parametrize("reads_up", [True, False], ids=["all", "one unread"])
@pytest.mark.parametrize("kind", [*KINDS, "op"])
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_pipeline_splits_backward(failures: Failures, kind: str, reads_up: bool) -> None:
    """Backward in two: the weights' half computes all of their gradients, and nothing is communicated twice."""
    tp = mesh()
    module = Exchange() if kind == "op" else parallel(kind, whole_stage(0, reads_up), tp)
    own = own_tokens(kind, integers(1, TOKENS, FEATURES, seed=3), tp)[0]

    def forward() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        module.zero_grad()
        input = own.clone().requires_grad_()
        output = module(input * 1)
        return input, output, integers(*output.shape, seed=4)

    input, output, gradient = forward()
    with Traffic() as at_once:
        output.backward(gradient)
    right, right_input = parameters(module), input.grad

    for _ in range(2):
        input, output, gradient = forward()
        with Traffic() as first:
            _, groups = stage_backward_input([output], [gradient], [input], module.parameters())
        early = [name for name, weight in module.named_parameters() if weight.grad is not None]
        failures.expect(f"{early} have one already" if early else None, kind)
        failures.expect(difference(input.grad, right_input), kind, "input's gradient")
        with Traffic() as second:
            stage_backward_weight(module.parameters(), groups)
        calls = first.calls + second.calls
        failures.equal(calls, at_once.calls, kind)
        for name, grad in parameters(module).items():
            failures.expect(difference(grad, right[name]), kind, name)
