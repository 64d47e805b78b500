"""Tests of a framework are skipped where it is not installed, or of a release that the integration does not know; Megatron's models."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import overlap_torch
from checks import Failures, close
from layers import ops_called
from operands import as_torchrun_places, rank_device
from overlap_torch.integrations import transformers
from overlap_torch.integrations._release import require


def needs(distribution: str, releases: Sequence[str], extra: str) -> pytest.MarkDecorator:
    """A mark that skips, and says what is installed and what is needed."""
    try:
        require(distribution, releases, extra)
    except ImportError as error:
        return pytest.mark.skipif(True, reason=str(error))
    return pytest.mark.skipif(False, reason="")


def needs_module(name: str) -> pytest.MarkDecorator:
    """A mark that skips where there is no such module."""
    return pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed")


# A language model's for transformers' configurations; 16 columns.
SMALL_MODEL = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def drawn_model(config, **options: object) -> torch.nn.Module:
    """A language model of transformers with random weights, the same on all ranks, of norms and biases, too."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def loaded_model(folder: str | Path, plan: object = "auto", fsdp_size: int = 1, **options: object):
    """The model of a checkpoint, with transformers' tensor parallelism over the ranks."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    fsdp = {"fsdp_size": fsdp_size} if fsdp_size > 1 else {}
    config = DistributedConfig(tp_size=dist.get_world_size() // fsdp_size, tp_plan=plan, **fsdp)
    with as_torchrun_places():
        return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, **options)


def some_tokens(*shape: int) -> torch.Tensor:
    """Ids that the small model knows, the same on all ranks."""
    return torch.arange(torch.Size(shape).numel(), device=rank_device()).view(shape) * 7 % 60


needs_transformers = needs("transformers", transformers.RELEASES, "transformers")
needs_megatron = needs("megatron-core", ("0.19",), "megatron")
needs_torchtitan = needs("torchtitan", ("0.3",), "torchtitan")


def check_training(
    failures: Failures,
    own: torch.nn.Module,
    ours: torch.nn.Module,
    step: Callable[[torch.nn.Module], torch.Tensor],
    ops: set[str],
    finish_gradients: Callable[[], None] = lambda: None,
) -> None:
    """Losses, gradients and parameters of three steps, beside the framework's own; ``step`` runs backward and returns the loss,
    and calls these ops for our model."""
    models, mine = (own, ours), dict(ours.named_parameters())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    for number in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = []
        called = [ops_called(lambda: losses.append(step(model).detach())) for model in models]  # noqa: B023, called at once
        failures.equal(called, [set(), ops], "ops of step", number)
        failures.expect(close(losses[1], losses[0]), "loss of step", number)
        finish_gradients()
        for name, parameter in own.named_parameters():
            failures.expect(close(mine[name].grad, parameter.grad), "gradient", name, number)
        for optimizer in optimizers:
            optimizer.step()
        for name, parameter in own.named_parameters():
            failures.expect(close(mine[name].detach(), parameter.detach()), name, number)


def reasons(layer: torch.nn.Module) -> list[str]:
    """The report's, of a layer left to its framework."""
    return [row["why"] for row in overlap_torch.report(layer) if not row["op"]]


_megatron_sizes: dict[str, int] = {}


@contextlib.contextmanager
def megatron_groups(context: int = 1, **sizes: int) -> Iterator[None]:
    """Megatron's groups, ``context`` of the ranks for context parallelism, and random states; ``sizes`` are others of Megatron's
    arguments. On CPU its sequence parallelism would make buffers on the current GPU, and its dropout has a state there."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    ranks = dist.get_world_size() // context
    wanted = {"tensor_model_parallel_size": ranks, "context_parallel_size": context, **sizes}
    if parallel_state.model_parallel_is_initialized() and _megatron_sizes != wanted:
        parallel_state.destroy_model_parallel()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(**wanted)
        _megatron_sizes.clear()
        _megatron_sizes.update(wanted)
    if rank_device().type == "cuda":
        random.model_parallel_cuda_manual_seed(1)
        yield
        return
    with (
        mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        mock.patch.object(random.CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext()),
    ):
        yield


def megatron_config(sequence_parallel: bool, **fields: object):
    from megatron.core.transformer import TransformerConfig

    settings = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": dist.get_world_size(),
        "sequence_parallel": sequence_parallel,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return TransformerConfig(**settings | fields)


def megatron_gpt(spec, settings, positions: str = "rope") -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel

    model = GPTModel(
        settings,
        transformer_layer_spec=spec,
        vocab_size=64,
        max_sequence_length=16,
        position_embedding_type=positions,
        parallel_output=True,
    )
    return model.to(rank_device())
