"""A layer of experts, with or without a router; its parameters are DTensors divided among the group's ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from overlap_torch._layers.dtensor import wrap
from overlap_torch._layers.meshes import group_mesh, note_mesh
from overlap_torch._layers.placements import local_parts
from overlap_torch._layers.sharding import checked_count, shard_range
from overlap_torch._moe.activation import Gate
from overlap_torch._moe.checks import check_options, check_scaled_sizes, check_way
from overlap_torch._moe.functions import moe
from overlap_torch._moe.scaled import block_quantized, row_quantized
from overlap_torch._ops import Group, group_name
from overlap_torch._ops.group import broadcast_integers, place_of
from overlap_torch.nn.parameters import holds_numbers, placed

Router = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class MoE(torch.nn.Module):
    """A mixture of experts over the group's ranks, by :func:`overlap_torch.moe`.

    ``gate_up`` [E, 2I, H], ``down`` [E, H, I], and with ``bias`` ``gate_up_bias`` [E, 2I] and ``down_bias`` [E, H], are DTensors,
    ``Shard(0)`` over the group's mesh: rank r computes the experts that ``torch.chunk`` gives it. ``load_state_dict`` takes DTensors
    on that mesh, the whole tensors, and this rank's parts. The parameters of ``router`` and ``shared`` are the caller's:
    their gradients are from this rank's tokens only.

    Args:
        hidden_size, intermediate_size, num_experts: H, I and the number E of all ranks' experts.
        bias: whether the experts have biases.
        activation, interleaved, shares_on, save, sum_order, max_tokens, max_rows, transport: as :func:`overlap_torch.moe`.
        router: a module or function of x [..., H] that returns (topk_ids, topk_weights), both [..., K]. None: ``forward``
            takes them.
        shared: a module or function of x, whose result is added, such as experts that serve every token.
        group: None (the default group), a process group's name, a ``ProcessGroup`` or a one-dimensional ``DeviceMesh``.
        device, dtype: of the parameters.

    Raises:
        ValueError: sizes that are not positive, and as :func:`overlap_torch.moe`.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        *,
        bias: bool = False,
        activation: str | Gate = "silu",
        interleaved: bool = False,
        shares_on: str = "output",
        save: str = "rows",
        sum_order: str = "choices",
        max_tokens: int | None = None,
        max_rows: int | None = None,
        transport: str | None = None,
        router: Router | None = None,
        shared: Callable[[torch.Tensor], torch.Tensor] | None = None,
        group: Group = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
        for name, value in (sizes | {"num_experts": num_experts}).items():
            checked_count(name, value)
        check_options(shares_on, save, interleaved)
        check_way(sum_order, (max_tokens, max_rows), transport)
        if min(hidden_size, intermediate_size, num_experts) < 1:
            raise ValueError(
                "hidden_size, intermediate_size and num_experts are at least 1, but got "
                f"{hidden_size}, {intermediate_size} and {num_experts}"
            )
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.num_experts = num_experts
        self.activation = Gate.of(activation)
        self.interleaved, self.shares_on, self.save = interleaved, shares_on, save
        self.sum_order, self.transport = sum_order, transport
        self.max_tokens, self.max_rows = max_tokens, max_rows
        self.router, self.shared = router, shared
        self.group = group_name(group)
        self.world_size, self.rank = place_of(self.group)
        columns = (2 if self.activation.gated else 1) * intermediate_size
        self._shapes = {
            "gate_up": (num_experts, columns, hidden_size),
            "down": (num_experts, hidden_size, intermediate_size),
        }
        if bias:
            self._shapes["gate_up_bias"] = (num_experts, columns)
            self._shapes["down_bias"] = (num_experts, hidden_size)
        made = torch.empty(0, device=device)
        if isinstance(group, DeviceMesh):
            note_mesh(group)
        self._mesh = group if isinstance(group, DeviceMesh) else None
        own = shard_range(num_experts, self.world_size, self.rank)[1]
        for name, shape in self._shapes.items():
            local = torch.empty((own, *shape[1:]), device=made.device, dtype=dtype)
            self.register_parameter(name, torch.nn.Parameter(self._whole(name, local)))
        for name in ("gate_up_bias", "down_bias", "scale_gate_up", "scale_down"):
            if name not in self._shapes:
                self.register_parameter(name, None)
        self.reset_parameters()

    # The original method, because accelerate's init_empty_weights replaces it by one that takes no DTensors.
    register_parameter = torch.nn.Module.register_parameter

    @torch.no_grad()
    def _whole(self, name: str, local: torch.Tensor) -> DTensor:
        kind = local.device.type
        mesh = self._mesh
        if mesh is None or mesh.device_type != kind:
            mesh = group_mesh(self.group, "cpu" if kind == "meta" else kind)
        return wrap(local, mesh, (Shard(0),), self._shapes[name])

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the experts as ``torch.nn.Linear`` does, each rank its own, by a seed of the group's first rank.

        This is a collective call, except for parameters on ``meta`` and fake ones, which it does not change.
        """
        if not holds_numbers(self.gate_up):
            return
        if self.scale_down is not None:
            raise ValueError("reset_parameters draws no fp8 weights; call it before cast_to_fp8")
        seed = broadcast_integers([int(torch.randint(2**31, (), device="cpu").item())], self.group)[
            0
        ]
        generator = torch.Generator(self.gate_up.to_local().device).manual_seed(seed + self.rank)
        for name in self._shapes:
            inner = self.intermediate_size if name.startswith("down") else self.hidden_size
            bound = 1 / math.sqrt(inner)
            getattr(self, name).to_local().uniform_(-bound, bound, generator=generator)

    @torch.no_grad()
    def cast_to_fp8(self, recipe: str = "rowwise") -> MoE:
        """Casts the experts for inference, in place: weights to float8_e4m3fn with parameters ``scale_gate_up`` and
        ``scale_down``, biases to bfloat16.

        A scale is a largest absolute value divided by 448. ``forward`` then takes x in bfloat16, and has no gradients. A
        layer that was cast loads the state dict of such a layer. Casts of the layer's dtype come before this one.

        Args:
            recipe: ``"rowwise"``, a scale for each row of a weight: [E, 2I] and [E, H]. ``"blockwise"``, one for each 128 rows
                and 128 columns: [E, ceil(2I / 128), ceil(H / 128)] and [E, ceil(H / 128), ceil(I / 128)].

        Returns:
            The layer.

        Raises:
            ValueError: the layer is cast, or on ``meta``; or H or I is no multiple of 16; or the recipe is another one.
        """
        if recipe not in ("rowwise", "blockwise"):
            raise ValueError(f'cast_to_fp8 takes "rowwise" or "blockwise", but got {recipe!r}')
        check_scaled_sizes("cast_to_fp8", self.hidden_size, self.intermediate_size)
        if self.scale_down is not None or self.down.is_meta:
            what = "on meta" if self.down.is_meta else "in float8_e4m3fn"
            raise ValueError(f"cast_to_fp8 takes a layer's weights once, but they are {what}")
        for name in ("gate_up", "down"):
            local = self._parameters[name].to_local()
            values, scales = row_quantized(local) if recipe == "rowwise" else block_quantized(local)
            self._shapes[f"scale_{name}"] = (self.num_experts, *scales.shape[1:])
            self._replace(name, values)
            self._replace(f"scale_{name}", scales)
            if (bias := self._parameters[f"{name}_bias"]) is not None:
                self._replace(f"{name}_bias", bias.to_local().bfloat16())
        return self

    def _replace(self, name: str, local: torch.Tensor) -> None:
        whole = self._whole(name, local)
        self.register_parameter(name, torch.nn.Parameter(whole, requires_grad=False))

    @torch.no_grad()
    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        begin, own = shard_range(self.num_experts, self.world_size, self.rank)
        for name, shape in self._shapes.items():
            value, parameter = state_dict.get(prefix + name), self._parameters[name]
            if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
                continue
            if value.shape == shape:
                value = value[begin : begin + own]
            if isinstance(parameter, DTensor) and value.shape == (own, *shape[1:]):
                mesh = parameter.device_mesh  # FSDP2's has more dims than the group's
                by_group = mesh.ndim == 1
                state_dict[prefix + name] = (
                    self._whole(name, value) if by_group else placed(value, parameter, mesh)
                )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def forward(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[..., H] to [..., H]: this rank's tokens, with their experts and shares [..., K] unless the layer has a router.

        Raises:
            TypeError: ids and shares given to a layer with a router, or not given to one without.
        """
        if (self.router is None) != (topk_ids is not None and topk_weights is not None):
            raise TypeError(
                "MoE takes topk_ids and topk_weights without a router, and x only with one; its router is "
                f"{type(self.router).__name__}"
            )
        if self.router is not None:
            topk_ids, topk_weights = self.router(x)
        read = x.requires_grad or self.save == "nothing"
        gate_up, gate_up_bias = local_parts(self.gate_up, self.gate_up_bias, read)
        read = read or self.gate_up.requires_grad or topk_weights.requires_grad
        down, down_bias = local_parts(self.down, self.down_bias, read)
        scale_gate_up, scale_down = local_parts(self.scale_gate_up, self.scale_down)
        output = moe(
            x,
            topk_ids,
            topk_weights,
            gate_up,
            down,
            num_experts=self.num_experts,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            activation=self.activation,
            interleaved=self.interleaved,
            scale_gate_up=scale_gate_up,
            scale_down=scale_down,
            shares_on=self.shares_on,
            save=self.save,
            sum_order=self.sum_order,
            max_tokens=self.max_tokens,
            max_rows=self.max_rows,
            transport=self.transport,
            group=self.group,
        )
        return output if self.shared is None else output + self.shared(x)

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}, num_experts={self.num_experts}, "
            f"bias={'down_bias' in self._shapes}, {self.activation}, rank={self.rank}, world_size={self.world_size}"
        )
