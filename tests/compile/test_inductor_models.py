"""The compile pass on whole models: PyTorch's styles, and Hugging Face's Llama and Qwen3 with them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

from checks import Failures
from frameworks import needs_transformers
from graphs import Graphs, expect_counts
from meshes import mesh
from operands import rank_device

WIDTH, HEADS, HIDDEN, TOKENS = 8, 4, 12, 16


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


class Mlp(torch.nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(WIDTH, HIDDEN, bias)
        self.up = torch.nn.Linear(WIDTH, HIDDEN, bias)
        self.down = torch.nn.Linear(HIDDEN, WIDTH, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class Model(torch.nn.Module):
    """Embedding, one block, head; the loss if it is given targets."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = torch.nn.Embedding(TOKENS, WIDTH)
        self.attention_norm, self.mlp_norm, self.norm = (torch.nn.RMSNorm(WIDTH) for _ in range(3))
        self.attention = Attention(bias)
        self.mlp = Mlp(bias)
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


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def near(found: torch.Tensor, right: torch.Tensor) -> str | None:
    """The fault beyond float64's rounding."""
    found = whole(found.detach())
    if found.shape != right.shape:
        return f"{tuple(found.shape)}, not {tuple(right.shape)}"
    error = (found - right.detach()).abs().max().item()
    return None if error <= 1e-12 * max(1.0, right.abs().max().item()) else f"off by {error}"


def near_in_all(
    failures: Failures, found: torch.Tensor, right: torch.Tensor, *models: torch.nn.Module
) -> None:
    """The losses, and the gradients of both models' parameters."""
    failures.expect(near(found, right), "loss")
    for (name, own), (_, other) in zip(
        *(model.named_parameters() for model in models), strict=True
    ):
        failures.expect(near(own.grad, other.grad), "gradient of", name)


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
    near_in_all(failures, found, expected, model, right)
    expect_counts(failures, graphs, *STYLED[sequence])


# --- Hugging Face ---------------------------------------------------------------------------------------------


def transformer(family: str) -> torch.nn.Module:
    """Two layers of random weights."""
    import transformers

    torch.manual_seed(5)
    sizes = {
        "vocab_size": TOKENS,
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "head_dim": 2,
        "max_position_embeddings": 16,
    }
    configuration = getattr(transformers, f"{family}Config")(**sizes)
    model = getattr(transformers, f"{family}ForCausalLM")(configuration)
    return model.to(rank_device(), torch.float64)


def transformer_plan(sequence: bool) -> dict[str, object]:
    """As `styled`, for the names that Llama and Qwen3 have."""
    outside = Shard(1) if sequence else Replicate()
    local = {"use_local_output": not sequence}
    layer = "model.layers.*"
    columns = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
    )
    plan: dict[str, object] = {f"{layer}.{name}": ColwiseParallel() for name in columns}
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"{layer}.{name}"] = RowwiseParallel(output_layouts=outside, **local)
    plan["model.embed_tokens"] = RowwiseParallel(
        input_layouts=Replicate(), output_layouts=outside, **local
    )
    plan["lm_head"] = ColwiseParallel(input_layouts=outside, output_layouts=Replicate())
    if sequence:
        plan[f"{layer}.self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        )
        plan[f"{layer}.mlp"] = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        )
        norms = (f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", "model.norm")
        plan |= {name: SequenceParallel() for name in norms}
    return plan


# The ops of two layers and a head, by hand; the embedding and the whole logits have collectives
# without a GEMM, and the embedding's
# gradient is gathered with sequence parallelism.
TRANSFORMERS = {
    False: (
        {("forward", "gemm_allreduce"): 4, ("backward", "gemm_allreduce"): 11},
        {("forward", "all_reduce"): 1, ("forward", "all_gather"): 1},
    ),
    True: (
        {
            ("forward", "gemm_reducescatter"): 4,
            ("forward", "allgather_gemm.weights"): 4,
            ("forward", "allgather_gemm"): 1,
            ("backward", "gemm_reducescatter"): 5,
            ("backward", "allgather_gemm"): 4,
        },
        {
            ("forward", "reduce_scatter"): 1,
            ("forward", "all_gather"): 1,
            ("backward", "all_gather"): 1,
        },
    ),
}


@pytest.mark.parametrize(
    "family, sequence",
    [
        pytest.param("Llama", True, id="llama-sequence"),
        pytest.param("Qwen3", False, id="qwen3-all", marks=pytest.mark.long),
        pytest.param("Llama", False, id="llama-all", marks=pytest.mark.whole),
        pytest.param("Qwen3", True, id="qwen3-sequence", marks=pytest.mark.whole),
    ],
)
@needs_transformers
@pytest.mark.ranks((2, "gloo"))
@pytest.mark.seconds(400)
def test_inductor_fuses_all_of_hugging_faces_models(
    failures: Failures, family: str, sequence: bool
) -> None:
    right = transformer(family)
    model = parallelize_module(transformer(family), mesh(), transformer_plan(sequence))
    tokens, targets = tokens_of()
    graphs = Graphs()
    compiled = graphs.compile(lambda ids: model(input_ids=ids, use_cache=False).logits)
    expected = loss_of(right(input_ids=tokens, use_cache=False).logits, targets)
    expected.backward()
    found = loss_of(compiled(tokens), targets)
    found.backward()
    for name, own in model.named_parameters():
        if "q_norm" in name or "k_norm" in name:  # plain parameters, which see this rank's heads
            dist.all_reduce(own.grad)
    near_in_all(failures, found, expected, model, right)
    expect_counts(failures, graphs, *TRANSFORMERS[sequence])
