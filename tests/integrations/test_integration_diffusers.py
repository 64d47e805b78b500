"""diffusers' enable_parallelism by this package: its attention in every mode, calls left to diffusers, whole models, layers."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("diffusers")

import diffusers
from diffusers import ContextParallelConfig
from diffusers.hooks import tensor_parallel
from diffusers.models import attention_dispatch
from diffusers.models._modeling_parallel import ParallelConfig, TensorParallelConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

from checks import Failures
from overlap_torch.integrations import diffusers as integration
from overlap_torch.parallel import OverlapColwiseLinear, OverlapRowwiseLinear

HEADS = {"attention_head_dim": 16, "num_attention_heads": 4}


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).double()


IMAGE = {
    "hidden_states": draw(1, 16, 4),
    "encoder_hidden_states": draw(1, 8, 32),
    "timestep": torch.tensor([1.0], dtype=torch.float64),
}
JOINT = HEADS | {"patch_size": 1, "in_channels": 4, "num_layers": 1, "joint_attention_dim": 32}
# Each model's class, its configuration, and its inputs.
MODELS = {
    "flux": (
        diffusers.FluxTransformer2DModel,
        JOINT | {"num_single_layers": 1, "pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8]},
        IMAGE | {"pooled_projections": draw(1, 32), "img_ids": draw(16, 3), "txt_ids": draw(8, 3)},
    ),
    "flux 2": (
        diffusers.Flux2Transformer2DModel,
        JOINT
        | {"num_single_layers": 1, "timestep_guidance_channels": 32, "axes_dims_rope": [4] * 4},
        IMAGE | {"guidance": draw(1), "img_ids": draw(1, 16, 4), "txt_ids": draw(1, 8, 4)},
    ),
    "qwen-image": (
        diffusers.QwenImageTransformer2DModel,
        JOINT | {"axes_dims_rope": (4, 4, 8), "out_channels": 4},
        IMAGE | {"img_shapes": [(1, 4, 4)]},
    ),
    "wan": (
        diffusers.WanTransformer3DModel,
        HEADS
        | {
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 16,
            "freq_dim": 32,
            "ffn_dim": 32,
            "num_layers": 1,
            "rope_max_seq_len": 32,
        },
        {
            "hidden_states": draw(1, 4, 2, 8, 8),
            "encoder_hidden_states": draw(1, 6, 16),
            "timestep": IMAGE["timestep"],
        },
    ),
}


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """diffusers asks for an accelerator where it parallelizes a model."""
    with (
        mock.patch.object(torch.accelerator, "device_count", lambda: 1),
        mock.patch.object(torch.accelerator, "current_accelerator", lambda: torch.device("cpu")),
        mock.patch.object(tensor_parallel, "_SUPPORTED_TP_DEVICES", ("cpu",)),
    ):
        yield


def config_of(ring: int, ulysses: int, **more: bool) -> ParallelConfig:
    context = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, **more)
    config, world = ParallelConfig(context_parallel_config=context), dist.get_world_size()
    mesh = init_device_mesh("cpu", context.mesh_shape, mesh_dim_names=context.mesh_dim_names)
    config.setup(dist.get_rank(), world, torch.device("cpu"), mesh=mesh)
    return config


def tensors(count: int, tokens: int, heads: int = 4) -> list[torch.Tensor]:
    """[B, S, H, D] of the whole sequence."""
    generator = torch.Generator().manual_seed(tokens)
    shape = (2, tokens, heads, 8)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(count)]


def whole_attention(q, k, v, mask: torch.Tensor | None = None) -> torch.Tensor:
    heads = (one.transpose(1, 2) for one in (q, k, v))
    return functional.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2)


def own(whole: torch.Tensor) -> torch.Tensor:
    """This rank's tokens, as diffusers cuts them."""
    return whole.tensor_split(dist.get_world_size(), dim=1)[dist.get_rank()]


