"""The plug-ins of vLLM and SGLang around experts: `moe` where ranks have different tokens, the frameworks' own code elsewhere.

Classes stand in for the frameworks'; tests/lib/wheels.py says how long tests get their own.
"""

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

import serving_sglang
import serving_vllm
from checks import Failures, message_of
from mixtures import ACTIVATIONS, CHOICES, INNER, H, Mixture, check_exchange, check_left
from overlap_torch.integrations import _serving, _sglang_experts, sglang, vllm
from serving import Turned, Unquantized, installed

FRAMEWORKS = {"vllm": serving_vllm, "sglang": serving_sglang}
NO_LIMITS = (None, None)
each_framework = pytest.mark.parametrize("name", FRAMEWORKS)


class Exchange(NamedTuple):
    """Changes of a configuration, numbers of the ranks' tokens, the call's limits, and the result's activation and factor."""

    changes: dict[str, Any]
    numbers: list[int]
    limits: tuple[int | None, int | None] = NO_LIMITS
    activation: str = "silu"
    factor: float = 1.0


FLASHINFER = {"dispatcher": "FlashinferDispatcher", "routed_scaling_factor": 2.5}
ON_INPUT = {"apply_router_weight_on_input": True, "experts_per_token": 1}
EXCHANGES = {
    # Every activation; unequal tokens, also none; biases; shares on the input; calls that a graph may hold, and others.
    "vllm": [
        *(Exchange({}, [4, 3], activation=activation) for activation in ACTIVATIONS),
        Exchange({"has_bias": True}, [4, 3], activation="swigluoai"),
        Exchange({}, [5, 0]),
        Exchange({"max_capture_size": 8}, [0, 5], (5, 15)),
        Exchange({"max_capture_size": 4}, [4, 4], (4, 24)),
        Exchange({"max_capture_size": 4}, [5, 4]),
        Exchange({"max_capture_size": 4} | ON_INPUT, [4, 3], (4, 7)),
        Exchange(
            {"is_sequence_parallel": True, "dp_size": 8, "max_capture_size": 4}, [4, 3], (4, 21)
        ),
    ],
    # Decoding has limits, prefill has none; scaling factors are where SGLang has them.
    "sglang": [
        Exchange({}, [4, 3], (4, 21)),
        Exchange({"known": [4, 4]}, [4, 3], (4, 24)),
        Exchange({}, [5, 0], (5, 15)),
        Exchange({"prefill": True}, [4, 3]),
        Exchange({"runner": "triton"}, [4, 3], (4, 21)),
        Exchange({}, [4, 3], (4, 21), activation="silu of limited numbers"),
        Exchange({"routed_scaling_factor": 2.5}, [4, 3], (4, 21)),
        Exchange(FLASHINFER, [4, 3], (4, 21), factor=2.5),
        Exchange(FLASHINFER | {"routed_scaling_factor": None, "prefill": True}, [4, 3]),
    ],
}


@pytest.mark.ranks((2, "gloo"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_framework
def test_experts_exchange_tokens(failures: Failures, name: str, dtype: torch.dtype) -> None:
    framework = FRAMEWORKS[name]
    for row in EXCHANGES[name]:
        options, activation = ACTIVATIONS[row.activation]
        changes = {"in_dtype": dtype, "activation": row.activation.partition(" ")[0]}
        changes |= options | row.changes
        width = INNER if row.activation.endswith("_no_mul") else 2 * INNER
        mixture = Mixture(dtype, width, framework.EXPERTS)
        tokens = mixture.tokens(row.numbers, changes.get("experts_per_token", CHOICES))
        x, ids, shares = tokens
        kinds = (changes.get(name) for name in ("has_bias", "apply_router_weight_on_input"))
        right = mixture.meaning(x, ids, shares * row.factor, activation, *kinds)
        with framework.experts(changes, row.numbers) as make:
            check_exchange(failures, make, mixture, tokens, row.limits, right, name, *row)


# Configurations whose experts are the framework's, and the reason.
OWN = {
    "vllm": [
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
    ],
    "sglang": [
        ({"moe_ep_size": 1}, "--ep-size"),
        ({"dispatcher": "StandardDispatcher"}, "with none all ranks get the same tokens"),
        ({"attn_dp_size": 1, "attn_tp_size": 2}, "--enable-dp-attention"),
        ({"attn_dp_size": 2, "attn_tp_size": 2}, "--enable-dp-attention"),
        ({"inners": 2}, "--enable-two-batch-overlap"),
        ({"tbo_enabled": True}, "--enable-two-batch-overlap"),
        ({"sbo_enabled": True}, "--enable-single-batch-overlap"),
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"elastic_ep_backend": "nixl"}, "elastic"),
        ({"enable_deterministic_inference": True}, "deterministic inference"),
        ({"method": Unquantized}, "quantized (Unquantized)"),
        ({"runner": "flashinfer_cutlass"}, "the runner flashinfer_cutlass may have weights"),
        ({"activation": "gelu"}, "the activation gelu"),
        ({"is_gated": False}, "without a gate"),
        ({"gemm1_alpha": 1.702}, "SwiGLU-OAI"),
        ({"gemm1_clamp_limit": 7.0}, "SwiGLU-OAI"),
        ({"with_bias": True}, "biases"),
        ({"num_fused_shared_experts": 1}, "shared experts among the experts"),
        ({"apply_router_weight_on_input": True}, "shares on the input"),
        ({"no_combine": True}, "results that SGLang adds itself"),
        ({"reduce_results": True}, "results that SGLang adds itself"),
        ({"_dwdp_bound": True}, "prefetched weights"),
        ({"known": [7]}, "ranks do not know the numbers of each other's tokens"),
    ],
}
# Configurations that are an error, and its message.
NO_ROUTING = "the experts of layer 7 got a SimpleNamespace, or quantized"
REFUSED = {
    "vllm": [
        ({"num_local_experts": 4}, "has 4 of 5 experts"),
        ({"group": Turned}, "vLLM's group of experts has this process as rank"),
    ],
    "sglang": [
        ({"routing": lambda ids, shares: SimpleNamespace(router_logits=shares)}, NO_ROUTING),
        ({"more": (("quantized", "scales"),)}, NO_ROUTING),
        ({"group": Turned}, "SGLang's group of experts has this process as rank"),
    ],
}


