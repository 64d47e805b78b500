"""A transformer block under tensor and sequence parallelism, forward and backward, by the styles and by the sequence.

A Llama block without rotary embeddings. Each rank holds equal shares of the tokens, between the GEMMs of the heads and of
the intermediate size. The styles' block is what a user of overlap_torch.parallel has: modules with a weight for each of q,
k, v, gate and up. The sequence is F.linear and PyTorch's functional collectives by hand, with the weights of GEMMs that
read one input fused, as training frameworks do it. All keep the gathered input for backward. PyTorch's own styles on
the same modules are a baseline.
"""

from __future__ import annotations

import functools
import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from . import measure, report, styled, tables
from .shapes import Block

MODES = ("call", "row")  # a training step is no graph
MAX_ERROR_RATIO = (
    1.25  # as below: the error of a norm's gradient, a few thousand sums, is itself noisy
)
# A small block has few numbers, and their roundings are chance: N numbers may differ by this divided by the root of N more.
_CHANCE = 8.0
_BOUND_REPEATS = 5

# input [rows, K], weight [N, K] -> [rows * world, N], and input [rows, K], weight [N, K] -> [rows / world, N]
_Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Linears:
    """The block's two kinds of GEMM with their communication."""

    gathering: _Linear  # all-gather of the tokens, then the GEMM
    scattering: _Linear  # the GEMM, then a reduce-scatter of the tokens


def by_sequence() -> Linears:
    """GEMMs and PyTorch's differentiable collectives over the default group."""
    group = dist.group.WORLD
    gather = functional_collectives.all_gather_tensor_autograd
    scatter = functional_collectives.reduce_scatter_tensor_autograd
    return Linears(
        gathering=lambda x, weight: F.linear(gather(x, 0, group), weight),
        scattering=lambda x, weight: scatter(F.linear(x, weight), "sum", 0, group),
    )


def without_communication(full: torch.Tensor, shard: torch.Tensor) -> Linears:
    """The GEMMs alone: `full` (all tokens) or `shard` (one rank's) replaces what they would communicate."""
    return Linears(
        gathering=lambda x, weight: F.linear(_StandIn.apply(x, full, shard), weight),
        scattering=lambda x, weight: _StandIn.apply(F.linear(x, weight), shard, full),
    )


