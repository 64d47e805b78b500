"""Calls of an attention over ranks: what is sent and kept, head parts, callers' kernels, positions, compilers, errors."""

import contextlib
import functools
import gc
import itertools
import random
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import overlap_torch
from captures import capture
from checks import Failures, message_of
from operands import difference, integers, rank_device
from overlap_torch import AttentionKernel, Documents
from overlap_torch._attention import functions, ops
from overlap_torch._attention.functions import choose_parts
from overlap_torch._attention.kernels import BUILT_IN, Form
from overlap_torch._attention.work import Problem, parts_allowed, share_of
from overlap_torch._ops import collectives
from peer_copies import over_peers
from peer_races import so_many_calls

attend = overlap_torch.context_parallel_attention


def operands(*sizes: tuple[int, int], tokens: int = 4, dtype=torch.float64, batch: int = 1):
    """Tensors [B, T, heads, width], others on every rank, that require grad."""
    made = []
    for at, (heads, width) in enumerate(sizes):
        generator = torch.Generator().manual_seed(10 * dist.get_rank() + at)
        one = torch.randn(batch, tokens, heads, width, generator=generator, dtype=torch.float64)
        made.append(one.to(rank_device(), dtype).requires_grad_())
    return made


@pytest.mark.ranks((2, "gloo"), (4, "gloo"))
def test_attention_sends_what_the_formula_says(failures: Failures) -> None:
    """Collectives and numbers that leave this rank, forward and backward, as the design's formula has them."""
    world = dist.get_world_size()
    heads, kv, width, value_width, tokens = 8, 2, 8, 4, 4
    sent: list[int] = []
    begin, gather = collectives.start_all_to_all, collectives.start_all_gather

    def counted(flat, send, come, group):
        sent.append(flat.numel() - send[dist.get_rank()])
        return begin(flat, send, come, group)

    def counted_gather(shard, group):
        sent.append(shard.numel() * (world - 1))
        return gather(shard, group)

    with (
        mock.patch.object(collectives, "start_all_to_all", counted),
        mock.patch.object(collectives, "start_all_gather", counted_gather),
    ):
        for parts in parts_allowed(world, heads, kv):
            q, k, v = operands((heads, width), (kv, width), (kv, value_width), tokens=tokens)
            sent.clear()
            with FlopCounterMode(display=False) as counter:
                output = attend(q, k, v, head_parts=parts)
            flops = 2 * heads * tokens * tokens * world * (width + value_width)
            failures.equal(counter.get_total_flops(), flops, "FLOP", parts)
            both = width + value_width
            # Queries and outputs move within the parts, keys and values to all.
            queries = tokens * heads * (parts - 1) // parts
            keys = tokens * max(kv, parts) * (world - 1) // parts * both
            forward = [keys] if parts == 1 else [queries * width + keys, queries * value_width]
            failures.equal(sent, forward, parts)
            sent.clear()
            output.sum().backward()
            again = [] if parts == world else [keys]
            grads = [] if parts == 1 else [queries * value_width]
            backward = again + grads + [(0 if parts == 1 else queries * width) + keys]
            failures.equal(sent, backward, parts)


LLAMA_8B, LLAMA_70B, WAN, QWEN = (32, 8), (64, 8), (40, 40), (14, 2)
CHOICES = [
    # heads, ranks, tokens in all, cut, causal, backward, kernels, head parts
    (LLAMA_8B, 2, 8192, "zigzag", True, False, "flash", 1),  # 4 + 1 > 2: less moves
    (LLAMA_8B, 4, 8192, "zigzag", True, False, "flash", 1),
    (LLAMA_8B, 8, 8192, "zigzag", True, False, "flash", 8),
    (LLAMA_8B, 4, 8192, "zigzag", True, True, "flash", 4),  # 2 * 5 < 3 * 4
    (LLAMA_8B, 2, 8192, "zigzag", True, True, "flash", 1),
    (LLAMA_70B, 4, 8192, "zigzag", True, True, "flash", 1),
    (WAN, 2, 8192, "contiguous", False, False, "flash", 2),
    (WAN, 8, 8192, "contiguous", False, False, "flash", 8),
    (LLAMA_8B, 2, 8192, "contiguous", True, False, "flash", 2),  # else the last has nearly all
    (LLAMA_8B, 2, 32768, "zigzag", True, False, "cudnn or flash", 2),  # cuDNN takes no lower right
    (LLAMA_8B, 2, 8192, "contiguous", False, False, "cudnn or flash", 1),
    (QWEN, 4, 8192, "contiguous", True, True, "flash", 2),  # 14 heads on 4 ranks
    ((7, 7), 4, 8192, "zigzag", True, True, "flash", 1),
    (LLAMA_8B, 4, 8192, "zigzag", True, False, "cudnn", 4),  # the only one that it takes
]


