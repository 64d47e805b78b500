"""PyTorch's own fused ops with these ops in their place: results, strides, what is refused, undoing, Inductor's async TP."""

import warnings
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.distributed._symmetric_memory as symmetric_memory
from torch._dynamo.backends.common import aot_autograd

import overlap_torch
from checks import Failures, message_of
from layers import integers
from operands import difference, rank_device, world_name
from overlap_torch._tools import doctor

FUSED = torch.ops.symm_mem
FP8 = torch.float8_e4m3fn
NAMES = (
    "fused_all_gather_matmul",
    "fused_matmul_reduce_scatter",
    "fused_all_gather_scaled_matmul",
    "fused_scaled_matmul_reduce_scatter",
)


def operand(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small integers, others on every rank."""
    return integers(*shape, seed=10 + rank, dtype=dtype)


def of_ranks(make: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    return [make(rank) for rank in range(dist.get_world_size())]


def as_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def expect_strides(failures: Failures, outputs, promised, *where) -> None:
    """The strides that PyTorch's Meta kernel promises to compilers; of one rank PyTorch's kernels
    have others themselves.
    """
    if dist.get_world_size() == 1:
        return
    for output, promise in zip(outputs, promised, strict=True):
        failures.equal((output.stride(), output.shape), (promise.stride(), promise.shape), *where)


@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (3, "gloo"), (2, "nccl"))
def test_all_gather_matmul_is_gather_and_matmul(failures: Failures) -> None:
    """Every dim, several weights in both layouts, dtypes; PyTorch's composition gathers the last dim."""
    rank, group = dist.get_rank(), world_name()
    cases = [
        ((4, 6), 0, torch.float32),
        ((4, 6), 0, torch.bfloat16),
        ((3, 5, 6), 1, torch.float32),
        ((2, 3, 2, 6), 2, torch.float64),
        ((4, 6), 1, torch.float32),
        ((2, 3, 4), -1, torch.float32),
    ]
    with overlap_torch.replace_symm_mem() as replacement:
        for shape, dim, dtype in cases:
            where = ("all-gather", shape, dim, dtype)
            if rank_device().type == "cuda" and dim % len(shape) == len(shape) - 1:
                continue  # PyTorch's kernel: another test
            gathered = torch.cat(of_ranks(lambda r: operand(r, *shape, dtype=dtype)), dim=dim)  # noqa: B023
            k = gathered.shape[-1]
            Bs = [integers(k, 3, seed=1, dtype=dtype), integers(4, k, seed=2, dtype=dtype).t()]
            own = operand(rank, *shape, dtype=dtype)
            A, outputs = FUSED.fused_all_gather_matmul(own, Bs, dim, group)
            failures.expect(difference(A, gathered), *where, "A")
            for output, B in zip(outputs, Bs, strict=True):
                failures.expect(difference(output, gathered @ B), *where)
            promised_A, promised = FUSED.fused_all_gather_matmul(
                as_meta(own), [as_meta(B) for B in Bs], dim, group
            )
            expect_strides(failures, [A, *outputs], [promised_A, *promised], *where, "strides")
            nothing, again = FUSED.fused_all_gather_matmul(own, Bs, dim, group, return_A=False)
            failures.expect(None if nothing is None else f"returned {nothing}", *where, "no A")
            failures.expect_equal(again, outputs, *where, "no A")
        calls = [(call.op, call.why, call.calls) for call in replacement.calls]
    right = [
        ("fused_all_gather_matmul", "", 8),
        ("fused_all_gather_matmul", "the features are gathered, not the rows", 4),
    ]
    if rank_device().type == "cpu":
        failures.equal(calls, right, "calls")
        A, B = torch.ones(2, 4), torch.ones(4, 4)
        with overlap_torch.replace_symm_mem():
            for dim in (2, -3):  # PyTorch refuses it
                with pytest.raises((IndexError, ValueError, AssertionError)):
                    FUSED.fused_all_gather_matmul(A, [B], dim, group)


@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (3, "gloo"), (2, "nccl"))
def test_matmul_reduce_scatter_is_matmul_and_scatter(failures: Failures) -> None:
    rank, world, group = dist.get_rank(), dist.get_world_size(), world_name()
    cases = [
        ((6, 4), 0, "sum", torch.float32),
        ((6, 4), 0, "sum", torch.bfloat16),
        ((2, 6, 4), 1, "sum", torch.float32),
        ((2, 6, 4), 2, "sum", torch.float32),
        ((2, 6, 4), 0, "sum", torch.float32),  # over three ranks it does not divide
        ((6, 4), 0, "avg", torch.float64),
    ]
    refused = 0
    on_gpu = rank_device().type == "cuda"
    with overlap_torch.replace_symm_mem() as replacement:
        for shape, dim, reduce_op, dtype in cases:
            where = ("reduce-scatter", shape, dim, reduce_op, dtype)
            if on_gpu and (reduce_op == "avg" or dim == len(shape) - 1):
                continue  # PyTorch's kernel: another test
            B = integers(shape[-1], 12, seed=1, dtype=dtype)
            whole = sum(of_ranks(lambda r: operand(r, *shape, dtype=dtype) @ B))  # noqa: B023
            own = operand(rank, *shape, dtype=dtype)
            if whole.shape[dim] % world != 0:
                refused += 1
                with pytest.raises(AssertionError, match=f"a multiple of group_size {world}"):
                    FUSED.fused_matmul_reduce_scatter(own, B, reduce_op, dim, group)
                continue
            if reduce_op == "avg":
                whole = whole / world
            output = FUSED.fused_matmul_reduce_scatter(own, B, reduce_op, dim, group)
            failures.expect(difference(output, whole.chunk(world, dim)[rank]), *where)
            promise = FUSED.fused_matmul_reduce_scatter(
                as_meta(own), as_meta(B), reduce_op, dim, group
            )
            expect_strides(failures, [output], [promise], *where, "strides")
        calls = {call.why: call.calls for call in replacement.calls}
    right = {"": 4 - refused}
    if not on_gpu:
        right["the features are scattered, not the rows"] = 1
        right["reduce_op is 'avg', not 'sum'"] = 1
    if refused:
        right["the scattered dim does not divide by the ranks"] = 1
    failures.equal(calls, right, "calls")


