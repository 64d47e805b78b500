"""Residual, RMSNorm and a cast after an all-reduce: exact sums, norms within one place of float64's, scales as they are defined."""

import contextlib
import random
import time
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import overlap_torch
import rank_pool
from captures import refill
from checks import Failures, export, message_of
from operands import Case, difference, integers, make_operands, poison, rank_device, world_name
from overlap_torch._ops import composition
from peer_races import come_late

EPS = 1e-6
every_op = pytest.mark.parametrize("gemm", [False, True], ids=["allreduce", "gemm_allreduce"])
on_peers = pytest.mark.ranks((2, "nccl"), (4, "nccl"))
BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16

# The variants of a call: the op's keywords, and which operands there are.
HOW = [
    {},
    {"residual": False},
    {"bias": True, "gain_offset": 1.0},
    {"round_before_gain": True, "bias": True},
    {"quantize": "tensorwise", "return_norm": True},
    {"quantize": "rowwise", "return_norm": True, "bias": True},
    {"quantize": "blockwise", "return_norm": True},
]
FUSED = [how | {"fused": True} for how in HOW]


def case_of(leading: tuple[int, ...], n: int, dtype: torch.dtype = BFLOAT16) -> Case:
    return Case(leading, n, 64, dtype, bias=True)


def flat(results) -> list[torch.Tensor]:
    first, *rest = results
    return [*(first if isinstance(first, tuple) else (first,)), *rest]


class Call:
    """This rank's operands, and all ranks' sum in float64: integers, whose sums have one value in every order."""

    def __init__(self, case: Case, gemm: bool, how: dict, seed: object = 0) -> None:
        device, rank, world = rank_device(), dist.get_rank(), dist.get_world_size()
        self.case, self.gemm, self.how = case, gemm, {"eps": EPS} | how
        parts = [make_operands(case, each, world, device, seed) for each in range(world)]
        products = [part.input.double() @ part.weight.double().t() for part in parts]
        mine = [parts[rank].input, parts[rank].weight] if gemm else [products[rank].to(case.dtype)]
        shape = (*case.leading, case.n)
        residual = integers(shape, device, seed, "residual", low=-9, high=9).to(case.dtype)
        gain = integers((case.n,), device, seed, "gain", low=-64, high=64).double() / 37
        self.gain = gain.to(case.dtype)
        self.residual = residual if self.how.pop("residual", True) else None
        self.bias = parts[rank].bias if self.how.pop("bias", False) else None
        if how.get("quantize") == "tensorwise":
            self.how["scale"] = torch.tensor(0.03, device=device)
        added = [each for each in (self.residual, self.bias) if each is not None]
        self.total = sum(products) + sum(each.double() for each in added)
        self.arguments = [*mine, self.residual, self.gain, self.bias]

    def __call__(self, *arguments, **keywords):
        name = "gemm_allreduce_rmsnorm" if self.gemm else "allreduce_rmsnorm"
        operator = getattr(overlap_torch, name)
        return operator(*(arguments or self.arguments), **self.how, **keywords)

    def expected_norm(self) -> torch.Tensor:
        """In float64; what is rounded on the way is the call's."""
        norm = self.total * torch.rsqrt(self.total.square().mean(-1, keepdim=True) + EPS)
        if self.how.get("round_before_gain"):
            norm = norm.to(self.case.dtype).double()
        return norm * (self.gain.double() + self.how.get("gain_offset", 0.0))

    def expected_cast(self, norm: torch.Tensor) -> list[torch.Tensor]:
        """Values and scales of a norm, block by block."""
        quantize, values, scales = self.how["quantize"], [], []
        for block in norm.float().split(128 if quantize == "blockwise" else self.case.n, -1):
            largest = block.abs().amax(-1, keepdim=True).clamp(min=1e-12)
            scale = (largest.cpu() / 448).to(largest.device)  # CUDA multiplies by the reciprocal
            scale = self.how.get("scale", scale)
            values.append((block / scale).clamp(-448, 448).to(torch.float8_e4m3fn))
            scales.append(scale)
        return [torch.cat(values, -1), *([] if "scale" in self.how else [torch.cat(scales, -1)])]


