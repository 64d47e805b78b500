"""A transformer block under tensor and sequence parallelism, forward and backward, by the ops and by the sequence.

A Llama block without rotary embeddings. Each rank holds equal shares of the tokens, between the GEMMs of the heads and of
the intermediate size. Weights of GEMMs that read one input are fused, as training frameworks do it. The sequence is
F.linear and PyTorch's functional collectives, which keep the gathered input for backward; the op gathers it again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.nn.functional as F

import overlap_torch

from . import measure, report
from .options import Options
from .shapes import Block

MODES = ("call", "row")  # a training step is no graph
MAX_ERROR_RATIO = (
    1.25  # as below: the error of a norm's gradient, a few thousand sums, is itself noisy
)
_BOUND_REPEATS = 5

# input [rows, K], weight [N, K] -> [rows * world, N], and input [rows, K], weight [N, K] -> [rows / world, N]
_Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Linears:
    """The block's two kinds of GEMM with their communication."""

    gathering: _Linear  # all-gather of the tokens, then the GEMM
    scattering: _Linear  # the GEMM, then a reduce-scatter of the tokens


def by_op(group: str) -> Linears:
    """The ops."""
    return Linears(
        gathering=lambda x, weight: overlap_torch.allgather_gemm(x, weight, group=group)[0],
        scattering=lambda x, weight: overlap_torch.gemm_reducescatter(x, weight, group=group),
    )


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
    """The GEMMs alone: what they would communicate is `full`, all tokens, or `shard`, one rank's."""
    return Linears(
        gathering=lambda x, weight: F.linear(_StandIn.apply(x, full, shard), weight),
        scattering=lambda x, weight: _StandIn.apply(F.linear(x, weight), shard, full),
    )


class _StandIn(torch.autograd.Function):
    """Takes `output` for the collective's output and `grad` for its gradient's, whatever comes in."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, output: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(grad)
        return output.detach()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.saved_tensors[0], None, None


@dataclass(frozen=True)
class Operands:
    """What one rank holds; all but the output's gradient get gradients."""

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

    def differentiated(self) -> list[torch.Tensor]:
        return [value for value in vars(self).values() if value.requires_grad]


def forward(block: Block, operands: Operands, linears: Linears) -> torch.Tensor:
    """The block's output for one rank's tokens, [tokens / world, hidden]."""
    x, hidden = operands.x, (block.hidden,)
    qkv = linears.gathering(F.rms_norm(x, hidden, operands.attention_norm), operands.qkv)
    x = x + linears.scattering(_attention(block, qkv), operands.out)
    gate_up = linears.gathering(F.rms_norm(x, hidden, operands.mlp_norm), operands.gate_up)
    gate, up = gate_up.chunk(2, dim=1)
    return x + linears.scattering(F.silu(gate) * up, operands.down)


def _attention(block: Block, qkv: torch.Tensor) -> torch.Tensor:
    """Causal attention of this rank's heads over all tokens: [tokens, features of q, k, v] -> [tokens, features of q]."""
    world_size = dist.get_world_size()
    counts = [count // world_size for count in (block.heads, block.kv_heads, block.kv_heads)]
    q, k, v = (
        part.unflatten(1, (count, block.head_dim)).transpose(0, 1).unsqueeze(0)
        for part, count in zip(
            qkv.split([count * block.head_dim for count in counts], dim=1), counts, strict=True
        )
    )
    grouped = (
        qkv.dtype.itemsize == 2
    )  # attention kernels that share key-value heads are 16-bit ones
    if not grouped:
        k, v = (part.repeat_interleave(counts[0] // counts[1], dim=1) for part in (k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return mixed.squeeze(0).transpose(0, 1).flatten(1)


def step(block: Block, operands: Operands, linears: Linears) -> tuple[torch.Tensor, ...]:
    """Forward and backward: the output, and the gradients of all operands that have one."""
    output = forward(block, operands, linears)
    return output.detach(), *torch.autograd.grad(output, operands.differentiated(), operands.grad)


def errors(block: Block, operands: Operands, group: str) -> torch.Tensor:
    """RMS errors [2, results] of the op's and the sequence's step, each the largest over the ranks. Collective.

    They are held to the sequence in float32, that of float32 operands to float64.
    """
    exact_dtype = torch.float32 if operands.x.dtype.itemsize == 2 else torch.float64
    exact = step(block, operands.to(exact_dtype), by_sequence())
    result = torch.stack(
        [
            torch.stack(
                [
                    (value.double() - true.double()).square_().mean().sqrt()
                    for value, true in zip(step(block, operands, linears), exact, strict=True)
                ]
            )
            for linears in (by_op(group), by_sequence())
        ]
    )
    dist.all_reduce(result, op=dist.ReduceOp.MAX)
    return result.cpu()


def run(
    options: Options,
    writer: report.Writer,
    stopwatch: measure.Stopwatch,
    block: Block,
    group: str,
) -> bool:
    """Checks and times one block; whether its results were right. Collective."""
    dtype = getattr(torch, options.dtype)
    operands = Operands.draw(block, dtype, stopwatch.device)
    checked = None
    if options.check:
        op, sequence = errors(block, operands, group)
        checked = bool((op <= MAX_ERROR_RATIO * sequence).all())

    def variant(linears: Linears) -> measure.Variant:
        def run_step(turn: int) -> None:
            step(block, operands, linears)

        return run_step

    bounds = _bounds(stopwatch, operands, variant)
    subject = report.Subject(
        op="block",
        group=block.name,
        label=str(block),
        fields={
            "block": block.name,
            "hidden": block.hidden,
            "heads": block.heads,
            "kv_heads": block.kv_heads,
            "intermediate": block.intermediate,
            "tokens": block.tokens,
        },
    )
    for mode in (mode for mode in options.modes if mode in MODES):
        sequence, op = stopwatch.compare(
            mode, [variant(by_sequence()), variant(by_op(group))], options.repeats(mode)
        )
        writer.measurement(subject, mode, report.Timed(sequence, op), checked, bounds=bounds)
    return checked is not False


def _bounds(
    stopwatch: measure.Stopwatch,
    operands: Operands,
    variant: Callable[[Linears], measure.Variant],
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
