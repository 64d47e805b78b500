"""Parameters of the parallel layers: how they are drawn, stored, loaded and put together."""

from __future__ import annotations

import io
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

import rank_pool
from checks import Failures, message_of
from layers import integer_linear, my_part
from meshes import mesh
from operands import difference, rank_device
from overlap_torch.nn import ColumnParallelLinear, RowParallelLinear, full_state_dict

KINDS = (ColumnParallelLinear, RowParallelLinear)
CUT_DIMS = {
    ColumnParallelLinear: {"weight": 0, "bias": 0},
    RowParallelLinear: {"weight": 1},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.ranks((2, "gloo"), (3, "gloo"), (2, "nccl"))
def test_nn_state_is_drawn_as_linears(failures: Failures, kind: type[torch.nn.Module]) -> None:
    """A new layer's parameters: what is cut differs between ranks, the rest does not, and all lie in Linear's bounds."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    layer = kind(60 * world, 40 * world, device=rank_device())
    bound = (60 * world) ** -0.5
    shapes = {"weight": [40 * world, 60 * world], "bias": [40 * world]}
    for name, parameter in layer.named_parameters():
        dim = CUT_DIMS[kind].get(name)
        shape = list(parameter.shape)
        failures.expect(None if shape == shapes[name] else f"shape {shape}", name)
        if dim is not None:
            shapes[name][dim] //= world
        parameter = parameter.to_local()
        shape = list(parameter.shape)
        failures.expect(None if shape == shapes[name] else f"local shape {shape}", name)
        inside = parameter.detach().abs().max().item() <= bound
        failures.expect(None if inside else "beyond Linear's bound", name)
        # Some of that many draws from a uniform distribution come near both ends.
        low, high = parameter.min().item(), parameter.max().item()
        spread = low < -0.5 * bound and high > 0.5 * bound
        failures.expect(None if spread else f"only {low} to {high}", name)
        peers = [torch.empty_like(parameter.data) for _ in range(world)]
        dist.all_gather(peers, parameter.data)
        for peer in range(world):
            alike = torch.equal(peers[peer], parameter.data)
            right = alike if dim is None or peer == rank else not alike
            failures.expect(None if right else f"alike: {alike}", name, "of rank", peer)


def my_state(kind: type[torch.nn.Module], whole: dict[str, torch.Tensor]) -> dict:
    """This rank's parts, as plain tensors."""
    dims = CUT_DIMS[kind]
    return {
        name: my_part(value, dims[name]) if name in dims else value for name, value in whole.items()
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (3, "gloo"), (2, "nccl"))
def test_nn_state_dicts_are_parts_of_linears(
    failures: Failures, kind: type[torch.nn.Module]
) -> None:
    for in_features, out_features in ((12, 8), (13, 7), (7, 4), (2, 1)):
        linear = integer_linear(in_features, out_features, True)
        whole = linear.state_dict()
        where = (in_features, out_features)

        layer = kind.from_linear(linear)
        parts = my_state(kind, whole)
        for name, value in layer.state_dict().items():
            failures.expect(difference(value.to_local(), parts[name]), *where, name, "from_linear")
            shape = value.shape == whole[name].shape
            failures.expect(None if shape else f"shape {value.shape}", *where, name)

        # All that loads into a new layer, copied or taken over.
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        file.seek(0)
        states = {
            "DTensors": torch.load(file),
            "replicated DTensors": {
                name: DTensor.from_local(value, mesh(), [Replicate()])
                for name, value in whole.items()
            },
            "parts": parts,
            "whole": whole,
        }
        for (what, state), assign in itertools.product(states.items(), (False, True)):
            device = "meta" if assign else rank_device()
            other = torch.nn.ModuleDict({"inner": kind(in_features, out_features, device=device)})
            other.load_state_dict({f"inner.{k}": v for k, v in state.items()}, assign=assign)
            for name, value in other["inner"].state_dict().items():
                place = (*where, name, "from", what, "assigned", assign)
                local = value.to_local()
                failures.expect(difference(local, parts[name]), *place)
                spec = layer.get_parameter(name)._spec
                failures.expect(None if value._spec == spec else f"{value._spec}", *place)
                size = local.untyped_storage().nbytes()
                keeps = what == "whole" and assign and name in CUT_DIMS[kind]
                kept = keeps and size > local.numel() * local.element_size()
                failures.expect("keeps the whole alive" if kept else None, *place)
        for name, value in layer.full_state_dict().items():
            plain = type(value) is torch.Tensor
            failures.expect(None if plain else f"a {type(value)}", *where, name, "gathered")
            failures.expect(difference(value, whole[name]), *where, name, "gathered")
        model = torch.nn.Sequential(layer, torch.nn.LayerNorm(3, device=rank_device()))
        gathered = full_state_dict(model)
        names = sorted(gathered)
        right = ["0.bias", "0.weight", "1.bias", "1.weight"]
        failures.expect(None if names == right else f"names {names}", *where)
        failures.expect(difference(gathered["0.weight"], whole["weight"]), *where, "in a model")


def pickled_state(kind: type[torch.nn.Module]) -> bytes:
    file = io.BytesIO()
    torch.save(kind.from_linear(integer_linear(12, 8, True)).state_dict(), file)
    return file.getvalue()


def load_of_another(kind: type[torch.nn.Module], state: bytes) -> str:
    layer = kind(12, 8, device=rank_device())
    return message_of(layer.load_state_dict, torch.load(io.BytesIO(state), weights_only=False))


@pytest.mark.parametrize("kind", KINDS)
def test_nn_state_dicts_of_another_rank_are_refused(kind):
    states = rank_pool.run(2, "gloo", pickled_state, kind)
    own, other = rank_pool.run(2, "gloo", load_of_another, kind, states[0])
    assert own == "" and "pickled by another rank" in other
    for world in (1, 3):
        for message in rank_pool.run(world, "gloo", load_of_another, kind, states[0]):
            assert (
                "another number of ranks" in message and "torch.distributed.checkpoint" in message
            )


def store_alone(kind: type[torch.nn.Module]) -> list[str]:
    """Rank 0 saves and loads while the others do not: that communicates nothing, or it would hang."""
    linear = integer_linear(13, 7, True)
    layer = kind.from_linear(linear)
    if dist.get_rank() == 0:
        layer.load_state_dict(layer.state_dict())
        layer.load_state_dict(my_state(kind, linear.state_dict()))
        layer.load_state_dict(linear.state_dict())
    wrong = {"weight": torch.zeros(5, 4), "bias": torch.zeros(7)}
    try:
        layer.load_state_dict(wrong)
    except RuntimeError as error:
        return [str(error)]
    return []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.ranks((2, "gloo"), (3, "gloo"), (2, "nccl"))
def test_nn_state_dicts_load_without_communication(ranks, kind):
    for (message,) in ranks.run(store_alone, kind):
        assert "size mismatch for weight" in message
