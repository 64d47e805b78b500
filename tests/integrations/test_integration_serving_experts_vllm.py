"""The plug-in of vLLM around experts: `moe` where ranks have different tokens, vLLM's own code elsewhere.

As in test_integration_serving.py, classes stand in for vLLM's, and its own are taken out of its wheel.
"""

import contextlib
import dataclasses
import enum
import functools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_integration_serving import (
    Group,
    Pluggable,
    Unquantized,
    VllmExperts,
    VllmLinear,
    installed,
    module,
    source_of,
    vllm_modules,
    wheel,
)
from torch import nn
from torch.nn import functional

from checks import Failures, message_of
from mixtures import ACTIVATIONS, CHOICES, EXPERTS, INNER, H, Mixture, limits_of_calls, near, warned
from overlap_torch.integrations import _serving, sglang, vllm

# --- classes that stand in for vLLM's----------


def vllm_moe(changes: dict[str, Any]) -> SimpleNamespace:
    """As a FusedMoEConfig of data parallel ranks with expert parallelism; ``changes`` of both of its parts."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    name = changes.get("activation", "silu")
    parallel = {
        "use_ep": True,
        "dp_size": ranks,
        "pcp_size": 1,
        "ep_size": ranks,
        "ep_rank": rank,
        "is_sequence_parallel": False,
        "all2all_backend": "allgather_reducescatter",
    }
    moe = {
        "num_experts": EXPERTS,
        "num_local_experts": EXPERTS // ranks + (rank < EXPERTS % ranks),
        "experts_per_token": CHOICES,
        "hidden_dim": H,
        "in_dtype": torch.float32,
        "device": "cpu",
        "swiglu_limit": None,
        "swiglu_alpha": None,
        "swiglu_beta": None,
        "has_bias": False,
        "is_lora_enabled": False,
        "max_capture_size": 0,
        "backend": "TRITON",
    }
    parallel |= {key: value for key, value in changes.items() if key in parallel}
    moe |= {key: value for key, value in changes.items() if key in moe}
    moe["activation"] = SimpleNamespace(value=name, is_gated=not name.endswith("_no_mul"))
    return SimpleNamespace(**moe, moe_parallel_config=SimpleNamespace(**parallel))


@contextlib.contextmanager
def vllm_enabled(numbers: list[int], group: type = Group):
    """vLLM with the plug-in; ``numbers`` are those of the ranks' tokens, as vLLM exchanges them."""
    sizes = SimpleNamespace(get_chunk_sizes_across_dp_rank=lambda: numbers)
    context = SimpleNamespace(dp_metadata=sizes)
    names = {"group": group, "context": lambda: context}
    modules = vllm_modules(VllmLinear, Pluggable.registry, Unquantized, **names)
    try:
        with installed("0.33.0", *modules), mock.patch.object(vllm, "_enabled", None):
            vllm.enable()
            yield SimpleNamespace(**{made.__name__.rpartition(".")[2]: made for made in modules})
    finally:
        Pluggable.registry.clear()


def check_vllms_experts(failures, changes, numbers, dtype, captured, on_input, *where) -> None:
    name = changes.get("activation", "silu")
    options, activation = ACTIVATIONS[name]
    choices, biased = (1 if on_input else CHOICES), changes.get("has_bias", False)
    changes = {
        **options,
        **changes,
        "activation": name.partition(" ")[0],
        "in_dtype": dtype,
        "max_capture_size": captured,
        "experts_per_token": choices,
    }
    mixture = Mixture(dtype, INNER if name.endswith("_no_mul") else 2 * INNER)
    x, ids, shares = mixture.tokens(numbers, choices)
    begin = 0 if dist.get_rank() == 0 else 3
    with vllm_enabled(numbers), limits_of_calls() as called:
        method, said = warned(lambda: VllmExperts(vllm_moe(changes)))
        layer = mixture.part(begin, 3 if begin == 0 else 2)
        layer.apply_router_weight_on_input = on_input
        with torch.inference_mode():
            found = method.apply(layer, x, shares, ids, "shared", None)
    failures.equal(said, [], *where)
    limited = (max(numbers), sum(numbers) * choices) if max(numbers) <= captured else (None, None)
    failures.equal(called, [limited], *where)
    right = mixture.meaning(x, ids, shares, activation, biased, on_input)
    near(failures, found, right, dtype, *where)