def off(norm: torch.Tensor, right: torch.Tensor, places: int) -> str | None:
    """The number of elements that are not within so many places of the right ones, which are in float64."""
    kind = torch.finfo(norm.dtype)
    wrong = ~((norm.double() - right).abs() <= places * kind.eps * right.abs().clamp(min=kind.tiny))
    return f"{int(wrong.sum())} of {wrong.numel()} numbers are off" if wrong.any() else None


def check_case(failures: Failures, *given: object) -> None:
    call = Call(*given)
    before = [None if each is None else each.clone() for each in call.arguments]
    poison(rank_device(), max(1, call.total.numel()) * call.case.dtype.itemsize, 512)
    # Where kernels finish the rows nothing else does.
    takes = call.case.dtype.itemsize == 2 and call.case.n % 8 == 0 and 0 < call.case.n <= 16384
    unused = takes and call.how.get("fused") and rank_device().type == "cuda"
    with mock.patch.object(composition, "finish", None) if unused else contextlib.nullcontext():
        first, total, *kept = call()
    failures.expect(difference(total, call.total.to(call.case.dtype)), "sum", *given)
    for operand, copy in zip(call.arguments, before, strict=True):
        same = operand is None or torch.equal(operand, copy)
        failures.expect(None if same else "an operand was modified", *given)
    norm = kept[0] if kept else first
    places = 4 if call.case.dtype.itemsize > 2 else 2 if call.how.get("round_before_gain") else 1
    failures.expect(off(norm, call.expected_norm(), places), "norm", *given)
    if kept:
        parts = [each.float() for each in flat([first])]
        rights = [each.float() for each in call.expected_cast(norm)]
        failures.expect_equal(parts, rights, "cast", *given)


# Rows of one warp, of odd numbers of warps, of two units and of four; runs and blocks of 128 that end in the middle.
COLUMNS = [8, 96, 200, 264, 1000, 4096, 5120, 8192, 16384]


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, torch.float32, torch.float64], ids=str)
@every_op
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (5, "gloo"), (1, "nccl"), (2, "nccl"), (4, "nccl"))
def test_rmsnorm_is_exact_in_the_sum_and_rounds_the_norm_once(
    failures: Failures, gemm: bool, dtype: torch.dtype
) -> None:
    on_gpu = rank_device().type == "cuda"
    rows = (1, 2, 7, 64, 131, 300) if on_gpu else (1, 2, 7)
    shapes = [(m, n) for m in rows for n in COLUMNS[: None if on_gpu else 6]]
    for turn, (m, n) in enumerate(shapes if dtype.itemsize == 2 else [(5, 264)]):
        for hows in (HOW, FUSED):
            for how in hows if turn % 3 == 0 else [hows[turn % len(hows)]]:
                check_case(failures, case_of((m,), n, dtype), gemm, how, turn)
    for leading in ((), (3, 5), (0,), (2, 0)):
        for how in (*HOW, *FUSED):
            check_case(failures, case_of(leading, 264, dtype), gemm, how)
    for n in (0, 12, 16392):  # no kernel takes these
        check_case(failures, case_of((3,), n, dtype), gemm, FUSED[0])