@pytest.mark.parametrize("heads, world, total, cut, causal, backward, kernel, parts", CHOICES)
def test_attention_chooses_head_parts(heads, world, total, cut, causal, backward, kernel, parts):
    numbers = (total // world,) * world
    problem = Problem(numbers, cut == "zigzag", *heads, None, 0 if causal else None, (), 1)
    form = Form(1, torch.bfloat16, 128, 128)
    assert choose_parts(problem, kernel, form, backward) == parts


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_attention_has_no_kernel_of_cuda_for_scales_that_are_not_above_0(causal, scale):
    """Kernels of CUDA multiply the -inf of hidden and missing keys by the scale."""
    from overlap_torch._attention.kernels import calls_of

    problem = Problem((7, 7), False, 4, 4, None, 0 if causal else None, (), 1)
    form = Form(1, torch.bfloat16, 64, 64)
    for kernels in ("cudnn or flash", "flash or masked"):
        calls = calls_of(share_of(problem, 1), BUILT_IN[kernels], form, scale)
        assert {kernel.name for kernel, *_ in calls} == {"masked"}


def test_attention_calls_several_documents_at_once_where_a_kernel_takes_them():
    """Flash attention on a zigzag's two runs: the ends of each document's queries and keys."""
    from overlap_torch._attention.kernels import calls_of

    problem = Problem((8, 8), True, 4, 4, None, 0, (3, 6, 7), 1)
    form = Form(1, torch.bfloat16, 64, 64)
    calls = list(calls_of(share_of(problem, 0), BUILT_IN["cudnn or flash"], form, 1.0))
    # Positions 0 to 4 and 12 to 16: of documents that begin at 0, 3 and 9.
    assert [kernel.name for kernel, *_ in calls] == ["flash", "flash"]
    first, second = (work for _, work, *_ in calls)
    assert (first.queries, first.keys) == ((0, 4), (0, 4))
    assert (first.query_ends, first.key_ends) == ((3, 4), (3, 4))
    assert (second.queries, second.keys, second.query_ends) == ((12, 16), (9, 16), ())
    starts, ends, longest, longest_keys = first.cu_seqlens(torch.device("cpu"))
    assert starts.tolist() == ends.tolist() == [0, 3, 4] and longest == longest_keys == 3


def with_slopes(q, k, v, work):
    """A caller's kernel: a slope for each head times the distance, beside the causal mask."""
    own = q.shape[2] // k.shape[2]
    query = torch.arange(*work.queries, device=q.device)[:, None]
    key = torch.arange(*work.keys, device=q.device)
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(own, 2)) * work.scale
    scores = scores + work.per_head[0][:, None, None] * (key - query)
    if work.causal:
        scores = scores.masked_fill(key > query, -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.repeat_interleave(own, 2))


class Slopes(AttentionKernel):
    """The same as a kernel of two functions."""

    name = "slopes"

    def forward(self, q, k, v, work):
        with torch.no_grad():
            return with_slopes(q, k, v, work), (work.heads,)

    def backward(self, grad, q, k, v, o, saved, work):
        assert saved == (work.heads,) and torch.equal(o, self.forward(q, k, v, work)[0])
        pulled = torch.func.vjp(
            lambda *all: with_slopes(*all[:3], mock.Mock(wraps=work, per_head=all[3:], scale=work.scale,
                causal=work.causal, queries=work.queries, keys=work.keys)), q, k, v, *work.per_head)[1]  # fmt: skip
        return pulled(grad)


class Plain(AttentionKernel):
    """Products and a mask, as the one that is built in."""

    name = "plain"

    def forward(self, q, k, v, work):
        return BUILT_IN["masked"][0].forward(q, k, v, work)

    def backward(self, *given):
        return BUILT_IN["masked"][0].backward(*given)


