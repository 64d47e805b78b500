"""torchtitan's `dist_gemm` by this package's ops: its Functions, its layers and a model of two blocks."""

import contextlib
import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from checks import Failures
from frameworks import check_training, needs_torchtitan
from layers import integers, my_features, my_tokens, ops_called, ops_of_a_step
from operands import difference, world_name
from overlap_torch.integrations import torchtitan

pytestmark = [needs_torchtitan, pytest.mark.ranks((2, "gloo"))]

TOKENS, K, N = 12, 8, 6


@contextlib.contextmanager
def operators_on_cpu() -> Iterator[None]:
    """Kernels of the operators that torchtitan's Functions call and PyTorch has on CUDA alone: its unfused compositions."""
    from torch.distributed import _symmetric_memory as symm_mem

    with torch.library._scoped_library("symm_mem", "IMPL") as symmetric:
        for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
            symmetric.impl(name, getattr(symm_mem, f"_{name}_fallback"), "CPU")
        with torch.library._scoped_library("aten", "IMPL") as aten:
            aten.impl("mm.dtype", lambda left, right, dtype: (left @ right).to(dtype), "CPU")
            yield


def operands(name: str, bias: bool, needs: tuple[bool, ...]) -> list[torch.Tensor | None]:
    """Input and weights of this rank, a bias if the Function takes one; which of them want a gradient."""
    whole = integers(TOKENS, K, seed=3)
    weights = [integers(N, K, seed=seed) for seed in (1, 2)]
    if name == "LinearReduceScatter":
        found = [my_features(whole), my_features(weights[0]), integers(N, seed=5)]
    elif name == "AllGatherLinear":
        found = [my_tokens(whole), my_tokens(weights[0]), my_tokens(integers(N, seed=5))]
    else:
        found = [my_tokens(whole), *(my_tokens(weight) for weight in weights)]
    if name != "AllGatherLinearMulti" and not bias:
        found[2] = None
    return [
        None if tensor is None else tensor.clone().requires_grad_(need)
        for tensor, need in zip(found, needs, strict=True)
    ]


def results(name: str, bias: bool, needs: tuple[bool, ...]) -> list[torch.Tensor | None]:
    """Outputs and gradients of the Function that torchtitan's module has now, by name."""
    from torchtitan.models.common import dist_gemm

    inputs = operands(name, bias, needs)
    outputs = getattr(dist_gemm, name).apply(*inputs, dist.group.WORLD, world_name())
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    gradients = [integers(TOKENS, N, seed=7 + i) for i in range(len(outputs))]
    cut = my_tokens if name == "LinearReduceScatter" else my_features
    if any(needs):
        torch.autograd.backward(outputs, [cut(gradient) for gradient in gradients])
    return [*outputs, *(tensor.grad for tensor in inputs if tensor is not None)]


def test_torchtitan_functions_are_torchtitans(failures: Failures) -> None:
    """Each Function's outputs and gradients beside torchtitan's own, bit for bit, whoever wants a gradient."""
    for name, bias, needs in itertools.product(
        ("AllGatherLinear", "AllGatherLinearMulti", "LinearReduceScatter"),
        (False, True),
        ((True, True, True), (True, False, False), (False, True, False), (False, False, True)),
    ):
        where = (name, "bias", bias, needs)
        if bias and name == "AllGatherLinearMulti":
            continue
        if not bias and name != "AllGatherLinearMulti" and needs == (False, False, True):
            continue
        with operators_on_cpu():
            own = results(name, bias, needs)
        with torchtitan.enable():
            ours = results(name, bias, needs)
        for i, (mine, right) in enumerate(zip(ours, own, strict=True)):
            # torchtitan's Functions compute gradients that nobody asked for, which autograd drops.
            failures.expect(difference(mine, right), i, *where)


def test_torchtitan_functions_run_the_ops(failures: Failures) -> None:
    """The ops that run, and how many collectives forward and backward make."""
    from torchtitan.models.common import dist_gemm

    for name, forward, backward in (
        ("AllGatherLinear", {"allgather_gemm"}, {"gemm_reducescatter"}),
        ("AllGatherLinearMulti", {"allgather_gemm"}, {"gemm_reducescatter"}),
        ("LinearReduceScatter", {"gemm_reducescatter"}, {"allgather_gemm"}),
    ):
        inputs = operands(name, False, (True, True, True))
        with torchtitan.enable():
            run = getattr(dist_gemm, name).apply
            _, *called = ops_of_a_step(lambda: run(*inputs, dist.group.WORLD, world_name()))  # noqa: B023, called at once
        failures.equal(called, [forward, backward], name)


def test_torchtitan_swap_is_once_and_undone(failures: Failures) -> None:
    """Twice is once, in torchtitan's module and in those that import from it; a graph keeps its own backward."""
    from torchtitan.distributed import linear
    from torchtitan.models.common import dist_gemm

    names = ("AllGatherLinear", "AllGatherLinearMulti", "LinearReduceScatter")

    def classes() -> list[type]:
        return [getattr(module, name) for module in (linear, dist_gemm) for name in names]

    def expect(right: bool, *where: object) -> None:
        failures.expect(None if right else "no", *where)

    own = classes()
    inputs = operands("AllGatherLinear", True, (True, True, True))
    first = torchtitan.enable()
    ours = classes()
    expect(not set(own) & set(ours), "all are swapped")
    expect(ours[:3] == ours[3:], "the same in both modules")
    expect(all(issubclass(new, old) for new, old in zip(ours, own, strict=True)), "of their kind")
    second = torchtitan.enable()
    expect(classes() == ours, "twice is once")
    first.undo()
    first.undo()
    expect(classes() == ours, "held by the second handle")
    output = linear.AllGatherLinear.apply(*inputs, dist.group.WORLD, world_name())
    second.undo()
    expect(classes() == own, "undone")
    failures.equal(ops_called(output.sum().backward), {"gemm_reducescatter"}, "backward after it")
    with torchtitan.enable():
        expect(classes() == ours, "again")
    expect(classes() == own, "undone again")


