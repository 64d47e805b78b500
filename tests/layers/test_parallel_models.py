"""Models made of layers with the styles for parallelize_module: every gradient is the unsharded model's."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from checks import Failures
from layers import Linears, fill_with_integers, integers
from meshes import OVERLAP, PYTORCH, check_parameter_gradients, mesh
from operands import difference, rank_device

STYLES = OVERLAP[1:]


class Block(Linears):
    """Calls view() on what its layers return, as models do."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        hidden = self.up(input)
        hidden = functional.relu(hidden.view(-1, hidden.shape[-1])).view(hidden.shape)
        return input + self.down(hidden).view(-1, input.shape[-1]).view(input.shape)


class Model(torch.nn.Module):
    """Two residual blocks between an embedding and a head: integers in, integers out."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding = torch.nn.Embedding(12, 8, device=rank_device())
        self.blocks = torch.nn.ModuleList([Block(up=(8, 12), down=(12, 8)) for _ in range(2)])
        self.head = torch.nn.Linear(8, 6, device=rank_device())
        fill_with_integers(self)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        values = self.embedding(tokens)
        for block in self.blocks:
            if self.checkpointed:
                values = checkpoint(block, values, use_reentrant=False)
            else:
                values = block(values)
        return self.head(values)


def parallel_model(
    sequence: bool, colwise: type, rowwise: type, tp: DeviceMesh, checkpointed: bool = False
) -> Model:
    outside = Shard(1) if sequence else Replicate()
    plan = {
        "embedding": rowwise(input_layouts=Replicate(), output_layouts=outside),
        "blocks.*.up": colwise(input_layouts=outside),
        "blocks.*.down": rowwise(output_layouts=outside),
        "head": colwise(input_layouts=outside, output_layouts=Replicate()),
    }
    return parallelize_module(Model(checkpointed), tp, plan)


def model_tokens(batch: int, length: int) -> torch.Tensor:
    return torch.arange(batch * length, device=rank_device()).view(batch, length) * 5 % 12


@pytest.mark.parametrize("how", ["eager", "checkpointed", "compiled"])
@pytest.mark.parametrize("sequence", [False, True], ids=["all", "sequence"])
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (3, "gloo"), (2, "nccl"))
def test_parallel_model_has_the_unsharded_models_gradients(
    failures: Failures, sequence: bool, how: str
) -> None:
    """Every gradient of a model of layers with biases, batch > 1, against the unsharded model."""
    whole = Model()
    model = parallel_model(sequence, *STYLES, mesh(), checkpointed=how == "checkpointed")
    tokens = model_tokens(3, 12)
    expected = whole(tokens)
    gradient = integers(*expected.shape, seed=4)
    expected.backward(gradient)
    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if how == "compiled" else model
    output = run(tokens)
    failures.expect(difference(output, expected), "output")
    output.backward(gradient)
    check_parameter_gradients(failures, model, whole)
    # The same as PyTorch's own styles, down to placements.
    native = parallel_model(sequence, *PYTORCH[1:], mesh())
    for (name, own), other in zip(model.named_parameters(), native.parameters(), strict=True):
        if "embedding" not in name:
            found = (own.placements, own.grad.placements)
            failures.equal(found, (other.placements,) * 2, name)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    right = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    failures.near(norm, right, "norm of the gradients", rtol=1e-5)
    check_parameter_gradients(failures, model, whole, "clipped", rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("sequence", [False, True], ids=["all", "sequence"])
@pytest.mark.ranks((4, "gloo"), (4, "nccl"))
def test_parallel_model_works_beside_fsdp(
    failures: Failures, sequence: bool, checkpointed: bool
) -> None:
    """FSDP2 over dp, the styles over tp: two steps against the unsharded model on the whole batch."""
    grid = mesh(2, dist.get_world_size() // 2)
    whole = Model()
    model = parallel_model(sequence, *STYLES, grid["tp"], checkpointed)
    for block in model.blocks:
        fully_shard(block, mesh=grid["dp"])
    fully_shard(model, mesh=grid["dp"])
    tokens = model_tokens(4, 12)
    mine = tokens.chunk(2)[grid.get_local_rank("dp")]
    optimizers = [torch.optim.SGD(m.parameters(), lr=2.0**-12) for m in (model, whole)]
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        # FSDP averages over dp.
        expected, output = whole(tokens), model(mine)
        if step == 0:
            right = expected.detach().chunk(2)[grid.get_local_rank("dp")]
            failures.expect(difference(output, right), "output")
        (expected.sum() / 2).backward()
        output.sum().backward()
        if step == 0:  # integers; later sums round
            check_parameter_gradients(failures, model, whole, "step", step)
        check_parameter_gradients(failures, model, whole, "step", step, rtol=1e-4, atol=1e-3)
        for optimizer in optimizers:
            optimizer.step()