def fp8_operand(rank: int, *shape: int) -> torch.Tensor:
    return operand(rank, *shape).to(FP8)


def powers_of_two(rank: int, *shape: int) -> torch.Tensor:
    return 2.0 ** operand(50 + rank, *shape)


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, device=rank_device())


def check_scaled_gather(failures: Failures) -> None:
    """Tensor-wise, row-wise of this rank's rows, and of all rows; scales are powers of two, so that all sums are exact."""
    rank, world, group = dist.get_rank(), dist.get_world_size(), world_name()
    for shape, dim in (((4, 6), 0), ((2, 3, 6), 1)):
        row_scales = torch.cat(of_ranks(lambda r: powers_of_two(r, *shape[:-1], 1)), dim=dim)  # noqa: B023
        one = number(0.5)
        kinds = {
            "tensor-wise": (one, one),
            "row-wise": (row_scales.chunk(world, dim)[rank], row_scales),
            "row-wise, replicated": (row_scales, row_scales),
        }
        gathered = torch.cat(of_ranks(lambda r: fp8_operand(r, *shape).float()), dim=dim)  # noqa: B023
        own = fp8_operand(rank, *shape)
        Bs = [integers(6, 3, seed=1).to(FP8), integers(5, 6, seed=2).to(FP8).t()]
        B_scales = [number(4.0), 2.0 ** integers(1, 5, seed=3)]
        biases, dtypes = [None, integers(5, seed=4)], [torch.float32] * 2
        for kind, (A_scale, of_all) in kinds.items():
            if world == 1 and kind == "row-wise, replicated":
                continue
            where = ("scaled all-gather", shape, dim, kind)
            A, outputs = FUSED.fused_all_gather_scaled_matmul(
                own, Bs, A_scale, B_scales, dim, group, biases, [None] * 2, dtypes, [False] * 2
            )
            failures.expect(difference(A.float(), gathered), *where, "A")
            for output, B, B_scale, bias, dtype in zip(
                outputs, Bs, B_scales, biases, dtypes, strict=True
            ):
                right = (gathered * of_all) @ (B.float() * B_scale)
                right = (right if bias is None else right + bias).to(dtype)
                failures.equal(output.dtype, dtype, *where)
                failures.expect(difference(output, right), *where)
        if rank_device().type == "cuda":
            continue  # PyTorch's kernel takes some of it, and has messages of its own
        for A_scale, scales, types, why in (
            (torch.ones(7, 1), B_scales, dtypes, "A_scale has the shape (7, 1)"),
            (one, B_scales[:1], dtypes, "there is not one value for each B"),
            (one, B_scales, [torch.float32, torch.bfloat16], "the results' dtypes"),
        ):
            message = message_of(
                FUSED.fused_all_gather_scaled_matmul,
                own, Bs, A_scale, scales, dim, group, biases, [None] * 2, types, [False] * 2,
            )  # fmt: skip
            failures.holds(why, message, why)


