"""The benchmark's transformer block as a user of styles has it: modules, and one parallelize_module call."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
)

from overlap_torch.parallel import (
    OverlapColwiseParallel,
    OverlapPrepareModuleInput,
    OverlapRowwiseParallel,
)

# Mixes q, k and v, [tokens, features of this rank's heads] each -> [tokens, features of q].
Mix = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Attention(torch.nn.Module):
    """Without norm: [tokens, hidden] -> [tokens, hidden]."""

    def __init__(self, hidden: int, features: int, kv_features: int, mix: Mix) -> None:
        super().__init__()
        self.q = torch.nn.Linear(hidden, features, bias=False)
        self.k = torch.nn.Linear(hidden, kv_features, bias=False)
        self.v = torch.nn.Linear(hidden, kv_features, bias=False)
        self.out = torch.nn.Linear(features, hidden, bias=False)
        self.mix = mix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.mix(self.q(x), self.k(x), self.v(x)))


class Mlp(torch.nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(hidden, intermediate, bias=False)
        self.up = torch.nn.Linear(hidden, intermediate, bias=False)
        self.down = torch.nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class StyledBlock(torch.nn.Module):
    """Norm, attention, norm, MLP, of one rank's rows: [tokens / world, hidden] -> [tokens / world, hidden]."""

    def __init__(
        self, hidden: int, features: int, kv_features: int, intermediate: int, mix: Mix
    ) -> None:
        super().__init__()
        self.attention_norm = torch.nn.Parameter(torch.empty(hidden))
        self.attention = Attention(hidden, features, kv_features, mix)
        self.mlp_norm = torch.nn.Parameter(torch.empty(hidden))
        self.mlp = Mlp(hidden, intermediate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(F.rms_norm(x, self.attention_norm.shape, self.attention_norm))
        return x + self.mlp(F.rms_norm(x, self.mlp_norm.shape, self.mlp_norm))

    def set_parts(self, mesh: DeviceMesh, **parts: torch.Tensor) -> None:
        """This rank's part of each parameter, by its name with _ for dots; they share memory."""
        for name, _ in list(self.named_parameters()):
            part = parts[name.replace(".", "_").removesuffix("_weight")].detach()
            owner, _, attribute = name.rpartition(".")
            if attribute == "weight":
                dim = 1 if owner.endswith(("out", "down")) else 0
                part = DTensor.from_local(part, mesh, [Shard(dim)], run_check=False)
            setattr(self.get_submodule(owner), attribute, torch.nn.Parameter(part))


class Styles(NamedTuple):
    """Three styles of one origin."""

    prepare: type[PrepareModuleInput]
    columns: type[ColwiseParallel]
    rows: type[RowwiseParallel]

    def plan(self) -> dict[str, ParallelStyle]:
        """Tokens (dim 0) cut over the ranks outside of attention and MLP, features inside."""
        tokens: Placement = Shard(0)

        def prepare() -> ParallelStyle:
            return self.prepare(
                input_layouts=(tokens,), desired_input_layouts=(Replicate(),), use_local_output=True
            )

        return {
            "attention": prepare(),
            **{f"attention.{name}": self.columns() for name in ("q", "k", "v")},
            "attention.out": self.rows(output_layouts=tokens),
            "mlp": prepare(),
            **{f"mlp.{name}": self.columns() for name in ("gate", "up")},
            "mlp.down": self.rows(output_layouts=tokens),
        }


OVERLAP = Styles(OverlapPrepareModuleInput, OverlapColwiseParallel, OverlapRowwiseParallel)
PYTORCH = Styles(PrepareModuleInput, ColwiseParallel, RowwiseParallel)
