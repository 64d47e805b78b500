"""README's layers stand on these: a group, a mesh and a block."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, init_device_mesh  # noqa: F401
from torch.distributed.tensor.parallel import parallelize_module  # noqa: F401

dist.init_process_group("gloo")
device_mesh = init_device_mesh("cpu", (dist.get_world_size(),))


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = torch.nn.Linear(16, 32), torch.nn.Linear(16, 32)
        self.down = torch.nn.Linear(32, 16)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


block = torch.nn.ModuleDict({"mlp": Mlp()})
