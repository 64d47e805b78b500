"""torchtitan's mixture of experts by `moe`, and its token dispatcher alone, beside torchtitan's own."""

import contextlib
import functools
import itertools
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from checks import Failures
from frameworks import needs_torchtitan, reasons
from layers import counted_events, integers

pytestmark = [needs_torchtitan, pytest.mark.ranks((2, "gloo"))]

EXPERTS, CHOICES, D, INNER = 16, 8, 256, 24  # the middle two are torchtitan's
OURS = "overlap_torch.integrations.torchtitan_experts.routed_experts"


def dispatched(kind: str, mesh, dtype: torch.dtype) -> list[torch.Tensor]:
    """Rows, counts, output and gradients of a token dispatcher, torchtitan's or ours, around experts that double."""
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    from overlap_torch.integrations.torchtitan_experts import token_dispatcher

    config = AllToAllTokenDispatcher.Config(num_experts=4, top_k=2)
    config = token_dispatcher(config) if kind == "ours" else config
    dispatcher = config.build()
    dispatcher.wire_meshes(ep_mesh=mesh)
    rank = dist.get_rank()
    x = integers(6, D, seed=20 + rank).to(dtype).requires_grad_()
    scores = (2.0 ** integers(6, 2, seed=30 + rank)).requires_grad_()
    ids = torch.stack([integers(6, seed=40 + rank) % 2, integers(6, seed=50) % 2 + 2], 1).long()
    counts = torch.bincount(ids.flatten(), minlength=4)
    rows, numbers, metadata = dispatcher.dispatch(x, scores, ids, counts)
    output = dispatcher.combine(rows * 2, metadata, x)
    output.backward(integers(6, D, seed=60 + rank).to(dtype))
    return [rows.detach(), numbers, output.detach(), x.grad, scores.grad]


def test_torchtitan_token_dispatcher_is_torchtitans(failures: Failures) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed.utils import set_spmd_backend

    set_spmd_backend("partial_dtensor")  # whose dispatcher takes the mesh that it was given
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    for dtype in (torch.float32, torch.bfloat16):
        own, ours = (dispatched(kind, mesh, dtype) for kind in ("torchtitan", "ours"))
        failures.expect_equal(ours, own, dtype)


def split_on_gloo(outputs, inputs, group=None) -> None:
    """`torch.distributed.all_to_all`, which gloo has for equal sizes alone."""
    sizes = [[part.shape[0] for part in parts] for parts in (outputs, inputs)]
    received = inputs[0].new_empty(sum(sizes[0]), *inputs[0].shape[1:])
    dist.all_to_all_single(received, torch.cat(inputs), *sizes, group=group)
    for output, part in zip(outputs, received.split(sizes[0]), strict=True):
        output.copy_(part)


