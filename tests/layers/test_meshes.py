"""The meshes of layers, and what becomes of DTensors of other meshes, nested tensors, and groups
that are made again.
"""

import copy
import gc
import itertools
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import overlap_torch
from checks import Failures, message_of
from layers import chain, integer_linear, integers
from meshes import OVERLAP, PYTORCH, mesh
from operands import difference, rank_device
from overlap_torch.nn import ColumnParallelLinear, RowParallelLinear, full_state_dict
from overlap_torch.plan import Problem

LAYOUTS = (Replicate(), Shard(0), Shard(1), Shard(-1), Partial())


def other_meshes(layers: DeviceMesh) -> dict[str, tuple[DeviceMesh, bool]]:
    """Meshes of inputs, and whether they are the layer's own ranks in their order."""
    kind = rank_device().type
    grid = mesh(2, 2)
    ranks = layers.mesh.tolist()
    return {
        "the layer's": (layers, True),
        "an equal one": (grid["tp"], True),
        "of its group": (DeviceMesh.from_group(layers.get_group(), kind), True),
        "the other dim's": (grid["dp"], False),
        "all ranks": (mesh(), False),
        "two dims": (grid, False),
        "reversed": (init_reversed(), ranks == [3, 2, 1, 0]),
    }


def init_reversed() -> DeviceMesh:
    return DeviceMesh(rank_device().type, torch.arange(dist.get_world_size()).flip(0))


def outcome(block: torch.nn.Module, input: torch.Tensor) -> list[torch.Tensor] | Exception:
    """Output and gradients as whole tensors."""
    try:
        output = block(input)
        whole = output.full_tensor() if hasattr(output, "full_tensor") else output
        whole.sum().backward()
        gradients = [input.grad, *(parameter.grad for parameter in block.parameters())]
        return [whole.detach(), *(gradient.full_tensor() for gradient in gradients)]
    except (RuntimeError, ValueError, NotImplementedError, IndexError, AssertionError) as error:
        return error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("prepared", [False, True], ids=["given", "prepared"])
@pytest.mark.ranks((4, "gloo"), (4, "nccl"))
def test_inputs_of_other_meshes_are_right_or_refused(
    failures: Failures, prepared: bool, dtype: torch.dtype
) -> None:
    layers = mesh(2, 2)["tp"]
    whole = chain(linear=integer_linear(8, 12, True, dtype))
    value = integers(4, 6, 8, seed=3, dtype=dtype)
    plain = value.clone().requires_grad_()
    right = whole(plain)
    right.sum().backward()
    expected = [right.detach(), plain.grad, *(own.grad for own in whole.parameters())]
    for (name, (given, same)), layout, row in itertools.product(
        other_meshes(layers).items(), LAYOUTS, (False, True)
    ):
        where = (name, layout, "rows" if row else "columns")

        def built(kinds, layout=layout, row=row):
            prepare, column, rows = kinds
            styles = {"linear": (rows if row else column)(output_layouts=Replicate())}
            if prepared:
                wanted = Shard(-1) if row else Replicate()
                styles[""] = prepare(input_layouts=layout, desired_input_layouts=wanted)
            model = copy.deepcopy(whole)
            for parameter in model.parameters():
                parameter.grad = None
            return parallelize_module(model, layers, styles)

        def made(given=given, layout=layout):
            placements = [Replicate()] * (given.ndim - 1) + [layout]
            if layout.is_partial():  # of which the first rank has all
                first = given.get_coordinate()[-1] == 0
                part = value if first else torch.zeros_like(value)
                return DTensor.from_local(part, given, placements).detach().requires_grad_()
            return distribute_tensor(value, given, placements).detach().requires_grad_()

        ours, theirs = (outcome(built(kinds), made()) for kinds in (OVERLAP, PYTORCH))
        if not same:
            said = isinstance(ours, ValueError) and "the layer's mesh is" in str(ours)
            failures.expect(None if said else f"gave {ours!r}", *where)
            raised = isinstance(theirs, Exception)
            failures.expect(None if raised else f"PyTorch takes it: {theirs}", *where)
        elif isinstance(ours, Exception):
            failures.expect(f"raised {ours!r}", *where)
        else:
            failures.expect_equal(ours, expected, *where)


