"""Attention on a ring of ranks equals attention in one process, to rounding, in every shape."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import planted_mesh
from conftest import GetRanks, long_unless
from shardlab.ledger import LEDGER
from shardlab.strategies.context import ring_attention as ring
from shardlab.strategies.context.ring_attention import View, Zigzag
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
    world: World, cases: Sequence[Case], bug: str = ""
) -> list[tuple[list[Tensor], list[tuple[str, int, str]]]]:
    """This rank's part of the results, and what it sent, as (call, bytes, label)."""
    found = []
    with ExitStack() as planted:
        for plant in BUGS[bug] if bug else ():
            planted.enter_context(mock.patch.object(*plant))
        for case in cases:
            split = Zigzag(case.length, world.size)
            mine = split.positions(world.rank, world.device)
            *parts, grad = (t[:, :, mine] for t in tensors(case))
            q, k, v = (t.requires_grad_() for t in parts)
            LEDGER.reset()
            how: Any = {"is_causal": case.is_causal, "scale": case.scale}
            out = ring.ring_attention(q, k, v, split, world.group, **how)
            grads = torch.autograd.grad(out, (q, k, v), grad)
            sent = [(e.op, e.bytes, e.label) for e in LEDGER.entries]
            found.append(([out.detach(), *grads], sent))
    return found


def errors(ranks: Any, cases: Sequence[Case], bug: str = "") -> list[float]:
    """For each case the largest difference from one process."""
    by_rank = ranks.run(on_rank, list(cases), bug)
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


@pytest.mark.parametrize("world", long_unless(lambda world: world < 3, [1, 2, 3, 4]))
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


_view, _attend = ring.view, ring.attend


def border_off_by_one(split: Zigzag, rank: int, source: int, is_causal: bool) -> View:
    """The last key of an earlier piece is not seen."""
    first, end, is_masked = _view(split, rank, source, is_causal)
    return View(first, max(1, end - (source < rank)), is_masked)


# Those of the proofs that lie in the ring, and more.
BUGS = {
    name: bug.plants
    for name, bug in planted_mesh.BUGS.items()
    if any(plant[0] is ring for plant in bug.plants) and bug.check == "equal"
}
BUGS |= {
    "the last key of an earlier piece is not seen": [(ring, "view", border_off_by_one)],
    "early queries see all": [(ring, "view", lambda *args: _view(*args)._replace(first=0))],
    "what a rank has to add to a gradient is lost": [
        (Tensor, "__iadd__", lambda self, other: self.copy_(other))
    ],
    "one head of those that share": [
        (ring, "_summed", lambda grad, heads: grad[:, :: grad.shape[1] // heads].contiguous())
    ],
    "without the scale": [
        (ring, "attend", lambda *args: _attend(*args[:-1], args[0].shape[-1] ** -0.5))
    ],
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(bug: str, ranks: GetRanks) -> None:
    cases = [Case(length=13, heads=4, kv_heads=2, scale=0.7)]
    assert errors(ranks(2), cases)[0] < TOLERANCE
    assert not errors(ranks(2), cases, bug)[0] < 1e-3