@contextlib.contextmanager
def meshes(backend: str, tp: int = 1, ep: int = 2) -> Iterator:
    """torchtitan's meshes and its context of a step: data parallelism, or a batch whose tokens are cut over the ranks."""
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend

    world = dist.get_world_size()
    with (
        mock.patch.object(parallel_dims, "device_type", "cpu"),
        mock.patch.object(dist, "all_to_all", split_on_gloo),
    ):
        set_spmd_backend(backend)
        dims = ParallelDims(1, world // tp, 1, tp, 1, ep, world, spmd_backend=backend)
        dims.build_mesh()
        with get_spmd_context(parallel_dims=dims)():
            yield dims


def config_of(kind: str, dims, overrides: tuple[str, ...]):
    """torchtitan's small Qwen3, of one block with few experts, or with gpt-oss's, sharded as torchtitan does it."""
    import spmd_types
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.moe_sharding import set_moe_sharding_config
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
    from torchtitan.models.qwen3 import qwen3_configs
    from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

    config = qwen3_configs["debugmodel_moe"](attn_backend="flex")
    del config.layers[1:]
    config.layers[0].attention.inner_attention = ScaledDotProductAttention.Config()
    layer = config.layers[0].moe
    routed = layer.routed_experts
    for each in (layer, layer.router, routed.inner_experts, routed.token_dispatcher):
        each.num_experts = EXPERTS
    layer.router.gate.out_features = EXPERTS
    routed.inner_experts.hidden_dim = INNER
    shards = {"enable_ep": dims.ep > 1, "enable_sp": True}
    set_qwen3_sharding_config(config, **shards)
    if kind == "gpt_oss":
        names = ("mlp1_weight_EGD", "mlp1_bias_EG", "mlp2_weight_EDF", "mlp2_bias_ED")
        routed.inner_experts = GptOssGroupedExperts.Config(
            dim=D, hidden_dim=INNER, num_experts=EXPERTS, swiglu_limit=2.5
        )
        layout = dict.fromkeys(names, spmd_types.S(1))
        set_moe_sharding_config(layer, **shards, expert_param_layout=layout)
    apply_overrides(OverrideConfig(imports=list(overrides)), config)
    return config


def experts_of(kind: str, dtype: torch.dtype, dims, overrides: tuple[str, ...] = (OURS,)):
    """The block's routed experts, of small whole numbers, so that no rounding decides on which side of a limit a number is."""
    layer = config_of(kind, dims, overrides).layers[0].moe.routed_experts.build()
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        drawn = torch.randint(-1, 2, parameter.shape, generator=generator)
        parameter.data = drawn.to(dtype)
    layer.parallelize(dims)
    return layer


def model_of(dims, overrides: tuple[str, ...]) -> torch.nn.Module:
    """The Qwen3 as torchtitan's trainer parallelizes it: FSDP in bfloat16, activations computed again."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.models.qwen3 import parallelize_qwen3

    model = parallelize_qwen3(
        config_of("swiglu", dims, overrides).build(),
        parallel_dims=dims,
        training=TrainingConfig(),
        parallelism=ParallelismConfig(),
        compile_config=CompileConfig(),
        ac_config=FullAC.Config(),
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):  # which would scale in the reduction; gloo cannot
            module.set_force_sum_reduction_for_comms(True)
    torch.manual_seed(1)
    model.init_states()
    return model


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def expert_results(layer, dtype: torch.dtype, how: str = "eager") -> dict[str, torch.Tensor]:
    """The layer's result and gradients in float32, for this rank's tokens, of which none chooses one of the experts."""
    import spmd_types
    from spmd_types.checker import typecheck

    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    x = torch.randint(-2, 3, (2, 10, D), generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(2, 10, D, generator=generator).bfloat16().to(dtype)
    likely = torch.rand(2, 10, EXPERTS, generator=generator)
    likely[..., 5] = -1
    scores, ids = likely.topk(CHOICES)
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
    scores.requires_grad_()
    given = (x, scores, ids, counts)
    run = {
        "computed again": functools.partial(checkpoint, layer, use_reentrant=False),
        "compiled": torch.compile(layer, fullgraph=True, backend="aot_eager"),
    }.get(how, layer)
    with typecheck(local=False) if how == "type checks" else contextlib.nullcontext():
        if how == "type checks":
            layouts = layer._sharding_config.in_src_shardings.values()  # in the arguments' order
            for tensor, layout in zip(given, layouts, strict=True):
                spmd_types.assert_type(tensor, layout.axis_types, layout.partition_spec)
        output = run(*given)
        output.backward(grad)
    found = {"output": output.detach(), "input's gradient": x.grad, "scores'": scores.grad}
    found |= {name: local(parameter.grad) for name, parameter in layer.named_parameters()}
    return {name: value.float() for name, value in found.items()}


def check_experts(failures: Failures, ours, dtype: torch.dtype, own: list, how: str, *where) -> int:
    """Ours are as near to the right results as torchtitan's own; ``own`` has both. Returns how often `moe` ran."""
    found: dict[str, torch.Tensor] = {}
    events = counted_events(lambda: found.update(expert_results(ours, dtype, how)))
    for name, value in own[0].items():
        error, bound = ((each[name] - value).norm() for each in (found, own[1]))
        fault = f"off by {error}, torchtitan by {bound}"
        failures.expect(None if error <= 1.2 * bound else fault, name, how, *where)
    return events.get("overlap::_moe_experts", 0)


def own_results(kind: str, dtype: torch.dtype, dims) -> list[dict[str, torch.Tensor]]:
    """The results of torchtitan's own experts in float32; and as they are, computing in bfloat16."""
    with mock.patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor):
        right = expert_results(experts_of(kind, torch.float32, dims, ()), torch.float32)
    return [right, expert_results(experts_of(kind, dtype, dims, ()), dtype)]


def test_torchtitan_experts_are_torchtitans(failures: Failures) -> None:
    """Results and gradients in bfloat16 are as near to torchtitan's in float32 as torchtitan's own in bfloat16."""
    for kind, (backend, tp, *hows) in itertools.product(
        ("swiglu", "gpt_oss"),
        (
            ("spmd_types", 1, "eager", "computed again", "compiled"),
            ("spmd_types", 2, "eager"),
            ("partial_dtensor", 1, "eager"),
        ),
    ):
        with meshes(backend, tp) as dims:
            own = own_results(kind, torch.bfloat16, dims)
            for how in hows:
                ours = experts_of(kind, torch.bfloat16, dims)
                where = (kind, backend, "tp", tp)
                called = check_experts(failures, ours, torch.bfloat16, own, how, *where)
                failures.equal((called > 0, reasons(ours)), (True, []), how, *where)


