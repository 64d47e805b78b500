"""Megatron-core's linears by this package's ops: the layers, a GPT that trains, and its experts, which stay as they are."""

import contextlib
import itertools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import overlap_torch
from checks import Failures
from frameworks import check_training, megatron_groups, needs_megatron
from frameworks import megatron_config as config
from frameworks import megatron_gpt as gpt
from layers import OPS_OF_LAYERS, integers, my_features, my_tokens, ops_called, ops_of_a_step
from operands import difference, rank_device

pytestmark = [needs_megatron, pytest.mark.ranks((2, "gloo"), (2, "nccl"))]

TOKENS, BATCH, IN, OUT = 6, 3, 8, 12


def classes() -> dict[str, tuple[type, type]]:
    """Megatron's layers and ours."""
    from megatron.core.tensor_parallel import layers

    from overlap_torch.integrations import megatron

    return {
        "column": (layers.ColumnParallelLinear, megatron.OverlapColumnParallelLinear),
        "row": (layers.RowParallelLinear, megatron.OverlapRowParallelLinear),
    }


def pair(name: str, settings, **arguments: object) -> list[torch.nn.Module]:
    """Megatron's layer and ours, with integers in their parameters, each rank others."""
    sizes = {"bias": True, "skip_bias_add": False, **arguments}
    if name == "row":
        sizes = {"input_is_parallel": True, **sizes}
    found = []
    for kind in classes()[name]:
        layer = kind(
            IN, OUT, config=settings, init_method=lambda weight: weight.fill_(1.0), **sizes
        ).to(rank_device())
        with torch.no_grad():
            layer.weight.copy_(integers(*layer.weight.shape, seed=1 + dist.get_rank()))
            if layer.bias is not None:
                layer.bias.copy_(integers(*layer.bias.shape, seed=5))
        found.append(layer)
    return found


def operand(name: str, layer: torch.nn.Module) -> torch.Tensor:
    whole = integers(TOKENS, BATCH, IN, seed=3)
    if name == "row":
        return my_features(whole) if layer.input_is_parallel else whole
    return my_tokens(whole) if layer.sequence_parallel else whole


