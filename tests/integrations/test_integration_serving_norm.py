"""The plug-ins of serving frameworks around a norm: SGLang's all-reduce with residual and norm, and what vLLM's layers refuse."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from test_integration_serving import Group, Unquantized, VllmLinear, installed, module
from torch.nn import functional

from checks import Failures
from operands import difference
from overlap_torch.integrations import sglang, vllm

N = 16


def rows_of(rows: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, (rows, N), generator=generator).to(dtype)


@pytest.mark.ranks((1, "gloo"), (2, "gloo"))
def test_sglangs_norm_is_one_op_for_few_rows(failures: Failures) -> None:
    """As the composition says where the op takes the rows; SGLang's own function, with its arguments, elsewhere."""
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = []

    def group_of(*, use_attn_tp_group: bool):
        groups.append(use_attn_tp_group)
        return world, rank, Group()

    fusion = module(sglang.NORM_TARGET.rpartition(".")[0], resolve_fusion_group=group_of)
    gain = rows_of(1, 5)[0] / 4
    cases = [
        (rows_of(3, rank), rows_of(3, 9), gain, True),
        (rows_of(512, rank), rows_of(512, 9), gain, True),
        (rows_of(513, rank), rows_of(513, 9), gain, False),
        (rows_of(0, rank), rows_of(0, 9), gain, False),
        (rows_of(3, rank, torch.float32), rows_of(3, 9, torch.float32), gain.float(), False),
        (rows_of(3, rank), rows_of(3, 9), gain.float(), False),
        (rows_of(3, rank)[:, :12].contiguous(), rows_of(3, 9)[:, :12].contiguous(), gain[:12], False),
        (rows_of(3, rank).repeat(1, 2)[:, :N], rows_of(3, 9), gain, False),
    ]  # fmt: skip
    with installed("0.5.23", fusion):
        for i, (partial, residual, weight, ours) in enumerate(cases):
            given = []

            def original(*arguments):
                given.append(arguments)  # noqa: B023
                return None, None

            norm, total = sglang._norm(
                original,
                input_tensor=partial,
                residual=residual,
                weight=weight,
                eps=1e-5,
                max_token_num=2048,
                use_attn_tp_group=i % 2 == 0,
            )
            if not ours or world == 1:
                right = (1e-5, 2048, None, False, True, i % 2 == 0)
                left = len(given) == 1 and given[0][3:] == right and given[0][0] is partial
                failures.expect(None if left and norm is None else f"{given}", i, "left")
                continue
            sum_ = partial.clone()
            dist.all_reduce(sum_)
            sum_ = sum_ + residual
            failures.expect(difference(total, sum_), i, "sum")
            right_norm = functional.rms_norm(sum_, (N,), weight, 1e-5)
            failures.expect(difference(norm, right_norm), i, "norm")
            failures.expect(None if not given else "SGLang's function ran, too", i)
    failures.equal(groups, [i % 2 == 0 for i in range(len(cases))], "groups")


@pytest.mark.ranks((2, "gloo"))
def test_vllms_layers_of_other_ranks_are_refused(failures: Failures) -> None:
    others = SimpleNamespace(device_group=dist.group.WORLD, world_size=4, rank_in_group=0)
    ours = vllm.layer_class(
        VllmLinear, Unquantized, tp_group=lambda: others, batch_invariant=lambda: False
    )
    with pytest.raises(RuntimeError, match=r"made for 2 ranks.*has 4.*OVERLAP_VLLM=0"):
        ours(8, 6)
    for options in ({"disable_tp": True}, {"reduce_results": False, "bias": False}):
        failures.equal(ours(8, 6, **options).overlap_group, "", options, "named")
