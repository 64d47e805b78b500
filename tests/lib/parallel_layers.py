"""Column and row layers, of one output or several, beside the whole `torch.nn.Linear`s whose parts they hold."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from checks import Failures
from layers import fill_with_integers, integers, my_features, my_part, my_tokens
from operands import difference, rank_device
from overlap_torch.nn import ColumnParallelLinear, RowParallelLinear

KINDS = ("column", "columns", "row")
every_kind = pytest.mark.parametrize("kind", KINDS)
sequence_or_not = pytest.mark.parametrize("sequence", [False, True], ids=["all", "sequence"])
# In features, out features and whether there is a bias. Features that divide, that do not, fewer than ranks, one, none.
Sizes = tuple[int, tuple[int, ...], tuple[bool, ...]]
ONE: list[Sizes] = [
    (in_features, (out_features,), (bias,))
    for in_features, out_features in ((12, 8), (13, 5), (2, 3), (24, 1), (0, 4), (4, 0))
    for bias in (True, False)
]
SEVERAL: list[Sizes] = [
    (12, (8, 4, 4), (True, True, True)),
    (13, (5, 3, 7), (True, False, True)),
    (2, (3, 1), (False, False)),
    (6, (5,), (True,)),
]
# Tokens that divide, that do not, fewer than ranks, none.
TOKENS = (12, 7, 1, 0)


def integer_linears(
    in_features: int,
    out_features: Sequence[int],
    bias: Sequence[bool],
    dtype: torch.dtype = torch.float32,
) -> torch.nn.ModuleList:
    linears = torch.nn.ModuleList(
        torch.nn.Linear(in_features, size, has_bias, device=rank_device(), dtype=dtype)
        for size, has_bias in zip(out_features, bias, strict=True)
    )
    fill_with_integers(linears)
    return linears


def all_outputs(linears: torch.nn.ModuleList, input: torch.Tensor) -> list[torch.Tensor]:
    return [linear(input) for linear in linears]


@dataclass(frozen=True)
class Form:
    """A layer's kind and options, and which parts of whole tensors are this rank's."""

    kind: str
    sequence: bool = False
    whole: bool = False  # the column layers' gather_output, the row layer's input_is_parallel=False

    @property
    def is_column(self) -> bool:
        return self.kind != "row"

    @property
    def type(self) -> type[torch.nn.Module]:
        return ColumnParallelLinear if self.is_column else RowParallelLinear

    @property
    def sizes(self) -> list[Sizes]:
        return SEVERAL if self.kind == "columns" else ONE

    def layer(self, linears: torch.nn.ModuleList, **options: object) -> torch.nn.Module:
        own = {"gather_output": self.whole} if self.is_column else {}
        own |= {} if self.is_column else {"input_is_parallel": not self.whole}
        given = linears if self.kind == "columns" else linears[0]
        return self.type.from_linear(given, sequence_parallel=self.sequence, **own, **options)

    def empty(self, sizes: Sizes, **options: object) -> torch.nn.Module:
        in_features, out_features, bias = sizes
        several = self.kind == "columns"
        given = (out_features, bias) if several else (out_features[0], bias[0])
        return self.type(in_features, *given, sequence_parallel=self.sequence, **options)

    def cut_input(self, whole: torch.Tensor) -> torch.Tensor:
        if not self.is_column:
            return whole if self.whole else my_features(whole)
        return my_tokens(whole) if self.sequence else whole

    def cut_output(self, whole: torch.Tensor) -> torch.Tensor:
        if self.is_column:
            return whole if self.whole else my_features(whole)
        return my_tokens(whole) if self.sequence else whole

    def cut_dim(self, name: str) -> int | None:
        """The dim in which the layer's parameter of this name is cut."""
        if self.is_column:
            return 0
        return 1 if name == "weight" else None

    def cut_parameter(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        dim = self.cut_dim(name)
        return whole if dim is None else my_part(whole, dim)

    def own_name(self, name: str) -> str:
        """The layer's name of a parameter that the list of whole layers calls `1.weight`."""
        number, kind = name.split(".")
        if self.kind != "columns":
            return kind
        return f"{'weights' if kind == 'weight' else 'biases'}.{number}"

    def whole_state(self, linears: torch.nn.ModuleList) -> dict[str, torch.Tensor]:
        """The whole parameters by the layer's names."""
        return {self.own_name(name): value for name, value in linears.state_dict().items()}

    def own_state(self, linears: torch.nn.ModuleList) -> dict[str, torch.Tensor]:
        """This rank's parts by the layer's names."""
        whole = self.whole_state(linears)
        return {name: self.cut_parameter(name, value).clone() for name, value in whole.items()}

    def call(self, run: Callable, input: torch.Tensor, tokens: int) -> list[torch.Tensor]:
        """The outputs; `tokens` are those of all ranks."""
        found = run(input, tokens) if self.is_column and self.sequence else run(input)
        assert (type(found) is tuple) == (self.kind == "columns")
        return list(found) if type(found) is tuple else [found]


def check_gradients(
    failures: Failures,
    form: Form,
    layer: torch.nn.Module,
    linears: torch.nn.ModuleList,
    *where: object,
    compiled: bool = False,
) -> None:
    """The layer's parameter gradients are its parts of the whole layers'; for an unused output None, zeros if ``compiled``."""
    for name, parameter in linears.named_parameters():
        name = form.own_name(name)
        own, where = layer.get_parameter(name).grad, (name, "gradient", *where)
        if parameter.grad is None:
            nothing = own is None or (compiled and not own.to_local().any())
            failures.expect(None if nothing else f"{own}", *where)
        elif own is None:
            failures.expect("has none", *where)
        else:
            right = form.cut_parameter(name, parameter.grad)
            failures.expect(difference(own.to_local(), right), *where)
            dim = form.cut_dim(name)
            placements = (Replicate() if dim is None else Shard(dim),)
            failures.equal((own.shape, own.placements), (parameter.shape, placements), *where)


def check_beside_linears(
    failures: Failures,
    form: Form,
    run: Callable,
    layer: torch.nn.Module,
    linears: torch.nn.ModuleList,
    tokens: int,
    used: Sequence[int],
    *where: object,
) -> None:
    """Outputs and gradients of `run`, the layer in some manner, beside the whole linears', where the outputs `used` are."""
    dtype = linears[0].weight.dtype
    for module in (layer, linears):
        module.zero_grad()
    whole = integers(tokens, 2, layer.in_features, seed=3, dtype=dtype).requires_grad_()
    mine = form.cut_input(whole).detach().clone().requires_grad_()
    expected, outputs = all_outputs(linears, whole), form.call(run, mine, tokens)
    for i, (output, right) in enumerate(zip(outputs, expected, strict=True)):
        right = form.cut_output(right.detach())
        failures.expect(difference(output, right), "output", i, *where)
    grads = [integers(*right.shape, seed=4 + i, dtype=dtype) for i, right in enumerate(expected)]
    torch.autograd.backward([expected[i] for i in used], [grads[i] for i in used])
    own = [form.cut_output(grad).contiguous() for grad in grads]
    torch.autograd.backward([outputs[i] for i in used], [own[i] for i in used])
    failures.expect(difference(mine.grad, form.cut_input(whole.grad)), "input's gradient", *where)
    compiled = isinstance(run, torch._dynamo.OptimizedModule)
    check_gradients(failures, form, layer, linears, *where, compiled=compiled)
