"""Layers with the styles beside PyTorch's styles: never more collectives, never more bytes, and the same strides."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.nn import functional

import overlap_torch
from checks import Failures
from layers import Linears, fill_with_integers, integer_linear, integers
from meshes import OVERLAP, PYTORCH, cut, gathered_tokens, local_part, mesh
from operands import difference, rank_device, world_name
from traffic import Traffic, traffic_of


def step(
    module: torch.nn.Module, input: torch.Tensor, grad: torch.Tensor
) -> tuple[list[Traffic], list[tuple[int, ...]], torch.Tensor]:
    """The communication of forward and backward, where the output's gradient is `grad`; this rank's strides of the output,
    which is viewed as rows, and of the input's gradient; and the output."""
    outputs, strides = [], []
    input.register_hook(lambda grad: strides.append(local_part(grad).stride()))
    forward = traffic_of(lambda: outputs.append(module(input)))
    local = local_part(outputs[0])
    local.view(-1, local.shape[-1])
    backward = traffic_of(lambda: outputs[0].backward(grad))
    return [forward, backward], [local.stride(), *strides], outputs[0].detach()


def compare(failures: Failures, ours: list[Traffic], theirs: list[Traffic], *where) -> None:
    for name, own, other in zip(("forward", "backward"), ours, theirs, strict=True):
        more = own.total > other.total or own.bytes > other.bytes
        what = f"{dict(own.calls)}, {own.bytes} bytes; PyTorch {dict(other.calls)}, {other.bytes}"
        failures.expect(what if more else None, name, *where)


def check_layer(
    failures: Failures,
    kinds: tuple[type, type],
    shape: tuple[int, ...],
    given: Placement,
    wanted: Placement,
    distributed: bool,
    local: bool,
) -> None:
    in_features, out_features, *leading = shape
    found = []
    for kind in kinds:
        style = kind(input_layouts=given, output_layouts=wanted, use_local_output=local)
        layer = parallelize_module(integer_linear(in_features, out_features, True), mesh(), style)
        input = cut(integers(*leading, in_features, seed=3), given, distributed).requires_grad_()
        grad = cut(integers(*leading, out_features, seed=4), wanted, not local)
        found.append(step(layer, input, grad))
    names = (kinds[0].__name__, shape, given, "to", wanted, distributed, local)
    traffic, strides, _ = zip(*found, strict=True)
    compare(failures, *traffic, *names)
    failures.equal(*strides, "strides", *names)


@pytest.mark.parametrize(
    ("ours", "theirs"), [*zip(OVERLAP[1:], PYTORCH[1:], strict=True)], ids=["columns", "rows"]
)
@pytest.mark.parametrize("shape", [(12, 6, 6, 12), (12, 6, 6, 6, 12)], ids=str)
@pytest.mark.ranks((2, "gloo"), (3, "gloo"), (2, "nccl"))
def test_collectives_of_a_layer_are_no_more_than_pytorchs(
    failures: Failures, ours: type, theirs: type, shape: tuple[int, ...]
) -> None:
    layouts = (Replicate(), Shard(-1), *(Shard(dim) for dim in range(len(shape) - 2)))
    for given, wanted, distributed, local in itertools.product(
        layouts, layouts, (False, True), (False, True)
    ):
        check_layer(failures, (ours, theirs), shape, given, wanted, distributed, local)


class Attention(Linears):
    """Three readers of one input, and integers out."""

    def __init__(self, width: int) -> None:
        super().__init__(**{name: (width, width, False) for name in ("wq", "wk", "wv", "wo")})

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        mixed = self.wq(x) * self.wk(x) + self.wv(x)
        return self.wo(mixed if scale is None else mixed * scale)


