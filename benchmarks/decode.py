"""``python -m benchmarks decode``: steps of greedy decoding of a Llama's layers, in CUDA graphs, as tokens a second.

The modules are plain ones with the names and the arithmetic of transformers' Llama, which need not be installed. A step embeds a token of
each sequence, writes keys and values into a full cache at its last position, and takes the most likely next token. All variants have
the same random weights and take turns in one run; logits are compared with the first one's.

PyTorch           PyTorch's styles: GEMM, NCCL's all-reduce, addition, norm; the kernels of transformers' ``tp_plan="auto"``
overlap           this package's styles: gemm_allreduce, addition, norm
overlap, norms    the same after what ``integrations.transformers.fuse_norms`` does
compiled          PyTorch's styles by torch.compile
compiled, pass    the same with ``overlap_torch.inductor``
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import overlap_torch
from overlap_torch._tools.arguments import count, counts
from overlap_torch._tools.launch import current_device
from overlap_torch.integrations._norms import Fusion
from overlap_torch.parallel import OverlapColwiseParallel, OverlapRowwiseParallel

from .measure import Stopwatch, Times
from .shapes import Block, parse_blocks
from .study import REPEATS, Option, Study, check_close
from .tables import table

EAGER = ("PyTorch", "overlap", "overlap, norms")
COMPILED = ("compiled", "compiled, pass")
MAX_ERROR = 0.05  # of the logits in bf16 between two orders of sums, relative, root mean square


class Norm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(hidden)), 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """[B, 1, hidden] to [B, 1, hidden], and None; ``block.tokens`` positions, of which this is the last."""

    def __init__(self, block: Block, sequences: int) -> None:
        super().__init__()
        self.width, ranks = block.head_dim, dist.get_world_size()
        for name, heads in (("q", block.heads), ("k", block.kv_heads), ("v", block.kv_heads)):
            linear = nn.Linear(block.hidden, heads * self.width, bias=False)
            self.add_module(f"{name}_proj", linear)
        self.o_proj = nn.Linear(block.heads * self.width, block.hidden, bias=False)
        cache = (sequences, block.kv_heads // ranks, block.tokens, self.width)
        generator = torch.Generator(self.o_proj.weight.device).manual_seed(dist.get_rank())
        for name in ("keys", "values"):
            drawn = torch.randn(cache, generator=generator)
            self.register_buffer(name, drawn, persistent=False)
        turns = 10000.0 ** (-torch.arange(0, self.width, 2) / self.width)
        angles = (turns * (block.tokens - 1)).repeat(2)
        self.register_buffer("turn", torch.stack([angles.cos(), angles.sin()]), persistent=False)

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * self.turn[0] + torch.cat((-second, first), -1) * self.turn[1]

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
        q, k, v = (
            linear(hidden_states).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        self.keys[:, :, -1:] = self._turned(k)
        self.values[:, :, -1:] = v
        grouped = {"enable_gqa": self.q_proj.out_features != self.k_proj.out_features}
        mixed = F.scaled_dot_product_attention(self._turned(q), self.keys, self.values, **grouped)
        return self.o_proj(mixed.transpose(1, 2).flatten(2)), None


class Mlp(nn.Module):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(block.hidden, block.intermediate, bias=False)
        self.up_proj = nn.Linear(block.hidden, block.intermediate, bias=False)
        self.down_proj = nn.Linear(block.intermediate, block.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, block: Block, sequences: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(block, sequences), Mlp(block)
        self.input_layernorm, self.post_attention_layernorm = Norm(block.hidden), Norm(block.hidden)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        mixed, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states))
        hidden_states = hidden_states + mixed
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Llama(nn.Module):
    """Tokens [B, 1] to logits [B, 1, vocabulary]."""

    def __init__(self, block: Block, sequences: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, block.hidden)
        self.layers = nn.ModuleList(Layer(block, sequences) for _ in range(layers))
        self.norm = Norm(block.hidden)
        self.lm_head = nn.Linear(block.hidden, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.lm_head(self.norm(hidden))


def whole_model(block: Block, sequences: int, args: argparse.Namespace) -> Llama:
    """Before it is cut: the same weights in each call."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with current_device():
            return Llama(block, sequences, args.layers, args.vocabulary)
    finally:
        torch.set_default_dtype(before)


