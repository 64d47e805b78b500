"""The compile pass on GEMMs with scales: what it fuses, what it says of the rest, that results are right.

Operands are small integers and scales are 0.5, 1 and 2, so that every sum is exact: results are equal bit for bit to products
of what the operands stand for, in float64.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import ScalingType

import rank_pool
from checks import Failures
from overlap_torch import inductor
from tests.compile.test_inductor import (
    Eager,
    Functional,
    Pattern,
    check_patterns,
    check_refused,
    compare,
    tensors_of,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
F32, BF16 = torch.float32, torch.bfloat16


class Compiled(Functional):
    """The functions that the pass sees."""

    def scaled(self, x, w, scale_x, scale_w, bias=None, out=F32):
        """[..., K] by [N, K], with scales of both: one number, or [..., 1] and [N, 1]."""
        rows = x.reshape(-1, x.shape[-1])
        if scale_w.numel() > 1:
            scale_x, scale_w = scale_x.reshape(-1, 1), scale_w.t()
        y = torch._scaled_mm(rows, w.t(), scale_x, scale_w, bias, out_dtype=out)
        return y.reshape(*x.shape[:-1], -1)

    def named(self, x, w, scale_x, scale_w, recipe, out=F32):
        """The operator that torch.nn.functional.scaled_mm calls; Dynamo does not trace into that (PyTorch 2.11)."""
        recipe = [recipe.value]
        product = torch.ops.aten._scaled_mm_v2
        return product(x, w.t(), [scale_x], recipe, [], [scale_w], recipe, [], None, out)

    def gather_bytes(self, x, dim=0):
        """As it is done where a transport has no fp8."""
        return self.all_gather(x.view(torch.uint8), dim).view(x.dtype)


class Right(Eager):
    """The right results."""

    def scaled(self, x, w, scale_x, scale_w, bias=None, out=F32):
        y = ((x.double() * scale_x) @ (w.double() * scale_w).t()).to(out)
        return y if bias is None else y + bias

    def named(self, x, w, scale_x, scale_w, recipe, out=F32):
        return self.scaled(x, w, scale_x.reshape(-1, 1), scale_w.reshape(-1, 1), None, out)

    def gather_bytes(self, x, dim=0):
        return self.all_gather(x.view(torch.uint8), dim).view(x.dtype)

    def all_gather(self, x, dim=0):
        if x.dtype in (E4M3, E5M2):
            return self.gather_bytes(x, dim)
        return super().all_gather(x, dim)


# Columns in sixteens, which CUDA's `_scaled_mm` asks for.
X, W = ((6, 16), E4M3), ((16, 16), E4M3)
ONE = ((), "scale")
OF_X, OF_W = ((6, 1), "scale"), ((16, 1), "scale")


def gathered_with_scales(c, x, w, v, s, t, u):
    """Rows and their scales are gathered apart; others read both."""
    g, of_g = c.all_gather(x, 1), c.all_gather(s, 1)
    y, z = c.scaled(g, w, of_g, t), c.scaled(g, v, of_g, u)
    return y, z.relu(), g.float() + 1, of_g * 2


def gathered_as_bytes(c, x, w, v, s, t):
    g = c.gather_bytes(x)
    return c.scaled(g, w, s, t), c.scaled(g[1:-1], v, s, t), g.float()


def gathered_joined_as_bytes(c, x, w, s, t):
    """As PyTorch joins the parts of a gathered middle dim where ``cat`` has no fp8."""
    parts = c.all_gather(x).chunk(dist.get_world_size())
    g = torch.cat([part.view(torch.uint8) for part in parts], 1).view(x.dtype)
    return c.scaled(g, w, s, t), g.float() + 1


def gathered_and_scattered(c, x, w, v, s, t):
    h = c.scaled(c.gather_bytes(x), w, s, t).relu().clamp(max=4).to(E4M3)
    return c.reduce_scatter(c.scaled(h, v, s, t))


def scales_by_views(c, x, w, s, t):
    """The scales are gathered as vectors, in another spelling than the rows."""
    of_g = c.all_gather(s.flatten()).view(2, *s.shape).transpose(0, 1).reshape(s.shape[0], -1, 1)
    return c.scaled(c.all_gather(x, 1), w, of_g, t)


PATTERNS = {
    "numbers, all-reduce": Pattern(lambda c, x, w, s, t: c.all_reduce(c.scaled(x, w, s, t)), (X, W, ONE, ONE), "gemm_allreduce"),
    "numbers, average": Pattern(
        lambda c, x, w, s, t: c.all_reduce(c.scaled(x, w, s, t), "avg"), (X, W, ((1,), "scale"), ((1, 1), "scale")),
        "gemm_allreduce"),
    "rows, all-reduce, bias behind": Pattern(
        lambda c, x, w, s, t, b: c.all_reduce(c.scaled(x, w, s, t)) + b,
        (((2, 3, 16), E4M3), W, ((2, 3, 1), "scale"), OF_W, ((16,), F32)), "gemm_allreduce"),
    "rows, e5m2, slice": Pattern(
        lambda c, x, w, s, t: c.all_reduce(c.named(x, w, s, t, ScalingType.RowWise)[1:, :-1]),
        (((6, 16), E5M2), W, OF_X, ((1, 16), "scale")), "gemm_allreduce"),
    "numbers, bias of every rank": Pattern(
        lambda c, x, w, s, t, b: c.reduce_scatter(c.scaled(x, w, s, t, b, BF16)), (X, W, ONE, ONE, ((16,), BF16)),
        "gemm_reducescatter all_reduce", "gemm_reducescatter"),
    "rows, reduce-scatter of dim 1": Pattern(
        lambda c, x, w, s, t: c.reduce_scatter(c.scaled(x, w, s, t), 1),  # [B, S, N], cut along the sequence
        (((3, 4, 16), E4M3), W, ((3, 4, 1), "scale"), OF_W), "gemm_reducescatter"
    ),
    "rows, reduce-scatter of columns": Pattern(
        lambda c, x, w, s, t: c.reduce_scatter(c.scaled(x, w, s, t), 1), (X, W, OF_X, OF_W), "gemm_reducescatter"),
    "named rows, reduce-scatter": Pattern(
        lambda c, x, w, s, t: c.reduce_scatter(c.named(x, w, s, t, ScalingType.RowWise)),
        (X, W, ((6,), "scale"), ((16,), "scale")), "gemm_reducescatter"),
    "named numbers, all-reduce": Pattern(
        lambda c, x, w, s, t: c.all_reduce(c.named(x, w, s, t, ScalingType.TensorWise)), (X, W, ONE, ONE), "gemm_allreduce"),
    "numbers, all-gather of bytes": Pattern(gathered_as_bytes, (X, W, W, ONE, ONE), "allgather_gemm", "allgather_gemm.weights"),
    "numbers, all-gather of dim 1": Pattern(
        lambda c, x, w, s, t, b: c.scaled(c.all_gather(x, 1), w, s, t, b, BF16), (((2, 3, 16), E4M3), W, ONE, ONE, ((16,), BF16)),
        "allgather_gemm"),
    "numbers, all-gather of dim 1, joined as bytes": Pattern(
        gathered_joined_as_bytes, (((2, 3, 16), E4M3), W, ONE, ONE), "allgather_gemm"),
    "numbers, all-gather, cast": Pattern(
        lambda c, x, w, s, t: c.scaled(c.all_gather(x).to(E4M3), w, s, t), (((6, 16), F32), W, ONE, ONE), "allgather_gemm"),
    "rows, all-gather of dim 1": Pattern(
        gathered_with_scales, (((2, 3, 16), E4M3), W, ((32, 16), E4M3), ((2, 3, 1), "scale"), OF_W, ((32, 1), "scale")),
        "allgather_gemm", "allgather_gemm.weights allgather_gemm.weights"),
    "rows, all-gather by views": Pattern(
        scales_by_views, (((2, 3, 16), E4M3), W, ((2, 3, 1), "scale"), OF_W), "allgather_gemm", "allgather_gemm allgather_gemm"),
    "all-gather, reduce-scatter": Pattern(
        gathered_and_scattered, (X, W, ((32, 16), E4M3), ONE, ONE), "allgather_gemm gemm_reducescatter"),
}  # fmt: skip


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_inductor_fuses_gemms_with_scales(failures: Failures) -> None:
    check_patterns(failures, PATTERNS, False, Compiled(), Right())


@pytest.mark.long
@pytest.mark.ranks((2, "gloo"))
@pytest.mark.seconds(600)
def test_inductor_fuses_gemms_with_scales_of_dynamic_shapes(failures: Failures) -> None:
    some = list(PATTERNS.items())[:: 1 if rank_pool.whole_grids() else 3]
    check_patterns(failures, dict(some), True, Compiled(), Right())


@pytest.mark.long  # Inductor compiles C++ or Triton
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
@pytest.mark.seconds(600)
def test_inductor_compiles_gemms_with_scales(failures: Failures) -> None:
    for name in ("rows, all-gather of dim 1", "all-gather, reduce-scatter"):
        pattern = PATTERNS[name]
        torch._dynamo.reset()
        tensors = tensors_of(pattern.tensors)
        with inductor.enable(strict=True), torch.no_grad():
            found = torch.compile(partial(pattern.run, Compiled()), fullgraph=True)(*tensors)
        compare(failures, found, pattern.run(Right(), *tensors), name)
        rows = [row["op"] for row in inductor.report(clear=True)]
        failures.equal(rows, (pattern.rows or pattern.ops).split(), name, "rows")


# --- what is not fused ----------------------------------------------------------------------------------------


def scaled_by_what_is_gathered(c, x, w, s, t):
    g = c.all_gather(x)
    return c.scaled(g, w, g.float().abs().amax(), t)


# Why computations are not fused (a part of what is said of each collective), and whether it counts as missed.
REFUSED = {
    "sum": (
        lambda c, x, w, v, s, t: c.all_reduce(c.scaled(x, w, s, t) + c.scaled(x, v, s, t)),
        (X, W, W, ONE, ONE), ("a sum of 2 GEMMs with scales", True)),
    "blocks": (
        lambda c, x, w, s, t: c.reduce_scatter(torch._scaled_mm(x, w.t(), s, t, out_dtype=BF16)),
        (((16, 256), E4M3), ((128, 256), E4M3), ((16, 2), "scale"), ((2, 1), "scale")),
        ("aten._scaled_mm with scales of shapes [16, 2] and [2, 1]", True)),
    "fp8 output": (lambda c, x, w, s, t: c.all_reduce(c.scaled(x, w, s, t, out=E4M3)), (X, W, ONE, ONE), ("result is in float8_e4m3fn", True)),
    "scales of all rows": (
        lambda c, x, w, s, t: c.scaled(c.all_gather(x), w, s, t), (X, W, ((12, 1), "scale"), OF_W),
        ("which are not gathered as the rows are", True)),
    "scales of other rows": (
        # As many scales as rows, but of other rows.
        lambda c, x, w, s, t: c.scaled(c.all_gather(x, 1), w, c.all_gather(s), t),
        (((2, 2, 16), E4M3), W, ((2, 2, 1), "scale"), OF_W),
        ("which are not gathered as the rows are", True),
        ("it gathers scales of a GEMM's operand", False),
    ),
    "scales that depend": (scaled_by_what_is_gathered, (X, W, ONE, ONE), ("scales depend on it", True)),
    "part of the rows": (
        lambda c, x, w, s, t: c.scaled(c.all_gather(x)[:4], w, c.all_gather(s)[:4], t), (X, W, OF_X, OF_W),
        ("reads a part of it, with scales of rows", True), ("it gathers scales of a GEMM's operand", False)),
    "weight": (lambda c, x, w, s, t: c.scaled(x, c.all_gather(w), s, t), (X, W, ONE, ONE), ("it gathers a weight", False)),
    "second operand": (
        lambda c, x, w, s, t: c.scaled(x, c.all_gather((w.float() * 2).to(E4M3)), s, t), (X, W, ONE, ONE),
        ("the second operand of a GEMM with scales", False)),
    "joined as bytes along K": (
        lambda c, x, w, s, t: c.scaled(
            torch.cat(
                [part.view(torch.uint8) for part in c.all_gather(x).chunk(dist.get_world_size())], 1
            ).view(E4M3),
            w,
            s,
            t,
        ),
        (((6, 8), E4M3), W, ONE, ONE),
        ("along the dim that its GEMM sums over", False),
    ),
    "words of four": (
        lambda c, x, w, s, t: c.scaled(c.all_gather(x.view(torch.int32)).view(E4M3), w, s, t), (X, W, ONE, ONE),
        ("aten._scaled_mm, reads it through aten.view, which the pass does not follow", True)),
    "along K": (
        lambda c, x, w, s, t: c.scaled(c.all_gather(x, 1), w, s, t), (((6, 8), E4M3), W, ONE, ONE),
        ("along the dim that its GEMM sums over", False)),
}  # fmt: skip


@pytest.mark.ranks((2, "gloo"))
def test_inductor_says_why_it_leaves_gemms_with_scales(failures: Failures) -> None:
    for name, (run, tensors, *expected) in REFUSED.items():
        check_refused(failures, partial(run, Compiled()), tensors, expected, name)