@pytest.mark.ranks((2, "gloo"), (4, "gloo"))
@pytest.mark.parametrize("mode", ["ulysses", "ring", "both", "ulysses_anything", "ring_anything"])
def test_diffusers_attention_is_the_whole_sequences(failures: Failures, mode: str) -> None:
    world = dist.get_world_size()
    degrees = {"ulysses": (1, world), "both": (2, world // 2)}
    ring, ulysses = degrees.get(mode.removesuffix("_anything"), (world, 1))
    uneven = mode.endswith("anything")
    heads = 3 if uneven else 4  # which no number of ranks here divides
    q, k, v, grad = tensors(4, 11 if uneven else 8, heads)
    leaves = [own(one).clone().requires_grad_() for one in (q, k, v)]
    wholes = [one.requires_grad_() for one in (q, k, v)]
    right = whole_attention(*wholes)
    right.backward(grad)
    with on_cpu(), integration.enable() as handle:
        config = config_of(ring, ulysses, **({mode: True} if uneven else {}))
        found = attention_dispatch.dispatch_attention_fn(*leaves, parallel_config=config)
        found.backward(own(grad))
        failures.equal(handle.calls, {"": 1})
    failures.near(found, own(right), "result", rtol=1e-12, atol=1e-12)
    for name, leaf, whole in zip("qkv", leaves, wholes, strict=True):
        failures.near(leaf.grad, own(whole.grad), name, rtol=1e-12, atol=1e-12)


def backend(ctx, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, *_, **more):  # fmt: skip
    """A stand-in for a backend that is not PyTorch's, such as SageAttention; it has no gradients."""
    assert not more.get("_save_ctx", False) or ctx is not None
    return whole_attention(query, key, value, attn_mask)


@pytest.mark.ranks((2, "gloo"))
def test_diffusers_own_attention_runs_for_the_rest(failures: Failures) -> None:
    q, k, v = tensors(3, 8)
    longer = tensors(1, 12)[0]
    mask = (torch.arange(8) < 5).expand(2, 1, 1, 8)
    config = config_of(1, 2)
    call = {"forward_op": backend, "backward_op": None, "_parallel_config": config}
    plain = {"forward_op": attention_dispatch._native_attention_forward_op}
    other = "a backend that is not PyTorch's"
    cases = [
        ("", (q, k, v), plain, {}),
        ("", (q, k, v), {}, {}),
        ("a mask", (q, k, v), plain, {"attn_mask": mask}),
        ("keys of another length than queries", (q, longer, longer), plain, {}),
        (f"{other}, with gradients", (q.clone().requires_grad_(), k, v), {}, {}),
    ]
    with integration.enable() as handle:
        for number, (why, operands, changed, more) in enumerate(cases):
            before = handle.calls.get(why, 0)
            attend = attention_dispatch._templated_context_parallel_attention
            found = attend(*(own(one) for one in operands), **more, **call | changed)
            right = whole_attention(*operands, mask if "attn_mask" in more else None)
            failures.near(found, own(right), number, why, rtol=1e-12, atol=1e-12)
            failures.equal(handle.calls.get(why, 0), before + 1, number, why)
        for why, wrong in (
            ("dropout", {"dropout_p": 0.1}),
            ("sums of exponentials are returned", {"return_lse": True}),
            (f"{other}, causal or with groups of heads", {"is_causal": True}),
        ):
            attend = mock.Mock(return_value=None)
            with mock.patch.dict(integration._before, {integration._ATTENTION: attend}):
                integration._attend(own(q), own(k), own(v), **wrong, **call)
            failures.equal((attend.call_count, handle.calls[why]), (1, 1), why)
    undone = attention_dispatch._templated_context_parallel_attention
    failures.equal(undone.__module__, "diffusers.models.attention_dispatch")


def drawn(name: str) -> torch.nn.Module:
    kind, config, _ = MODELS[name]
    model = kind(**config).double()
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return model


def run(name: str, model: torch.nn.Module) -> torch.Tensor:
    return model(**MODELS[name][2], return_dict=False)[0]


@pytest.mark.ranks((2, "gloo"))
@pytest.mark.parametrize("name", MODELS)
def test_diffusers_models_of_a_cut_sequence(failures: Failures, name: str) -> None:
    """Output and gradients, which add up over the ranks; compiled blocks are one graph each."""
    whole, model = drawn(name), drawn(name)
    right = run(name, whole)
    right.square().sum().backward()
    with integration.enable() as handle:
        with on_cpu():
            model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))
        found = run(name, model)
        found.square().sum().backward()
        failures.equal(set(handle.calls), {""})
        model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            failures.near(run(name, model), right, "compiled", rtol=1e-6, atol=1e-6)
    failures.near(found, right, "output", rtol=1e-6, atol=1e-6)
    bound = 1e-12 if name == "flux" else 1e-6  # others compute in float32 somewhere
    for (where, one), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        if other.grad is None:
            failures.equal(one.grad, None, where)
            continue
        dist.all_reduce(one.grad)
        error = (one.grad - other.grad).norm() / other.grad.norm().clamp(min=1e-3)
        failures.expect(None if error < bound else f"off by {error}", where)


@pytest.mark.ranks((2, "gloo"))
@pytest.mark.parametrize("loaded", [False, True], ids=["parallelized", "loaded"])
@pytest.mark.parametrize("name", ["flux", "flux 2"])
def test_diffusers_tensor_parallel_layers(
    failures: Failures, name: str, loaded: bool, tmp_path
) -> None:
    """Layers, packed ones among them, parallelized in memory or as they are read: gradients are those of diffusers' layers."""
    whole, folder = drawn(name), tmp_path / str(dist.get_rank())
    whole.save_pretrained(folder)

    def parallelized() -> torch.nn.Module:
        if loaded:
            tp = ParallelConfig(tensor_parallel_config=TensorParallelConfig(tp_degree=2))
            how = {"parallel_config": tp, "torch_dtype": torch.float64}
            return type(whole).from_pretrained(folder, **how).requires_grad_()
        model = drawn(name)
        model.enable_parallelism(config=TensorParallelConfig(tp_degree=2))
        return model

    with on_cpu():
        theirs = parallelized()
        with integration.enable():
            model = parallelized()
    ours = [type(one) for one in model.modules()].count
    kinds = (ours(OverlapColwiseLinear), ours(OverlapRowwiseLinear))
    failures.equal(kinds, {"flux": (12, 5), "flux 2": (9, 5)}[name], "layers")
    for each in (theirs, model):
        output = run(name, each)
        failures.near(output, run(name, whole), "output", rtol=1e-6, atol=1e-6)
        output.square().sum().backward()
    for (where, one), other in zip(model.named_parameters(), theirs.parameters(), strict=True):
        if one.grad is None:
            failures.equal(other.grad, None, where)
            continue
        pair = [
            each.grad.to_local() if isinstance(each.grad, DTensor) else each.grad
            for each in (one, other)
        ]
        failures.near(*pair, where, rtol=1e-6, atol=1e-6)
