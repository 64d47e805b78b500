"""transformers' expert parallelism with ``ep_implementation="overlap"``: what its own implementation computes, and the ops run."""

import importlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import overlap_torch
from checks import Failures, close
from frameworks import SMALL_MODEL, drawn_model, needs
from layers import ops_called
from operands import rank_device
from overlap_torch.integrations import transformers as integration
from scaled import cast, dequantised

pytestmark = needs("transformers", ("5.23", "5.24"), "transformers")


TWO = {"num_experts_per_tok": 2, "head_dim": 8}
FAMILIES = {
    # Experts with biases and a gate of their own, whose limit many of these models' numbers exceed.
    "gpt_oss": {"num_local_experts": 4, "swiglu_limit": 0.1, **TWO},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 3},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24, **TWO},
}


def model_of(family: str, implementation: str, shared_batch: bool):
    """A model with random weights, the same on all ranks, whose experts are cut over them."""
    from transformers import AutoConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    config = AutoConfig.for_model(family, **SMALL_MODEL, **FAMILIES[family])
    model = drawn_model(config).to(rank_device())
    shape = (1, dist.get_world_size()) if shared_batch else (dist.get_world_size(), 1)
    mesh = init_device_mesh(rank_device().type, shape, mesh_dim_names=("fsdp", "tp"))
    ep_mesh = mesh["tp"] if shared_batch else mesh["fsdp"]
    plan = {}
    for name, style in model.config.base_model_ep_plan.items():
        for layer in range(SMALL_MODEL["num_hidden_layers"]):
            plan["model." + name.replace("*", str(layer))] = style
    plan = {name: style for name, style in plan.items() if "router" not in name}
    return apply_expert_parallelism(model, ep_mesh, mesh["tp"], plan, implementation)


def results(family: str, implementation: str, shared_batch: bool) -> dict[str, torch.Tensor]:
    """The logits and every gradient."""
    model = model_of(family, implementation, shared_batch)
    rank = 0 if shared_batch else dist.get_rank()
    tokens = torch.arange(2 * (5 + rank), device=rank_device()).view(2, -1) * (7 + rank) % 60
    logits = model(tokens, use_cache=False).logits
    logits.square().mean().backward()
    found = {"logits": logits.detach()}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is not None:
            found[name] = grad.to_local() if isinstance(grad, DTensor) else grad
    return found


@pytest.mark.parametrize("shared_batch", [False, True], ids=["own_batch", "shared_batch"])
@pytest.mark.parametrize(
    ("family", "known"),
    [("qwen3_moe", True), ("mixtral", True), ("gpt_oss", True), ("gpt_oss", False)],
)
@pytest.mark.ranks((2, "gloo"), (2, "nccl"), long=[(4, "gloo")])
def test_transformers_experts_are_transformers(
    failures: Failures, family: str, shared_batch: bool, known: bool
) -> None:
    """Known experts are `moe`'s, others keep the forward that they have between its halves."""
    own = results(family, "all_to_all", shared_batch)
    experts = integration._experts()
    with (
        integration.register(),
        mock.patch.object(experts, "GATES", experts.GATES if known else {}),
        mock.patch.object(experts, "moe", wraps=overlap_torch.moe) as moe,
    ):
        ours: dict[str, torch.Tensor] = {}
        called = ops_called(lambda: ours.update(results(family, "overlap", shared_batch)))
    failures.equal(called - {"moe_combine"}, {"moe_dispatch"}, family)
    failures.equal(moe.called, known, family)
    failures.equal(own.keys(), ours.keys(), family, "other gradients")
    for name, right in own.items():
        bound = 1e-5 * right.abs().max().item() + 1e-9
        failures.near(ours[name], right, name, family, rtol=0.0, atol=bound)