def run(name: str, layer: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The layer's result, and its gradients."""
    input = operand(name, layer).detach().clone().requires_grad_()
    output, bias = layer(input)
    gradient = integers(TOKENS, BATCH, OUT, seed=7)
    if name == "column":
        cut = torch.Tensor.detach if layer.gather_output else my_features
    else:
        cut = my_tokens if layer.sequence_parallel else torch.Tensor.detach
    output.backward(cut(gradient).contiguous())
    found = {"output": output.detach(), "bias": bias, "input's gradient": input.grad}
    return found | {key: value.grad for key, value in layer.named_parameters()}


def compare(failures: Failures, name: str, own: torch.nn.Module, ours: torch.nn.Module, *where):
    right = run(name, own)
    for key, value in run(name, ours).items():
        failures.expect(difference(value, right[key]), key, name, *where)


def test_megatron_layers_are_megatrons(failures: Failures) -> None:
    """Outputs and gradients beside Megatron's own layers, bit for bit."""
    for name, sequence, bias, skip, frozen in itertools.product(
        ("column", "row"), (False, True), (False, True), (False, True), (False, True)
    ):
        with megatron_groups():
            own, ours = pair(name, config(sequence), bias=bias, skip_bias_add=skip)
            for layer in (own, ours):
                # Megatron's frozen column layers give their biases no gradient either.
                layer.requires_grad_(not frozen)
            where = ("sequence", sequence, "bias", bias, skip, "frozen", frozen)
            compare(failures, name, own, ours, *where)
    with megatron_groups():
        compare(failures, "column", *pair("column", config(True), gather_output=True), "gathered")
        compare(failures, "row", *pair("row", config(False), input_is_parallel=False), "whole")
        own, ours = pair("column", config(False), disable_grad_reduce=True)
        compare(failures, "column", own, ours, "not reduced")


def test_megatron_layers_run_the_ops(failures: Failures) -> None:
    """The ops that run, and what the report says of the layers."""
    for name, sequence, forward, backward in OPS_OF_LAYERS:
        with megatron_groups():
            _, layer = pair(name, config(sequence))
            input = operand(name, layer).clone().requires_grad_()
            _, *called = ops_of_a_step(lambda: layer(input)[0])  # noqa: B023, called at once
            failures.equal(called, [forward, backward], name, sequence)
        rows = [row for row in overlap_torch.report(layer) if row["direction"]]
        said = {direction: set() for direction in ("forward", "backward")}
        for row in rows:
            said[row["direction"]].add(row["op"])
        right = said["forward"] >= forward and said["backward"] >= backward
        failures.expect(None if right else f"report says {said}", name, sequence)


def test_megatron_layers_accumulate_into_main_grad(failures: Failures) -> None:
    """Gradients that are added to main_grad: the same sums in it, and what Megatron's hooks look at."""
    from megatron.core.tensor_parallel import layers

    def add(input: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad += grad.t() @ input

    kernels = SimpleNamespace(wgrad_gemm_accum_fp32=add)
    with (
        megatron_groups(),
        mock.patch.object(layers, "_grad_accum_fusion_available", True),
        mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", kernels, create=True),
    ):
        for name, sequence, hooks, zeros in itertools.product(
            ("column", "row"), (False, True), (False, True), (False, True)
        ):
            settings = config(sequence, gradient_accumulation_fusion=True)
            found = []
            for layer in pair(name, settings):
                weight = layer.weight
                weight.main_grad = integers(*weight.shape, seed=9)
                weight.zero_out_wgrad = zeros
                if hooks:
                    weight.grad_added_to_main_grad = False
                results = [run(name, layer) for _ in range(2)]
                del results[0]["weight"], results[1]["weight"]  # the second adds to the first
                grad = weight.grad
                found.append(
                    {
                        "main_grad": weight.main_grad,
                        "output": results[0]["output"],
                        "input's gradient": results[0]["input's gradient"],
                        "hooks": torch.tensor(getattr(weight, "grad_added_to_main_grad", False)),
                        "arrived": torch.tensor(grad is not None),
                        "zeros": grad if zeros and hooks else torch.zeros(()),
                    }
                )
            own, ours = found
            for key in own:
                failures.expect(difference(ours[key], own[key]), key, name, sequence, hooks, zeros)
        _, layer = pair("row", config(True, gradient_accumulation_fusion=True))
        failures.raises("but the weight had none in forward", run, "row", layer)


def test_megatron_layers_have_megatrons_state(failures: Failures) -> None:
    """Sharded state dicts are Megatron's, and either layer loads the other's."""
    for name in ("column", "row"):
        with megatron_groups():
            own, ours = pair(name, config(True))
            metadata = {"dp_cp_group": None}
            from megatron.core import parallel_state

            metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(
                with_context_parallel=True
            )
            right, found = (
                layer.sharded_state_dict("layer.", metadata=metadata) for layer in (own, ours)
            )
            failures.equal(list(found), list(right), name)
            for key in ("layer.weight", "layer.bias"):
                for field in ("key", "dtype", "local_shape", "global_shape", "global_offset"):
                    one, other = getattr(found[key], field), getattr(right[key], field)
                    failures.equal(one, other, name, key, field)
            with torch.no_grad():
                own.weight += 1
            ours.load_state_dict(own.state_dict())
            failures.expect(difference(ours.weight, own.weight), name, "loaded")
            for tag in ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce"):
                one, other = getattr(ours.weight, tag), getattr(own.weight, tag)
                failures.equal(one, other, name, tag)


def test_megatron_layers_leave_experts_alone(failures: Failures) -> None:
    """The calls that Megatron's own layer runs: experts in silence, the rest with a reason in the report."""
    with megatron_groups():
        for name in ("column", "row"):
            own, ours = pair(name, config(False), is_expert=True, skip_bias_add=True, bias=False)
            called = ops_called(lambda: compare(failures, name, own, ours, "expert"))  # noqa: B023, called at once
            failures.expect(None if not called else f"ran {called}", name, "expert")
            _, layer = pair(name, config(False))
            layer.gtp_remat_size = 2
            with contextlib.suppress(AttributeError):  # the weight is not one of GTP's
                layer(operand(name, layer))
            whys = [row["why"] for row in overlap_torch.report(layer) if not row["op"]]
            right = "Megatron's own layer: the weight is gathered before its GEMM (GTP)"
            failures.holds(right, whys, name)


def train_beside(failures: Failures, sequence: bool, spec, our_spec, settings=config) -> None:
    """A GPT of our spec beside one of Megatron's, whose norms refuse sequence parallelism; ``our_spec`` takes a configuration."""
    torch.manual_seed(1)
    own, ours = gpt(spec, settings(False)), gpt(our_spec(settings(sequence)), settings(sequence))
    ours.load_state_dict(own.state_dict())
    device = rank_device()
    tokens = torch.arange(2 * 12, device=device).view(2, 12) * 7 % 64
    positions = torch.arange(12, device=device).expand(2, 12)
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool, device=device).triu(1)
    ran = {"allgather_gemm", "gemm_reducescatter"} if sequence else {"gemm_allreduce"}

    def step(model):
        loss = model(tokens, positions, mask, labels=tokens).mean()
        loss.backward()
        return loss

    def finish_gradients():
        """As Megatron's finalize_model_grads."""
        for parameter in ours.parameters():
            if getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(parameter.grad)

    check_training(failures, own, ours, step, ran, finish_gradients)


each_sequence = pytest.mark.parametrize("sequence", [False, True], ids=["all", "sequence"])


@each_sequence
def test_megatron_gpt_trains(failures: Failures, sequence: bool) -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from overlap_torch.integrations import megatron

    with megatron_groups():
        train_beside(failures, sequence, get_gpt_layer_local_spec(), megatron.gpt_block_spec)


@each_sequence
def test_megatron_gpt_with_latent_attention_trains(failures: Failures, sequence: bool) -> None:
    """Megatron's latent attention; the widths that it passes to its core are those of Transformer Engine's."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import MLATransformerConfig
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from overlap_torch.integrations import megatron

    class Core(DotProductAttention):
        def __init__(self, *given, k_channels=8, v_channels=4, **named) -> None:
            super().__init__(*given, **named)
            heads = self.num_attention_heads_per_partition
            self.hidden_size_per_partition = v_channels * heads

    class Provider(LocalSpecProvider):
        def core_attention(self) -> type:
            return Core

    def settings(sequence_parallel: bool):
        widths = dict.fromkeys(("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"), 4)
        ranks = dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 8)
        with mock.patch("megatron.core.transformer.TransformerConfig", MLATransformerConfig):
            return config(
                sequence_parallel, multi_latent_attention=True, rope_type="rope", **widths, **ranks
            )

    spec = get_gpt_layer_local_spec(multi_latent_attention=True)
    spec.submodules.self_attention.submodules.core_attention = Core
    provider = megatron.OverlapSpecProvider(Provider())

    def ours(settings):
        return megatron.gpt_block_spec(settings, provider)

    with megatron_groups():
        train_beside(failures, sequence, spec, ours, settings)


@pytest.mark.parametrize(
    "fields",
    [
        {"qk_layernorm": True},
        {"qk_layernorm": True, "normalization": "RMSNorm"},
        {"num_moe_experts": 2, "add_bias_linear": False, "moe_layer_freq": [1, 1]},
    ],
    ids=str,
)
def test_megatron_blocks_are_as_the_config_says(failures: Failures, fields) -> None:
    """The parameters of Megatron's own block of this configuration."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from overlap_torch.integrations import megatron

    with megatron_groups():
        settings = config(False, **fields)
        own = get_gpt_decoder_block_spec(settings, False, settings.normalization)
        names = [
            list(gpt(spec, settings).state_dict())
            for spec in (own, megatron.gpt_block_spec(settings))
        ]
        failures.equal(names[1], names[0], "parameters")
        if "num_moe_experts" in fields:
            for freq in ([1, 0], 2):
                some = config(False, **fields | {"moe_layer_freq": freq})
                failures.raises("experts in some only", megatron.gpt_block_spec, some)
            failures.equal(
                len(megatron.gpt_block_spec(some, num_experts=None).layer_specs), 2, "dense"
            )


def test_megatron_specs_hold_our_linears_outside_experts(failures: Failures) -> None:
    """The classes that a layer is built of: ours outside the experts, Megatron's in them."""
    from megatron.core.models.backends import LocalSpecProvider

    from overlap_torch.integrations import megatron

    column, row = (names[1] for names in classes().values())
    own_column, own_row = (names[0] for names in classes().values())
    with megatron_groups():
        settings = config(False, num_moe_experts=2, add_bias_linear=False)
        model = gpt(megatron.gpt_layer_spec(num_experts=2), settings)
        for name, module in model.named_modules():
            if isinstance(module, (own_column, own_row)):
                inside = "experts" in name or "output_layer" in name
                right = {own_column, own_row} if inside else {column, row}
                failures.holds(type(module), right, name)

    class Fallback(LocalSpecProvider):
        """With something that the protocol does not have."""

        def linear(self) -> type:
            return torch.nn.Linear

    provider = megatron.OverlapSpecProvider(Fallback())
    found = [provider.linear(), provider.column_parallel_linear(), provider.row_parallel_linear()]
    failures.equal(found, [torch.nn.Linear, column, row], "fallback")
    local = LocalSpecProvider()
    one, other = provider.activation_func(), local.activation_func()
    failures.expect(None if one is other else f"{one}, not {other}", "activation_func")
    norms = [provider.layer_norm(), provider.layer_norm(rms_norm=True, for_qk=True)]
    failures.equal(norms, [megatron.TorchNorm] * 2, "norms")
    spec = megatron.gpt_layer_spec(multi_latent_attention=True).submodules
    linears = [
        getattr(spec.self_attention.submodules, f"linear_{name}_proj")
        for name in ("q", "q_down", "q_up", "kv_down", "kv_up")
    ]
    right = [column, own_column, column, own_column, column]  # Megatron refuses subclasses of two
    failures.equal(linears, right, "latent attention")
    alike = spec.self_attention.submodules.linear_proj is row
    failures.expect(None if alike else "not ours", "latent attention's output")
