"""The compile pass on a whole model with PyTorch's styles."""

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from checks import Failures
from frameworks import SMALL_MODEL, drawn_model, needs_transformers
from graphs import Graphs, expect_counts
from layers import GatedMlp
from meshes import check_parameter_gradients, mesh, whole_of
from operands import difference, rank_device

WIDTH, HEADS, HIDDEN, TOKENS = 8, 4, 12, 16
ROUNDED = {"rtol": 1e-12, "atol": 1e-12}  # in float64


class Attention(torch.nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(WIDTH, WIDTH, bias) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Model(torch.nn.Module):
    """Embedding, one block, head; the loss if it is given targets."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = torch.nn.Embedding(TOKENS, WIDTH)
        self.attention_norm, self.mlp_norm, self.norm = (torch.nn.RMSNorm(WIDTH) for _ in range(3))
        self.attention = Attention(bias)
        self.mlp = GatedMlp(WIDTH, HIDDEN, bias)
        self.head = torch.nn.Linear(WIDTH, TOKENS, bias)
        self.to(rank_device(), torch.float64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return self.head(self.norm(x))


def styled(sequence: bool, bias: bool) -> Model:
    """The model with PyTorch's styles, as torchtitan has them; each rank has its part of the logits."""
    outside = Shard(1) if sequence else Replicate()
    local = {"use_local_output": not sequence}
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=outside, **local),
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.o": RowwiseParallel(output_layouts=outside, **local),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=outside, **local),
        "head": ColwiseParallel(
            input_layouts=outside, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    if sequence:
        gathers = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        )
        plan |= {"attention": gathers, "mlp": gathers}
        plan |= {name: SequenceParallel() for name in ("attention_norm", "mlp_norm", "norm")}
    return parallelize_module(Model(bias), mesh(), plan)


def tokens_of() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.arange(24, device=rank_device()).view(3, 8) * 5 % TOKENS
    return tokens[:, :-2].contiguous(), tokens[:, 2:].contiguous()


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


# The ops by hand, forward and backward: attention.o and mlp.down reduce, and what goes into q, k and v, gate and up, and the
# head is gathered. In backward each does the other thing; without sequence parallelism every column-parallel layer reduces its
# own gradient: q, k, v, gate, up, head. The embedding's output has no GEMM beside it: one collective forward, and, as its
# gradient is gathered with sequence parallelism, one backward. The three all-reduces of a parallel loss have none either: each row's
# maximum, its sum of exponentials, and the logit of its target.
STYLED = {
    False: (
        {("forward", "gemm_allreduce"): 2, ("backward", "gemm_allreduce"): 6},
        {("forward", "all_reduce"): 1 + 3},
    ),
    True: (
        {
            ("forward", "gemm_reducescatter"): 2,
            ("forward", "allgather_gemm.weights"): 2,
            ("forward", "allgather_gemm"): 1,
            ("backward", "gemm_reducescatter"): 3,
            ("backward", "allgather_gemm"): 2,
        },
        {
            ("forward", "reduce_scatter"): 1,
            ("forward", "all_reduce"): 3,
            ("backward", "all_gather"): 1,
        },
    ),
}


@pytest.mark.parametrize(
    "sequence",
    [pytest.param(False, marks=pytest.mark.long, id="all"), pytest.param(True, id="sequence")],
)
@pytest.mark.ranks((2, "gloo"))
def test_inductor_fuses_all_of_pytorchs_styles_and_a_parallel_loss(
    failures: Failures, sequence: bool
) -> None:
    """The loss is in the graph, computed of this rank's part of the logits."""
    bias = True
    right, model = Model(bias), styled(sequence, bias)
    tokens, targets = tokens_of()
    graphs = Graphs()
    compiled = graphs.compile(lambda tokens, targets: loss_of(model(tokens), targets))
    expected = loss_of(right(tokens), targets)
    expected.backward()
    with loss_parallel():
        found = compiled(tokens, targets)
        found.backward()
    failures.near(whole_of(found), expected, "loss", **ROUNDED)
    check_parameter_gradients(failures, model, right, **ROUNDED)
    expect_counts(failures, graphs, *STYLED[sequence])


# --- Hugging Face ---------------------------------------------------------------------------------------------


def llama() -> torch.nn.Module:
    """Two layers of random weights, in bfloat16, whose blocks are cut as PyTorch's styles cut them."""
    from transformers import LlamaConfig

    model = drawn_model(LlamaConfig(**SMALL_MODEL), dtype=torch.bfloat16).to(rank_device())
    layer = "model.layers.*"
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")  # fmt: skip
    rows = ("self_attn.o_proj", "mlp.down_proj")
    plan = {f"{layer}.{name}": ColwiseParallel() for name in columns}
    plan |= {f"{layer}.{name}": RowwiseParallel() for name in rows}
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(model, mesh(), plan)


@pytest.mark.long
@needs_transformers
@pytest.mark.ranks((2, "gloo"))
@pytest.mark.seconds(400)
def test_inductor_fuses_the_norms_of_hugging_faces_llama(failures: Failures) -> None:
    """Each all-reduce with the norm after it, the embedding's too; bit for bit the parallel model without a compiler."""
    model, (tokens, _) = llama(), tokens_of()

    def logits(ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, use_cache=False).logits

    graphs = Graphs()
    with torch.no_grad():
        found, right = whole_of(graphs.compile(logits)(tokens)), whole_of(logits(tokens))
    failures.expect(difference(found, right), "logits")
    ops = {("forward", "gemm_allreduce_rmsnorm"): 4, ("forward", "allreduce_rmsnorm"): 1}
    expect_counts(failures, graphs, ops, {("forward", "all_gather"): 1})
