"""A mixture of experts: ``overlap_torch.moe`` beside PyTorch's ops one after the other, as frameworks call them.

The sequence sends a row for each token and expert, and puts rows in order by indexing. Both find the routes in each call.
``--mode graph`` replays ten calls in a CUDA graph, as serving does: ``moe(max_rows=)`` beside a gather of all tokens, the rank's
experts, and a reduce-scatter, as the sequence's host reads numbers of rows. There ``max_rows`` is for any routing. With
``--fp8`` weights are float8_e4m3fn, rows are cast before they travel and again before down, and the sequence multiplies by
``torch._scaled_grouped_mm``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional

import overlap_torch
from overlap_torch._moe.activation import Gate
from overlap_torch._moe.scaled import block_quantized, packed_linear
from overlap_torch._tools.launch import current_device

from .measure import Stopwatch
from .study import REPEATS, Option, Study, check_close, model_cases, model_rows, pass_of
from .tables import table


@dataclass(frozen=True)
class Model:
    """Hidden and intermediate sizes, the experts of a rank on four ranks, and the experts of a token."""

    hidden: int
    inner: int
    experts: int
    choices: int


MODELS = {
    "qwen3-235b": Model(4096, 1536, 32, 8),
    "deepseek-v3": Model(7168, 2048, 64, 8),
    "gpt-oss-120b": Model(2880, 2880, 32, 4),
    "llama-4-scout": Model(5120, 8192, 4, 1),
    "mixtral-8x7b": Model(4096, 14336, 2, 2),
    "tiny": Model(64, 32, 2, 2),
}

# The options of each variant beside the sequence. Over NCCL (gloo on CPU), and as `moe` chooses; `max_rows` leaves a tenth of room.
OVER_NCCL, LIMITED = {"transport": "nccl"}, {"max_rows": 1.1}
IN_CALLS: dict[str, dict] = {
    "moe over NCCL": OVER_NCCL,
    "moe": {},
    "max_rows": LIMITED,
    "by ranks over NCCL": OVER_NCCL | {"sum_order": "ranks"},
    "by ranks": {"sum_order": "ranks"},
    "by ranks, max_rows": LIMITED | {"sum_order": "ranks"},
}
# In graphs, with room for any routing; and the rank's two products alone, whose time is a bound.
IN_GRAPHS = {
    "max_rows": {"max_rows": None},
    "by ranks, max_rows": {"max_rows": None, "sum_order": "ranks"},
}
BOUND = "GEMMs"


def _names(args: argparse.Namespace) -> list[str]:
    """The columns: what is compared with, `moe`'s variants, and the bound."""
    return (
        ["gathered", *IN_GRAPHS, BOUND] if args.mode == "graph" else ["sequence", *IN_CALLS, BOUND]
    )


def _places(order: torch.Tensor) -> torch.Tensor:
    """The inverse of a permutation."""
    return torch.empty_like(order).scatter_(
        0, order, torch.arange(order.shape[0], device=order.device)
    )