class _StandIn(torch.autograd.Function):
    """Returns `output` as the collective's output and `grad` as its gradient, for any input."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, output: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(grad)
        return output.detach()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.saved_tensors[0], None, None


@dataclass(frozen=True)
class Operands:
    """The operands of one rank; all except the output's gradient get gradients."""

    x: torch.Tensor  # [tokens / world, hidden]
    attention_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(heads + 2 * kv_heads) * head_dim / world, hidden]
    out: torch.Tensor  # [hidden, heads * head_dim / world]
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * intermediate / world, hidden]
    down: torch.Tensor  # [hidden, intermediate / world]
    grad: torch.Tensor  # [tokens / world, hidden]

    @staticmethod
    def draw(block: Block, dtype: torch.dtype, device: torch.device) -> Operands:
        """Normal operands; the norms' weights, all ones, are the same on all ranks."""
        world_size = dist.get_world_size()
        generator = torch.Generator(device).manual_seed(dist.get_rank())

        def normal(*sizes: int, scale: float = 1.0) -> torch.Tensor:
            drawn = torch.randn(*sizes, dtype=dtype, device=device, generator=generator)
            return drawn.mul_(scale)

        def weight(outputs: int, inputs: int, fan_in: int) -> torch.Tensor:
            return normal(outputs, inputs, scale=fan_in**-0.5).requires_grad_()

        hidden, rows = block.hidden, block.tokens // world_size
        heads = block.heads // world_size * block.head_dim
        kv_heads = block.kv_heads // world_size * block.head_dim
        intermediate = block.intermediate // world_size
        ones = functools.partial(torch.ones, hidden, dtype=dtype, device=device, requires_grad=True)
        return Operands(
            x=normal(rows, hidden).requires_grad_(),
            attention_norm=ones(),
            qkv=weight(heads + 2 * kv_heads, hidden, hidden),
            out=weight(hidden, heads, hidden),
            mlp_norm=ones(),
            gate_up=weight(2 * intermediate, hidden, hidden),
            down=weight(hidden, intermediate, block.intermediate),
            grad=normal(rows, hidden),
        )

    def to(self, dtype: torch.dtype) -> Operands:
        """Copies of another dtype."""
        return Operands(
            **{
                name: value.detach().to(dtype).requires_grad_(value.requires_grad)
                for name, value in vars(self).items()
            }
        )

    def styled(self, block: Block, styles: styled.Styles) -> styled.StyledBlock:
        """The block with these styles, with these operands' memory."""
        mesh = init_device_mesh(self.x.device.type, (dist.get_world_size(),))
        features, kv_features = block.heads * block.head_dim, block.kv_heads * block.head_dim
        sizes = (block.hidden, features, kv_features, block.intermediate)
        with torch.device("meta"):
            module = styled.StyledBlock(*sizes, functools.partial(_attention, block))
        module = parallelize_module(module, mesh, styles.plan())
        q, k, v = self.qkv.split(_local_features(block))
        gate, up = self.gate_up.chunk(2)
        module.set_parts(
            mesh,
            attention_norm=self.attention_norm,
            attention_q=q,
            attention_k=k,
            attention_v=v,
            attention_out=self.out,
            mlp_norm=self.mlp_norm,
            mlp_gate=gate,
            mlp_up=up,
            mlp_down=self.down,
        )
        return module

    def differentiated(self) -> list[torch.Tensor]:
        return [value for value in vars(self).values() if value.requires_grad]


def forward(block: Block, operands: Operands, linears: Linears) -> torch.Tensor:
    """The block's output for one rank's tokens, [tokens / world, hidden]."""
    x, hidden = operands.x, (block.hidden,)
    qkv = linears.gathering(F.rms_norm(x, hidden, operands.attention_norm), operands.qkv)
    mixed = _attention(block, *qkv.split(_local_features(block), dim=1))
    x = x + linears.scattering(mixed, operands.out)
    gate_up = linears.gathering(F.rms_norm(x, hidden, operands.mlp_norm), operands.gate_up)
    gate, up = gate_up.chunk(2, dim=1)
    return x + linears.scattering(F.silu(gate) * up, operands.down)


def _local_features(block: Block) -> list[int]:
    """The numbers of features of q, k and v on a rank."""
    return [
        count // dist.get_world_size() * block.head_dim
        for count in (block.heads, block.kv_heads, block.kv_heads)
    ]