@pytest.mark.ranks((4, "gloo"))
def test_meshes_and_parameters_of_other_ranks_are_refused(failures: Failures) -> None:
    """Meshes and parameters that layers and styles refuse, by name."""
    layers = mesh(2, 2)["tp"]
    turned = init_reversed()
    foreign = distribute_tensor(integers(12, 8, seed=1), mesh(2, 2)["dp"], [Shard(0)])

    def call(layer: torch.nn.Module) -> object:
        return torch.func.functional_call(layer, {"weight": foreign}, (integers(4, 8, seed=2),))

    for job, said in (
        (lambda: ColumnParallelLinear(8, 12, group=turned), "[3, 2, 1, 0]"),
        (lambda: ColumnParallelLinear(8, 12, group=turned, device="meta"), "ascending"),
        (lambda: styled(OVERLAP[1], turned), "ascending"),
        (lambda: styled(OVERLAP[2], turned), "ascending"),
        (lambda: call(ColumnParallelLinear(8, 12, group=layers)), "its weight is a DTensor"),
        (lambda: call(RowParallelLinear(16, 12, group=layers)), "its weight is a DTensor"),
        (lambda: call(styled(OVERLAP[1], layers)), "its weight is a DTensor"),
        (lambda: ColumnParallelLinear(8, 12)(foreign), "its input is a DTensor on"),
        (lambda: RowParallelLinear(8, 12)(foreign), "its input is a DTensor on"),
    ):
        failures.holds(said, message_of(job), said)
    # A state dict of another mesh is what load_state_dict redistributes.
    layer = ColumnParallelLinear(8, 12, group=layers, bias=False)
    layer.load_state_dict({"weight": foreign})
    failures.expect(difference(full_state_dict(layer)["weight"], foreign.full_tensor()), "loaded")


def styled(style: type, ranks: DeviceMesh) -> torch.nn.Module:
    return parallelize_module(integer_linear(8, 12, True), ranks, style())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_nested_tensors_are_refused_with_what_to_call(failures: Failures) -> None:
    weight = integers(12, 8, seed=1)
    world = dist.get_world_size()
    counts = [5] + [0] * (world - 1)
    for layout, gradient in itertools.product((torch.jagged, torch.strided), (False, True)):
        rows = [integers(size, 8, seed=size) for size in (2, 3)]
        nested = torch.nested.nested_tensor(rows, layout=layout, requires_grad=gradient)
        for name, job in {
            "gemm_allreduce": lambda of: overlap_torch.gemm_allreduce(of, weight),
            "gemm_reducescatter": lambda of: overlap_torch.gemm_reducescatter(of, weight),
            "allgather_gemm": lambda of: overlap_torch.allgather_gemm(of, [weight]),
            "gemm_alltoall": lambda of: overlap_torch.gemm_alltoall(of, weight, counts, counts),
            "ColumnParallelLinear": lambda of: ColumnParallelLinear(8, 12)(of),
            "RowParallelLinear": lambda of: RowParallelLinear(8 * world, 12)(of),
            "OverlapColwiseLinear": lambda of: styled(OVERLAP[1], mesh())(of),
            "OverlapRowwiseLinear": lambda of: styled(OVERLAP[2], mesh())(of),
        }.items():
            message = message_of(job, nested)
            remedy = "input.values()" if layout == torch.jagged else "torch.cat(input.unbind())"
            said = message.startswith(f"{name} takes one tensor of rows") and remedy in message
            failures.expect(None if said else f"said {message!r}", name, layout, gradient)