@pytest.mark.parametrize("quantize", [None, "rowwise", "blockwise"])
@pytest.mark.parametrize("n", [264, 8192])
@on_peers
def test_rmsnorm_of_a_row_does_not_depend_on_the_batch(
    failures: Failures, n: int, quantize: str | None
) -> None:
    """A row's bits beside other rows and other numbers of rows, at other places; NaN among the others."""
    device = rank_device()
    own, shared = (torch.Generator(device).manual_seed(s) for s in (dist.get_rank(), 77))
    row = torch.randn(n, generator=own, device=device).bfloat16()
    residual, gain = torch.randn(2, n, generator=shared, device=device).bfloat16()
    first = None
    for m in (1, 2, 7, 64, 300):
        for place in {0, m // 2, m - 1}:
            terms = torch.randn(m, n, generator=own, device=device).bfloat16()
            terms[(place + 1) % m] = torch.nan
            terms[place] = row
            call = partial(overlap_torch.allreduce_rmsnorm, quantize=quantize, fused=True)
            value, *_, total = flat(call(terms, residual.expand(m, n), gain))
            bits = [each[place].contiguous().view(torch.uint8) for each in (value, total)]
            first = first or bits
            failures.expect_equal(bits, first, m, place)
    everybody = [torch.empty_like(first[1]) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, first[1])
    failures.expect_equal(everybody, [first[1]] * len(everybody), "ranks")


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@on_peers
def test_rmsnorm_lets_nan_and_infinities_through(failures: Failures, dtype: torch.dtype) -> None:
    """NaN, infinities, zeros of both signs and denormals, as in the composition."""
    special = [torch.nan, torch.inf, -torch.inf, -0.0, 0.0, 1e-40, 3e38, -1e-38]
    terms = torch.zeros(len(special) + 1, 264)
    for i, number in enumerate(special if dist.get_rank() == 0 else []):
        terms[i, i] = number
        terms[i, 40 + i] = 1.0
    terms = terms.to(rank_device(), dtype)
    gain = torch.ones(264, device=terms.device, dtype=dtype)
    for quantize in (None, "rowwise", "blockwise"):
        call = partial(overlap_torch.allreduce_rmsnorm, terms, None, gain, quantize=quantize)
        for part, expected in zip(flat(call(fused=True)), flat(call()), strict=True):
            same = torch.allclose(part.float(), expected.float(), 2e-2, 0, equal_nan=True)
            failures.expect(None if same else "differs", quantize, part.dtype)


# The weight's scales for each cast of 4 x 264 values, and each cast's own.
CASTS = {"tensorwise": ((), ()), "rowwise": ((4, 1), (16, 1)), "blockwise": ((4, 3), (1, 3))}


@pytest.mark.parametrize("quantize", CASTS)
@pytest.mark.ranks((2, "gloo"))
def test_rmsnorm_casts_as_the_fp8_ops_take_them(failures: Failures, quantize: str) -> None:
    """The fp8 ops take values and scales as they are: scales of 1 in the weight leave what the cast stands for."""
    call = Call(case_of((4,), 264), False, {"quantize": quantize})
    values, scales, *_ = [*flat([call()[0]]), call.how.get("scale")]
    shape, of_weight = CASTS[quantize]
    failures.equal(scales.shape, shape)
    weight = torch.zeros(16, 264)
    weight[range(16), range(0, 256, 16)] = 1.0  # a column for each output
    output = overlap_torch.gemm_allreduce(
        values,
        weight.to(torch.float8_e4m3fn),
        scale_input=scales,
        scale_weight=torch.ones(of_weight),
        output_dtype=torch.float32,
    )
    every = scales.expand(4, 1) if quantize == "tensorwise" else scales
    width = 128 if quantize == "blockwise" else 264
    right = (values.float() * every.repeat_interleave(width, 1)[:, :264])[:, 0:256:16]
    failures.expect(difference(output, right * dist.get_world_size()), quantize)


@pytest.mark.parametrize("how", [*HOW[:4], FUSED[0]], ids=str)
@every_op
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_rmsnorm_has_the_gradients_of_its_composition(
    failures: Failures, gemm: bool, how: dict
) -> None:
    """Against float64's of all ranks' operands, differentiated as one function."""
    call = Call(case_of((6,), 24, torch.float64), gemm, how)
    leaves = [None if each is None else each.clone().requires_grad_() for each in call.arguments]
    first, total = call(*leaves)
    weights = [integers((6, 24), first.device, each).double() for each in "ab"]
    given = [leaf for leaf in leaves if leaf is not None]
    gradients = torch.autograd.grad(
        (first * weights[0]).sum() + (total * weights[1]).sum(), given, create_graph=True
    )
    # The other ranks' terms are constants of this rank's.
    mine = [leaf if leaf is None else leaf.detach().requires_grad_() for leaf in leaves]
    *terms, residual, gain, bias = mine
    whole = call.total
    part = terms[0] @ terms[1].t() if gemm else terms[0]
    for term in (part, residual, bias):
        whole = whole if term is None else whole + term - term.detach()
    gain_with_offset = gain + how.get("gain_offset", 0.0)
    norm = whole * torch.rsqrt(whole.square().mean(-1, keepdim=True) + EPS) * gain_with_offset
    loss = (norm * weights[0]).sum() + (whole * weights[1]).sum()
    rights = torch.autograd.grad(loss, [leaf for leaf in mine if leaf is not None])
    for gradient, right in zip(gradients, rights, strict=True):
        failures.near(gradient, right, how, rtol=1e-9, atol=1e-9)
    cast = Call(case_of((2,), 8, torch.float32), gemm, {"quantize": "rowwise"})
    cast.arguments[0].requires_grad_()
    failures.holds("no gradient", message_of(cast), "cast")


@pytest.mark.parametrize("how", [HOW[0], HOW[3], *FUSED[4:]], ids=str)
@every_op
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (2, "nccl"))
def test_rmsnorm_compiles_to_what_it_is(failures: Failures, gemm: bool, how: dict) -> None:
    torch.compiler.reset()
    call = Call(case_of((5,), 264), gemm, how)
    eager = flat(call())
    compiled = torch.compile(lambda *given: call(*given), fullgraph=True, backend="aot_eager")(
        *call.arguments
    )
    program = export(lambda *given: flat(call(*given)), *call.arguments)
    for made in (flat(compiled), program.module()(*call.arguments)):
        for one, other in zip(eager, made, strict=True):
            failures.expect(difference(other.float(), one.float()), how)
            failures.equal(one.stride(), other.stride(), how)
    # The op as compilers see it.
    meta = [None if each is None else each.to("meta") for each in call.arguments]
    if not gemm:
        meta.insert(1, None)
    keywords = {key: each for key, each in call.how.items() if key != "fused"}
    if "scale" in keywords:
        keywords["scale"] = keywords["scale"].to("meta")
    fakes = torch.ops.overlap.allreduce_rmsnorm(*meta, **keywords, group=world_name())
    if len(fakes) == 4:  # the scales come third, the sum second
        fakes[1], fakes[2] = fakes[2], fakes[1]
    for fake, one in zip(fakes, eager, strict=True):
        same = (fake.shape, fake.dtype, fake.stride()) == (one.shape, one.dtype, one.stride())
        failures.expect(None if same else f"fake {fake}", how)


