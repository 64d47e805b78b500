"""docs/layers.md stands on these: a group, a mesh, tokens and a block."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
width, hidden, heads = 16, 32, 4
tokens = torch.ones(8 // dist.get_world_size(), width)


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (
            torch.nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x):
        q, k, v = (
            linear(x).unflatten(-1, (-1, 4)).transpose(1, 2)
            for linear in (self.wq, self.wk, self.wv)
        )
        return self.wo(
            torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        )


class FeedForward(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.mlp = Attention(), FeedForward()

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


block = Block()
