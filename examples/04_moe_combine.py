"""A mixture-of-experts layer over ranks: gemm_alltoall sends each token's result home while experts go on computing.

    python examples/04_moe_combine.py                       starts a rank on each GPU, or 2 on the CPU
    torchrun --nproc-per-node 2 examples/04_moe_combine.py

Every rank holds some experts and some tokens. A router sends each token to two experts, so how many rows a rank sends and
gets is uneven, and may be none. The second GEMM of an expert and the exchange that brings its rows back are one op.
Outputs and gradients are compared with a single-process layer that has all experts and all tokens.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_to_all_single
from torch.nn import functional

from overlap_torch import gemm_alltoall
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


def exchange_counts(counts: torch.Tensor) -> torch.Tensor:
    """[ranks, experts of a rank]: how many rows go to each expert of each rank; how many come from each rank."""
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts)
    return received


def parallel_forward(layer: Experts, tokens: torch.Tensor) -> torch.Tensor:
    """This rank's tokens through all ranks' experts, of which it computes its own."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    local = len(layer.ups) // world_size
    experts, shares = layer.choose(tokens)

    # Rows in the order of their experts, and so of the ranks that hold them.
    order = experts.flatten().argsort(stable=True)
    counts = torch.bincount(experts.flatten(), minlength=len(layer.ups)).view(world_size, local)
    sent, received = counts.tolist(), exchange_counts(counts).tolist()
    given = tokens[order // CHOICES]
    rows = all_to_all_single(
        given.new_empty(sum(map(sum, received)), given.shape[1]),
        given,
        [sum(of_rank) for of_rank in received],
        [sum(of_rank) for of_rank in sent],
    )
    # From each rank came the rows of all its experts here: pieces[source][expert].
    pieces = [
        part.split(of_rank)
        for part, of_rank in zip(rows.split([sum(r) for r in received]), received, strict=True)
    ]
    results = []
    for expert in range(local):
        mine = torch.cat([of_rank[expert] for of_rank in pieces])
        up, down = layer.ups[rank * local + expert], layer.downs[rank * local + expert]
        hidden = functional.gelu(functional.linear(mine, up))
        home = [of_rank[expert] for of_rank in received]
        back = [of_rank[expert] for of_rank in sent]
        # The results of every rank's expert of this number, in order of the ranks.
        results.append(gemm_alltoall(hidden, down, home, back).split(back))
    in_order = torch.cat([of_expert[r] for r in range(world_size) for of_expert in results])
    weighted = in_order * shares.flatten()[order, None]
    return torch.zeros_like(tokens).index_add(0, order // CHOICES, weighted)


@torch.no_grad()
def difference(own: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The largest, in units of the second tensor's largest value; an expert without tokens has gradients of zero."""
    return (own - right).abs().max() / right.abs().max().clamp(min=1e-6)


def work(options: argparse.Namespace) -> None:
    world_size, rank, device = dist.get_world_size(), dist.get_rank(), current_device()
    torch.manual_seed(0)  # every rank has the whole layer and all tokens, for the comparison alone
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