@pytest.mark.ranks((2, "gloo"))
@each_framework
def test_experts_are_the_frameworks_or_refused(failures: Failures, name: str) -> None:
    framework = FRAMEWORKS[name]
    mixture = Mixture(torch.float32, 2 * INNER, framework.EXPERTS)
    tokens = mixture.tokens([2, 2], CHOICES)
    for changes, why in OWN[name]:
        with framework.experts(changes, [2, 2]) as make:
            check_left(failures, make, mixture, tokens, name, why, changes)
    for changes, why in REFUSED[name]:
        with framework.experts(changes, [2, 2]) as make:
            said = message_of(lambda: make(mixture)(*tokens))
        failures.holds(why, said, changes)


def test_sglangs_tokens_are_divided_in_an_attentions_group(monkeypatch):
    """Four ranks: two batches, each in two parts. A rank's part is as large as the first one's."""
    monkeypatch.setattr(_serving, "say", mock.Mock())
    run = mock.Mock()
    monkeypatch.setattr(_serving, "run_experts", run)
    parallel = SimpleNamespace(attn_dp_size=2, attn_tp_size=2)
    context = SimpleNamespace(get_parallel=lambda: parallel)
    attention = SimpleNamespace(
        get_dp_global_num_tokens=lambda: [5, 2], get_is_extend_in_batch=lambda: False
    )
    config = SimpleNamespace(routed_scaling_factor=None)
    layer = SimpleNamespace(_overlap_experts={"group": "ep"}, moe_runner_config=config)
    ids, shares = torch.zeros(3, CHOICES, dtype=torch.int32), torch.ones(3, CHOICES)
    _sglang_experts.experts_hook(context, attention, serving_sglang.SglangExperts)(
        None, layer, torch.zeros(3, H), serving_sglang.routed(ids, shares), None
    )
    limits = {"max_tokens": 3, "max_rows": (3 + 3 + 1 + 1) * CHOICES}
    assert run.call_args.kwargs == {"group": "ep"} | limits


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
    limits = {"max_tokens": right[0], "max_rows": right[1]}
    assert _serving.limits(tokens, choices) == limits


@each_framework
@pytest.mark.parametrize("value", ["0", "-3", "many", ""])
def test_rows_are_a_number(name, value, monkeypatch):
    monkeypatch.setenv("OVERLAP_MOE_ROWS", value)
    integration = {"vllm": vllm, "sglang": sglang}[name]
    with (
        installed(FRAMEWORKS[name].VERSION, {}),
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
    what, x, ids, *others = way.call_args.args
    assert what == ""  # a question, and no call
    assert (x.shape, x.dtype, ids.shape) == ((0, H), torch.bfloat16, (0, CHOICES))
    assert others == ["choices", (512, 1), None, "ep"]
    assert bool(why) is not peers
    assert not why or "doctor" in why
    on_cpu = (H, torch.bfloat16, torch.device("cpu"))
    assert _serving.why_not_captured(on_cpu, CHOICES, 512, "ep") == ""
