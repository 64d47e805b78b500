"""Attention over a cut sequence beside its parts one after the other: Ulysses, a gather, and PyTorch's ring; and only the attention.

``--ours`` names this op's variants: ``chosen``; ``nccl``; or PxC, head parts P in C chunks over peers.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import overlap_torch
from overlap_torch._tools.launch import current_device
from overlap_torch._torch_versions import context_parallel_module

from .measure import MODES, Stopwatch
from .study import REPEATS, Option, Study, check_close, model_cases, model_rows, modes_here, pass_of
from .tables import table

WIDTH = 128


@dataclass(frozen=True)
class Model:
    heads: int
    kv_heads: int
    causal: bool


MODELS = {
    "llama-3-8b": Model(32, 8, True),
    "llama-3-70b": Model(64, 8, True),
    "wan-14b": Model(40, 40, False),
    "tiny": Model(4, 2, True),
}


class _Exchange(torch.autograd.Function):
    """[T, H, D] to [S, H / P, D], or back, with the transposing copies of a plain all-to-all."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, home: bool) -> torch.Tensor:
        ctx.home, world = home, dist.get_world_size()
        sent = x if home else x.unflatten(1, (world, -1)).transpose(0, 1)
        sent = sent.contiguous()
        come = torch.empty_like(sent)
        dist.all_to_all_single(come, sent)
        if not home:
            return come.flatten(0, 1)
        return come.unflatten(0, (world, -1)).transpose(0, 1).flatten(1, 2).contiguous()

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return _Exchange.apply(grad, not ctx.home), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        whole = x.new_empty((x.shape[0] * dist.get_world_size(), *x.shape[1:]))
        dist.all_gather_into_tensor(whole, x.contiguous())
        return whole

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        own = grad.new_empty((grad.shape[0] // dist.get_world_size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(own, grad.contiguous())
        return own


def _sdpa(q, k, v, causal: bool) -> torch.Tensor:
    """cuDNN's attention on CUDA, [T, H, D]."""
    heads_first = [one.transpose(0, 1)[None] for one in (q, k, v)]
    backends = [SDPBackend.CUDNN_ATTENTION] if q.is_cuda else [SDPBackend.MATH]
    with sdpa_kernel(backends):
        o = functional.scaled_dot_product_attention(
            *heads_first, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        )
    return o[0].transpose(0, 1)


def _ulysses(q, k, v, causal: bool) -> torch.Tensor:
    world = dist.get_world_size()
    if k.shape[1] < world:
        k, v = (one.repeat_interleave(world // k.shape[1], 1) for one in (k, v))
    return _Exchange.apply(_sdpa(*(_Exchange.apply(one, False) for one in (q, k, v)), causal), True)


def _gathered(q, k, v, causal: bool) -> torch.Tensor:
    return _sdpa(q, _Gather.apply(k), _Gather.apply(v), causal)


def _ring(q, k, v, causal: bool, mesh) -> torch.Tensor:
    """PyTorch's ring by cuDNN; if causal, load balanced, so with tokens in a zigzag."""
    module = context_parallel_module()
    module._cp_options.enable_load_balance = causal
    k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
    own = [DTensor.from_local(one.transpose(0, 1)[None], mesh, [Shard(2)]) for one in (q, k, v)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        o = functional.scaled_dot_product_attention(*own, is_causal=causal)
    return o.to_local()[0].transpose(0, 1)


def _ours(q, k, v, causal: bool, cut: str, how: str) -> torch.Tensor:
    keywords: dict = {}
    if how == "nccl":
        keywords = {"transport": "nccl"}
    elif how != "chosen":
        parts, chunks = map(int, how.split("x"))
        keywords = {"transport": "peer", "head_parts": parts, "chunks": chunks}
    return overlap_torch.context_parallel_attention(
        q[None], k[None], v[None], causal=causal, tokens=cut, **keywords
    )[0]


def _variants(
    model: Model, total: int, backward: bool, args: argparse.Namespace
) -> dict[str, Callable]:
    device, world = current_device(), dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    q, k, v, grad = (
        torch.randn(total // world, heads, WIDTH, device=device, dtype=torch.bfloat16)
        for heads in (model.heads, model.kv_heads, model.kv_heads, model.heads)
    )
    part = [  # of the whole sequence, a rank's heads
        torch.randn(total, max(1, heads // world), WIDTH, device=device, dtype=torch.bfloat16)
        for heads in (model.heads, model.kv_heads, model.kv_heads)
    ]
    for one in (q, k, v, *part):
        one.requires_grad_(backward)
    part_grad = torch.randn_like(part[0])
    cut = args.cut if model.causal else "contiguous"

    def variant(compute: Callable, operands=(q, k, v), given=grad) -> Callable[[int], torch.Tensor]:
        def run(_: int) -> torch.Tensor:
            o = compute(*operands, model.causal)
            if backward:
                torch.autograd.grad(o, operands, given)
            return o

        return run

    found = {"ulysses": variant(_ulysses)}
    if not model.causal:
        found["gather"] = variant(_gathered)
    if device.type == "cuda":
        mesh = init_device_mesh("cuda", (world,))
        context_parallel_module()._enable_context_parallel_dispatcher()
        found["ring"] = variant(partial(_ring, mesh=mesh))
    found["alone"] = variant(_sdpa, part, part_grad)
    for how in args.ours:
        found[f"ours, {how}"] = variant(partial(_ours, cut=cut, how=how))
    return found


def _rows(args: argparse.Namespace) -> Iterator[dict]:
    watch = Stopwatch(current_device())
    for name, total, backward in model_cases(args):
        variants = _variants(MODELS[name], total, backward, args)
        first, *others = (
            run(0).detach().float()
            for key, run in variants.items()
            if key.startswith(("ulysses", "ours"))
        )
        if args.cut == "contiguous":
            for mine in others:  # a rounding of bf16
                check_close(f"{name}, {total} tokens:", mine, first, 0.02)
        for mode in args.modes:
            times = watch.named(mode, variants, args.repeats)
            found = {"model": name, "tokens": total, "backward": backward, "mode": mode}
            yield found | {"times": times}


def _line(row: dict) -> str:
    times = row["times"]
    best = min(one.median for key, one in times.items() if key in ("ulysses", "gather", "ring"))
    rows = [
        [key, one.spread(), f"{one.host:.0f}", f"{best / one.median:.2f}"]
        for key, one in times.items()
    ]
    head = [f"{row['model']}, {row['tokens']}, {pass_of(row)}, {row['mode']}"]
    head += ["us (10 to 90 %)", "host", "speed-up over the best sequence"]
    return table(head, rows) + "\n"


def _variants_of_ours(text: str, args: argparse.Namespace) -> list[str]:
    found = text.split(",")
    for how in found:
        cut = re.fullmatch(r"([1-9]\d*)x[1-9]\d*", how)
        if how not in ("chosen", "nccl") and not cut:
            raise ValueError(f"--ours has {how!r}, allowed are chosen, nccl, and PxC, as in 2x4")
        if cut and args.device == "cpu":
            raise ValueError(f"--ours has {how}, which is over peer memory, and so for GPUs only")
        if cut and int(cut[1]) not in (1, args.world):
            raise ValueError(f"--ours has {how}, allowed are 1 and {args.world} parts of the heads")
    return found


def _prepare(args: argparse.Namespace) -> None:
    """Raises ValueError where ranks cannot have equal parts."""
    world, parts = args.world, args.world * (2 if args.cut == "zigzag" else 1)
    for name in args.models:
        heads, kv_heads = MODELS[name].heads, MODELS[name].kv_heads
        if heads % world or (kv_heads % world and world % kv_heads):
            raise ValueError(
                f"--models has {name}, whose {heads} heads, {kv_heads} of keys, cannot be cut into {world} equal parts: "
                "take another --world"
            )
    if wrong := [tokens for tokens in args.tokens if tokens % parts]:
        raise ValueError(f"--tokens has {wrong[0]}, allowed are multiples of {parts}")


OPTIONS = (
    *model_rows(MODELS, "of the whole sequence", [8192, 32768]),
    Option("--modes", default="call,row", allowed=MODES, check=modes_here),
    Option("--cut", default="contiguous", choices=["contiguous", "zigzag"]),
    Option(
        "--ours",
        default="nccl,chosen",
        help="variants of this op, as above",
        check=_variants_of_ours,
    ),
    REPEATS(default=9),
)
STUDY = Study(OPTIONS, _rows, _line, prepare=_prepare)