def check_scaled_scatter(failures: Failures) -> None:
    rank, world, group = dist.get_rank(), dist.get_world_size(), world_name()
    B = integers(4, 5, seed=1).to(FP8)
    B_scale = 2.0 ** integers(1, 5, seed=3)
    for scale in ("tensor-wise", "row-wise"):
        where = ("scaled reduce-scatter", scale)

        def scale_of(r):
            return number(0.25) if scale == "tensor-wise" else powers_of_two(r, 12, 1)  # noqa: B023

        def call(reduce_op, bias):
            # [2, 6, 5] outside, [12, 5] in the GEMM: what Inductor hands over.
            return FUSED.fused_scaled_matmul_reduce_scatter(
                fp8_operand(rank, 12, 4), B, scale_of(rank), B_scale, reduce_op, 1, 0, group,
                [2, 6, 5], bias, None, torch.float32,
            )  # fmt: skip

        whole = sum(
            of_ranks(
                lambda r: (fp8_operand(r, 12, 4).float() * scale_of(r)) @ (B.float() * B_scale)
            )
        ).view(2, 6, 5)
        output = call("sum", None)
        failures.expect(difference(output, whole.chunk(world, 1)[rank]), *where)
        contiguous = output.is_contiguous()
        failures.expect(None if contiguous else str(output.stride()), *where, "contiguous")
        if rank_device().type == "cuda":
            continue
        for *arguments, why in (
            ("avg", None, "'avg'"),
            ("sum", integers(5, seed=4), "there is a bias"),
        ):
            failures.holds(why, message_of(call, *arguments), *where, why)