@pytest.mark.ranks((2, "gloo"), (4, "gloo"))
def test_attention_by_callers_kernels_is_the_whole_sequences(failures: Failures) -> None:
    """Against the whole sequence, in float64, over collectives and over peers; slopes' gradients are terms of a sum over the ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for kernel, transport in itertools.product((with_slopes, Slopes()), ("nccl", "peer")):
        for parts in parts_allowed(world, 4, 2):
            by = {"head_parts": parts, "transport": transport, "chunks": max(1, 2 // parts)}
            own = operands((4, 8), (2, 8), (2, 6))
            slopes = torch.linspace(
                0.1, 0.4, 4, dtype=torch.float64, device=rank_device()
            ).requires_grad_()
            with over_peers():
                output = attend(*own, causal=True, kernel=kernel, per_head=[slopes], **by)
                output.square().sum().backward()
            dist.all_reduce(slopes.grad)
            whole = []
            for tensor in own:
                shares = [torch.empty_like(tensor) for _ in range(world)]
                dist.all_gather(shares, tensor.detach().contiguous())
                whole.append(torch.cat(shares, 1).requires_grad_())
            again = slopes.detach().clone().requires_grad_()
            tokens = (0, 4 * world)
            given = {"queries": tokens, "keys": tokens, "causal": True, "scale": 8**-0.5}
            work = mock.Mock(**given, per_head=(again,))
            right = with_slopes(*whole, work)
            right.square().sum().backward()
            pairs = [(output, right.split(4, 1)[rank]), (slopes.grad, again.grad)]
            pairs += [(a.grad, b.grad.split(4, 1)[rank]) for a, b in zip(own, whole, strict=True)]
            for at, (mine, value) in enumerate(pairs):
                failures.near(mine, value, kernel, by, at, rtol=0.0, atol=1e-12)


def scaled(q, k, v, work, by=None):
    """A caller's kernel without a mask; ``by``: a factor of the scores."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * work.scale
    scores = scores if by is None else scores * by
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


class Called:
    """An object that is called as a function."""

    def __call__(self, *given):
        return scaled(*given)


def dropped(q, k, v, work):
    return scaled(q, k, torch.nn.functional.dropout(v, 0.5), work)


class Keeps(Plain):
    """A kernel that keeps what it was lent."""

    def forward(self, q, k, v, work):
        o, saved = super().forward(q, k, v, work)
        return o, (saved, {"k": k, "v": v})

    def backward(self, grad, q, k, v, o, saved, work):
        saved, lent = saved
        assert torch.equal(lent["k"], k) and torch.equal(lent["v"], v)
        return super().backward(grad, q, lent["k"], lent["v"], o, saved, work)


@pytest.mark.ranks((2, "gloo"))
def test_attention_takes_functions_of_all_kinds(failures: Failures) -> None:
    """A partial, an object and a lambda are the function on all ranks; none of them is kept."""
    right = attend(*operands((4, 8), (4, 8), (4, 8)), kernel=scaled)
    for kernel in (functools.partial(scaled, by=1.0), Called(), lambda *given: scaled(*given)):
        found = attend(*operands((4, 8), (4, 8), (4, 8)), kernel=kernel)
        failures.expect_equal([found], [right], kernel)
    gone = []
    for kernel in (Called(), Plain()):
        attend(*operands((4, 8), (4, 8), (4, 8)), kernel=kernel).sum().backward()
        gone.append(weakref.ref(kernel))
    del kernel
    gc.collect()
    failures.equal([each() for each in gone], [None, None], "kept")


