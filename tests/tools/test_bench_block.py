"""The benchmark's transformer block: the same computation as an unsharded one, and what is written."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from bench_runs import bench, check_times, lines_of, measure


@pytest.mark.ranks((2, "gloo"))
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bench_measures_a_block(ranks, tmp_path, dtype):
    path = tmp_path / "rows.jsonl"
    argv = ["--op", "block", "--device", "cpu", "--blocks", "32x4x2x48@8", "--repeats", "2"]
    ranks.run(measure, [*argv, "--dtype", dtype, "--modes", "row", "--json", str(path)])

    _, row = lines_of(path)
    assert (row["op"], row["block"], row["mode"]) == ("block", "custom", "row")
    sizes = ("hidden", "heads", "kv_heads", "intermediate", "tokens")
    assert [row[name] for name in sizes] == [32, 4, 2, 48, 8]
    assert row["checked"] is True
    assert "plan" not in row
    assert "pytorch_us" not in row
    check_times(row)


@pytest.mark.ranks((2, "gloo"))
def test_bench_measures_a_block_beside_pytorchs_styles(ranks, tmp_path):
    path = tmp_path / "rows.jsonl"
    argv = ["--op", "block", "--device", "cpu", "--blocks", "32x4x2x48@8", "--repeats", "2"]
    argv += ["--baselines", "pytorch", "--modes", "row", "--dtype", "fp32", "--json", str(path)]
    ranks.run(measure, argv)

    _, row = lines_of(path)
    assert row["checked"] is True
    assert row["pytorch_checked"] == {"styles": True} and row["pytorch_best"] == "styles"
    ratio = row["sequence_us"]["median"] / row["pytorch_us"]["styles"]["median"]
    assert row["pytorch_speedup"] == pytest.approx(ratio, abs=1e-3)
    check_times(row)


def gradients_of_block(styles: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A block's step by styles, and the same block's on one rank, cut to this rank's part."""
    block = bench("block")
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = bench("shapes").Block("custom", 16, 4, 2, 24, 8)
    device = torch.device("cpu")
    operands = block.Operands.draw(sizes, torch.float64, device)
    found = block.styled_results(sizes, operands, getattr(bench("styled"), styles))

    def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(world)]
        dist.all_gather(parts, tensor.detach().contiguous())
        return parts

    # The unsharded block, written without the module under test: parts of each rank side by side.
    x = torch.cat(gathered(operands.x)).requires_grad_()
    grad = torch.cat(gathered(operands.grad))
    norms = [operands.attention_norm, operands.mlp_norm]
    q, k, v = (
        torch.cat(parts)
        for parts in zip(*(part.split([8, 4, 4]) for part in gathered(operands.qkv)), strict=True)
    )
    out = torch.cat(gathered(operands.out), dim=1)
    gate, up = (
        torch.cat(parts)
        for parts in zip(*(part.chunk(2) for part in gathered(operands.gate_up)), strict=True)
    )
    down = torch.cat(gathered(operands.down), dim=1)
    weights = [tensor.requires_grad_() for tensor in (q, k, v, out, gate, up, down)]

    def heads(features: torch.Tensor, count: int) -> torch.Tensor:
        return features.view(8, count, 4).transpose(0, 1)

    normed = F.rms_norm(x, (16,), norms[0])
    keys, values = (heads(normed @ w.t(), 2).repeat_interleave(2, dim=0) for w in (k, v))
    scores = heads(normed @ q.t(), 4) @ keys.transpose(1, 2) / 2.0
    scores = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), -math.inf)
    mixed = (scores.softmax(-1) @ values).transpose(0, 1).reshape(8, 16)
    middle = x + mixed @ out.t()
    normed = F.rms_norm(middle, (16,), norms[1])
    result = middle + (F.silu(normed @ gate.t()) * (normed @ up.t())) @ down.t()
    grads = torch.autograd.grad(result, [x, *weights], grad)
    grad_x, grad_q, grad_k, grad_v, grad_out, grad_gate, grad_up, grad_down = grads

    def cut(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return tensor.chunk(world, dim)[rank]

    expected = [
        cut(result.detach()),
        cut(grad_x),
        torch.cat([cut(grad_q), cut(grad_k), cut(grad_v)]),
        cut(grad_out, 1),
        torch.cat([cut(grad_gate), cut(grad_up)]),
        cut(grad_down, 1),
    ]
    output, x_grad, _, qkv, out_grad, _, gate_up, down_grad = found
    return [output, x_grad, qkv, out_grad, gate_up, down_grad], expected


@pytest.mark.ranks((2, "gloo"))
@pytest.mark.parametrize("styles", ["OVERLAP", "PYTORCH"])
def test_bench_block_computes_the_unsharded_block(ranks, styles):
    for found, expected in ranks.run(gradients_of_block, styles):
        for value, true in zip(found, expected, strict=True):
            torch.testing.assert_close(value, true, rtol=1e-9, atol=1e-9)
