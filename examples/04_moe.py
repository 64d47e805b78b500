"""A mixture-of-experts layer over ranks: each rank holds some experts, and moe sends tokens to them and results home.

    python examples/04_moe.py                       starts a rank on each GPU, or 2 on the CPU
    torchrun --nproc-per-node 2 examples/04_moe.py

A router sends each token to two experts, so ranks send and get different numbers of rows, and some may get none. Outputs and
gradients are compared with a single-process layer that has all experts and all tokens.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.nn import functional

from overlap_torch import Gate, moe
from ranks import add_arguments, current_device, launch

CHOICES = 2  # experts of a token


class Experts(torch.nn.Module):
    """MLPs of one shape, `down(gelu(up(x)))`, and the router that chooses among them."""

    def __init__(self, count: int, width: int, hidden: int) -> None:
        super().__init__()
        self.router = torch.nn.Linear(width, count, bias=False)
        self.ups = torch.nn.ParameterList(
            [torch.randn(hidden, width) * width**-0.5 for _ in range(count)]
        )
        self.downs = torch.nn.ParameterList(
            [torch.randn(width, hidden) * hidden**-0.5 for _ in range(count)]
        )

    def choose(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each token's experts and their shares, both [tokens, CHOICES]."""
        shares, experts = self.router(tokens).softmax(-1).topk(CHOICES)
        return experts, shares / shares.sum(-1, keepdim=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The reference: every expert computes the tokens that chose it, in one process."""
        experts, shares = self.choose(tokens)
        output = torch.zeros_like(tokens)
        for index, (up, down) in enumerate(zip(self.ups, self.downs, strict=True)):
            rows, choice = (experts == index).nonzero(as_tuple=True)
            hidden = functional.gelu(functional.linear(tokens[rows], up))
            result = functional.linear(hidden, down) * shares[rows, choice, None]
            output = output.index_add(0, rows, result)
        return output


def parallel_forward(layer: Experts, tokens: torch.Tensor) -> torch.Tensor:
    """This rank's tokens through all ranks' experts, of which it computes its own."""
    local = len(layer.ups) // dist.get_world_size()
    mine = slice(dist.get_rank() * local, (dist.get_rank() + 1) * local)
    experts, shares = layer.choose(tokens)
    activation = Gate("gelu", gated=False)
    ups, downs = list(layer.ups)[mine], list(layer.downs)[mine]
    return moe(tokens, experts, shares, ups, downs, activation=activation)


@torch.no_grad()
def difference(own: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The largest, in units of the second tensor's largest value; an expert without tokens has gradients of zero."""
    return (own - right).abs().max() / right.abs().max().clamp(min=1e-6)


def work(options: argparse.Namespace) -> None:
    world_size, rank, device = dist.get_world_size(), dist.get_rank(), current_device()
    torch.manual_seed(0)  # every rank has the whole layer and all tokens, only for the comparison
    count = options.experts * world_size
    reference = Experts(count, options.width, 2 * options.width).to(device)
    parallel = Experts(count, options.width, 2 * options.width).to(device)
    parallel.load_state_dict(reference.state_dict())
    sizes = [options.tokens + 17 * r for r in range(world_size)]
    everything = torch.randn(sum(sizes), options.width, device=device)
    everything[:, 0] = 3
    with torch.no_grad():  # so that the first expert is popular and nobody chooses the last one
        for layer in (reference, parallel):
            layer.router.weight[0, 0], layer.router.weight[-1, 0] = 0.3, -100
    everything.requires_grad_()
    mine = everything.detach().split(sizes)[rank].clone().requires_grad_()

    expected, output = reference(everything), parallel_forward(parallel, mine)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    output.backward(gradient.split(sizes)[rank])

    dist.all_reduce(parallel.router.weight.grad)  # each rank's tokens contribute
    pairs = [
        (output, expected.split(sizes)[rank]),
        (mine.grad, everything.grad.split(sizes)[rank]),
        (parallel.router.weight.grad, reference.router.weight.grad),
    ]
    for number in range(rank * options.experts, (rank + 1) * options.experts):
        pairs.append((parallel.ups[number].grad, reference.ups[number].grad))
        pairs.append((parallel.downs[number].grad, reference.downs[number].grad))
    worst = torch.stack([difference(own, right) for own, right in pairs]).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)

    chosen = torch.bincount(parallel.choose(mine)[0].flatten(), minlength=count).tolist()
    for turn in range(world_size):
        if turn == rank:
            print(f"rank {rank}: {sizes[rank]} tokens, rows to experts {chosen}", flush=True)
        dist.barrier()
    if rank == 0:
        print(f"largest relative difference from the single-process layer: {worst.item():.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, "as many as there are GPUs, or 2 on the CPU")
    parser.add_argument("--experts", type=int, default=2, help="of each rank")
    parser.add_argument(
        "--tokens", type=int, default=300, help="of rank 0; each next one has 17 more"
    )
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()
    launch(work, options)


if __name__ == "__main__":
    main()
