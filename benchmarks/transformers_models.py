"""``python -m benchmarks transformers_models``: Hugging Face models through this package's styles beside transformers' own.

A causal model with random weights, of a Llama's sizes, is saved and loaded three times: with transformers' own styles
(``tp_plan="auto"``), with ours under the same plan, and with ours and the tokens cut over the ranks. All take turns in one
run, eager; a time is the median of the slowest rank's. Logits are compared with those of transformers' own styles first.

prefill   logits of the last token of a prompt, no gradient
step      loss, forward and backward
decode    a step of greedy generation, after a short prompt, for several sequences at once; not with tokens cut
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict

import torch
import torch.distributed as dist

from overlap_torch._tools.arguments import count
from overlap_torch._tools.launch import current_device
from overlap_torch.integrations import transformers as integration

from .measure import Stopwatch, Times, Variant
from .shapes import parse_blocks
from .study import REPEATS, Option, Study, check_close
from .tables import table

WORK = ("prefill", "step", "decode")
MAX_ERROR = 0.05  # of the logits in bf16 between two orders of sums, relative, root mean square
_PROMPT, _NEW = 16, 16  # of decode


def config_of(sizes: dict[str, int]):
    from transformers import LlamaConfig

    return LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=None)


def save(job: argparse.Namespace, folder: str, device: torch.device, dtype: torch.dtype) -> None:
    """A model of random weights into the folder, by rank 0."""
    from transformers import AutoModelForCausalLM

    if dist.get_rank() == 0:
        torch.manual_seed(0)
        with device:
            model = AutoModelForCausalLM.from_config(config_of(job.sizes), dtype=dtype)
        model.save_pretrained(folder)
    dist.barrier()


def load(folder: str, dtype: torch.dtype, plan: str | dict[str, str] = "auto") -> torch.nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=dist.get_world_size(), tp_plan=plan)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype=dtype)


def load_all(
    job: argparse.Namespace, folder: str, device: torch.device
) -> dict[str, torch.nn.Module]:
    """The models, by the styles that they have."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    save(job, folder, device, dtype)
    models = {"transformers": load(folder, dtype)}
    with integration.register():
        models["auto"] = load(folder, dtype)
        models["sequence"] = load(folder, dtype, integration.sequence_plan(config_of(job.sizes)))
    return models


def prefill(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, use_cache=False, logits_to_keep=1).logits


def step(model: torch.nn.Module, tokens: torch.Tensor) -> None:
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    for parameter in model.parameters():
        parameter.grad = None


def decode(model: torch.nn.Module, prompt: torch.Tensor) -> None:
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=_NEW,
        min_new_tokens=_NEW,
        do_sample=False,
    )


def variants_of(
    what: str, models: dict[str, torch.nn.Module], job: argparse.Namespace, device: torch.device
) -> dict[str, Variant]:
    """The calls that are timed for each model."""
    run: Callable[[torch.nn.Module, torch.Tensor], object]
    run = {"prefill": prefill, "step": step, "decode": decode}[what]
    shape = (job.sequences, _PROMPT) if what == "decode" else (1, job.tokens)
    given = torch.randint(0, job.sizes["vocab_size"], shape, device=device)
    dist.broadcast(given, 0)
    return {
        name: lambda _, model=model: run(model, given)
        for name, model in models.items()
        if not (what == "decode" and name == "sequence")
    }


def check(
    models: dict[str, torch.nn.Module], job: argparse.Namespace, device: torch.device
) -> None:
    """Raises RuntimeError where logits are not those of transformers' own styles."""
    tokens = torch.randint(0, job.sizes["vocab_size"], (1, job.tokens), device=device)
    dist.broadcast(tokens, 0)
    found = {name: prefill(model, tokens).float() for name, model in models.items()}
    for name, logits in found.items():
        check_close(f"{name}: the logits are", logits, found["transformers"], MAX_ERROR)


def measured(
    models: dict[str, torch.nn.Module], job: argparse.Namespace, device: torch.device
) -> Iterator[tuple[str, str, Times]]:
    """For each work and each model's styles: the work, the styles and the times. A step of decode is one token of each sequence."""
    watch = Stopwatch(device)
    for what in job.work:
        variants = variants_of(what, models, job, device)
        mode = "call" if what == "decode" else "row"
        steps = _NEW if what == "decode" else 1
        for name, times in watch.named(mode, variants, job.repeats).items():
            each = {key: us / steps for key, us in asdict(times).items()}
            yield what, name, Times(**each)


def lines(rows: Iterable[tuple[str, str, Times]]) -> Iterator[list[str]]:
    """The lines of the table; speed-ups are over transformers' own styles, which come first."""
    base = 0.0
    for what, name, times in rows:
        if name == "transformers":
            base = times.median
        yield [what, name, times.spread(), f"{times.host:.0f}", f"{base / times.median:.2f}"]


def rows(job: argparse.Namespace) -> Iterator[list[str]]:
    device = current_device()
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))  # for transformers, as torchrun does
    with contextlib.ExitStack() as stack:
        folder = [None]
        if dist.get_rank() == 0:
            folder = [stack.enter_context(tempfile.TemporaryDirectory(prefix="overlap_model_"))]
        dist.broadcast_object_list(folder, device=device)
        models = load_all(job, folder[0], device)
        dist.barrier()
    check(models, job, device)
    yield from lines(measured(models, job, device))


OPTIONS = (
    Option("--hidden", type=count, default=4096),
    Option("--intermediate", type=count, default=14336),
    Option("--heads", type=count, default=32),
    Option("--kv-heads", type=count, default=8),
    Option("--layers", type=count, default=4),
    Option("--vocabulary", type=count, default=32768),
    Option("--tokens", type=count, default=4096, help="of prefill and step"),
    Option("--sequences", type=count, default=16, help="of decode"),
    Option("--work", default=",".join(WORK), allowed=WORK, help="comma-separated"),
    REPEATS(default=5),
)


def prepare(args: argparse.Namespace) -> None:
    if not importlib.util.find_spec("transformers") or not importlib.util.find_spec("accelerate"):
        raise ValueError("transformers is missing: pip install transformers accelerate")
    sizes = (args.hidden, args.heads, args.kv_heads, args.intermediate)
    (block,) = parse_blocks(f"{'x'.join(map(str, sizes))}@{args.tokens}")
    block.check_divisible(args.world, "tokens")
    args.sizes = {
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "num_hidden_layers": args.layers,
        "vocab_size": args.vocabulary,
        "max_position_embeddings": max(args.tokens, _PROMPT + _NEW),
    }


def summary(found: list[list[str]], job: argparse.Namespace) -> str:
    return table(["work", "styles", "us (10 to 90 %)", "host, us", "speed-up"], found)


STUDY = Study(OPTIONS, rows, summary=summary, prepare=prepare)