def _cast(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers in float8_e4m3fn, and their rows' scales."""
    scale = numbers.abs().amax(-1).float().clamp(min=1e-12) / 448
    return (numbers.float() / scale[..., None]).to(torch.float8_e4m3fn), scale


def _experts(rows, weight, offs: torch.Tensor) -> torch.Tensor:
    """Rows and weights as they are, or each with its scales."""
    if isinstance(rows, torch.Tensor):
        return functional.grouped_mm(rows, weight.transpose(1, 2), offs=offs)
    (values, scale), (of_experts, of_columns) = rows, weight
    if not values.is_cuda:  # PyTorch has none there
        rows, weight = (each.float() * its[..., None] for each, its in (rows, weight))
        return _experts(rows.bfloat16(), weight.bfloat16(), offs)
    return torch._scaled_grouped_mm(
        values,
        of_experts.transpose(1, 2),
        scale,
        of_columns,
        offs=offs,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def _moved(x: torch.Tensor, fp8: bool, move: Callable[[torch.Tensor], torch.Tensor]):
    """Tokens where ``move`` brings them, in fp8 with their scales."""
    if not fp8:
        return move(x)
    values, scale = _cast_compiled(x)
    return move(values.view(torch.uint8)).view(torch.float8_e4m3fn), move(scale)


def _results(rows, gate_up, down, offs: torch.Tensor) -> torch.Tensor:
    """Each row's result; rows and weights as they are, or each with its scales."""
    gate, up = _experts(rows, gate_up, offs).chunk(2, 1)
    hidden = functional.silu(gate) * up
    return _experts(
        hidden if isinstance(rows, torch.Tensor) else _cast_compiled(hidden), down, offs
    )


def _rows_of(tokens, index: torch.Tensor):
    return (
        tokens[index] if isinstance(tokens, torch.Tensor) else tuple(each[index] for each in tokens)
    )


def _own_experts(down) -> int:
    return (down if isinstance(down, torch.Tensor) else down[0]).shape[0]


def sequence(x, ids, shares, gate_up, down) -> torch.Tensor:
    """All rows to their experts, grouped GEMMs and SwiGLU, all results home, a weighted sum. ``gate_up`` and ``down``: weights, or
    each with its scales."""
    own, (tokens, choices), ranks = _own_experts(down), ids.shape, dist.get_world_size()
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = flat.new_zeros(own * ranks).scatter_add_(0, flat, torch.ones_like(flat))
    met = torch.empty_like(counts)
    dist.all_to_all_single(met, counts)
    sent, came = (each.view(ranks, own).sum(1).tolist() for each in (counts, met))
    group = dist.group.WORLD

    def arrived(each: torch.Tensor) -> torch.Tensor:
        return all_to_all_single_autograd(each[order // choices], came, sent, group)

    numbers = torch.arange(own, device=x.device).repeat(ranks)
    by_expert = numbers.repeat_interleave(met, output_size=sum(came)).argsort(stable=True)
    offs = met.view(ranks, own).sum(0).cumsum(0).to(torch.int32)
    rows = _rows_of(_moved(x, not isinstance(down, torch.Tensor), arrived), by_expert)
    results = _results(rows, gate_up, down, offs)
    home = all_to_all_single_autograd(results[_places(by_expert)], sent, came, group)
    parts = home[_places(order)].view(tokens, choices, -1)
    return (parts * shares[:, :, None].to(x.dtype)).sum(1)


def gathered(x, ids, shares, gate_up, down) -> torch.Tensor:
    """All ranks' tokens on each rank, its own experts' results of them, and their sums to the tokens' ranks; no wait of the host."""
    own, ranks, choices = _own_experts(down), dist.get_world_size(), ids.shape[1]

    def of_all(each: torch.Tensor) -> torch.Tensor:
        whole = each.new_empty((ranks * each.shape[0], *each.shape[1:]))
        dist.all_gather_into_tensor(whole, each)
        return whole

    tokens = _moved(x, not isinstance(down, torch.Tensor), of_all)
    ids, shares = of_all(ids).flatten() - dist.get_rank() * own, of_all(shares).flatten()
    ids = torch.where((ids >= 0) & (ids < own), ids, own)  # others' come last
    order = ids.argsort(stable=True)
    counts = ids.new_zeros(own + 1).scatter_add_(0, ids, torch.ones_like(ids))
    offs = counts[:own].cumsum(0).to(torch.int32)
    results = _results(_rows_of(tokens, order // choices), gate_up, down, offs)
    parts = results * shares[order, None].to(x.dtype)
    parts = torch.where(ids[order, None] < own, parts, 0)
    sums = parts.new_zeros((ranks * x.shape[0], x.shape[1])).index_add_(0, order // choices, parts)
    y = torch.empty_like(x)
    dist.reduce_scatter_tensor(y, sums)
    return y


_cast_compiled = torch.compile(_cast, dynamic=True)


def _products(rows, offs: torch.Tensor, gate_up, down, scaled) -> Callable[[int], object]:
    """The two grouped GEMMs of `moe`, with the activation; of `scaled` weights where they are not None, without the casts."""
    ops, form = torch.ops.overlap, Gate().form(False)
    if scaled is None:

        def products(_: int) -> torch.Tensor:
            hidden, *_ = ops._moe_hidden(rows, gate_up, None, None, None, offs, *form, False)
            return ops._moe_linear(hidden, down, offs)

        return products
    (gate_up, of_gate_up), (down, of_down) = scaled
    by_blocks = of_down.dim() == 3
    packed = ops._moe_pack(rows, offs, by_blocks)

    def hidden() -> torch.Tensor:
        scales = of_gate_up, None, None, None
        return ops._moe_scaled_hidden(packed, gate_up, None, *scales, offs, *form)

    packed_hidden = ops._moe_pack(hidden(), offs, by_blocks)
    return lambda _: (hidden(), packed_linear(packed_hidden, down, of_down, None, offs))


def _variants(
    model: Model, tokens: int, device: torch.device, backward: bool, args: argparse.Namespace
) -> dict[str, Callable]:
    skewed, fp8, graph = args.routing == "skewed", args.fp8, args.mode == "graph"

    def draw(*shape: int) -> torch.Tensor:
        made = torch.randn(shape, device=device, dtype=torch.bfloat16) / shape[-1] ** 0.5
        return made.requires_grad_(backward)

    torch.manual_seed(dist.get_rank())
    experts = model.experts * dist.get_world_size()
    x, grad = draw(tokens, model.hidden), torch.ones(tokens, model.hidden, device=device)
    gate_up = draw(model.experts, 2 * model.inner, model.hidden)
    down = draw(model.experts, model.hidden, model.inner)
    scales, ours = {}, None
    if fp8:
        weights = gate_up, down
        gate_up, down = ours = [_cast(each) for each in weights]
        if fp8 == "blocks":
            ours = [block_quantized(each) for each in weights]
        scales = {"scale_gate_up": ours[0][1], "scale_down": ours[1][1]}
    chances = torch.arange(1.0, experts + 1, device=device).rsqrt()
    chances = chances if skewed else torch.ones_like(chances)
    ids = chances.expand(tokens, -1).multinomial(model.choices)
    rows_of_ranks = (ids // model.experts).flatten().bincount(minlength=dist.get_world_size())
    dist.all_reduce(rows_of_ranks)
    most_rows = int(rows_of_ranks.max())
    shares = torch.rand(tokens, model.choices, device=device)

    def with_options(options: dict) -> Callable:
        if "max_rows" in options:
            share = options["max_rows"]
            rows = tokens * dist.get_world_size() * min(model.choices, model.experts)
            rows = rows if share is None else int(share * most_rows) + 64
            options = options | {"max_tokens": tokens, "max_rows": rows}

        def call(x, ids, shares, gate_up, down) -> torch.Tensor:
            if fp8:
                gate_up, down = (values for values, _ in ours)
            return overlap_torch.moe(x, ids, shares, gate_up, down, **options, **scales)

        return call

    def variant(compute: Callable) -> Callable[[int], torch.Tensor]:
        def run(_: int) -> torch.Tensor:
            y = compute(x, ids, shares, gate_up, down)
            if backward:
                torch.autograd.grad(y, (x, gate_up, down), grad.to(y.dtype))
            return y

        return run

    options = IN_GRAPHS if graph else IN_CALLS
    computations = {"gathered": gathered} if graph else {"sequence": sequence}
    computations |= {name: with_options(each) for name, each in options.items()}
    found = {name: variant(one) for name, one in computations.items()}
    if not backward:
        rows, route = overlap_torch.moe_dispatch(x, ids, num_experts=experts)
        found[BOUND] = _products(rows, route.offs, gate_up, down, ours)
    return found


def _rows(args: argparse.Namespace) -> Iterator[dict]:
    device = current_device()
    watch = Stopwatch(device)
    mode = args.mode if device.type == "cuda" else args.mode.replace("graph", "row")
    for name, tokens, backward in model_cases(args):
        variants = _variants(MODELS[name], tokens, device, backward, args)
        first, *others = (run(0).detach().float() for key, run in variants.items() if key != BOUND)
        for mine in others:  # a few roundings of bfloat16
            most = {None: 0.02, "rows": 0.03, "blocks": 0.12}[args.fp8]
            check_close(f"{name}, {tokens} tokens: moe is", mine, first, most)
        times = watch.named(mode, variants, args.repeats)
        yield {"model": name, "tokens": tokens, "backward": backward} | times


def _cells(row: dict, names: list[str]) -> list[str]:
    times = [row.get(name) for name in names]
    over = [times[0].median / mine.median for mine in times[1:-1]]
    return [
        row["model"],
        str(row["tokens"]),
        pass_of(row),
        *("" if time is None else time.spread() for time in times),
        *(f"{each:.2f}" for each in over),
    ]


OPTIONS = (
    *model_rows(MODELS, "of a rank", [8192, 1024]),
    Option(
        "--routing",
        default="balanced",
        choices=["balanced", "skewed"],
        help="skewed: the chance of the i-th expert falls as 1 / sqrt(i)",
    ),
    Option(
        "--fp8",
        nargs="?",
        const="rows",
        choices=["rows", "blocks"],
        help="weights and rows, forward only; blocks: moe's scales, while the sequence has those of rows",
    ),
    Option("--mode", choices=["call", "graph"], default="call"),
    REPEATS(default=15),
)


def _summary(found: list[dict], args: argparse.Namespace) -> str:
    names = _names(args)
    head = ["model", "tokens", "pass", f"{names[0]}, us (10 to 90 %)"]
    head += [f"{name}, us" for name in names[1:]] + [f"speed-up: {name}" for name in names[1:-1]]
    return table(head, [_cells(row, names) for row in found])


def _prepare(args: argparse.Namespace) -> None:
    if args.fp8 or args.mode == "graph":
        args.passes = ("forward",)


STUDY = Study(OPTIONS, _rows, summary=_summary, prepare=_prepare)