@pytest.mark.ranks((1, "gloo"))
def test_attention_calls_a_function_again_as_it_was_called(failures: Failures) -> None:
    """Backward has the random numbers and the autocast of forward, and leaves the generator as it is."""
    own = operands((4, 8), (4, 8), (4, 8))
    torch.manual_seed(5)
    output = attend(*own, kernel=dropped)
    after = torch.get_rng_state()
    mine = torch.autograd.grad(output.square().sum(), own)
    failures.expect_equal([torch.get_rng_state()], [after], "generator")
    torch.manual_seed(5)
    again = dropped(*own, mock.Mock(scale=8**-0.5))
    right = torch.autograd.grad(again.square().sum(), own)
    for at, pair in enumerate(zip((output, *mine), (again, *right), strict=True)):
        failures.near(*pair, at, rtol=0.0, atol=1e-12)
    own = operands((4, 8), (4, 8), (4, 8), dtype=torch.float32)
    factor = torch.full((4, 1, 1), 0.5, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        output = attend(
            *own, kernel=lambda *given: scaled(*given, by=given[3].per_head[0]), per_head=[factor]
        )
    output.float().sum().backward()
    failures.equal(output.dtype, torch.bfloat16, "autocast")
    failures.equal(factor.grad.dtype, torch.float32, "gradient")


@pytest.mark.ranks((1, "gloo"))
def test_attention_refuses_gradients_that_would_be_lost(failures: Failures) -> None:
    """A tensor that a function reads past its arguments; gradients of a kernel that are none, or too few."""

    class Wrong(Plain):
        def __init__(self, grads):
            self.grads = grads

        def backward(self, *given):
            return self.grads(super().backward(*given))

    hidden = torch.ones((), dtype=torch.float64, requires_grad=True)
    cases = [
        ("is not among its arguments", lambda *given: scaled(*given, by=hidden * 2)),
        ("returned gradients of the shapes", Wrong(lambda grads: None)),
        ("returned gradients of the shapes", Wrong(lambda grads: grads[:2])),
        ("returned gradients of the shapes", Wrong(lambda grads: (*grads[:2], None))),
    ]
    for said, kernel in cases:
        output = attend(*operands((4, 8), (4, 8), (4, 8)), kernel=kernel)
        failures.says(message_of(output.sum().backward), (said,), said)
    whole = torch.arange(4).reshape(4, 1, 1)  # no gradient
    own = operands((4, 8), (4, 8), (4, 8))
    kernel = lambda *given: scaled(*given, by=given[3].per_head[0])  # noqa: E731
    attend(*own, kernel=kernel, per_head=[whole]).sum().backward()
    failures.equal([one.grad is None for one in own], [False] * 3, "integers")


@pytest.mark.ranks((2, "gloo"))
def test_attention_over_peers_lends_slots(failures: Failures) -> None:
    """A kernel that keeps what it was lent has it in backward; tables lie on the CPU under any default device."""
    for parts in (1, 2):
        found = []
        for kernel in (Keeps(), Plain()):
            own = operands((8, 8), (8, 8), (8, 8), tokens=6)
            with over_peers(), torch.device("meta"):
                output = attend(*own, kernel=kernel, head_parts=parts, transport="peer", chunks=2)
            with over_peers():
                found.append([output, *torch.autograd.grad(output.square().sum(), own)])
        failures.expect_equal(*found, parts)


def test_attention_takes_peers_by_itself_only_where_they_were_timed() -> None:
    """The passes that copies carry of calls on a GPU, and why they carry none; without gradients one at most."""
    form = (1, torch.bfloat16, 64, 64)
    cases = [
        ((4, 8, 8), {}, (2, "")),
        ((4, 8, 2), {}, (1, "")),  # several ranks have terms of a head's gradient
        ((1, 8, 8), {}, (1, "")),
        ((2, 8, 8), {}, (0, "head parts of 2 on 4 ranks")),
        ((4, 8, 8), {"per_head": True}, (0, "per_head")),
        ((4, 8, 2), {"transport": "peer"}, (2, "")),
        ((1, 8, 8), {"transport": "peer", "per_head": True}, (2, "")),
        ((2, 8, 8), {"transport": "peer"}, (2, "")),
    ]
    for (parts, *heads), asked, expected in cases:
        wanted = (asked.get("transport"), None, asked.get("per_head", False))
        problem = ((64,) * 4, False, *heads, None, 0, (), parts)
        for backward in (False, True):
            _, copied, why = functions._chunks(
                wanted, backward, torch.device("cuda"), True, problem, form
            )
            passes, said = expected
            assert (copied, why) == (passes if backward else min(passes, 1), said), expected


@pytest.mark.ranks((2, "gloo"))
def test_attention_in_chunks_sends_before_the_kernel(failures: Failures) -> None:
    """A chunk is on its way before the kernel computes the one before; results go home before the next kernel."""
    order: list[str] = []

    class Noted(Plain):
        def forward(self, *given):
            order.append("kernel")
            return super().forward(*given)

        def backward(self, *given):
            order.append("kernel")
            return super().backward(*given)

    start = collectives.start_all_to_all

    def noted(*given):
        order.append("send")
        return start(*given)

    with mock.patch.object(collectives, "start_all_to_all", noted):
        own = operands((4, 8), (4, 8), (4, 8))
        output = attend(*own, kernel=Noted(), head_parts=2, transport="nccl", chunks=2)
        forward, order = order, []
        output.sum().backward()
    # Heads 0 and 1, products 0, results 0, products 1, results 1; the gradients likewise.
    expected = ["send", "send", "kernel", "send", "kernel", "send"]
    failures.equal([forward, order], [expected, expected], "order")


@pytest.mark.ranks((1, "gloo"), (3, "gloo"))
def test_attention_cuts_tokens_and_positions_alike(failures: Failures) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    total = 4 * world
    numbers = [0] * (world - 1) + [total]
    expected = {
        "contiguous": list(range(4 * rank, 4 * rank + 4)),
        "zigzag": [*range(2 * rank, 2 * rank + 2), *range(total - 2 * rank - 2, total - 2 * rank)],
        tuple(numbers): list(range(total)) if rank == world - 1 else [],
    }
    whole = integers((2, total, 3), torch.device("cpu"), "whole")
    for tokens, right in expected.items():
        failures.equal(overlap_torch.token_positions(total, tokens).tolist(), right, tokens)
        cut = overlap_torch.cut_tokens(whole, 1, tokens)
        failures.expect(difference(cut, whole[:, right]), tokens)
        compiled = torch.compile(overlap_torch.cut_tokens, backend="eager", fullgraph=True)
        failures.expect(difference(compiled(whole, 1, tokens), cut), "compiled", tokens)


@pytest.mark.ranks((2, "gloo"))
def test_attention_compiles_for_documents_that_change(failures: Failures) -> None:
    def function(q, documents):
        return attend(q, q, q, causal=True, documents=documents)

    (q,) = operands((4, 8), dtype=torch.float32)
    for dynamic in (None, True):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        for lengths in ([3, 5], [2, 6], [1, 3, 4]):
            documents = Documents(lengths)
            failures.expect_equal([compiled(q, documents)], [function(q, documents)], lengths)


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_attention_compiles_for_sizes_that_change(failures: Failures) -> None:
    """A second size, or ``dynamic=True``, makes symbols of batch, heads and width."""
    on_gpu = rank_device().type == "cuda"
    for tokens, dynamic in itertools.product(("contiguous", "zigzag"), (None, True)):

        def function(q):
            return attend(q, q, q, causal=True, tokens=tokens)  # noqa: B023

        torch._dynamo.reset()
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        for batch, heads, width in ((1, 4, 8), (2, 4, 8), (3, 8, 16)):
            dtype = torch.bfloat16 if on_gpu else torch.float32
            (q,) = operands((heads, width), batch=batch, dtype=dtype)
            found, right = compiled(q), function(q)
            pairs = [(found, right)]
            if not on_gpu:  # flash attention adds gradients in any order
                pairs += zip(
                    *(torch.autograd.grad(each.sum(), q) for each in pairs[0]), strict=True
                )
            for one, other in pairs:
                failures.expect_equal([one], [other], tokens, dynamic, batch)


@pytest.mark.ranks((2, "gloo"), (4, "gloo"), (2, "nccl"))
def test_attention_compiles_to_one_operator(failures: Failures) -> None:
    """One graph with a built-in kernel; a caller's breaks it, and says why."""
    on_gpu = rank_device().type == "cuda"
    cases = [
        {"causal": True},
        {"causal": True, "tokens": "zigzag", "head_parts": 1},
        {"window": (1, None), "documents": Documents([3, 4 * dist.get_world_size() - 3])},
        {"causal": True, "head_parts": 2, "transport": "peer", "chunks": 1},
        {"window": (1, 1), "head_parts": 1, "transport": "peer", "chunks": 2},
        {"causal": True, "head_parts": 1, "transport": "nccl", "chunks": 2},
    ]
    for keywords in cases:
        own = operands((4, 8), (2, 8), (2, 8), dtype=torch.bfloat16 if on_gpu else torch.float32)

        def function(q, k, v):
            return attend(2 * q, k, v, **keywords).sin()  # noqa: B023

        with contextlib.nullcontext() if on_gpu else over_peers():
            right = function(*own)
            expected = [right, *torch.autograd.grad(right.sum(), own)]
            output = torch.compile(function, backend="aot_eager", fullgraph=True)(*own)
            found = [output, *torch.autograd.grad(output.sum(), own)]
        if on_gpu:  # flash attention adds gradients in any order
            found, expected = found[:1], expected[:1]
        failures.expect_equal(found, expected, keywords)
    longer = torch.compile(lambda q: attend(q, q, q), backend="aot_eager", fullgraph=True)
    for tokens in (4, 6, 7):  # a second length makes sizes symbols
        (q,) = operands((4, 8), tokens=tokens, dtype=torch.bfloat16 if on_gpu else torch.float32)
        failures.expect_equal([longer(q.detach())], [attend(*[q.detach()] * 3)], tokens)
    scaled = torch.compile(
        lambda q, scale: attend(q, q, q, scale=scale), backend="aot_eager", fullgraph=True
    )
    for scale in (0.5, 0.25, 0.75, -0.5):  # the second one makes it a symbol
        right = attend(*[q.detach()] * 3, scale=scale)
        failures.expect_equal([scaled(q.detach(), scale)], [right], scale)
    slopes = torch.ones(4, device=rank_device())
    compiled = torch.compile(
        lambda q: attend(q, q, q, kernel=with_slopes, per_head=[slopes]),
        fullgraph=True,
        backend="eager",
    )
    with pytest.raises(Exception, match="a kernel of the caller's"):
        compiled(own[0])


@pytest.mark.ranks((1, "gloo"))
def test_attention_passes_gradcheck(failures: Failures) -> None:
    for keywords in ({"kernel": "masked", "window": (1, 1)}, {"causal": True}, {"kernel": "cpu"}):
        own = operands((2, 3), (2, 3), (2, 3), tokens=3)
        right = torch.autograd.gradcheck(lambda *all: attend(*all, **keywords), own)  # noqa: B023
        failures.expect(None if right else "wrong", keywords)


@pytest.mark.ranks((2, "gloo"))
def test_attention_refuses_second_derivatives_and_shows_modes_its_operator(failures) -> None:
    """A gradient depends on the inputs even where the output's gradient does not; a mode may come before backward only."""
    for kernel in (None, Plain()):
        for parts, power in itertools.product((1, 2), (1, 2)):
            q = operands((2, 4))[0]
            output = attend(q, q, q, kernel=kernel, head_parts=parts)
            (grad,) = torch.autograd.grad(output.pow(power).sum(), q, create_graph=True)
            said = message_of(torch.autograd.grad, grad.sum(), q)
            failures.holds("gradients of first order only", said, kernel, parts, power)
    q = operands((2, 4))[0].detach()
    with forward_ad.dual_level():
        failures.raises("has a tangent", attend, q, forward_ad.make_dual(q, q), q)
    for transform in (
        torch.func.grad(lambda q: attend(q, q, q).sum()),
        torch.vmap(lambda q: attend(q, q, q)),
    ):
        failures.raises("takes no transform of torch.func", transform, q[None])
    for parts in (1, 2):
        q = operands((2, 4))[0]
        output, right = (attend(q, q, q, head_parts=parts) for _ in range(2))
        (right,) = torch.autograd.grad(right.sum(), q)
        with FlopCounterMode(display=False) as counter:
            (found,) = torch.autograd.grad(output.sum(), q)
        failures.expect_equal([found], [right], parts)
        counts = [str(op) for op in counter.get_flop_counts()["Global"]]
        failures.equal(counts, ["overlap._context_parallel_attention_backward"], parts)


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_attention_takes_scales_that_are_not_above_0(failures: Failures) -> None:
    """Against products of the whole sequence and a mask: kernels that multiply a mask's -inf by the scale would give NaN."""
    rank, total = dist.get_rank(), 8
    q = torch.randn(1, total, 2, 8, generator=torch.Generator().manual_seed(3)).to(rank_device())
    later = torch.ones(total, total, device=q.device).triu(1).bool()
    for scale, dtype in itertools.product((0.0, -0.5), (torch.float32, torch.bfloat16)):
        whole = q.to(dtype).double()
        scores = torch.einsum("bihd,bjhd->bhij", whole, whole) * scale
        shares = scores.masked_fill(later, float("-inf")).softmax(-1)
        right = torch.einsum("bhij,bjhd->bihd", shares, whole).split(4, 1)[rank]
        own = q.to(dtype).split(4, 1)[rank]
        found = attend(own, own, own, causal=True, scale=scale)
        near = 1e-5 if dtype == torch.float32 else 2e-2
        failures.near(found.double(), right, scale, dtype, rtol=near, atol=near)


@pytest.mark.ranks((2, "gloo"))
def test_attention_knows_calls_by_all_that_they_depend_on(failures: Failures) -> None:
    """Shapes, options and groups by turns have their own results; what is known has a bound, and keeps no group that has gone."""
    known, made = functions._known_attention, ops.known
    groups = [dist.new_group([0, 1]), *(dist.new_group([each]) for each in (0, 1))]
    groups = [None, groups[0], groups[1 + dist.get_rank()]]
    cases = [
        (operands((heads, 8), (2, 8), (2, 8), tokens=tokens), {"group": group, **keywords})
        for group in groups
        for heads, tokens in ((4, 4), (4, 6), (2, 4))
        for keywords in ({"causal": True}, {"scale": 0.1}, {"causal": True, "kernel": Plain()})
    ]

    def both(own, keywords):
        output = attend(*own, **keywords)
        return [output.detach(), *torch.autograd.grad(output.square().sum(), own)]

    right = []
    for case in cases:
        known.cache_clear()
        made.cache_clear()
        right.append(both(*case))
    known.cache_clear()
    for turn in range(2):
        for at, case in enumerate(cases):
            failures.expect_equal(both(*case), right[at], turn, at)
    found = known.cache_info()
    failures.expect(None if found.misses == found.hits == len(cases) else f"{found}", "turns")
    own = [one.detach() for one in cases[0][0]]
    for each in range(300):
        attend(*own, scale=float(each + 1), group=groups[2])
    for cache in (known, made):
        found = cache.cache_info()
        failures.expect(None if found.currsize <= 256 else f"{found}", "bound")
    gone = weakref.ref(groups[2])
    dist.destroy_process_group(groups[2])
    del groups, cases, case
    gc.collect()
    failures.expect(None if gone() is None else "kept", "a group that has gone")


@pytest.mark.ranks((2, "gloo"))
def test_attention_says_what_does_not_fit(failures: Failures) -> None:
    """On every rank, before anything is sent."""
    nothing = torch.zeros(1, 4, 4, 8, device=rank_device())
    three = torch.zeros(1, 4, 3, 8, device=rank_device())
    cases = [
        ("[B, T, H, D], but q is (4, 4, 8)", (nothing[0], nothing, nothing), {}),
        ("no multiple of 3 key/value heads", (nothing, three, three), {}),
        ("this rank's tokens in each", (nothing, nothing[:, :3], nothing), {}),
        ("of one dtype", (nothing, nothing.double(), nothing), {}),
        ("asks for 2 of them", None, {"causal": True, "window": (1, 2)}),
        ("has a negative side", None, {"window": (-1, 0)}),
        ("window is (left, right)", None, {"window": 4}),
        ('takes tokens="contiguous"', None, {"tokens": "round"}),
        ("a zigzag is of 4 equal chunks", (three[:, :3], three[:, :3], three[:, :3]), {"tokens": "zigzag"}),
        ("one number for each rank", None, {"tokens": [4]}),
        ("has 5 tokens, but it has 4", None, {"tokens": [5, 5]}),
        ("documents have 7 tokens", None, {"documents": Documents([3, 4])}),
        ("documents is an overlap_torch.Documents", None, {"documents": [8]}),
        ("B = 1, but B is 2", (nothing.expand(2, -1, -1, -1),) * 3, {"documents": Documents([3, 5])}),
        ("heads on 2 ranks allow 1", (three, three, three), {"head_parts": 2}),
        ("heads on 2 ranks allow 1, 2", None, {"head_parts": 3}),
        ("the kernels that are built in are", None, {"kernel": "fast"}),
        ("does not run on cpu", None, {"kernel": "flash"}),
        ("cpu does not take a window", None, {"kernel": "cpu", "window": (1, 0)}),
        ("cpu does not take a causal mask of 4 queries with 8 keys", None,
            {"kernel": "cpu", "causal": True, "head_parts": 1}),
        ("slopes does not take a window, (1, -1)", None, {"kernel": Slopes(), "window": (1, None)}),
        ("with_slopes does not take a window, (1, -1)", None, {"kernel": with_slopes, "window": (1, None)}),
        ("kernel is None, a name", None, {"kernel": 3}),
        ("the kernels that are built in read none", None, {"per_head": [nothing]}),
        ("per_head takes tensors [4, ...]", None, {"kernel": with_slopes, "per_head": [three[0, 0]]}),
        ("per_head is a list of tensors, but it is a NoneType", None, {"kernel": with_slopes, "per_head": None}),
        ("per_head[0] must be a tensor, but it is a float", None, {"kernel": with_slopes, "per_head": [1.0]}),
        ("tokens is \"contiguous\", \"zigzag\" or a list", None, {"tokens": 4}),
        ("window must be an integer, but it is a float", None, {"window": (1.5, 0)}),
        ("head_parts must be an integer, but it is a str", None, {"head_parts": "2"}),
        ("scale is a number, but it is a str", None, {"scale": "x"}),
        ("multiply q by it", None, {"scale": torch.ones((), requires_grad=True)}),
        ("a mask with a scale that is not above 0", None, {"kernel": "cpu", "causal": True, "scale": 0.0, "head_parts": 2}),
        ("call it with q.to_dense()", (nothing.to_sparse(), nothing, nothing), {}),
        ("no process group is named", None, {"group": "nobody"}),
        ("transport is None, 'peer' or 'nccl'", None, {"transport": "ring"}),
        ("do not carry calls on cpu", None, {"transport": "peer"}),
        ("head parts of 2 allow 1 to 2 over the group's collectives", None, {"chunks": 3, "head_parts": 2}),
        ("chunks=3: its parts of 2 allow 1 to 2", None, {"transport": "peer", "head_parts": 2, "chunks": 3}),
        ("no multiple of 16 bytes", (nothing[..., :3],) * 3, {"transport": "peer"}),
    ]  # fmt: skip
    for expected, given, keywords in cases:
        with mock.patch.object(collectives, "start_all_to_all", side_effect=AssertionError):
            failures.raises(expected, attend, *(given or (nothing,) * 3), **keywords)
    for returned, kernel in (
        ("(1, 2, 8, 8) in torch.float32", lambda q, k, v, work: q.transpose(1, 2)),
        ("(1, 8, 2, 8) in torch.float64", lambda q, k, v, work: q.double()),
        ("NoneType", lambda q, k, v, work: None),
    ):
        expected = f"returned {returned}, but the output of its queries is [B, Tq, h, Dv], (1, 8, 2, 8) in torch.float32"
        failures.raises(expected, attend, *(nothing,) * 3, kernel=kernel, head_parts=2)
    makers = [
        ("x must be a tensor", overlap_torch.cut_tokens, ([1, 2], 0)),
        ("at least 0 tokens", Documents, ([3, -1],)),
        ("a list of integers", Documents, ([3.5],)),
        ("do not divide into 4 equal chunks", overlap_torch.token_positions, (6, "zigzag")),
        ("add up to 7, but the sequence has 8", overlap_torch.cut_tokens, (nothing[0, 0].t(), 0, [3, 4])),
    ]  # fmt: skip
    for expected, maker, given in makers:
        failures.raises(expected, maker, *given)


@pytest.mark.ranks((2, "gloo"))
def test_attention_names_what_ranks_disagree_about(failures: Failures) -> None:
    rank = dist.get_rank()
    cases = [
        ("left None, right 0", "left 3, right 0", {"causal": True}, {"causal": True, "window": (3, 0)}),
        ("documents [3, 5]", "documents [4, 4]", *({"documents": Documents([n, 8 - n])} for n in (3, 4))),
        ("tokens [4, 4]", "in a zigzag", {}, {"tokens": "zigzag"}),
        ("head parts 1", "head parts 2", {"head_parts": 1}, {"head_parts": 2}),
        ("scale 1.0", "scale 2.0", {"scale": 1.0}, {"scale": 2}),
        ("by cpu", "by masked", {}, {"kernel": "masked"}),
        ("float64", "float32", {}, {"dtype": torch.float32}),
        ("[1, 4, 4, 8, 8]", "[1, 4, 2, 8, 8]", {}, {"kv": 2, "kernel": "masked"}),
    ]  # fmt: skip
    for own, other, *keywords in cases:
        mine = dict(keywords[rank])
        kv = mine.pop("kv", 4)
        given = operands((4, 8), (kv, 8), (kv, 8), dtype=mine.pop("dtype", torch.float64))
        failures.says(message_of(attend, *given, **mine), ("disagree", own, other), own, other)


def problems_over_peers() -> list[tuple[list[torch.Tensor], dict]]:
    """Operands with 16-bit numbers, and keywords, of all kinds of head parts."""
    world = dist.get_world_size()
    # Each part has eight heads of keys and values, divided among the ranks.
    cases = [
        ((16, 8, 256), {"head_parts": world, "chunks": 8 // world, "causal": True}),
        ((8, 8, 96), {"head_parts": world, "chunks": 2}),
        ((8, 4, 128), {"head_parts": 1, "chunks": 2, "causal": True, "tokens": "zigzag"}),
        ((8, 4, 160), {"head_parts": world // 2, "chunks": 2}),
        ((8, 1, 96), {"head_parts": world, "chunks": 1, "causal": True}),
    ]
    return [
        (
            operands((heads, 64), (kv, 64), (kv, 64), tokens=tokens, dtype=torch.bfloat16),
            {**keywords, "transport": "peer"},
        )
        for (heads, kv, tokens), keywords in cases
    ]


@so_many_calls(100)
@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
def test_attention_over_peers_does_not_race(failures: Failures, calls: int) -> None:
    """Calls of several problems by turns, forward and backward, on ranks that are late at random, and the replay of a graph between them.

    Outputs and the gradients of keys and values are those of the collectives, bit for bit; cuDNN adds those of queries in any order.
    """
    late, turns = random.Random(dist.get_rank()), random.Random(0)

    def both(own, **keywords):
        output = attend(*own, **keywords)
        _, dk, dv = torch.autograd.grad(output.float().square().sum(), own)
        return [output.detach(), dk, dv]

    def wait():
        if late.random() < 0.4:
            torch.cuda._sleep(int(late.random() * 2e6))

    problems = problems_over_peers()
    right = []
    for own, keywords in problems:
        chunks, by_nccl = keywords["chunks"], {**keywords, "transport": "nccl"}
        right.append(both(own, **{**by_nccl, "chunks": None}))
        failures.expect_equal(both(own, **by_nccl), right[-1], f"{chunks} chunks over NCCL")
        failures.expect_equal(both(own, **keywords), right[-1], f"first call, {chunks} chunks")
    own, keywords = [one.detach() for one in problems[0][0]], problems[0][1]
    graph, output = capture(lambda: attend(*own, **keywords))
    for call in range(calls):
        which = turns.randrange(len(problems))
        wait()
        failures.expect_equal(both(problems[which][0], **problems[which][1]), right[which], call)
        if turns.random() < 0.3:
            wait()
            output.zero_()
            graph.replay()
            failures.expect_equal([output], right[0][:1], f"replay after {call}")


@pytest.mark.ranks((2, "nccl"))
def test_attention_over_peers_runs_beside_the_current_device(failures: Failures) -> None:
    """Operands on another device than the current one."""
    own, keywords = problems_over_peers()[0]
    own = [one.detach() for one in own]
    right = attend(*own, **keywords)
    other = (torch.cuda.current_device() + 1) % torch.cuda.device_count()
    with torch.cuda.device(other):
        found = attend(*own, **keywords)
    failures.expect_equal([found], [right], f"current device {other}")