def _attention(block: Block, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of this rank's heads over all tokens: [tokens, features of q, k, v] -> [tokens, features of q]."""
    sharing = block.heads // block.kv_heads
    q, k, v = (
        part.unflatten(1, (-1, block.head_dim)).transpose(0, 1).unsqueeze(0) for part in (q, k, v)
    )
    grouped = q.dtype.itemsize == 2  # attention kernels that share key-value heads are 16-bit ones
    if not grouped:
        k, v = (part.repeat_interleave(sharing, dim=1) for part in (k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return mixed.squeeze(0).transpose(0, 1).flatten(1)


def step(block: Block, operands: Operands, linears: Linears) -> tuple[torch.Tensor, ...]:
    """Forward and backward: the output, and the gradients of all operands that have one."""
    output = forward(block, operands, linears)
    return output.detach(), *torch.autograd.grad(output, operands.differentiated(), operands.grad)


def styled_step(
    module: styled.StyledBlock, x: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Forward and backward by the styles: the output, and the gradients of x and of the parameters in their order."""
    output = module(x)
    return output.detach(), *torch.autograd.grad(output, [x, *module.parameters()], grad)


def styled_results(
    block: Block, operands: Operands, styles: styled.Styles
) -> tuple[torch.Tensor, ...]:
    """The results in the form of `step`."""
    output, x, *grads = styled_step(operands.styled(block, styles), operands.x, operands.grad)
    norm, mlp_norm, q, k, v, out, gate, up, down = (
        grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads
    )
    return output, x, norm, torch.cat([q, k, v]), out, mlp_norm, torch.cat([gate, up]), down


def right(block: Block, operands: Operands, variants: Sequence[styled.Styles]) -> list[bool]:
    """For each of these styles: True if its step's RMS errors are hardly larger than the sequence's. Collective.

    The reference is the sequence in float32, for float32 operands in float64; each error is the largest over the ranks.
    """
    exact_dtype = torch.float32 if operands.x.dtype.itemsize == 2 else torch.float64
    exact = step(block, operands.to(exact_dtype), by_sequence())
    steps = [functools.partial(styled_results, block, operands, styles) for styles in variants]
    errors = torch.stack(
        [
            torch.stack(
                [
                    (value.double() - true.double()).square_().mean().sqrt()
                    for value, true in zip(compute(), exact, strict=True)
                ]
            )
            for compute in (*steps, functools.partial(step, block, operands, by_sequence()))
        ]
    )
    dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    *found, sequence = errors.cpu()
    ratios = [MAX_ERROR_RATIO + _CHANCE / math.sqrt(true.numel()) for true in exact]
    allowed = sequence * torch.tensor(ratios, dtype=sequence.dtype)
    return [bool((error <= allowed).all()) for error in found]


def rows(args: Namespace, stopwatch: measure.Stopwatch, block: Block) -> Iterator[tables.Row]:
    """Checks and times one block. Collective."""
    dtype = getattr(torch, args.dtype)
    operands = Operands.draw(block, dtype, stopwatch.device)
    baselines = {"styles": styled.PYTORCH} if "pytorch" in args.baselines else {}
    styles = [styled.OVERLAP, *baselines.values()]
    checked, baselines_checked = None, {}
    if not args.no_check:
        checked, *others = right(block, operands, styles)
        baselines_checked = dict(zip(baselines, others, strict=True))

    def variant(linears: Linears) -> measure.Variant:
        return lambda turn: step(block, operands, linears)

    def by_styles(module: styled.StyledBlock) -> measure.Variant:
        return lambda turn: styled_step(module, operands.x, operands.grad)

    modules = [operands.styled(block, one) for one in styles]
    variants = [variant(by_sequence()), *map(by_styles, modules)]
    bounds = _bounds(stopwatch, operands, variant)
    fields = {"block" if key == "name" else key: value for key, value in asdict(block).items()}
    subject = report.Subject(args, op="block", group=block.name, label=str(block), fields=fields)
    for mode in (mode for mode in args.modes if mode in MODES):
        sequence, op, *others = stopwatch.compare(mode, variants, measure.repeats_of(args, mode))
        timed = report.Timed(
            sequence, op, dict(zip(baselines, others, strict=True)), baselines_checked
        )
        yield report.measurement(subject, mode, timed, checked, bounds)


def _bounds(
    stopwatch: measure.Stopwatch, operands: Operands, variant: Callable[[Linears], measure.Variant]
) -> report.Bounds:
    """The block without its communication, and the sequence's communication alone."""
    shard = torch.randn_like(operands.grad)
    full = shard.repeat(dist.get_world_size(), 1)
    message, received = torch.zeros_like(full), torch.zeros_like(shard)

    def communicate(turn: int) -> None:
        for _ in range(4):  # two of each kind forward, two of the other in their backward
            dist.all_gather_into_tensor(message, received)
            dist.reduce_scatter_tensor(received, message)

    variants = [variant(without_communication(full, shard)), communicate]
    compute, communication = stopwatch.compare("row", variants, _BOUND_REPEATS)
    return report.Bounds(compute.median, communication.median, compute="compute")
