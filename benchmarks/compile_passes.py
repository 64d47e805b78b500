"""``python -m overlap_torch.benchmarks compile_passes``: what two passes of Inductor fuse in the same graphs.

One is ``overlap_torch.inductor``, the other PyTorch's ``_micro_pipeline_tp``. Each runs where it stands among Inductor's post-grad
passes, on forward and backward graphs of small models, cut over two ranks that do not exist: nothing is communicated, and
nothing is timed. It prints a Markdown table. Models of Hugging Face are among them where ``transformers`` is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
from torch._inductor.virtualized import V
from torch.distributed._symmetric_memory import _test_mode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.fx import GraphModule

from overlap_torch import inductor

from .study import Study

WORLD = 2
_COLLECTIVES = {
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",  # what post-grad passes make of those that may reduce in place
    "reduce_scatter_tensor": "reduce-scatter",
    "all_gather_into_tensor": "all-gather",
}
_KINDS = tuple(dict.fromkeys(_COLLECTIVES.values()))

# A model and what it is called with.
Case = tuple[Callable[..., torch.Tensor], Sequence[torch.Tensor]]


class Block(torch.nn.Module):
    """A Llama block on [batch, tokens, 8] without rotary embeddings."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = torch.nn.RMSNorm(8), torch.nn.RMSNorm(8)
        self.attention, self.mlp = Attention(bias), Mlp(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Attention(torch.nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (torch.nn.Linear(8, 8, bias) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mlp(torch.nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = torch.nn.Linear(8, 16, bias), torch.nn.Linear(8, 16, bias)
        self.down = torch.nn.Linear(16, 8, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def styled(mesh: DeviceMesh, sequence: bool, bias: bool, batch: int) -> Case:
    """The block with PyTorch's styles."""
    outside = Shard(1) if sequence else Replicate()
    rows = RowwiseParallel(output_layouts=outside, use_local_output=not sequence)
    plan: dict[str, Any] = {
        f"attention.{name}": ColwiseParallel(use_local_output=True) for name in ("q", "k", "v")
    }
    plan |= {"attention.out": rows, "mlp.down": rows}
    plan |= {"mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel()}
    if sequence:
        gathers = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        )
        plan |= {"attention": gathers, "mlp": gathers}
        # Their inputs are DTensors from here on: the first norm makes them of this rank's tokens.
        plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    block = parallelize_module(Block(bias), mesh, plan)
    x = torch.randn(batch, 6, 8)
    if not sequence:
        return block, [x]

    def on_tokens(x: torch.Tensor) -> torch.Tensor:
        return block(DTensor.from_local(x, mesh, [Shard(1)], run_check=False)).to_local()

    return on_tokens, [x]


def by_hand() -> Case:
    """An MLP of functional collectives as Megatron has it, rows cut over the ranks."""
    group = dist.group.WORLD

    def mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor):
        x = functional.all_gather_tensor_autograd(x, 0, group)
        y = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
        return functional.reduce_scatter_tensor_autograd(y, "sum", 0, group)

    return mlp, [torch.randn(6, 8), *(torch.randn(8, 8) for _ in range(3))]


def transformer(mesh: DeviceMesh, family: str) -> Case:
    """Two layers of a Hugging Face model with PyTorch's styles, all tokens on every rank."""
    import transformers

    settings = getattr(transformers, f"{family}Config")(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=2,
        max_position_embeddings=16,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(settings)
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj")
    plan: dict[str, Any] = {
        f"model.layers.*.{name}": ColwiseParallel() for name in (*columns, "mlp.up_proj")
    }
    plan |= {
        f"model.layers.*.{name}": RowwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj")
    }
    parallelize_module(model, mesh, plan)
    return lambda ids: model(input_ids=ids, use_cache=False).logits, [torch.arange(12).view(2, 6)]


def cases(mesh: DeviceMesh) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Each model by name, and how it is made."""
    yield "Llama block, PyTorch's styles", lambda: styled(mesh, False, False, 2)
    yield "the same with biases", lambda: styled(mesh, False, True, 2)
    yield "sequence-parallel, a batch of 1", lambda: styled(mesh, True, False, 1)
    yield "sequence-parallel, a batch of 2", lambda: styled(mesh, True, False, 2)
    yield "the same with biases", lambda: styled(mesh, True, True, 2)
    yield "MLP by hand, all-gather and reduce-scatter", by_hand
    if importlib.util.find_spec("transformers") is not None:
        for family in ("Llama", "Qwen3"):
            name = f"Hugging Face {family}, two layers, PyTorch's styles"
            yield name, lambda family=family: transformer(mesh, family)


def left_by(case: Case, settings: dict[str, Any]) -> tuple[Counter[str], Counter[str]]:
    """The collectives of forward and backward before Inductor's post-grad passes, and behind them, with these settings."""
    found, left = Counter[str](), Counter[str]()

    def compiler(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        values = [node.meta.get("val") for node in graph.graph.nodes if node.op == "placeholder"]
        found.update(_collectives(graph))
        forward = _zeros(graph)
        view_to_reshape(graph)
        with config.patch(settings), V.set_fake_mode(detect_fake_mode(values)), _test_mode():
            post_grad_passes(graph, False)
        left.update(_collectives(graph))
        return make_boxed_func(forward)

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=compiler,
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    function, inputs = case
    inputs = [tensor.requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    torch.compile(function, backend=backend, fullgraph=True)(*inputs).sum().backward()
    return found, left


def _collectives(graph: GraphModule) -> Counter[str]:
    names = (
        node.target._overloadpacket.__name__
        for node in graph.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace == "_c10d_functional"
    )
    return Counter(_COLLECTIVES[name] for name in names if name in _COLLECTIVES)


def _zeros(graph: GraphModule) -> Callable[..., list[Any]]:
    """A function that returns zeros in the shapes of the graph's results."""
    (results,) = next(node for node in graph.graph.nodes if node.op == "output").args
    values = [getattr(result, "meta", {}).get("val") for result in results]
    return lambda *inputs: [
        torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
        for value in values
    ]


@contextlib.contextmanager
def two_ranks() -> Iterator[DeviceMesh]:
    """A process group of two ranks, of which there is one: the other's part in each collective is made up."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    try:
        yield init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


def table() -> list[str]:
    """The lines of the table."""
    lines = [
        "| graphs, forward and backward | collectives | `overlap_torch.inductor` | `_micro_pipeline_tp` |",
        "| --- | --- | --- | --- |",
    ]
    with two_ranks() as mesh:
        for name, make in cases(mesh):
            with inductor.enable():
                ours = {"post_grad_custom_pre_pass": config.post_grad_custom_pre_pass}
            found, left = left_by(make(), ours)
            _, left_by_pytorch = left_by(make(), {"_micro_pipeline_tp": True})
            cells = [_fused(found, Counter()), _fused(found, left), _fused(found, left_by_pytorch)]
            lines.append(f"| {' | '.join([name, *cells])} |")
    return lines


def _fused(found: Counter[str], left: Counter[str]) -> str:
    fused = found - left
    parts = [f"{fused[kind]} {kind}" for kind in _KINDS if fused[kind]]
    return ", ".join(parts) or "none"


def rows(args: argparse.Namespace) -> list[str]:
    warnings.filterwarnings("ignore", "erase_node")  # _micro_pipeline_tp erases some nodes twice
    logging.getLogger("torch._inductor.fx_passes.micro_pipeline_tp").setLevel(logging.ERROR)
    return table()


STUDY = Study(lambda parser: None, rows, str, lambda rows, args: "", on_ranks=False)
