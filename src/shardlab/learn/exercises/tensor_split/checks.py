"""Columns, then rows: who holds what, the output, both kinds of gradients, one message each way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from shardlab import wire
from shardlab.learn import mistakes
from shardlab.learn.exercise import (
    Case,
    Finding,
    Rejected,
    Row,
    Rows,
    Stage,
    each_step,
    judging,
    say,
)
from shardlab.learn.mistakes import Array, close, flat

DIM, HIDDEN, HEADS = 12, 18, 6
CASES = (
    Case("who holds what", 2, {"halves": []}),
    Case("two ranks", 2, {"halves": ["mlp", "attention"]}),
    Case("three ranks", 3, {"halves": ["attention", "mlp"]}),
)
SHAPES: dict[str, tuple[int, ...]] = {
    "up.weight": (HIDDEN, DIM),
    "up.bias": (HIDDEN,),
    "down.weight": (DIM, HIDDEN),
    "down.bias": (DIM,),
    "qkv.weight": (3 * DIM, DIM),
    "qkv.bias": (3 * DIM,),
    "out.weight": (DIM, DIM),
    "out.bias": (DIM,),
}
LAYERS = {"mlp": ("up", "down"), "attention": ("qkv", "out")}
ROW_BIASES = ("down.bias", "out.bias")  # added after the sum


def run(at: Stage) -> dict[str, Any]:
    # Cut first with numbers in the place of values: they say which elements a rank takes.
    numbered = {
        name: torch.arange(1, 1 + math.prod(shape), dtype=torch.float64).view(shape)
        for name, shape in SHAPES.items()
    }
    held = {name: tensor.flatten() for name, tensor in _cut(at, numbered).items()}
    whole = {
        name: _random(shape, seed) / DIM**0.5
        for seed, (name, shape) in enumerate(SHAPES.items(), start=100)
    }
    part = {name: t.detach().clone().requires_grad_() for name, t in _cut(at, whole).items()}
    return {"held": held, "steps": [_half(at, half, whole, part) for half in at.options["halves"]]}


def _cut(at: Stage, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    given = {name: tensor.clone() for name, tensor in whole.items()}
    part = at.submission.cut(given, at.rank, at.world)
    if not isinstance(part, Mapping) or not all(isinstance(t, Tensor) for t in part.values()):
        raise Rejected(say("wrong-type/cut", type=type(part).__name__))
    for name in SHAPES:
        if name not in part and name not in ROW_BIASES:
            raise Rejected(say("part-missing", name=name))
    return {name: part[name].detach() for name in SHAPES if name in part}


def _half(
    at: Stage, half: str, whole: Mapping[str, Tensor], part: Mapping[str, Tensor]
) -> dict[str, Any]:
    """One half block with its residual connection, by the learner and by one process."""
    x = _random((2, 5, DIM), 1).requires_grad_()
    gradient = _random((2, 5, DIM), 2)
    first = len(at.spy.calls)
    at.spy.mark("forward")
    inner = x * 1.0  # as in a model: x is what a layer below has computed
    got = _learners(at, half)(part, inner)
    if not isinstance(got, Tensor) or got.shape != x.shape:
        what = list(got.shape) if isinstance(got, Tensor) else type(got).__name__
        raise Rejected(say("wrong-type/half", half=half, what=what, shape=list(x.shape)))
    if not got.requires_grad:
        raise Rejected(say("graph-lost", half=half))
    at.spy.mark("backward")
    (inner + got).backward(gradient)
    at.spy.mark("")
    assert x.grad is not None

    copy = {name: tensor.detach().clone().requires_grad_() for name, tensor in whole.items()}
    ours = x.detach().clone().requires_grad_()
    want = one_process(half, copy, ours, HEADS)
    want.backward(gradient)
    assert ours.grad is not None
    names = [name for name in SHAPES if name.split(".")[0] in LAYERS[half]]
    return {
        "half": half,
        "got": got.detach(),
        "want": want.detach(),
        "at_entry": one_process(half, whole, at.world * x.detach(), HEADS),
        "more_heads": one_process(half, whole, x.detach(), HEADS * at.world),
        "bias": whole[f"{LAYERS[half][1]}.bias"].expand(2, 5, DIM),
        "dx": x.grad - gradient,  # without what came by the residual connection
        "dx_want": ours.grad,
        "gradient": gradient,
        "parts": {n: None if (g := part[n].grad) is None else g.flatten()
                  for n in names if n in part},
        "wholes": {n: copy[n].grad.flatten() for n in names},  # type: ignore[union-attr]
        "calls": list(at.spy.calls[first:]),
    }  # fmt: skip


def _learners(at: Stage, half: str) -> Any:
    if half == "mlp":
        return at.submission.mlp
    return lambda part, x: at.submission.attention(part, x, HEADS)


def one_process(half: str, whole: Mapping[str, Tensor], x: Tensor, heads: int) -> Tensor:
    first, second = LAYERS[half]
    hidden = F.linear(x, whole[f"{first}.weight"], whole[f"{first}.bias"])
    if half == "mlp":
        hidden = F.gelu(hidden)
    else:
        batch, seq, _ = x.shape
        size = DIM // heads or 1  # only for a mistake are there more heads than columns
        q, k, v = hidden.view(batch, seq, 3, DIM // size, size).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = mixed.transpose(1, 2).reshape(batch, seq, DIM)
    return F.linear(hidden, whole[f"{second}.weight"], whole[f"{second}.bias"])


def _random(shape: Sequence[int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)


# ------------------------------------------------------------------ who holds what


def held(ranks: Rows) -> Finding | None:
    for name, shape in SHAPES.items():
        size = math.prod(shape)
        for rank, row in enumerate(ranks):
            values = flat(row["held"].get(name, []))
            if (values != values.round()).any() or ((values < 1) | (values > size)).any():
                return say("values-changed", name=name, rank=rank)
    for rank, row in enumerate(ranks):
        for half, (columns, rows) in LAYERS.items():
            if found := _along(columns, rows, row, rank):
                return found
            if half == "attention" and (found := _heads(row, rank)):
                return found
            if found := _together(columns, rows, row, rank):
                return found
    return _each_once(ranks)


def _elements(row: Row, name: str) -> list[tuple[int, ...]]:
    """The places in the whole tensor of what a rank holds of it."""
    found = flat(row["held"].get(name, [])).astype(int) - 1
    return list(zip(*np.unravel_index(found, SHAPES[name]), strict=True))


def _along(columns: str, rows: str, row: Row, rank: int) -> Finding | None:
    """The first layer is cut by its outputs, the second by its inputs."""
    for layer, should in ((columns, 0), (rows, 1)):
        name = f"{layer}.weight"
        extents = [len({place[d] for place in _elements(row, name)}) for d in (0, 1)]
        if extents == list(SHAPES[name]):
            return say("not-split", name=name, rank=rank)
        if extents[1 - should] != SHAPES[name][1 - should]:
            ways = ("outputs", "inputs")
            return say("wrong-dimension", name=name, rank=rank, by=ways[1 - should],
                       should=ways[should])  # fmt: skip
    return None


def _heads(row: Row, rank: int) -> Finding | None:
    """A rank needs q, k and v of the same heads, whole ones."""
    outputs = {place[0] for place in _elements(row, "qkv.weight")}
    q, k, v = ({o - i * DIM for o in outputs if o // DIM == i} for i in range(3))
    size = DIM // HEADS
    if q == k == v and all(o // size * size + j in q for o in q for j in range(size)):
        return None
    listed = [mistakes.listed(map(str, sorted({o // size for o in part})), HEADS) for part in
              (q, k, v) if part]  # fmt: skip
    if len(listed) < 3:
        return say("qkv-one-block", rank=rank, held=len(outputs), lacking=3 - len(listed))
    return say("heads-do-not-match", rank=rank, q=listed[0], k=listed[1], v=listed[2])


def _together(columns: str, rows: str, row: Row, rank: int) -> Finding | None:
    """What the first layer puts out on a rank is what the second takes in there."""
    units = {place[0] for place in _elements(row, f"{columns}.weight")}
    bias = {place[0] for place in _elements(row, f"{columns}.bias")}
    inputs = {place[1] for place in _elements(row, f"{rows}.weight")}
    other = f"{rows}.weight" if units == bias else f"{columns}.bias"
    # q, k and v of a head are one input of the layer that follows.
    if units != bias or inputs != {unit % SHAPES[other][1] for unit in units}:
        return say("parts-do-not-match", a=f"{columns}.weight", b=other, rank=rank)
    return None


def _each_once(ranks: Rows) -> Finding | None:
    for name, shape in SHAPES.items():
        size = math.prod(shape)
        every = [value for row in ranks for value in row["held"].get(name, [])]
        if len(set(every)) < size:
            return say("elements-lost", name=name, lost=size - len(set(every)), size=size)
        if len(every) > size and name not in ROW_BIASES:
            return say("held-twice", name=name, twice=len(every) - size)
    return None


# ------------------------------------------------------------------ forward


@each_step
def output(rows: Rows, _step: int) -> Finding | None:
    n, half = len(rows), rows[0]["half"]
    want, bias = flat(rows[0]["want"]), flat(rows[0]["bias"])
    got = [flat(row["got"]) for row in rows]

    def every(wanted: Array) -> bool:
        return all(close(one, wanted) for one in got)

    if every(want):
        return None
    if not np.isfinite(got).all():
        return say("not-finite/tensor", half=half)
    if every(want + (n - 1) * bias):
        return say("bias-on-every-rank", half=half, n=n)
    if every(want - bias):
        return say("bias-forgotten", half=half)
    if every(flat(rows[0]["at_entry"])):
        return say("summed-at-entry", half=half, n=n)
    if half == "attention" and every(flat(rows[0]["more_heads"])):
        return say("heads-not-divided", heads=HEADS, mine=HEADS // n)
    if every(want / n) or every((want - bias) / n + bias):
        return say("averaged/tensor", half=half, n=n)
    total = np.sum(got, axis=0)
    if any(close(total, want + times * bias) for times in (0, n - 1, -1)):
        return say("not-summed", half=half, n=n)
    off = max(mistakes.error(one, want) for one in got)
    if not all(close(one, got[0]) for one in got):
        return say("outputs-differ", half=half, error=off)
    return say("wrong-output", half=half, error=off)


# ------------------------------------------------------------------ backward


def part_gradients(ranks: Rows) -> Finding | None:
    """What each rank has for its elements against what one process has for the same ones."""

    @each_step
    def look(rows: Rows, _step: int) -> Finding | None:
        return _part_gradients(rows, ranks)

    return look(ranks)


def _part_gradients(rows: Rows, ranks: Rows) -> Finding | None:
    n, half = len(rows), rows[0]["half"]
    right: list[dict[str, Array]] = []
    for row, rank in zip(rows, ranks, strict=True):
        held = {name: flat(rank["held"][name]).astype(int) - 1 for name in row["parts"]}
        right.append({name: flat(row["wholes"][name])[places] for name, places in held.items()})
    wrong = [
        (r, name)
        for r, row in enumerate(rows)
        for name, value in row["parts"].items()
        if not close(value, right[r][name])
    ]
    if not wrong:
        return None
    names = dict.fromkeys(name for _, name in wrong)
    for r, name in wrong:
        if rows[r]["parts"][name] is None or not flat(rows[r]["parts"][name]).any():
            there = [q for q in range(n) if name in right[q] and (q, name) not in wrong]
            if name in ROW_BIASES and there:
                return say("copies-drift", name=name, rank=r, there=there[0])
            return say("no-gradient/part", name=name, rank=r)
    factor = mistakes.ratio(
        [rows[r]["parts"][name] for r, name in wrong], [right[r][name] for r, name in wrong]
    )
    if factor and set(names) <= set(ROW_BIASES):
        return say("bias-scaled", name=next(iter(names)), factor=factor, n=n)
    if factor and np.isclose(factor, n):
        return say("summed-at-exit", half=half, n=n)
    if factor and np.isclose(factor, 1 / n):
        return say("gradient-divided", half=half, n=n)
    if all(
        close(rows[r]["parts"][name], np.sum([one[name] for one in right], axis=0))
        for r, name in wrong
    ):
        return say("part-gradients-mixed", names=mistakes.listed(names))
    r, name = wrong[0]
    off = mistakes.error(rows[r]["parts"][name], right[r][name])
    return say("wrong-part-gradient", name=name, rank=r, error=off)


@each_step
def input_gradient(rows: Rows, _step: int) -> Finding | None:
    n, half, want = len(rows), rows[0]["half"], flat(rows[0]["dx_want"])
    got, gradient = [flat(row["dx"]) for row in rows], flat(rows[0]["gradient"])
    if all(close(one, want) for one in got):
        return None
    if all(close(one, want + (n - 1) * gradient) for one in got):
        return say("residual-summed", half=half, n=n)
    if factor := mistakes.ratio(got, [want] * n):
        return say("input-gradient-scaled", half=half, n=n, factor=factor)
    if close(np.sum(got, axis=0), want):
        return say("input-gradient-partial", half=half, n=n)
    off = max(mistakes.error(one, want) for one in got)
    return say("wrong-input-gradient", half=half, error=off)


# ------------------------------------------------------------------ what was sent


@each_step
def sent(rows: Rows, _step: int) -> Finding | None:
    n, first = len(rows), rows[0]
    should = wire.wire_bytes("all_reduce", 8 * len(flat(first["want"])), n)
    if not first["calls"]:
        return say("not-by-hand")
    for way in ("forward", "backward"):
        calls = [call for call in first["calls"] if call["mark"] == way]
        total = mistakes.wire_bytes(calls, n)
        if total > 1.05 * should:
            ops = ", ".join(mistakes.described(call) for call in calls)
            return say(
                "too-many-bytes/tensor", half=first["half"], way=way, sent=total, should=should,
                ops=ops,
            )  # fmt: skip
    return None


judge = judging(
    mistakes.not_waited, held, output, part_gradients, input_gradient, sent, only_first=True
)
