"""Tensor-parallel MLPs: ColumnParallelLinear divides hidden features among the ranks, RowParallelLinear sums them up.

    torchrun --nproc-per-node 2 examples/01_row_parallel.py

The program uses NCCL if there is a GPU for each rank, else gloo. It trains two such MLPs, one after the other, and the same
MLPs unsharded, with equal weights. It prints how much their outputs and gradients differ.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from overlap_torch.nn import ColumnParallelLinear, RowParallelLinear

TOKENS, WIDTH, HIDDEN, STEPS = 1024, 512, 2048, 3


class Mlp(torch.nn.Module):
    """`input + down(gelu(up(input)))`."""

    def __init__(self, up: torch.nn.Module, down: torch.nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input + self.down(torch.nn.functional.gelu(self.up(input)))


def parallel(mlp: Mlp) -> Mlp:
    """The same MLP, a part of the hidden features on each rank.

    `up` must be a column-parallel layer: a plain Linear with a part of the weight computes the same output, but its
    input's gradient would be only this rank's part of the sum.
    """
    return Mlp(ColumnParallelLinear.from_linear(mlp.up), RowParallelLinear.from_linear(mlp.down))


def main() -> None:
    local_rank = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")

    torch.manual_seed(0)  # the same unsharded MLPs and the same tokens on every rank
    mlps = [
        Mlp(
            torch.nn.Linear(WIDTH, HIDDEN, device=device),
            torch.nn.Linear(HIDDEN, WIDTH, device=device),
        )
        for _ in range(2)
    ]
    models = [torch.nn.Sequential(*(parallel(mlp) for mlp in mlps)), torch.nn.Sequential(*mlps)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(STEPS):
        tokens, target = torch.randn(2, TOKENS, WIDTH, device=device)
        outputs = [model(tokens) for model in models]
        for output, optimizer in zip(outputs, optimizers, strict=True):
            loss = torch.nn.functional.mse_loss(output, target)
            optimizer.zero_grad()
            loss.backward()
        apart = (outputs[0] - outputs[1]).abs().max().item()
        # The parallel layers' parameters and their gradients are DTensors.
        gradients_apart = max(
            ((own.grad.full_tensor() - right.grad).norm() / right.grad.norm()).item()
            for own, right in zip(*(model.parameters() for model in models), strict=True)
        )
        for optimizer in optimizers:
            optimizer.step()
        if dist.get_rank() == 0:
            print(
                f"step {step}: loss {loss.item():.5f}, from the unsharded MLPs' outputs {apart:.1e}, "
                f"from their gradients relative {gradients_apart:.1e}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