def hooked(module: torch.nn.Module, register: str) -> list[str]:
    """Registers a hook by the module's method of this name, and returns the list to which each of its calls adds the name."""
    fired: list[str] = []
    getattr(module, register)(lambda *_: fired.append(register))
    return fired


def test_torchtitan_experts_left_to_torchtitan(failures: Failures) -> None:
    """The experts' own forward runs, with the reason in the report and torchtitan's results; other dispatchers stay."""
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    from overlap_torch.integrations.torchtitan_experts import routed_experts

    class Other(GroupedExperts):
        pass

    hooks = "they have hooks"
    for why, dtype, ep, *register in (
        ("tokens are torch.float32", torch.float32, 2),
        ("Other with OverlapTokenDispatcher", torch.bfloat16, 2),
        (hooks, torch.bfloat16, 2, "register_forward_pre_hook"),
        (hooks, torch.bfloat16, 2, "register_forward_hook"),
        (hooks, torch.bfloat16, 2, "register_full_backward_pre_hook"),
        (hooks, torch.bfloat16, 2, "register_full_backward_hook"),
        ("they are not divided among ranks", torch.bfloat16, 1),
        ("spmd_types checks types", torch.bfloat16, 2),
    ):
        with meshes("spmd_types", ep=ep) as dims:
            ours = experts_of("swiglu", dtype, dims)
            if why.startswith("Other"):
                ours.inner_experts.__class__ = Other
            fired = [hooked(ours.inner_experts, name) for name in register]
            own = own_results("swiglu", dtype, dims)
            how = "type checks" if "types" in why else "eager"
            called = check_experts(failures, ours, dtype, own, how, why, *register)
        right = (0, [f"torchtitan's own experts: {why}"])
        failures.equal((called, reasons(ours)), right, why, *register)
        failures.equal(fired, [[name] for name in register], "hook's calls", *register)
    sizes = {"num_experts": EXPERTS, "top_k": CHOICES}
    inner = GroupedExperts.Config(dim=D, hidden_dim=INNER, num_experts=EXPERTS)
    config = RoutedExperts.Config(
        inner_experts=inner, token_dispatcher=LocalTokenDispatcher.Config(**sizes)
    )
    failures.expect(None if routed_experts(config) is config else "replaced", "other dispatchers")


def test_torchtitan_experts_forget_an_earlier_reason(failures: Failures) -> None:
    """A call that runs `moe` removes the reason of an earlier call that did not."""
    left = ["torchtitan's own experts: tokens are torch.float32"]
    with meshes("spmd_types") as dims:
        ours = experts_of("swiglu", torch.bfloat16, dims)
        for dtype, right in ((torch.float32, left), (torch.bfloat16, [])):
            expert_results(ours, dtype)
            failures.equal(reasons(ours), right, dtype)


@pytest.mark.fresh()  # FSDP takes one layout of the ranks in a process
@pytest.mark.parametrize("tp", [1, 2])
def test_torchtitan_model_with_experts_is_torchtitans(failures: Failures, tp: int) -> None:
    """Beside torchtitan's own experts: loss, gradients and counters, with data or tensor parallelism."""
    number = 7 + (dist.get_rank() if tp == 1 else 0)
    tokens = torch.arange(2 * 12).view(2, 12) * number % 64
    runs: list[dict[str, torch.Tensor]] = []

    def step() -> None:
        loss = model(tokens, torch.arange(12).expand(2, 12)).square().mean()
        loss.backward()
        found["loss"] = loss.detach()

    with meshes("spmd_types", tp) as dims:
        for overrides in ((), (OURS,)):
            model, found = model_of(dims, overrides), {}
            events = counted_events(step)
            ran = events.get("overlap::_moe_experts", 0) > 0
            failures.equal(ran, bool(overrides), *overrides)
            found |= {name: each.grad for name, each in model.named_parameters()}
            runs.append(found | dict(model.named_buffers()))
    for name in runs[0]:
        own, ours = (local(run[name]).double() for run in runs)
        rounding = 0 if name.endswith("_E") else 0.02  # counters of experts, and their biases
        off, whole = (ours - own).norm(), own.norm()
        failures.expect(None if off <= rounding * whole else f"off by {off} of {whole}", name)