@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (2, "nccl"))
def test_scaled_siblings_run(failures: Failures) -> None:
    with overlap_torch.replace_symm_mem() as replacement:
        check_scaled_gather(failures)
        check_scaled_scatter(failures)
        calls = replacement.calls
    # Both shapes have two or three kinds of scales; sums of both kinds.
    kinds = 2 if dist.get_world_size() == 1 else 3
    ours = {call.op: call.calls for call in calls if not call.why}
    right = {"fused_all_gather_scaled_matmul": 2 * kinds, "fused_scaled_matmul_reduce_scatter": 2}
    failures.equal(ours, right)


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_stand_ins_behave_as_kernels(failures: Failures) -> None:
    """No gradient is recorded and autocast casts nothing, as in PyTorch's kernels."""
    rank, group = dist.get_rank(), world_name()
    A = operand(rank, 4, 6).requires_grad_()
    B = integers(6, 5, seed=1)
    with (
        overlap_torch.replace_symm_mem(),
        torch.autocast(rank_device().type, torch.bfloat16),
        torch.no_grad(),
    ):
        _, (output,) = FUSED.fused_all_gather_matmul(A, [B], 0, group)
        scattered = FUSED.fused_matmul_reduce_scatter(output, B.t(), "sum", 0, group)
    for name, tensor in (("gathered", output), ("scattered", scattered)):
        failures.equal(tensor.dtype, torch.float32, name)
    right = torch.cat(of_ranks(lambda r: operand(r, 4, 6))) @ B
    failures.expect(difference(output, right), "under autocast")
    with overlap_torch.replace_symm_mem(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch may say that the operator has no gradient
        _, (output,) = FUSED.fused_all_gather_matmul(A, [B], 0, group)
    names = str(output.grad_fn)
    failures.expect(None if "Gemm" not in names else names, "recorded")


# --- putting them there, and undoing it -----------------------------------------------------------------------


def kernels(device: str) -> list[bool]:
    return [
        torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{name}", device)
        for name in NAMES
    ]


def test_twice_is_once_and_the_last_handle_undoes():
    assert kernels("CPU") == [False] * 4 and kernels("CUDA") == [True] * 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an override is said by no warning
        first = overlap_torch.replace_symm_mem()
        second = overlap_torch.replace_symm_mem()
    assert kernels("CPU") == [True] * 4
    second.undo()
    second.undo()
    assert kernels("CPU") == [True] * 4, "the first handle still holds it"
    first.undo()
    assert kernels("CPU") == [False] * 4 and kernels("CUDA") == [True] * 4
    with pytest.raises(ZeroDivisionError), overlap_torch.replace_symm_mem():
        assert kernels("CPU") == [True] * 4
        raise ZeroDivisionError
    assert kernels("CPU") == [False] * 4


def test_doctor_and_report_say_it():
    asked = "torch.ops.symm_mem: PyTorch's own kernels; overlap_torch.replace_symm_mem()"
    assert asked in doctor.report()
    assert "symm_mem" not in str(overlap_torch.report())
    with overlap_torch.replace_symm_mem():
        said = (
            "torch.ops.symm_mem: these ops run fused_all_gather_matmul, fused_matmul_reduce_scatter"
        )
        assert said in doctor.report()
        assert said in str(overlap_torch.report())
    assert asked in doctor.report()
    assert "symm_mem" not in str(overlap_torch.report())


@pytest.mark.ranks((2, "gloo"))
def test_report_counts_calls_and_says_why_not(failures: Failures) -> None:
    A, B = integers(4, 6, seed=1), integers(6, 4, seed=2)
    with overlap_torch.replace_symm_mem() as replacement:
        for _ in range(3):
            FUSED.fused_all_gather_matmul(A, [B], 0, world_name())
        FUSED.fused_matmul_reduce_scatter(A, B, "avg", 0, world_name())
        text = str(overlap_torch.report())
    for line in (
        "  fused_all_gather_matmul on cpu, 3 calls: ours",
        "  fused_matmul_reduce_scatter on cpu, 1 call: not ours but GEMM and collective: reduce_op is 'avg', not 'sum'",
    ):
        failures.holds(line, text.split("\n"), line)
    failures.expect(None if not replacement.calls else str(replacement.calls), "after undoing")


@pytest.mark.ranks((2, "gloo"))
def test_what_ours_do_not_take_goes_to_pytorchs_kernel_on_cuda(failures: Failures) -> None:
    """The kernel that stands over PyTorch's on CUDA, called with tensors on the CPU.

    PyTorch's op takes what ours do not; in its test mode it is a composition that runs anywhere."""
    rank, world, group = dist.get_rank(), dist.get_world_size(), world_name()
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    A, B = operand(rank, 4, 6), integers(6, 4, seed=2)
    with overlap_torch.replace_symm_mem() as replacement:
        gather, scatter, scaled_gather, scaled = (
            torch.library.get_kernel(f"symm_mem::{name}", "CUDA") for name in NAMES
        )
        whole = torch.cat(of_ranks(lambda r: operand(r, 4, 6)))
        gathered, (output,) = gather.call_boxed(keys, A, [B], 0, group)
        failures.expect(difference(output, whole @ B), "ours")
        with symmetric_memory._test_mode():
            wide, _ = gather.call_boxed(keys, A, [integers(6 * world, 4, seed=3)], 1, group)
            right = torch.cat(of_ranks(lambda r: operand(r, 4, 6)), dim=1)
            failures.expect(difference(wide, right), "PyTorch's, features gathered")
            nothing, _ = gather.call_boxed(
                keys, A, [integers(6 * world, 4, seed=3)], 1, group, return_A=False
            )
            failures.expect(None if nothing is None else str(nothing), "PyTorch's, no A")
            one, columns = torch.tensor(1.0), B.t().contiguous().t().to(FP8)
            # Gloo sends no fp8: what PyTorch's kernel gets is all there is to see.
            seen = mock.Mock(return_value=(A, [B]))
            with mock.patch.object(
                symmetric_memory, "_fused_all_gather_scaled_matmul_fallback", seen
            ):
                scaled_gather.call_boxed(
                    keys, A.to(FP8), [columns], one, [one], 0, group, [None], [None], [torch.float64], [False]
                )  # fmt: skip
            found = list(seen.call_args.args[4:])
            right = [0, group, [None], [None], [torch.float64], [False]]
            failures.equal(found, right, "PyTorch's, with scales")
            summed = scatter.call_boxed(keys, A, B, "sum", 1, group)
            right = sum(of_ranks(lambda r: operand(r, 4, 6) @ B)).chunk(world, 1)[rank]
            failures.expect(difference(summed, right), "PyTorch's, features scattered")
            summed = scaled.call_boxed(
                keys, A.to(FP8), columns, one, one, "avg", 0, 0, group, [4, 4], None, None, torch.float32, False,
            )  # fmt: skip
            right = sum(of_ranks(lambda r: operand(r, 4, 6) @ B)).chunk(world)[rank] / world
            failures.expect(difference(summed, right), "PyTorch's, with scales")
        found = [(call.device, bool(call.why), call.calls) for call in replacement.calls]
    right = [("cuda", False, 1), ("cuda", True, 2)] + [("cuda", True, 1)] * 3
    failures.equal(found, right, "calls")


# --- Inductor's async TP --------------------------------------------------------------------------------------


def block(shard: torch.Tensor, up: torch.Tensor, gate: torch.Tensor, down: torch.Tensor, group):
    """An MLP between sequence-parallel tokens: [tokens part, K] to [tokens part, K]."""
    whole = collectives.all_gather_tensor_autograd(shard, 0, group)
    hidden = (whole @ up).relu() * (whole @ gate)
    return collectives.reduce_scatter_tensor_autograd(hidden @ down, "sum", 0, group)


def passed(gm: torch.fx.GraphModule, inputs) -> torch.fx.GraphModule:
    """A graph behind Inductor's pass, as it is run without code being generated."""
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    view_to_reshape(gm)
    micro_pipeline_tp_pass(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return gm


@pytest.mark.parametrize("how", ["pass", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_inductors_async_tp_runs_ours(failures: Failures, how: str) -> None:
    """Outputs and gradients are the eager ones, and the fused ops in the graphs are ours."""
    rank, group = dist.get_rank(), world_name()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        symmetric_memory.enable_symm_mem_for_group(group)

    def operands_of_rank():
        made = [operand(rank, 4, 6), operand(rank, 6, 8), operand(rank + 7, 6, 8)]
        return [tensor.requires_grad_() for tensor in (*made, operand(rank + 9, 8, 6))]

    expected = operands_of_rank()
    right = block(*expected, group)
    gradient = operand(rank + 20, *right.shape)
    right.backward(gradient)
    own = operands_of_rank()
    torch._dynamo.reset()
    backend = "inductor" if how == "inductor" else aot_autograd(fw_compiler=passed)
    # A PyTorch without NCCL runs the pass on no graph at all, and one from 2.15 on none without a GPU.
    with (
        overlap_torch.replace_symm_mem() as replacement,
        torch._inductor.config.patch(_micro_pipeline_tp=True, fx_graph_cache=False),
        mock.patch.object(dist, "is_nccl_available", lambda: True),
        mock.patch.object(symmetric_memory, "is_symm_mem_enabled_for_group", lambda name: True),
    ):
        compiled = torch.compile(block, fullgraph=True, backend=backend)
        output = compiled(*own, group)
        output.backward(gradient)
        found = {(call.op, call.why): call.calls for call in replacement.calls}
    failures.expect(difference(output, right), "output")
    for name, tensor, whole in zip(("shard", "up", "gate", "down"), own, expected, strict=True):
        failures.expect(difference(tensor.grad, whole.grad), "gradient of", name)
    # Forward gathers for two GEMMs and scatters one's sums. Backward gathers the gradient for the GEMM with down; what
    # it scatters is a sum of two products, which the pass does not fuse.
    counted = {("fused_all_gather_matmul", ""): 2, ("fused_matmul_reduce_scatter", ""): 1}
    failures.equal(found, counted, "calls")