@pytest.mark.ranks((1, "gloo"), (2, "gloo"))
def test_transformers_gates_are_transformers(failures: Failures) -> None:
    """Every class whose gate `moe` knows, and a transposed one without: outputs and gradients of the class's own forward."""
    experts = integration._experts()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("ep", "tp"))
    sizes = {name: 16 for name in ("hidden_size", "intermediate_size", "moe_intermediate_size")}
    config = SimpleNamespace(
        **sizes,
        num_local_experts=4,
        moe_num_experts=4,
        hidden_act="silu",
        swiglu_limit=0.3,
        swiglu_alpha=1.7,
        _experts_implementation="eager",
    )
    for name in (*experts.GATES, "aria.modeling_aria.AriaExperts"):
        module, _, kind = name.rpartition(".")
        kind = getattr(importlib.import_module(f"transformers.models.{module}"), kind)
        torch.manual_seed(0)
        whole, part = kind(config), kind(config)
        for key, parameter in whole.named_parameters():
            torch.nn.init.normal_(parameter, std=0.3)
            own = parameter.detach().chunk(ranks)[rank].clone()
            setattr(part, key, torch.nn.Parameter(own))
        part.num_experts = 4 // ranks
        torch.manual_seed(1 + rank)
        x, shares = torch.randn(7 + rank, 16), torch.rand(7 + rank, 2)
        ids = torch.rand(7 + rank, 4).topk(2).indices
        found = []
        ours = experts.OverlapEP(part, mesh["ep"], mesh["tp"])
        for layer in (whole, ours):
            operands = [each.clone().requires_grad_() for each in (x, shares)]
            with mock.patch.object(experts, "moe", wraps=overlap_torch.moe) as moe:
                output = layer(operands[0], ids, operands[1])
            output.square().sum().backward()
            failures.equal(moe.called, layer is ours, name)
            found.append([output.detach(), *(each.grad for each in operands)])
        for key, parameter in whole.named_parameters():
            dist.all_reduce(parameter.grad)
            found[0].append(parameter.grad.chunk(ranks)[rank])
            found[1].append(getattr(part, key).grad)
        for right, one in zip(*found, strict=True):
            failures.expect(close(one, right), name)


def test_transformers_experts_go_with_the_last_handle():
    from transformers.distributed.expert_parallel import EPImplementationInterface

    with integration.register():
        with integration.register(auto=False):
            assert "overlap" in EPImplementationInterface()
        assert "overlap" in EPImplementationInterface()
    assert "overlap" not in EPImplementationInterface()


def fp8_linear(self, input, weight, scale, activation_scale=None):
    """The layer's own product, which needs a GPU: each 128 numbers cast with a scale of their own, in float64."""
    left = dequantised(*cast(input, (1, 128)))
    return (left @ dequantised(weight, scale).t()).to(input.dtype)


@pytest.mark.ranks((1, "gloo"), (2, "gloo"))
def test_transformers_fp8_experts_are_transformers(failures: Failures) -> None:
    """Experts as an fp8 checkpoint has them: the class's own forward, with casts of 128 numbers; with gradients it keeps that."""
    from transformers.integrations import finegrained_fp8
    from transformers.integrations.moe import use_experts_implementation

    class Experts(finegrained_fp8.FP8Experts):
        linear = fp8_linear

    use_experts_implementation(Experts, experts_interface=finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS)
    experts = integration._experts()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("ep", "tp"))
    sizes = {"hidden_size": 272, "moe_intermediate_size": 192, "num_experts": 4}
    usual = {"hidden_act": "silu", "_experts_implementation": "eager"}
    for limits in ({}, {"swiglu_limit": 0.3}, {"swiglu_limit": 0.3, "swiglu_alpha": 1.7}):
        config = SimpleNamespace(**sizes, **usual, **limits)
        torch.manual_seed(0)
        whole, part = (Experts(config, block_size=(128, 128)) for _ in range(2))
        for key, parameter in whole.named_parameters():
            drawn = (
                torch.rand(parameter.shape) / 16 if "scale" in key else torch.randn(parameter.shape)
            )
            parameter.data.copy_(drawn)
            own = parameter.detach().chunk(ranks)[rank].clone()
            setattr(part, key, torch.nn.Parameter(own, requires_grad=False))
        part.num_experts = 4 // ranks
        torch.manual_seed(1 + rank)
        x, shares = torch.randn(7 + rank, 272).bfloat16(), torch.rand(7 + rank, 2)
        ids = torch.rand(7 + rank, 4).topk(2).indices
        ours = experts.OverlapEP(part, mesh["ep"], mesh["tp"])
        for recorded in (False, True):
            with (
                torch.set_grad_enabled(recorded),
                mock.patch.object(experts, "moe", wraps=overlap_torch.moe) as moe,
            ):
                right, mine = whole(x, ids, shares), ours(x, ids, shares)
            failures.equal(moe.called, not recorded, limits, recorded)
            off = ((mine - right).float().norm() / right.float().norm()).item()
            # The class rounds gate and product apart, so that a few casts differ; without a cast 0.026 and more are off.
            failures.expect(None if off < 0.022 else f"off by {off}", limits, recorded)

    static = Experts(config, block_size=(128, 128), activation_scheme="static")
    failures.equal(experts.OverlapEP(static, mesh["ep"], mesh["tp"]).gate, None, "static scales")