@pytest.mark.ranks((2, "gloo"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_vllms_experts_exchange_tokens(failures: Failures, dtype: torch.dtype) -> None:
    """Every activation; unequal tokens, also none; biases; shares on the input; calls that a graph may hold, and others."""
    cases = [
        *(({"activation": name}, [4, 3], 0, False) for name in ACTIVATIONS),
        ({"activation": "swigluoai", "has_bias": True}, [4, 3], 0, False),
        ({}, [5, 0], 0, False),
        ({}, [0, 5], 8, False),
        ({}, [4, 4], 4, False),
        ({}, [5, 4], 4, False),
        ({}, [4, 3], 4, True),
        ({"is_sequence_parallel": True, "dp_size": 8}, [4, 3], 4, False),
    ]
    for changes, numbers, captured, on_input in cases:
        where = (changes, numbers, captured, on_input)
        check_vllms_experts(failures, changes, numbers, dtype, captured, on_input, *where)


VLLMS_OWN = [
    ({"use_ep": False}, "--enable-expert-parallel"),
    ({"dp_size": 1}, "without data parallelism ranks of a tensor-parallel group have the same"),
    ({"pcp_size": 2}, "prefill context parallelism"),
    ({"dp_size": 4}, "this model does not divide tokens"),
    ({"all2all_backend": "deepep_low_latency"}, "--all2all-backend deepep_low_latency carries"),
    ({"is_lora_enabled": True}, "LoRA"),
    ({"backend": "FLASHINFER_TRTLLM"}, "FLASHINFER_TRTLLM may have weights in another order"),
    ({"activation": "situ"}, "the activation situ"),
    ({"activation": "relu2_no_mul"}, "the activation relu2_no_mul"),
    ({"use_ubatching": True}, "--enable-dbo"),
    ({"enable_elastic_ep": True}, "elastic expert parallelism"),
    ({"VLLM_BATCH_INVARIANT": True}, "VLLM_BATCH_INVARIANT=1"),
]


@pytest.mark.ranks((2, "gloo"))
def test_vllms_experts_say_once_why_they_are_vllms(failures: Failures) -> None:
    for changes, why in VLLMS_OWN:
        with vllm_enabled([1, 1]) as modules:
            config = modules.config.get_current_vllm_config().parallel_config
            places = (config, modules.envs)
            for place in places:
                vars(place).update({key: changes[key] for key in changes if key in vars(place)})
            made, said = warned(lambda: [VllmExperts(vllm_moe(changes)) for _ in range(2)])  # noqa: B023
            found = {each.apply(None, None, None, None, None, None) for each in made}
        failures.equal(found, {"vLLM's own"}, changes)
        text = "OVERLAP_VLLM=1: vLLM's own experts run, without overlap_torch.moe: "
        failures.equal([why in line and line.startswith(text) for line in said], [True], *said)


@pytest.mark.ranks((2, "gloo"))
def test_vllms_experts_refuse_other_groups(failures: Failures) -> None:
    class Turned(Group):
        def __init__(self) -> None:
            super().__init__()
            self.rank_in_group = 1 - self.rank_in_group

    with vllm_enabled([1, 1]):
        uneven = message_of(lambda: VllmExperts(vllm_moe({"num_local_experts": 4})))
    failures.holds("has 4 of 5 experts", uneven, "experts")
    with vllm_enabled([1, 1], Turned):
        turned = message_of(lambda: VllmExperts(vllm_moe({})))
    failures.holds("vLLM's group of experts has this process as rank", turned, "group")


def test_another_plugins_experts_are_refused():
    with mock.patch.dict(VllmExperts.registry, {"VllmExperts": int}):
        modules = vllm_modules(VllmLinear, VllmExperts.registry, Unquantized)
        with (
            installed("0.33.0", *modules),
            mock.patch.object(vllm, "_enabled", None),
            pytest.raises(RuntimeError, match=r"in the place of vLLM's VllmExperts.*VLLM_PLUGINS"),
        ):
            vllm.enable()
        assert VllmExperts.registry == {"VllmExperts": int}


# --- room for rows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "choices", "value", "right"),
    [
        ([4, 4], 3, None, (4, 24)),
        ([5, 0], 2, None, (5, 10)),
        ([0, 0], 2, None, (1, 1)),
        ([4, 4], 3, "1000", (4, 24)),
        ([4, 4], 3, "7", (4, 7)),
    ],
)
def test_rows_have_room_for_any_routing(tokens, choices, value, right, monkeypatch):
    monkeypatch.delenv("OVERLAP_MOE_ROWS", raising=False)
    if value:
        monkeypatch.setenv("OVERLAP_MOE_ROWS", value)
    assert _serving.limits(tokens, choices) == dict(
        zip(("max_tokens", "max_rows"), right, strict=True)
    )


@pytest.mark.parametrize("name", ["vllm", "sglang"])
@pytest.mark.parametrize("value", ["0", "-3", "many", ""])
def test_rows_are_a_number(name, value, monkeypatch):
    monkeypatch.setenv("OVERLAP_MOE_ROWS", value)
    integration = {"vllm": vllm, "sglang": sglang}[name]
    version = {"vllm": "0.33.0", "sglang": "0.5.23"}[name]
    with (
        installed(version),
        mock.patch.object(integration, "_enabled", None),
        pytest.raises(ValueError, match=f"OVERLAP_MOE_ROWS must be.*but it is {value!r}"),
    ):
        integration.enable()


@pytest.mark.parametrize("peers", [True, False])
def test_graphs_need_peers(peers):
    """A device on which there are graphs, without one here."""
    cuda = torch.device("cuda", 0)
    made = functools.partial(torch.empty, device="meta")
    way = mock.Mock(return_value=SimpleNamespace(peers=peers))
    with (
        mock.patch.object(_serving, "way_of", way),
        mock.patch.object(torch, "empty", lambda shape, dtype, device: made(shape, dtype=dtype)),
    ):
        why = _serving.why_not_captured((H, torch.bfloat16, cuda), CHOICES, 512, "ep")
    x, ids, *others = way.call_args.args
    assert (x.shape, x.dtype, ids.shape) == ((0, H), torch.bfloat16, (0, CHOICES))
    assert others == ["choices", (512, 1), None, "ep"]
    assert bool(why) is not peers
    assert not why or "doctor" in why
    assert (
        _serving.why_not_captured((H, torch.bfloat16, torch.device("cpu")), CHOICES, 512, "ep")
        == ""
    )


# --- vLLM's own classes, from its wheel -----------------------------------------------------------------------

FOLDER = "vllm/model_executor"
MOE = f"{FOLDER}/layers/fused_moe"
# A module's path, and those of its names that are run, in this order.
OWN = [
    (f"{FOLDER}/custom_op.py", "CustomOp"),
    (f"{FOLDER}/layers/quantization/base_config.py", "QuantizeMethodBase"),
    (f"{MOE}/fused_moe_method_base.py", "FusedMoEMethodBase"),
    (f"{MOE}/activation.py", "MoEActivation"),
    (f"{MOE}/config.py", "FusedMoEParallelConfig FusedMoEConfig"),
    (f"{MOE}/oracle/unquantized.py", "UnquantizedMoeBackend convert_to_unquantized_kernel_format"),
    (f"{MOE}/unquantized_fused_moe_method.py", "UnquantizedFusedMoEMethod"),
    (f"{MOE}/expert_map_manager.py", "determine_expert_map determine_expert_placement_strategy"),
    (f"{MOE}/routed_experts.py", "RoutedExperts.forward_modular"),
    ("vllm/forward_context.py", "_compute_sp_num_tokens DPMetadata"),
]
NATIVE = {
    "silu": ("SiluAndMul", {}),
    "silu of limited numbers": (
        "SiluAndMulWithClamp",
        {"swiglu_limit": 0.4, "alpha": 1.0, "beta": 0.0},
    ),
    "swigluoai": ("SwigluOAIAndMul", {"alpha": 1.702, "limit": 7.0}),
    "swigluoai_uninterleave": (
        "SiluAndMulWithClamp",
        {"swiglu_limit": 0.3, "alpha": 1.5, "beta": 0.5},
    ),
}


PLATFORMS = ("is_rocm", "is_xpu", "is_cpu", "is_tpu", "is_out_of_tree", "is_cuda_alike")


class OwnKernel:
    """Stands in for the FusedMoEKernel that vLLM makes."""

    is_monolithic = can_overlap_shared_experts = False
    fused_experts = SimpleNamespace(process_weights_after_loading=lambda layer: None)

    def apply(self, **arguments: Any) -> str:
        return "vLLM's own"


def own_names(tensor_ranks: int) -> dict[str, Any]:
    """The names beside vLLM's classes, of a process among data parallel groups of so many ranks."""
    group = Group()
    place = divmod(group.rank_in_group, tensor_ranks)
    compiled = SimpleNamespace(
        custom_ops=["all"], enabled_custom_ops=set(), disabled_custom_ops=set()
    )
    platform = {name: lambda: False for name in PLATFORMS}
    return {
        "__name__": __name__,
        "torch": torch,
        "nn": nn,
        "F": functional,
        "ABC": object,
        "abstractmethod": lambda function: function,
        "Enum": enum.Enum,
        "field": dataclasses.field,
        "contextmanager": contextlib.contextmanager,
        "op_registry": {},
        "op_registry_oot": Pluggable.registry,
        "logger": mock.Mock(),
        "envs": SimpleNamespace(
            VLLM_ROCM_MOE_PADDING=False, VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4=False
        ),
        "current_platform": SimpleNamespace(**platform),
        "get_cached_compilation_config": lambda: compiled,
        "SchedulerConfig": SimpleNamespace(DEFAULT_MAX_NUM_BATCHED_TOKENS_FOR_BATCHED_DP=256),
        "get_tensor_model_parallel_rank": lambda: place[1],
        "get_dp_group": lambda: SimpleNamespace(rank_in_group=place[0]),
        "get_pcp_group": lambda: SimpleNamespace(rank_in_group=0),
        "set_weight_attrs": lambda *arguments: None,
        "replace_parameter": lambda layer, name, new: getattr(layer, name).data.copy_(new),
        "is_weights_pre_processed": lambda: False,
        "FusedMoEQuantConfig": SimpleNamespace(make=mock.Mock()),
        "biased_moe_quant_config": mock.Mock(),
        "make_unquantized_moe_kernel": lambda **arguments: OwnKernel(),
    }


def own_layer(names: dict[str, Any], mixture: Mixture, config: Any) -> nn.Module:
    """A layer with vLLM's method, whose weights vLLM makes, and processes after they are loaded."""
    parallel = config.moe_parallel_config
    method = names["UnquantizedFusedMoEMethod"](config)
    layer = nn.Module()
    layer.quant_method, layer.moe_config, layer.activation = method, config, config.activation
    layer.apply_router_weight_on_input, layer.expert_map = False, None
    layer.global_num_experts, layer._expert_routing_tables = config.num_experts, lambda: None
    width = config.intermediate_size_per_partition
    method.create_weights(layer, config.num_local_experts, H, width, mixture.dtype)
    own, placed, _ = names["determine_expert_map"](
        parallel.ep_size, parallel.ep_rank, config.num_experts
    )
    held = range(own) if placed is None else (placed >= 0).nonzero()[:, 0].tolist()
    for name, value in vars(mixture.part(held[0], own)).items():
        if name in dict(layer.named_parameters()):
            getattr(layer, name).data.copy_(value)
    method.process_weights_after_loading(layer)
    return layer


def native(names: dict[str, Any], sources: dict[str, str], name: str):
    """An activation as vLLM's class computes it without its kernels."""
    kind, numbers = NATIVE[name]
    exec(sources[kind], names)
    forward = names["forward_native"]
    return forward if not numbers else functools.partial(forward, SimpleNamespace(**numbers))


def check_vllms_own(failures, sources, natives, tensor_ranks: int, activation: str) -> None:
    """Data parallel groups of `tensor_ranks`, in which tokens are divided; then configurations that are left to vLLM."""
    names = own_names(tensor_ranks)
    for source in sources:
        exec(source, names)
    for name in ("FusedMoEParallelConfig", "FusedMoEConfig", "DPMetadata"):
        names[name] = dataclasses.dataclass(names[name])
    experts, kernels = names["UnquantizedFusedMoEMethod"], names["UnquantizedMoeBackend"]
    experts.name = "unquantized_fused_moe"
    method = SimpleNamespace(is_monolithic=lambda: False)
    names["select_unquantized_moe_backend"] = lambda moe_config: (kernels.TRITON, method)
    context, options = SimpleNamespace(dp_metadata=None), ACTIVATIONS[activation][0]
    replicas = dist.get_world_size() // tensor_ranks

    def config_of(tp: int, dp: int, sp: int, expert_parallel: bool = True) -> Any:
        parallel = names["FusedMoEParallelConfig"].make(
            tp_size_=tp,
            pcp_size_=1,
            dp_size_=dp,
            sp_size_=sp,
            vllm_parallel_config=SimpleNamespace(
                enable_expert_parallel=expert_parallel,
                all2all_backend="allgather_reducescatter",
                enable_eplb=False,
            ),
        )
        own = names["determine_expert_map"](parallel.ep_size, parallel.ep_rank, EXPERTS)[0]
        return names["FusedMoEConfig"](
            num_experts=EXPERTS,
            num_logical_experts=EXPERTS,
            num_local_experts=own,
            experts_per_token=CHOICES,
            hidden_dim=H,
            intermediate_size=parallel.tp_size * INNER,
            activation=names["MoEActivation"](activation.partition(" ")[0]),
            device="cpu",
            routing_method=None,
            moe_parallel_config=parallel,
            in_dtype=torch.float32,
            has_bias=activation == "swigluoai",
            max_capture_size=3,
            **options,
        )

    modules = vllm_modules(
        VllmLinear, Pluggable.registry, Unquantized, experts, context=lambda: context
    )
    aiter = mock.MagicMock(**{"is_fused_moe_enabled.return_value": False})
    modules.append(module("vllm._aiter_ops", rocm_aiter_ops=aiter))
    mixture = Mixture(torch.float32, 2 * INNER)
    across = torch.tensor([5, 4][:replicas], dtype=torch.int32)
    try:
        with installed("0.33.0", *modules), mock.patch.object(vllm, "_enabled", None):
            vllm.enable()
            config = config_of(tensor_ranks, replicas, tensor_ranks)
            layer, said = warned(lambda: own_layer(names, mixture, config))
            failures.equal((type(layer.quant_method).__mro__[1], said), (experts, []), "made")
            context.dp_metadata = names["DPMetadata"](across)
            with context.dp_metadata.sp_local_sizes(tensor_ranks, 1, True) as numbers:
                x, ids, shares = mixture.tokens(numbers, CHOICES)
                with limits_of_calls() as called:
                    found = names["forward_modular"](layer, x, shares, ids)
            limits = (3, sum(numbers) * CHOICES) if max(numbers) <= 3 else (None, None)
            failures.equal(called, [limits], numbers)
            act = native(names, natives, activation)
            right = mixture.meaning(x, ids, shares, act, biased=config.has_bias)
            near(failures, found, right, torch.float32, activation)
            left = [
                (dist.get_world_size(), 1, 1, True, "without data parallelism"),
                (tensor_ranks, replicas, 1, False, "--enable-expert-parallel"),
                *([(2, 2, 1, True, "does not divide tokens")] if tensor_ranks == 2 else []),
            ]
            for *sizes, why in left:
                layer, said = warned(lambda: own_layer(names, mixture, config_of(*sizes)))  # noqa: B023
                found = names["forward_modular"](layer, x, shares, ids)
                failures.equal(found, "vLLM's own", *sizes)
                failures.equal([why in line for line in said], [True], *said)
    finally:
        Pluggable.registry.clear()


@pytest.mark.long
@pytest.mark.ranks((2, "gloo"), (4, "gloo"))
@pytest.mark.parametrize("activation", NATIVE)
def test_vllms_own_experts_exchange_tokens(ranks, activation):
    with wheel("vllm") as archive:
        sources = [source_of(archive, path, name) for path, all in OWN for name in all.split()]
        path = f"{FOLDER}/layers/activation.py"
        natives = {
            name: source_of(archive, path, f"{name}.forward_native") for name, _ in NATIVE.values()
        }
    ranks.expect_no_failures(check_vllms_own, sources, natives, ranks.world // 2, activation)


@pytest.mark.long
def test_vllms_code_is_as_the_plugin_takes_it():
    """The plug-in relies on these lines; and its experts cannot ask for vLLM's "passthrough"."""
    with wheel("vllm") as archive:
        manager = source_of(
            archive, "vllm/distributed/device_communicators/all2all.py", "AgRsAll2AllManager"
        )
        prepare = source_of(
            archive,
            f"{MOE}/prepare_finalize/naive_dp_ep.py",
            "MoEPrepareAndFinalizeNaiveDPEPModular",
        )
        runner = source_of(archive, f"{MOE}/runner/moe_runner.py", "MoERunner._forward_impl")
        parallel = archive.read("vllm/config/parallel.py").decode()
        names: dict[str, Any] = {
            "logger": mock.Mock(),
            "FLASHINFER_MOE_EP_BACKENDS": frozenset(),
            "PASSTHROUGH_ALL2ALL_BACKEND": "passthrough",
        }
        exec(source_of(archive, "vllm/config/kernel.py", "bind_passthrough_all2all_backend"), names)
        placement = "determine_expert_placement_strategy"
        exec(source_of(archive, f"{MOE}/expert_map_manager.py", placement), names)
    # Its own dispatch asks the same numbers; the sums over a tensor parallel group do not change; shared experts are the runner's.
    assert "sizes = dp_metadata.get_chunk_sizes_across_dp_rank()" in manager
    assert "def output_is_reduced(self) -> bool:\n        return False" in prepare
    assert "supports_async" not in prepare.replace("supports_async()", "")
    context, call = (
        runner.index(text)
        for text in ("with self._sequence_parallel_context", "self._apply_quant_method(")
    )
    assert context < call
    assert 'all2all_backend: All2AllBackend = "allgather_reducescatter"' in parallel
    ours = SimpleNamespace(all2all_backend="passthrough")
    with pytest.raises(ValueError, match=r"only valid with a moe_backend that"):
        names["bind_passthrough_all2all_backend"]("triton", ours)
    kernels = SimpleNamespace(
        use_all2all_kernels=True, needs_round_robin_routing_tables=False, all2all_backend="ag"
    )
    assert names[placement]("round_robin", kernels, 4, 0, False) == "linear"
