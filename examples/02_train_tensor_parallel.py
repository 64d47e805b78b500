"""A small GPT trained tensor and sequence parallel on text that is on this machine; draws the loss curve.

    python examples/02_train_tensor_parallel.py                    starts 2 ranks on GPUs, or 4 on the CPU
    torchrun --nproc-per-node 2 examples/02_train_tensor_parallel.py --compare

The model is written for one device. One parallelize_module call divides it among the ranks; between its blocks each rank
holds a part of the tokens. With --compare the program trains the same model again with PyTorch's own styles, and prints
the largest difference between the two loss curves.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from overlap_torch.parallel import (
    OverlapColwiseParallel,
    OverlapPrepareModuleInput,
    OverlapRowwiseParallel,
)
from ranks import add_arguments, current_device, launch

VOCABULARY = 256  # bytes
OVERLAP = (OverlapPrepareModuleInput, OverlapColwiseParallel, OverlapRowwiseParallel)
PYTORCH = (PrepareModuleInput, ColwiseParallel, RowwiseParallel)


class Attention(torch.nn.Module):
    def __init__(self, width: int, head_size: int) -> None:
        super().__init__()
        self.head_size = head_size
        self.query = torch.nn.Linear(width, width)
        self.key = torch.nn.Linear(width, width)
        self.value = torch.nn.Linear(width, width)
        self.out = torch.nn.Linear(width, width)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            layer(values).unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # this rank's heads
            for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Mlp(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(values)))


class Block(torch.nn.Module):
    def __init__(self, width: int, head_size: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, head_size), Mlp(width)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = values + self.attention(self.norm1(values))
        return values + self.mlp(self.norm2(values))


class Gpt(torch.nn.Module):
    def __init__(self, layers: int, width: int, head_size: int, context: int) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, width)
        self.positions = torch.nn.Embedding(context, width)
        self.blocks = torch.nn.ModuleList([Block(width, head_size) for _ in range(layers)])
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        values = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            values = block(values)
        return self.head(self.norm(values))


def parallel_plan(prepare: type, colwise: type, rowwise: type) -> dict[str, object]:
    """Features cut over the ranks inside attention and MLP, tokens (dim 1) outside.

    The style that gathers an attention's tokens does it once, for the query's, key's and value's
    layer.
    """
    return {
        "tokens": rowwise(input_layouts=Replicate(), output_layouts=Shard(1)),
        "positions": rowwise(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.norm*": SequenceParallel(use_local_output=True),
        "blocks.*.attention": prepare(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "blocks.*.attention.query": colwise(),
        "blocks.*.attention.key": colwise(),
        "blocks.*.attention.value": colwise(),
        "blocks.*.attention.out": rowwise(output_layouts=Shard(1)),
        "blocks.*.mlp.up": colwise(input_layouts=Shard(1)),
        "blocks.*.mlp.down": rowwise(output_layouts=Shard(1)),
        "norm": SequenceParallel(use_local_output=True),
        "head": colwise(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def read_text() -> tuple[str, torch.Tensor]:
    """Where the text is from, and its bytes: Debian's licences, or the sources of Python's standard library."""
    licences = Path("/usr/share/common-licenses")
    if licences.is_dir():
        source, files = str(licences), [path for path in licences.iterdir() if path.is_file()]
    else:
        source = str(Path(os.__file__).parent)
        files = list(Path(source).glob("*.py"))[:40]
    text = b"".join(path.read_bytes() for path in sorted({path.resolve() for path in files}))
    return source, torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def show_progress(name: str, step: int, steps: int, loss: float, start: float) -> None:
    """One line that is written over; where it would not be seen as such, ten lines."""
    if dist.get_rank() != 0:
        return
    terminal = sys.stderr.isatty()
    if not terminal and step % max(1, steps // 10) != 0 and step != steps:
        return
    done = 30 * step // steps
    line = f"{name:8s} [{'#' * done}{'.' * (30 - done)}] {step}/{steps}  loss {loss:.4f}  {time.monotonic() - start:.1f} s"
    end = "\n" if step == steps or not terminal else ""
    print(f"\r{line}" if terminal else line, end=end, file=sys.stderr, flush=True)


def train(name: str, styles: tuple[type, type, type], options: argparse.Namespace) -> list[float]:
    """Losses of all steps, the same on every rank."""
    device = current_device()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Gpt(options.layers, options.width, options.head_size, options.context).to(device)
    parallelize_module(model, mesh, parallel_plan(*styles))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, fused=True)
    _, text = read_text()
    draws = torch.Generator().manual_seed(1)  # the same batches on every rank
    offsets = torch.arange(options.context + 1)
    start = time.monotonic()
    losses = []
    for step in range(1, options.steps + 1):
        begins = torch.randint(len(text) - options.context, (options.batch, 1), generator=draws)
        batch = text[begins + offsets].to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=options.bf16):
            logits = model(batch[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        show_progress(name, step, options.steps, losses[-1], start)
    return losses


def draw(curves: dict[str, list[float]], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no loss plot: matplotlib is not installed (pip install matplotlib)")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for (name, losses), line in zip(curves.items(), ("-", "--"), strict=False):
        axes.plot(range(1, len(losses) + 1), losses, line, label=name)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=f"{dist.get_world_size()} ranks")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    print(f"loss plot: {path}")


def work(options: argparse.Namespace) -> None:
    first = dist.get_rank() == 0
    if first:
        source, text = read_text()
        print(
            f"{dist.get_world_size()} ranks on {current_device().type}, {len(text)} bytes of {source}"
        )
    curves = {"overlap": train("overlap", OVERLAP, options)}
    if options.compare:
        curves["PyTorch"] = train("PyTorch", PYTORCH, options)
    if not first:
        return
    losses = curves["overlap"]
    print(f"loss {losses[0]:.4f} after 1 step, {losses[-1]:.4f} after {len(losses)}")
    if options.compare:
        pairs = zip(losses, curves["PyTorch"], strict=True)
        largest = max(abs(a - b) for a, b in pairs)
        print(f"largest difference from PyTorch's own styles: {largest:.2e}")
    draw(curves, options.out / "loss.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    add_arguments(parser, "2 on GPUs, 4 on the CPU")
    parser.add_argument(
        "--compare", action="store_true", help="train with PyTorch's own styles too"
    )
    parser.add_argument("--bf16", action="store_true", help="under autocast to bfloat16")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--head-size", type=int, default=16)
    parser.add_argument("--context", type=int, default=64, help="tokens of a text")
    parser.add_argument("--batch", type=int, default=8, help="texts of a step")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument(
        "--out", type=Path, default=Path("example02"), help="folder of the loss plot"
    )
    options = parser.parse_args()
    launch(work, options, gpus=2, cpus=4)


if __name__ == "__main__":
    main()
