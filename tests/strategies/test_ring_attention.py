"""Attention on a ring of ranks equals attention in one process, to rounding, in every shape."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from conftest import GetRanks
from shardlab import comm
from shardlab.strategies import ring_attention as ring
from shardlab.strategies.ring_attention import View, Zigzag
from shardlab.world import World

TOLERANCE = 1e-10


class Case(NamedTuple):
    length: int
    batch: int = 2
    heads: int = 2
    kv_heads: int = 2
    size: int = 4
    v_size: int = 4
    is_causal: bool = True
    scale: float | None = None
    dtype: torch.dtype = torch.float64


@functools.cache
def tensors(case: Case) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of the result, of the whole sequence."""
    random = torch.Generator().manual_seed(hash(case[:6]) % 1000)
    shapes = [
        (case.batch, case.heads, case.length, case.size),
        (case.batch, case.kv_heads, case.length, case.size),
        (case.batch, case.kv_heads, case.length, case.v_size),
        (case.batch, case.heads, case.length, case.v_size),
    ]
    # Large scores: a softmax that is not rescaled, or overflows, shows.
    return tuple(
        (4 * torch.randn(shape, generator=random, dtype=torch.float64)).to(case.dtype)
        for shape in shapes
    )


def plain(case: Case) -> list[Tensor]:
    """The result and the gradients of q, k and v, by the formula."""
    *given, grad = tensors(case)
    q, k, v = (t.double().requires_grad_() for t in given)
    shared = case.heads // case.kv_heads
    scale = case.size**-0.5 if case.scale is None else case.scale
    scores = q @ k.repeat_interleave(shared, 1).transpose(-1, -2) * scale
    if case.is_causal:
        is_later = torch.ones(case.length, case.length, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(is_later, -torch.inf)
    out = scores.softmax(-1) @ v.repeat_interleave(shared, 1)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad.double())]


def on_rank(
    world: World, cases: Sequence[Case], plant: Callable[[pytest.MonkeyPatch], None] | None = None
) -> list[tuple[list[Tensor], list[tuple[str, int, str]]]]:
    """This rank's part of the results, and what it sent, as (call, bytes, label)."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch)
        for case in cases:
            split = Zigzag(case.length, world.size)
            mine = split.positions(world.rank, world.device)
            *parts, grad = (t[:, :, mine] for t in tensors(case))
            q, k, v = (t.requires_grad_() for t in parts)
            comm.LEDGER.reset()
            how: Any = {"is_causal": case.is_causal, "scale": case.scale}
            out = ring.ring_attention(q, k, v, split, world.group, **how)
            grads = torch.autograd.grad(out, (q, k, v), grad)
            sent = [(e.op, e.bytes, e.label) for e in comm.LEDGER.entries]
            found.append(([out.detach(), *grads], sent))
    return found


def errors(ranks: Any, cases: Sequence[Case], plant: Any = None) -> list[float]:
    """For each case the largest difference from one process."""
    by_rank = ranks.run(on_rank, list(cases), plant)
    found = []
    for i, case in enumerate(cases):
        split, worst = Zigzag(case.length, ranks.size), 0.0
        for rank, results in enumerate(by_rank):
            mine = split.positions(rank, torch.device("cpu"))
            for got, whole in zip(results[i][0], plain(case), strict=True):
                wanted = whole[:, :, mine]
                assert got.shape == wanted.shape
                difference = (got.double() - wanted).abs()
                worst = max(worst, float(difference.max()) if got.numel() else 0.0)
                worst = float("inf") if got.isnan().any() else worst
        found.append(worst)
    return found


CASES = [
    Case(length=16),
    Case(length=16, is_causal=False),
    Case(length=13, heads=4, kv_heads=2),  # pieces of different lengths, shared heads
    Case(length=29, heads=6, kv_heads=1, scale=0.7, is_causal=False),
    Case(length=12, v_size=6),  # values of another size: not PyTorch's kernel, but ours
    Case(length=11, v_size=3, heads=4, kv_heads=2, is_causal=False),
    Case(length=150, size=8, v_size=8),  # longer than a kernel's tile
    *(Case(length=n) for n in range(1, 8)),  # empty pieces
    Case(length=3, is_causal=False),
    Case(length=10, batch=0),
]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_it_equals_attention_in_one_process(world: int, ranks: GetRanks) -> None:
    found = dict(zip(CASES, errors(ranks(world), CASES), strict=True))
    assert {case: error for case, error in found.items() if not error < TOLERANCE} == {}


HEADS = [(1, 1), (2, 1), (4, 2), (3, 3), (6, 2)]


@pytest.mark.long
@given(
    st.lists(
        st.builds(
            lambda length, batch, heads, size, v_size, is_causal, scale: Case(
                length, batch, *heads, size, v_size or size, is_causal, scale
            ),
            length=st.integers(1, 40), batch=st.integers(1, 3), heads=st.sampled_from(HEADS),
            size=st.integers(1, 9), v_size=st.sampled_from([None, None, 1, 5]),
            is_causal=st.booleans(), scale=st.sampled_from([None, 1.0, 0.3]),
        ),
        min_size=8, max_size=8,
    ),
    st.sampled_from([2, 3, 4]),
)  # fmt: skip
@settings(max_examples=12)
def test_any_shape(ranks: GetRanks, cases: list[Case], world: int) -> None:
    assert max(errors(ranks(world), cases)) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrow_numbers(dtype: torch.dtype, ranks: GetRanks) -> None:
    """At most three times as far off as PyTorch's own kernel is in one process."""
    cases = [Case(length=64, size=8, v_size=v, dtype=dtype) for v in (8, 5)]
    *inputs, grad = tensors(cases[0])
    q, k, v = (t.clone().requires_grad_() for t in inputs)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    theirs = [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]
    pairs = zip(theirs, plain(cases[0]), strict=True)
    own = max(float((a.double() - b).abs().max()) for a, b in pairs)
    assert 0 < max(errors(ranks(2), cases)) < 3 * own


