"""The Functions of ``torchtitan.distributed.linear``, of release 0.3, by this package's ops.

Their base classes tell torchtitan's type checker how to treat a call, by the names that `torchtitan.enable` swaps.
"""

from __future__ import annotations

import spmd_types
import torch
import torch.distributed as dist
from torchtitan.distributed import linear

from overlap_torch._layers.maps import Plain, column_gradients, row_gradients
from overlap_torch._ops import allgather_gemm, gemm_reducescatter
from overlap_torch._ops.gradients import Gradient, rows, weight_gradient


@spmd_types.register_autograd_function
class AllGatherLinear(linear.AllGatherLinear):
    """This rank's tokens [rows, K] to all tokens' [ranks * rows, N part]."""

    @staticmethod
    def forward(
        ctx,
        x_shard_m: torch.Tensor,
        w_shard_n: torch.Tensor,
        bias_shard_n: torch.Tensor | None,
        group: dist.ProcessGroup,
        group_name: str,
    ) -> torch.Tensor:
        output, _ = allgather_gemm(x_shard_m, w_shard_n, bias_shard_n, group=group_name)
        ctx.save_for_backward(w_shard_n, x_shard_m)
        ctx.group_name = group_name
        return output

    @staticmethod
    def backward(ctx, grad_y_shard_n: torch.Tensor) -> tuple[Gradient, ...]:
        by, needs = Plain(ctx.group_name, sequence=True), ctx.needs_input_grad[:3]
        found = column_gradients(by, [grad_y_shard_n], ctx.saved_tensors, needs)
        return *found, None, None


@spmd_types.register_autograd_function
class AllGatherLinearMulti(linear.AllGatherLinearMulti):
    """`AllGatherLinear` of two weights: one gather, and backward one reduce-scatter."""

    @staticmethod
    def forward(
        ctx,
        x_shard_m: torch.Tensor,
        wa_shard_n: torch.Tensor,
        wb_shard_n: torch.Tensor,
        group: dist.ProcessGroup,
        group_name: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, _ = allgather_gemm(x_shard_m, [wa_shard_n, wb_shard_n], group=group_name)
        ctx.save_for_backward(wa_shard_n, wb_shard_n, x_shard_m)
        ctx.group_name = group_name
        return outputs[0], outputs[1]

    @staticmethod
    def backward(
        ctx, grad_ya_shard_n: torch.Tensor, grad_yb_shard_n: torch.Tensor
    ) -> tuple[Gradient, ...]:
        by, needs = Plain(ctx.group_name, sequence=True), (*ctx.needs_input_grad[:3], False, False)
        grads = [grad_ya_shard_n, grad_yb_shard_n]
        found = column_gradients(by, grads, ctx.saved_tensors, needs)
        return *found[:3], None, None


@spmd_types.register_autograd_function
class LinearReduceScatter(linear.LinearReduceScatter):
    """All tokens' [rows, K part] to this rank's [rows / ranks, N]. The bias's gradient is summed over the ranks."""

    @staticmethod
    def forward(
        ctx,
        x_shard_k: torch.Tensor,
        w_shard_k: torch.Tensor,
        bias: torch.Tensor | None,
        group: dist.ProcessGroup,
        group_name: str,
    ) -> torch.Tensor:
        output = gemm_reducescatter(x_shard_k, w_shard_k, bias, group=group_name)
        ctx.save_for_backward(w_shard_k, x_shard_k)
        ctx.group, ctx.group_name = group, group_name
        return output

    @staticmethod
    def backward(ctx, grad_y_shard_m: torch.Tensor) -> tuple[Gradient, ...]:
        by = Plain(ctx.group_name, sequence=True, weight_gradient=_summed_in_float32)
        needs = ctx.needs_input_grad[:3]
        (*found, grad_bias), _ = row_gradients(by, grad_y_shard_m, ctx.saved_tensors, needs)
        if grad_bias is not None:
            dist.all_reduce(grad_bias, group=ctx.group)
        return *found, grad_bias, None, None


def _summed_in_float32(grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """The weight's gradient, summed in float32 as in torchtitan's Function; cuBLAS may otherwise add parts in bfloat16."""
    if input.device.type == "cpu" or input.dtype not in (torch.bfloat16, torch.float16):
        return weight_gradient(grad, input)
    product = torch.mm(rows(grad).t(), rows(input), out_dtype=torch.float32)
    return product.to(input.dtype)


PAIRS: dict[type, type] = {
    linear.AllGatherLinear: AllGatherLinear,
    linear.AllGatherLinearMulti: AllGatherLinearMulti,
    linear.LinearReduceScatter: LinearReduceScatter,
}