def test_torchtitan_type_checker_knows_the_functions(failures: Failures) -> None:
    """torchtitan's type checker sees the swapped Functions as it sees torchtitan's."""
    import spmd_types as spmd
    from spmd_types.checker import typecheck
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.models.common import dist_gemm

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    group = mesh.get_group("tp")
    for name, given, right in (
        ("AllGatherLinear", (spmd.S(0), spmd.S(0), spmd.S(0)), spmd.S(1)),
        ("AllGatherLinearMulti", (spmd.S(0), spmd.S(0), spmd.S(0)), spmd.S(1)),
        ("LinearReduceScatter", (spmd.S(1), spmd.S(1), spmd.R), spmd.S(0)),
    ):
        for wrong in (False, True):
            inputs = operands(name, True, (True, True, True))
            with torchtitan.enable(), spmd.set_current_mesh(mesh), typecheck(local=False):
                for tensor, kind in zip(inputs, given, strict=True):
                    spmd.assert_type(tensor, {group: spmd.R if wrong else kind})
                function = getattr(dist_gemm, name)
                try:
                    outputs = function.apply(*inputs, group, group.group_name)
                    for output in outputs if isinstance(outputs, tuple) else (outputs,):
                        spmd.assert_type(output, {group: right})
                    problem = "took operands of another kind" if wrong else None
                except spmd.SpmdTypeError as error:
                    problem = None if wrong else str(error)
            failures.expect(problem, name)


def test_torchtitan_functions_compile(failures: Failures) -> None:
    """A pair of layers, compiled: as eager, and the ops are in its graph."""
    from torchtitan.models.common import dist_gemm

    def pair(x, up, down):
        hidden = dist_gemm.AllGatherLinear.apply(x, up, None, dist.group.WORLD, name)
        return dist_gemm.LinearReduceScatter.apply(
            hidden.relu(), down, None, dist.group.WORLD, name
        )

    name = world_name()
    torch._dynamo.reset()
    compiled = torch.compile(pair, fullgraph=True, backend="aot_eager")
    runs = []
    with torchtitan.enable():
        for run in (pair, compiled):
            x = my_tokens(integers(TOKENS, K, seed=3)).clone().requires_grad_()
            up = my_tokens(integers(N, K, seed=1)).clone().requires_grad_()
            down = my_features(integers(K, N, seed=2)).clone().requires_grad_()
            outputs, *called = ops_of_a_step(lambda: run(x, up, down))  # noqa: B023, called at once
            failures.equal(called, [{"allgather_gemm", "gemm_reducescatter"}] * 2, "ops")
            runs.append([*outputs, x.grad, up.grad, down.grad])
    for i, (eager, traced) in enumerate(zip(*runs, strict=True)):
        failures.expect(difference(traced, eager), "result", i)


def llama(tp_gemm_backend: str, dims) -> torch.nn.Module:
    """Two blocks of torchtitan's Llama 3, parallelized as its trainer does."""
    from torch import nn
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import Llama3Model, _build_llama3_layers
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    dim, heads, vocab = 32, 4, 64
    normal = {"weight": nn.init.normal_}
    layers = _build_llama3_layers(
        n_layers=2,
        dim=dim,
        n_heads=heads,
        n_kv_heads=2,
        hidden_dim=48,
        rope=ComplexRoPE.Config(dim=dim // heads, max_seq_len=64, theta=500000, scaling="llama"),
        attn_backend="flex",
        tp_gemm_backend=tp_gemm_backend,
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config = Llama3Model.Config(
        dim=dim,
        vocab_size=vocab,
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=dim, param_init=normal),
        norm=RMSNorm.Config(normalized_shape=dim, param_init={"weight": nn.init.ones_}),
        lm_head=Linear.Config(in_features=dim, out_features=vocab, param_init=normal),
        layers=layers,
    )
    set_llama3_sharding_config(config, enable_sp=True)
    torch.manual_seed(1)
    model = config.build()
    model.init_states(buffer_device=None)
    model.parallelize(dims)
    return model


def test_torchtitan_model_trains(failures: Failures) -> None:
    """Beside torchtitan's own layers, which communicate by themselves."""
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend

    world = dist.get_world_size()
    set_spmd_backend("spmd_types")
    dims = ParallelDims(1, 1, 1, world, 1, 1, world)
    dims.build_mesh()
    own, ours = llama("default", dims), llama("dist_gemm", dims)
    ours.load_state_dict(own.state_dict())
    tokens = torch.arange(2 * 12).view(2, 12) * 7 % 64
    positions = torch.arange(12).expand(2, 12)
    context = get_spmd_context(parallel_dims=dims)

    def step(model):
        enabled = contextlib.nullcontext() if model is own else torchtitan.enable()
        with enabled, context():
            loss = model(tokens, positions).square().mean()
            loss.backward()
        return loss

    check_training(failures, own, ours, step, {"allgather_gemm", "gemm_reducescatter"})
