"""Megatron-core's mixture of experts by `moe_dispatch` and `moe_combine`, beside Megatron's own "alltoall" dispatcher."""

import contextlib
import functools
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from checks import Failures, close
from frameworks import check_training, megatron_groups, needs_megatron, reasons
from frameworks import megatron_config as config
from frameworks import megatron_gpt as gpt
from layers import ops_called
from operands import difference, rank_device

pytestmark = [needs_megatron, pytest.mark.ranks((1, "gloo"), (2, "gloo"), (4, "gloo"), (2, "nccl"))]

EXPERTS, HIDDEN, LEFT_OUT = 8, 16, 5
ALL_TOKENS = {"moe_token_dispatcher_type": "allgather"}


@contextlib.contextmanager
def groups(tensor: int = 1) -> Iterator[None]:
    """Megatron's groups: each expert has parts on ``tensor`` ranks. On CPU its dispatcher's CUDA streams are stand-ins."""
    from megatron.core.transformer.moe import token_dispatcher as own

    def moved(tensor: torch.Tensor | None, as_numpy: bool = False, **_: object):
        return tensor.numpy() if as_numpy and tensor is not None else tensor

    sizes = {
        "tensor_model_parallel_size": 1,
        "expert_model_parallel_size": dist.get_world_size() // tensor,
        "expert_tensor_parallel_size": tensor,
    }
    with megatron_groups(**sizes), contextlib.ExitStack() as patches:
        if rank_device().type == "cpu":
            event = SimpleNamespace(synchronize=lambda: None)
            stream = SimpleNamespace(record_event=lambda: event)
            for where, name, stand_in in (
                (own.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", stream),
                (own, "maybe_move_tensor_to_cpu", moved),
                (torch.cuda, "current_stream", lambda: stream),
                (torch.cuda, "stream", lambda _: contextlib.nullcontext()),
            ):
                patches.enter_context(mock.patch.object(where, name, stand_in))
        yield


def settings(tensor: int = 1, **fields: object):
    sizes = {
        "tensor_model_parallel_size": 1,
        "expert_model_parallel_size": dist.get_world_size() // tensor,
        "expert_tensor_parallel_size": tensor,
        "num_moe_experts": EXPERTS,
        "moe_ffn_hidden_size": 12,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
    }
    return config(False, **sizes | fields)


def layers(made) -> list[torch.nn.Module]:
    """Megatron's layer and ours with the same weights, in which no token chooses one of the experts."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend

    from overlap_torch.integrations import megatron

    torch.manual_seed(3 + dist.get_rank())
    spec = get_moe_module_spec_for_backend(LocalSpecProvider(), num_experts=EXPERTS)
    own, ours = (
        build(config=made, pg_collection=None).to(rank_device())
        for build in (spec, megatron.gpt_layer_spec(num_experts=EXPERTS).submodules.mlp)
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        own.router.weight.copy_(torch.randn(EXPERTS, HIDDEN, generator=generator))
        own.router.weight[LEFT_OUT] = -9.0
    ours.load_state_dict(own.state_dict())
    return [own, ours]


def results(layer: torch.nn.Module, tokens: int, again: bool = False) -> dict[str, torch.Tensor]:
    """The layer's result and its gradients, for positive inputs of this rank; ``again``: backward computes forward again."""
    device, dtype = rank_device(), layer.config.params_dtype
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    x, grad = (torch.rand(tokens, 1, HIDDEN, generator=generator).to(device, dtype) for _ in "xg")
    x.requires_grad_()
    run = functools.partial(checkpoint, layer, use_reentrant=False) if again else layer
    output, _ = run(x)
    output.backward(grad)
    found = {"output": output.detach(), "input's gradient": x.grad}
    return found | {name: parameter.grad for name, parameter in layer.named_parameters()}


def uneven() -> int:
    """The tokens of this rank."""
    return (7, 1, 12, 5)[dist.get_rank()]


def compare(failures: Failures, fault, pair: list[torch.nn.Module], tokens: int, *where) -> None:
    own, ours = pair
    right, found = results(own, tokens), {}
    for again in (False, True):
        ours.zero_grad()
        called = ops_called(lambda: found.update(results(ours, tokens, again)))  # noqa: B023, called at once
        failures.equal(called, {"moe_dispatch", "moe_combine"}, *where)
        for name, value in right.items():
            failures.expect(fault(found[name], value), name, "again", again, *where)


def test_megatron_experts_are_megatrons(failures: Failures) -> None:
    """Results and gradients bit for bit, as sums in float32 have one order on CPU: top-k, capacities, shared experts."""
    fault = difference if rank_device().type == "cpu" else close
    for choices, more in itertools.product(
        (1, 2, 3),
        (
            {},
            {"moe_router_dtype": "fp32", "moe_router_score_function": "sigmoid"},
            {"moe_expert_capacity_factor": 0.7},  # drops tokens, and pads none
            {"moe_shared_expert_intermediate_size": 20},
        ),
    ):
        first = {"moe_router_topk": choices, "moe_router_pre_softmax": choices < 3}
        if choices == 1 and not more:
            first["moe_apply_probs_on_input"] = True
        with groups():
            made = settings(**first, **more)
            compare(failures, fault, layers(made), uneven(), choices, *more.items())


def test_megatron_experts_in_parts_and_in_bfloat16(failures: Failures) -> None:
    """Experts that are cut over two ranks; and bfloat16, as near to float32's results as Megatron, which sums in bfloat16."""
    if dist.get_world_size() > 1:
        for choices in (2, 3):
            with groups(2):
                # gloo cannot gather different numbers of rows, as Megatron's "alltoall" does here.
                own, _ = layers(settings(2, moe_router_topk=choices, **ALL_TOKENS))
                _, ours = layers(settings(2, moe_router_topk=choices))
                compare(failures, close, [own, ours], 6, "parts", choices)
    for choices in (2, 4):
        fields = {"moe_router_topk": choices, "moe_router_dtype": "fp32"}
        with groups():
            own, ours = layers(settings(**fields, bf16=True, params_dtype=torch.bfloat16))
            exact, _ = layers(settings(**fields))
            exact.load_state_dict(own.state_dict())
            right, theirs, found = (results(each, uneven()) for each in (exact, own, ours))
        for name, value in right.items():
            error, bound = ((each[name].float() - value).norm() for each in (found, theirs))
            fault = f"off by {error}, Megatron by {bound}" if error > 1.1 * bound else None
            failures.expect(fault, name, "bfloat16", choices)


def test_megatron_experts_leave_options_to_megatron(failures: Failures) -> None:
    """The options that keep Megatron's own dispatcher, each with its name in the report; then padding has Megatron's results."""
    from overlap_torch.integrations.megatron import OverlapTokenDispatcher

    padded = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    for name, value in (
        ("moe_token_dispatcher_type", "allgather"),
        ("moe_pad_experts_for_cuda_graph_inference", True),
        ("moe_router_padding_for_quantization", True),
        ("moe_shared_expert_overlap", True),
        ("overlap_moe_expert_parallel_comm", True),
        ("transformer_impl", "inference_optimized"),
        ("cuda_graph_impl", "local"),
        ("moe_pad_expert_input_to_capacity", True),
    ):
        with groups():
            inference = {"inference_grouped_gemm_backend": "torch"}
            made = settings(**padded, inference_moe_token_dispatcher_type="nccl", **inference)
            made.moe_pad_expert_input_to_capacity = False
            # The config's own checks of some options ask for Transformer Engine, or for a GPU.
            setattr(made, name, value)
            own, ours = layers(made)
            right = [f"Megatron's own token dispatcher: {name}={value!r}"]
            failures.equal(reasons(ours), right, name)
            failures.equal(type(ours.token_dispatcher), type(own.token_dispatcher), name)
    with groups():
        right, found = (results(layer, 6) for layer in layers(settings(**padded)))
        for name, value in right.items():
            failures.expect(difference(found[name], value), name, "padded")
        _, ours = layers(settings())
        failures.equal(type(ours.token_dispatcher), OverlapTokenDispatcher, "none of them")
        failures.equal(reasons(ours), [], "none of them")


def test_megatron_gpt_with_experts_trains(failures: Failures) -> None:
    """Beside Megatron's local spec, each rank on its own tokens."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from overlap_torch.integrations import megatron

    with groups():
        torch.manual_seed(1)
        made = settings(moe_shared_expert_intermediate_size=20)
        own = gpt(get_gpt_layer_local_spec(num_experts=EXPERTS), made)
        ours = gpt(megatron.gpt_block_spec(made, num_experts=EXPERTS), made)
        ours.load_state_dict(own.state_dict())
        rank, device = dist.get_rank(), rank_device()
        tokens = torch.arange(2 * 12, device=device).view(2, 12) * (7 + rank) % 64
        positions = torch.arange(12, device=device).expand(2, 12)
        mask = torch.ones(1, 1, 12, 12, dtype=torch.bool, device=device).triu(1)

        def step(model):
            loss = model(tokens, positions, mask, labels=tokens).mean()
            loss.backward()
            return loss

        check_training(failures, own, ours, step, {"moe_dispatch", "moe_combine"})