def test_the_bytes_are_those_of_the_docstring(ranks: GetRanks) -> None:
    """(3C-2)K, one message for each hop, and gradients in float32."""
    world, case = 3, Case(length=24, heads=4, kv_heads=2, dtype=torch.bfloat16)
    numbers = 2 * case.batch * case.length // world * case.kv_heads * case.size
    keys = [("send", 2 * numbers, "keys, values")]
    grads = [("send", 4 * numbers, "gradients of keys, values")]
    for results in ranks(world).run(on_rank, [case]):
        sent = results[0][1]
        assert sorted(sent) == sorted(2 * (world - 1) * keys + world * grads)


# ------------------------------------------------------------------ planted bugs


def off_by_one(patch: pytest.MonkeyPatch) -> None:
    """A query does not see the key of its own position."""
    right = ring._scores

    def scores(q: Tensor, k: Tensor, is_masked: bool, scale: float) -> Tensor:
        found = right(q, k, is_masked, scale)
        if is_masked:
            tokens = torch.arange(1, found.shape[-1])
            found[..., tokens, tokens] = -torch.inf
        return found

    patch.setattr(ring, "_is_fused", lambda *_: False)
    patch.setattr(ring, "_scores", scores)


def border_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """The last key of an earlier piece is not seen."""
    right = ring.view

    def view(split: Zigzag, rank: int, source: int, is_causal: bool) -> View:
        first, end, is_masked = right(split, rank, source, is_causal)
        return View(first, max(1, end - (source < rank)), is_masked)

    patch.setattr(ring, "view", view)


def late_piece_is_seen(patch: pytest.MonkeyPatch) -> None:
    """The late piece of a rank before this one is not skipped."""
    right = ring.view

    def view(split: Zigzag, rank: int, source: int, is_causal: bool) -> View:
        first, end, is_masked = right(split, rank, source, is_causal)
        return View(first, split.tokens(source) if source < rank else end, is_masked)

    patch.setattr(ring, "view", view)


def early_queries_see_all(patch: pytest.MonkeyPatch) -> None:
    right = ring.view
    patch.setattr(ring, "view", lambda *args: right(*args)._replace(first=0))


def not_rescaled(patch: pytest.MonkeyPatch) -> None:
    """What was summed before is not weighed again when a block with larger scores comes."""

    def merge(out: Tensor, log_sum: Tensor, part: Tensor, its_sum: Tensor) -> None:
        total = torch.logaddexp(log_sum, its_sum)
        out.add_(part * (its_sum - total).exp().unsqueeze(-1))
        log_sum.copy_(total)

    patch.setattr(ring, "merge", merge)


def one_hop_short(patch: pytest.MonkeyPatch) -> None:
    """The gradients of keys and values are not sent home: each rank keeps what is with it."""
    right = ring.Blocks.pass_on
    hops: list[int] = []

    def pass_on(self: ring.Blocks, block: Tensor, what: str) -> tuple[Tensor, comm.Pending]:
        came, pending = right(self, block, what)
        if what.startswith("gradients"):
            hops.append(1)
            if len(hops) % self.ranks == 0:
                pending.wait()
                came.copy_(block)
        return came, pending

    patch.setattr(ring.Blocks, "pass_on", pass_on)


def own_sum_in_backward(patch: pytest.MonkeyPatch) -> None:
    """Each block's weights are normalised by its own sum, not by that of the whole sequence."""
    right = ring.attend_backward

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        out, _, is_masked, scale = rest
        return right(
            grad, q, k, v, out, ring.attend(q, k, v, is_masked, scale)[1], is_masked, scale
        )

    patch.setattr(ring, "attend_backward", backward)


def gradients_of_the_last_rank(patch: pytest.MonkeyPatch) -> None:
    """What came is kept, and what this rank has to add to it is lost."""
    patch.setattr(Tensor, "__iadd__", lambda self, other: self.copy_(other))


def one_head_of_those_that_share(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        ring, "_summed", lambda grad, heads: grad[:, :: grad.shape[1] // heads].contiguous()
    )


def without_the_scale(patch: pytest.MonkeyPatch) -> None:
    right = ring.attend
    patch.setattr(ring, "attend", lambda *args: right(*args[:-1], args[0].shape[-1] ** -0.5))


BUGS = [
    off_by_one, border_off_by_one, late_piece_is_seen, early_queries_see_all, not_rescaled,
    one_hop_short, own_sum_in_backward, gradients_of_the_last_rank, one_head_of_those_that_share,
    without_the_scale,
]  # fmt: skip


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_seen(plant: Any, ranks: GetRanks) -> None:
    cases = [Case(length=13, heads=4, kv_heads=2, scale=0.7)]
    assert errors(ranks(2), cases)[0] < TOLERANCE
    assert not errors(ranks(2), cases, plant)[0] < 1e-3