REFUSED = [
    ({"quantize": "row"}, "quantize is 'row'"),
    ({"quantize": "tensorwise"}, "give a scale"),
    ({"scale": torch.ones(())}, "give a scale"),
    ({"return_norm": True}, "return_norm"),
    ({"residual": torch.zeros(3, 8)}, "residual must"),
    ({"residual": torch.zeros(2, 8, dtype=FLOAT16)}, "residual is"),
    ({"norm_weight": torch.zeros(9)}, "norm_weight must"),
    ({"bias": torch.zeros(1, 8)}, "bias must"),
    ({"partial": torch.zeros(2, 8, dtype=torch.int32)}, "supported are"),
    ({"partial": torch.zeros(2, 8).to_sparse()}, "call it with partial.to_dense()"),
    ({"norm_weight": None}, "norm_weight must be a tensor, but it is a NoneType"),
    ({"residual": (0.0,)}, "residual must be a tensor, but it is a tuple"),
    ({"quantize": "tensorwise", "scale": 0.5}, "scale must be a tensor, but it is a float"),
    ({"eps": None, "round_before_gain": True}, "eps is a number, but it is a NoneType"),
    ({"gain_offset": "1"}, "gain_offset is a number, but it is a str"),
]


@pytest.mark.parametrize(("changed", "words"), REFUSED, ids=[words for _, words in REFUSED])
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_rmsnorm_refuses_what_does_not_fit(failures: Failures, changed: dict, words: str) -> None:
    dtype = BFLOAT16 if rank_device().type == "cuda" else torch.float32
    sizes = {"partial": (2, 8), "residual": (2, 8), "norm_weight": (8,)}
    given = {name: torch.zeros(size, dtype=dtype) for name, size in sizes.items()} | changed
    given = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(rank_device()), given)
    failures.holds(words, message_of(overlap_torch.allreduce_rmsnorm, **given, fused=True))
    given["input"], given["weight"] = given.pop("partial"), None
    said = message_of(overlap_torch.gemm_allreduce_rmsnorm, **given)
    failures.holds("weight must be a tensor, but it is a NoneType", said)