# Who makes the first layer, and who the second: over the default group, a group or its mesh, made when it is asked for.
ORDERS = [
    ("mesh", "mesh"), ("mesh", "group"), ("mesh", None), ("group", "mesh"), (None, "mesh"),
    ("unused", None), (None, "group"), ("twin", "mesh"), ("mesh", "twin"), ("style", None), (None, "style"),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second"), ORDERS, ids=str)
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_layers_over_the_same_ranks_have_one_mesh(
    failures: Failures, first: str | None, second: str | None
) -> None:
    kind = rank_device().type
    mesh.cache_clear()  # other tests' mesh over these ranks would be the user's own
    gc.collect()
    made: list[DeviceMesh] = []

    def named() -> DeviceMesh:
        if not made:
            made.append(init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("own",)))
        return made[0]

    def layer(of: str | None, row: bool) -> torch.nn.Module:
        if of == "style":
            return parallelize_module(integer_linear(8, 8, True), named(), OVERLAP[1 + row]())
        group = named() if of == "mesh" else None
        if of == "unused":
            named()
        if of == "group":
            group = dist.group.WORLD
        if of == "twin":
            group = twin
        make = RowParallelLinear if row else ColumnParallelLinear
        return make.from_linear(integer_linear(8, 8, True), group=group)

    twin = dist.new_group(list(range(dist.get_world_size())))
    grid = torch.tensor([[7, 8], [9, 10]])
    others = DeviceMesh(kind, grid, mesh_dim_names=("a", "b"), _init_backend=False)
    model = torch.nn.Sequential(layer(first, False), layer(second, True)).to(rank_device())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    whole = torch.nn.Sequential(*(integer_linear(8, 8, True) for _ in range(2)))
    for module in (model, whole):
        module(integers(4, 8, seed=3)).sum().backward()
    right = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1e9)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, foreach=True).full_tensor()
    failures.near(norm, right, "norm", first, second, rtol=1e-6)
    optimizer.step()
    one, other = (part.weight.device_mesh for part in model)
    failures.equal(one, other, first, second)
    if made:
        failures.equal(one, made[0], first, second)
    del others  # a mesh of other ranks disturbs no search


def step(layers: torch.nn.Module, input: torch.Tensor, right: float) -> str | None:
    output = layers(input)
    output.sum().backward()
    torch.nn.utils.clip_grad_norm_(layers.parameters(), 1.0).full_tensor()
    state = full_state_dict(layers)
    for name, value in state.items():
        if value.device.type == "meta" or type(value) is not torch.Tensor:
            return f"{name} is {value}"
    return None if bool((output == right).all()) else f"{output}, not {right}"


def ones(layer: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.fill_(1.0 if "weight" in name else 0.0)
    return layer


@pytest.mark.parametrize("all_again", [False, True], ids=["groups", "everything"])
@pytest.mark.ranks((3, "gloo"))
@pytest.mark.fresh(group_timeout_s=60.0)
def test_layers_are_made_on_groups_that_are_made_again(
    failures: Failures, tmp_path, all_again: bool
) -> None:
    """Groups that go and come, of other ranks under names that come again; old layers live on, and are used between."""
    kept, groups = [], []
    rank, world = dist.get_rank(), dist.get_world_size()
    for life, members in enumerate(([0, 1], [1, 2], [0, 1], [0, 2], [0, 1, 2])):
        if all_again:
            dist.destroy_process_group()
            dist.init_process_group(
                "gloo", init_method=f"file://{tmp_path}/{life}", rank=rank, world_size=world
            )
        group = dist.new_group(members)
        if rank in members:
            groups.append(weakref.ref(group))
            size = len(members)
            x = torch.ones(3, 4)
            y = overlap_torch.gemm_allreduce(x, torch.ones(2, 4), group=group)
            failures.equal(y[0, 0], 4 * size)
            layer = ones(RowParallelLinear(4 * size, 6, group=group))
            failures.expect(step(layer, x, 4.0 * size))
            named = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
            style = parallelize_module(torch.nn.Linear(4, 6), named, OVERLAP[1]())
            failures.expect(step(ones(style), x, 4.0))
            for old in kept:
                old.weight.detach().clone()  # PyTorch remembers the meshes of results
            fresh = ones(ColumnParallelLinear(4, 6, group=group, gather_output=True))
            failures.expect(step(fresh, x, 4.0))
            for each in (layer, fresh):
                found = dist.get_process_group_ranks(each.weight.device_mesh.get_group())
                failures.equal(found, members)
            problem = Problem(64, 8, 8, "float32", size, "gemm_allreduce")
            overlap_torch.tune([problem], group=group, repeats=1, most=1, cache=False)
            kept += [layer, fresh, style]
        whole = ones(RowParallelLinear(4 * world, 6))
        failures.expect(step(whole, torch.ones(3, 4), 4.0 * world))
        dist.barrier()
        if group != dist.GroupMember.NON_GROUP_MEMBER and not all_again:
            dist.destroy_process_group(group)
    del group
    if (
        not all_again
    ):  # a life of the same name and ranks takes over the meshes that PyTorch remembers
        gc.collect()
        failures.equal([one() is None for one in groups[:-1]], [True] * (len(groups) - 1))