class FeedForward(Linears):
    def __init__(self, width: int) -> None:
        wide = (width, 2 * width)
        super().__init__(w1=wide, w3=wide, w2=wide[::-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.relu(self.w1(x)) * self.w3(x))


class Norm(torch.nn.Module):
    """A norm's parameters, and nothing that rounds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width, device=rank_device()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = Norm(width), Norm(width)
        self.attention, self.feed_forward = Attention(width), FeedForward(width)
        fill_with_integers(self)
        for norm in (self.attention_norm, self.ffn_norm):
            torch.nn.init.ones_(norm.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), None)
        return x + self.feed_forward(self.ffn_norm(x))


def llama_plan(prepare: type, colwise: type, rowwise: type) -> dict[str, object]:
    """As Llama is parallelized in torchtitan: tokens cut outside of attention and MLP, gathered once for each."""
    return {
        "attention_norm": SequenceParallel(),
        "attention": prepare(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        ),
        **{f"attention.{name}": colwise() for name in ("wq", "wk", "wv")},
        "attention.wo": rowwise(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": gathered_tokens(prepare, 1),
        **{f"feed_forward.{name}": colwise() for name in ("w1", "w3")},
        "feed_forward.w2": rowwise(output_layouts=Shard(1)),
    }


@pytest.mark.parametrize("prepare", [PYTORCH[0], OVERLAP[0]])
@pytest.mark.ranks((2, "gloo"), (3, "gloo"), (2, "nccl"))
def test_collectives_of_llamas_block_are_no_more_than_pytorchs(
    failures: Failures, prepare: type
) -> None:
    input, gradient = (cut(integers(2, 6, 6, seed=seed), Shard(1)) for seed in (3, 4))
    found, models, inputs = [], [], []
    for styles in ((prepare, *OVERLAP[1:]), PYTORCH):
        models.append(parallelize_module(Block(6), mesh(), llama_plan(*styles)))
        inputs.append(input.detach().clone().requires_grad_())
        found.append(step(models[-1], inputs[-1], gradient))
    traffic, _, outputs = zip(*found, strict=True)
    compare(failures, *traffic, "block")
    for one in traffic[0]:
        calls = (one.calls["all-gather"], one.calls["reduce-scatter"])
        failures.equal(calls, (2, 2), "block")
    whole = Block(6)(integers(2, 6, 6, seed=3))
    failures.expect(difference(outputs[0], cut(whole, Shard(1))), "output")
    failures.expect(difference(inputs[0].grad, inputs[1].grad), "input's gradient")
    for (name, own), other in zip(
        models[0].named_parameters(), models[1].parameters(), strict=True
    ):
        if "norm" not in name:
            failures.equal(own.grad.placements, other.grad.placements, "placements of", name)
        failures.expect(difference(own.grad.full_tensor(), other.grad.full_tensor()), name)


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_collectives_are_counted_by_comm_debug_mode(failures: Failures) -> None:
    """The counts of CommDebugMode: an op by its function and by its operator, and a layer's step."""
    x, weight = integers(4, 6, seed=1), integers(6, 6, seed=2)
    rows = [4 if rank == dist.get_rank() else 0 for rank in range(dist.get_world_size())]

    def layer_step() -> None:
        style = OVERLAP[1](input_layouts=Shard(0))
        layer = parallelize_module(integer_linear(6, 6, True), mesh(), style)
        layer(x.clone().requires_grad_()).sum().backward()

    scatter = torch.ops.overlap.gemm_reducescatter
    for job, right in (
        (lambda: overlap_torch.gemm_allreduce(x, weight), {"gemm_allreduce"}),
        (lambda: scatter(x, weight, group=world_name()), {"gemm_reducescatter"}),
        (lambda: overlap_torch.allgather_gemm(x, [weight, weight]), {"allgather_gemm"}),
        (lambda: overlap_torch.gemm_alltoall(x, weight, rows, rows), {"gemm_alltoall"}),
        (layer_step, {"allgather_gemm", "gemm_reducescatter"}),
    ):
        with CommDebugMode() as mode:
            job()
        counts = {str(op): n for op, n in mode.get_comm_counts().items() if "overlap" in str(op)}
        failures.equal(counts, {f"overlap.{name}": 1 for name in right}, right)