@pytest.mark.parametrize("rows", [0, 4])
@pytest.mark.ranks((2, "gloo"))
def test_rmsnorm_takes_no_columns(failures: Failures, rows: int) -> None:
    for quantize, blocks in ((None, None), ("rowwise", 1), ("blockwise", 0)):
        operands = torch.ones(rows, 8), torch.ones(0, 8), None, torch.ones(0)
        results = overlap_torch.gemm_allreduce_rmsnorm(*operands, quantize=quantize)
        shapes = [tuple(each.shape) for each in torch.utils._pytree.tree_leaves(results)]
        scales = [] if blocks is None else [(rows, blocks)]
        failures.equal(sorted(shapes), sorted([(rows, 0), (rows, 0), *scales]), quantize)


# --- over peers -------------------------------------------------------------------------------------


@on_peers
@pytest.mark.peers
def test_rmsnorm_keeps_its_calls_apart(failures: Failures) -> None:
    """Ranks that come late at random, two groups, other numbers of rows and columns from call to call."""
    calls = 200 if rank_pool.shares_gpus() else 1000
    groups = [None, dist.new_group()]
    order = random.Random(5)  # the same on all ranks
    chance = random.Random(dist.get_rank())
    sizes = [(m, n) for m in (1, 3, 16, 128, 200) for n in (264, 4096, 8192)]
    prepared = [
        Call(case_of((m,), n), gemm, FUSED[i % len(FUSED)])
        for i, (m, n) in enumerate(sizes)
        for gemm in (False, True)
    ]
    wrong = torch.zeros(calls, dtype=torch.int64, device=rank_device())
    plain = torch.ones(32, 64, device=rank_device(), dtype=BFLOAT16)
    for turn in range(calls):
        call = order.choice(prepared)
        group = order.choice(groups)
        come_late(chance)
        if order.random() < 0.2:  # calls that share the buffers
            overlap_torch.gemm_allreduce(plain, plain, group=group)
        total = call(group=group)[1]
        wrong[turn] = (total.double() != call.total).sum()
    torch.cuda.synchronize()
    overlap_torch.check()
    found = wrong.nonzero().flatten().tolist()
    failures.expect(f"wrong in calls {found[:10]}" if found else None)


@on_peers
@pytest.mark.peers
def test_rmsnorm_in_graphs_by_turns_with_plain_calls(failures: Failures) -> None:
    """Replays by turns with plain calls, with operands that change."""
    hows = [((1,), 8192, FUSED[0]), ((16,), 4096, FUSED[5]), ((130,), 1024, FUSED[2])]
    places = [(case_of(m, n), gemm, how) for m, n, how in hows for gemm in (False, True)]
    prepared = [Call(*place) for place in places]

    def calls():
        return [call()[1] for call in prepared]

    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        captured = calls()
    for turn in range(20):
        others = [Call(*place, turn) for place in places]
        refill(*([one.arguments for one in made] for made in (prepared, others)))
        graph.replay()
        for each in ([captured], [captured, calls()], [calls()])[turn % 3]:
            failures.expect_equal(each, [other.total.to(BFLOAT16) for other in others], turn)
    overlap_torch.check()


def fail_and_report(rows: int | None) -> str:
    """The last rank's calls have so many rows, or do not come. Returns the error that the others get."""
    call = Call(case_of((16,), 4096), False, FUSED[0])
    call()
    torch.cuda.synchronize()
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        if rows is None:
            torch.cuda.synchronize()
            time.sleep(6.0)
            return ""
        call = Call(case_of((rows,), 4096), False, FUSED[0])

    def ends() -> None:
        call()
        torch.cuda.synchronize()
        overlap_torch.check()

    return message_of(ends)


@pytest.mark.parametrize("rows", [None, 15, 1], ids=["never comes", "15 rows", "one row"])
@on_peers
def test_rmsnorm_names_a_rank_that_fails_it(ranks, rows):
    ranks.skip_without_peers()
    outcomes = rank_pool.run_fresh(
        ranks.world, "nccl", fail_and_report, rows, group_timeout_s=2.0, timeout_s=90.0
    )
    for rank, outcome in enumerate(outcomes[:-1]):
        assert f"rank {ranks.world - 1}" in outcome.result(), (rank, outcome)
