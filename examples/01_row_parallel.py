"""A tensor-parallel MLP: the first layer's outputs are spread over the ranks, RowParallelLinear sums up the second's.

    torchrun --nproc-per-node 2 examples/01_row_parallel.py

Uses NCCL where there is a GPU for each rank, else gloo. It trains the parallel MLP beside an unsharded one with
the same weights and prints how far their outputs are apart.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from overlap_torch.nn import RowParallelLinear

TOKENS, WIDTH, HIDDEN, STEPS = 1024, 512, 2048, 3


class ParallelMlp(torch.nn.Module):
    """`down(gelu(up(x)))` of an unsharded MLP, a part of the hidden features on each rank."""

    def __init__(self, up: torch.nn.Linear, down: torch.nn.Linear) -> None:
        super().__init__()
        rank, world_size = dist.get_rank(), dist.get_world_size()
        weight = torch.tensor_split(up.weight.detach(), world_size, dim=0)[rank]
        self.up = torch.nn.Linear(up.in_features, weight.shape[0], bias=False, device=weight.device)
        self.up.weight.data.copy_(weight)
        self.down = RowParallelLinear.from_linear(down)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(input)))


def main() -> None:
    local_rank = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")

    torch.manual_seed(0)  # the same unsharded MLP and the same tokens on every rank
    up = torch.nn.Linear(WIDTH, HIDDEN, bias=False, device=device)
    down = torch.nn.Linear(HIDDEN, WIDTH, device=device)
    whole = torch.nn.Sequential(up, torch.nn.GELU(), down)
    parallel = ParallelMlp(up, down)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (whole, parallel)]
    for step in range(STEPS):
        tokens, target = torch.randn(2, TOKENS, WIDTH, device=device)
        outputs = [model(tokens) for model in (whole, parallel)]
        difference = (outputs[0] - outputs[1]).abs().max().item()
        for output, optimizer in zip(outputs, optimizers, strict=True):
            loss = torch.nn.functional.mse_loss(output, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(
                f"step {step}: loss {loss.item():.5f}, largest difference from the unsharded MLP {difference:.2e}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