def model_of(name: str, block: Block, sequences: int, args: argparse.Namespace) -> nn.Module:
    """A variant's."""
    device, model = current_device(), whole_model(block, sequences, args)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    ours = name.startswith("overlap")
    column = OverlapColwiseParallel if ours else ColwiseParallel
    row = OverlapRowwiseParallel if ours else RowwiseParallel
    plan = {f"layers.*.self_attn.{one}_proj": column() for one in "qkv"}
    plan |= {f"layers.*.mlp.{one}_proj": column() for one in ("gate", "up")}
    plan |= {f"layers.*.{one}": row() for one in ("self_attn.o_proj", "mlp.down_proj")}
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, plan, src_data_rank=None)
    if name == "overlap, norms":
        Fusion(model.layers, model.norm)
    if name in COMPILED:
        backend = "inductor" if name == "compiled" else overlap_torch.inductor.backend
        return torch.compile(model, backend=backend, dynamic=False)
    return model


def _check_fused(name: str, model: nn.Module, args: argparse.Namespace) -> None:
    """Raises RuntimeError unless both norms of each layer follow their all-reduces in one op where the variant says so. One rank
    has no all-reduces: its times are the bound of ranks whose communication costs nothing."""
    if dist.get_world_size() == 1:
        return
    if name == "compiled, pass":
        found = overlap_torch.inductor.report(clear=True)
        fused = sum(row["op"] == "gemm_allreduce_rmsnorm" for row in found)
        if fused != 2 * args.layers:
            raise RuntimeError(f"{name}: {fused} of {2 * args.layers} norms are fused:\n{found}")
    if name == "overlap, norms" and len(notes := overlap_torch.report(model).notes) != 1:
        raise RuntimeError(f"{name}: {notes}")


def _step(model: nn.Module, tokens: torch.Tensor, _: int) -> None:
    tokens.copy_(model(tokens).argmax(-1))


def _rows(args: argparse.Namespace) -> Iterator[list[str]]:
    device = current_device()
    watch = Stopwatch(device)
    mode = "graph" if device.type == "cuda" else "row"
    for block in args.blocks:
        for sequences in args.sequences:
            names = EAGER + (COMPILED if sequences in args.compiled else ())
            variants, right = {}, None
            with torch.no_grad():
                for name in names:
                    tokens = torch.arange(sequences, device=device)[:, None] % args.vocabulary
                    model = model_of(name, block, sequences, args)
                    logits = model(tokens).float()
                    right = logits if right is None else right
                    check_close(f"{name}: the logits are", logits, right, MAX_ERROR)
                    _check_fused(name, model, args)
                    variants[name] = partial(_step, model, tokens)
                times = watch.named(mode, variants, args.repeats)
            yield from _lines(block, sequences, times)
            del variants, model
            torch.compiler.reset()


def _lines(block: Block, sequences: int, times: dict[str, Times]) -> Iterator[list[str]]:
    for name, time in times.items():
        over = [times[base].median if base in times else None for base in ("PyTorch", "compiled")]
        ratios = ["" if base is None else f"{base / time.median:.2f}" for base in over]
        second = f"{sequences / time.median * 1e6:.0f}"
        yield [block.name, str(sequences), name, time.spread(), second, *ratios]


def _blocks(text: str, args: argparse.Namespace) -> list[Block]:
    blocks = parse_blocks(text)
    for block in blocks:
        block.check_divisible(args.world)
        if block.head_dim % 2:
            raise ValueError(
                f"block {block}: hidden / heads is {block.head_dim}, allowed are even numbers: a head turns its halves"
            )
    return blocks


OPTIONS = (
    Option(
        "--blocks",
        default="llama3-8b@1024,llama3-70b@1024",
        check=_blocks,
        help="MODEL@POSITIONS and so on",
    ),
    Option("--layers", type=count, default=4),
    Option("--vocabulary", type=count, default=32768),
    Option("--sequences", type=counts, default=[1, 2, 4, 8, 16, 32, 64]),
    Option(
        "--compiled",
        type=partial(counts, least=0),
        default=[16],
        help="sequences at which compiled ones run, too; 0: none",
    ),
    REPEATS(default=9),
)


def _summary(found: list[list[str]], args: argparse.Namespace) -> str:
    head = ["model", "sequences", "variant", "us a step", "tokens a second"]
    return table([*head, "over PyTorch", "over compiled"], found)


STUDY = Study(OPTIONS, _rows, " | ".join, _summary)
