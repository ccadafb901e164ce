"""A parameter on two stages: equal at first, summed, averaged over replicas, counted once."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from shardlab import numbers
from shardlab.learn import mistakes, toys
from shardlab.learn.exercise import Case, Finding, Rejected, Row, Rows, Stage, judging, say
from shardlab.learn.mistakes import Array, close, flat

VOCABULARY, WIDTH = 11, 6
SHARED = "embedding"
CASES = (
    Case("two stages", 2, {"stages": 2}),
    Case("three stages", 3, {"stages": 3}),
    Case("two replicas of two stages", 4, {"stages": 2}),
)
SMALL_NORM = 0.05  # of max_norm: the gradient is larger
LARGE_NORM = 1e6


class Part(nn.Module):
    """A stage: a layer, and on the first and the last one the embedding."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        if stage in (0, stages - 1):
            self.embedding = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
        self.layer = nn.Linear(WIDTH, WIDTH)


def run(at: Stage) -> dict[str, Any]:
    stages = at.options["stages"]
    replicas = at.world // stages
    replica, stage = divmod(at.rank, stages)  # ranks of a pipeline are neighbours
    parts = [toys.build(partial(Part, s, stages), s) for s in range(stages)]
    pipes = [list(range(r * stages, (r + 1) * stages)) for r in range(replicas)]
    pipe = _group(pipes, at.rank)
    tied = _group([[ranks[0], ranks[-1]] for ranks in pipes], at.rank)
    data = _group([list(range(s, at.world, stages)) for s in range(stages)], at.rank)
    mine = copy.deepcopy(parts[stage])
    shared = getattr(mine, SHARED, None)
    at.spy.watch(mine)

    at.spy.mark("begin")
    at.submission.begin(shared, tied)
    began = toys.trained(mine)
    parts[-1].load_state_dict(parts[-1].state_dict() | {SHARED: parts[0].state_dict()[SHARED]})
    mine.load_state_dict(parts[stage].state_dict())  # what is wrong above stays there

    own = [gradients(parts, r) for r in range(replicas)]  # by replica, then by stage
    put(mine, own[replica][stage])
    at.spy.mark("reduce")
    params = list(mine.parameters())
    at.submission.reduce_gradients(params, shared, tied, data)
    got = toys.gradients(mine)
    moved = [
        n for n, p in mine.named_parameters() if not torch.equal(p, parts[stage].get_parameter(n))
    ]
    means = [
        {name: torch.stack([each[s][name] for each in own]).mean(0) for name in own[0][s]}
        for s in range(stages)
    ]
    whole = means[0][SHARED] + means[-1][SHARED]
    want = [mean | {SHARED: whole} if SHARED in mean else mean for mean in means]

    at.spy.mark("clip")
    clips = []
    for max_norm in (SMALL_NORM, LARGE_NORM):
        put(mine, want[stage])
        norm = at.submission.clip(params, shared, tied, pipe, max_norm)
        if not isinstance(norm, float | int) and not (
            isinstance(norm, Tensor) and norm.numel() == 1
        ):
            raise Rejected(say("wrong-type/norm", type=type(norm).__name__))
        clips.append({"norm": float(norm), "max": max_norm, "got": toys.gradients(mine)})
    squares = [{n: float(g.square().sum()) for n, g in each.items()} for each in want]
    return {
        "replica": replica, "stage": stage, "replicas": replicas,
        "began": began, "drawn": toys.trained(toys.build(lambda: Part(stage, stages), stage)),
        "own": own[replica][stage], "got": got, "want": want[stage], "mean": means[stage],
        "parts": {"first": means[0][SHARED], "last": means[-1][SHARED]},
        "moved": moved, "clips": clips, "squares": squares,
        "steps": [{"calls": list(at.spy.calls)}],
    }  # fmt: skip


def _group(every: Sequence[Sequence[int]], rank: int) -> dist.ProcessGroup | None:
    """All ranks make all groups; this rank's."""
    groups = [dist.new_group(list(ranks)) for ranks in every]
    return next((g for g, ranks in zip(groups, every, strict=True) if rank in ranks), None)


def gradients(parts: Sequence[nn.Module], replica: int) -> list[dict[str, Tensor]]:
    """What a pipeline leaves on each of its stages: each use of the embedding has its own part."""
    generator = torch.Generator().manual_seed(100 + replica)
    tokens = torch.randint(VOCABULARY, (9,), generator=generator)
    x = parts[0].get_parameter(SHARED)[tokens]
    for part in parts:
        x = torch.tanh(part.get_submodule("layer")(x))
    loss = F.cross_entropy(x @ parts[-1].get_parameter(SHARED).T, tokens.roll(1))
    found = []
    for part in parts:
        names, params = zip(*part.named_parameters(), strict=True)
        gradient = torch.autograd.grad(loss, params, retain_graph=True)
        found.append(dict(zip(names, gradient, strict=True)))
    return found


def put(module: nn.Module, gradients: dict[str, Tensor]) -> None:
    for name, p in module.named_parameters():
        p.grad = gradients[name].clone()


# ------------------------------------------------------------------ what is wrong


def began(ranks: Rows) -> Finding | None:
    ends = [row for row in ranks if SHARED in row["began"]]
    first, last = (flat(ends[i]["drawn"][SHARED]) for i in (0, -1))
    got = [flat(row["began"][SHARED]) for row in ends]
    if all(close(one, first) for one in got):
        return None
    if all(close(one, last) for one in got):
        return say("wrong-source/tied")
    if all(close(one, (first + last) / 2) for one in got):
        return say("starts-averaged")
    off = max(mistakes.error(one, got[0]) for one in got)
    return say("starts-differ", error=off) if off > 1e-9 else say("wrong-start")


def weights(ranks: Rows) -> Finding | None:
    calls = [call for row in ranks for call in _reducing(row)]
    sent = [c["what"].partition(":")[2] for c in calls if c["what"].startswith("param:")]
    names = dict.fromkeys([*sent, *(name for row in ranks for name in row["moved"])])
    return say("weights-averaged/tied", names=mistakes.listed(names)) if names else None


def _reducing(row: Row) -> list[Row]:
    return [call for call in row["steps"][0]["calls"] if call["mark"] == "reduce"]


def embedding(ranks: Rows) -> Finding | None:
    """The gradient of what both stages hold."""
    n = ranks[0]["replicas"]
    ends = [row for row in ranks if SHARED in row["got"]]
    if any(row["got"][SHARED] is None for row in ends):
        return say("no-gradient/tied", name=SHARED)
    parts = ranks[0]["parts"]
    first, last = flat(parts["first"]), flat(parts["last"])
    right = first + last

    def are(of_first: Array, of_last: Array) -> bool:
        return all(
            close(row["got"][SHARED], of_last if row["stage"] else of_first, 1e-8) for row in ends
        )

    if are(right, right):
        return None
    known = {
        "not-summed/tied": (first, last),
        "averaged/tied": (right / 2, right / 2),
        "summed-twice": (2 * right, 2 * right),
        "not-averaged/tied": (n * right, n * right),
        "copied/tied": (first, first),
    }
    if cause := next((key for key, values in known.items() if are(*values)), None):
        return say(cause, n=n)
    by_replica = _by_replica(ends)
    if n > 1 and all(close(row["got"][SHARED], by_replica[row["replica"]]) for row in ends):
        return say("replicas-apart", name=SHARED)
    there = {bool(row["stage"]) for row in ends if close(row["got"][SHARED], right, 1e-8)}
    if len(there) == 1:
        sides = ("first", "last")
        return say("one-side-only", has=sides[there.pop()])
    off = max(mistakes.error(row["got"][SHARED], right) for row in ends)
    return say("wrong-gradient/tied", name=SHARED, error=off)


def _by_replica(ends: Rows) -> dict[int, Array]:
    """The sum of both parts within each pipeline."""
    found: dict[int, Array] = {}
    for row in ends:
        found[row["replica"]] = found.get(row["replica"], 0) + flat(row["own"][SHARED])
    return found


def others(ranks: Rows) -> Finding | None:
    for row in ranks:
        n = row["replicas"]
        for name, want in row["want"].items():
            got = row["got"][name]
            if name == SHARED or close(got, want, 1e-8):
                continue
            if n > 1 and close(got, row["own"][name]):
                return say("replicas-apart", name=name)
            if got is None:
                return say("no-gradient/tied", name=name)
            factor = mistakes.ratio(got, want)
            if factor and np.isclose(factor, n):
                return say("not-averaged/tied", n=n)
            if factor and np.isclose(factor, n / len(ranks)):
                return say("divided-by-all", all=len(ranks), n=n)
            return say("wrong-gradient/tied", name=name, error=mistakes.error(got, want))
    return None


def order(ranks: Rows) -> Finding | None:
    """The sum between stages comes before the replicas'."""
    stages = max(row["stage"] for row in ranks) + 1
    for rank, row in enumerate(ranks):
        if row["replicas"] == 1 or SHARED not in row["got"]:
            continue
        mine = row["replica"] * stages
        tied = [mine, mine + stages - 1]
        calls = _reducing(row)
        between = [i for i, call in enumerate(calls) if call["group"] == tied]
        over = [i for i, call in enumerate(calls) if call["group"] not in (None, tied)]
        if between and over and min(between) > max(over):
            call = mistakes.described(calls[between[0]])
            return say("summed-late", rank=rank, call=call)
        sent = sum(mistakes.wire_bytes([c], len(c["group"] or ranks)) for c in calls)
        sizes = {name: 8 * len(flat(value)) for name, value in row["want"].items()}
        over_replicas = numbers.wire_bytes("all_reduce", sum(sizes.values()), row["replicas"])
        should = numbers.wire_bytes("all_reduce", sizes[SHARED], 2) + over_replicas
        if sent > 1.05 * should:
            return say("too-many-bytes/tied", rank=rank, sent=sent, should=should)
    return None


def clipped(ranks: Rows) -> Finding | None:
    squares = ranks[0]["squares"]
    twice = sum(sum(each.values()) for each in squares)
    norm = math.sqrt(twice - squares[0][SHARED])
    for rank, row in enumerate(ranks):
        for one in row["clips"]:
            if not math.isclose(one["norm"], norm, rel_tol=1e-6):  # in float32, too
                return _wrong_norm(one["norm"], norm, twice, row, rank)
            scale = min(1.0, one["max"] / norm)
            for name, want in row["want"].items():
                if not close(one["got"][name], scale * flat(want), 1e-4):
                    return _wrong_clip(one, name, row, rank, norm, scale)
    return None


def _wrong_norm(got: float, norm: float, twice: float, row: Row, rank: int) -> Finding:
    shared, stage = row["squares"][0][SHARED], row["squares"][row["stage"]]
    known = {
        "counted-twice/norm": math.sqrt(twice),
        "left-out/norm": math.sqrt(twice - 2 * shared),
        "local-norm/tied": math.sqrt(sum(stage.values())),
        "no-root": norm**2,
        "replicas-counted": math.sqrt(row["replicas"]) * norm,
    }
    close_to = (key for key, value in known.items() if math.isclose(got, value, rel_tol=1e-6))
    return say(next(close_to, "wrong-norm"), rank=rank, got=got, norm=norm)


def _wrong_clip(one: Row, name: str, row: Row, rank: int, norm: float, scale: float) -> Finding:
    if scale == 1:
        return say("clipped-needlessly", rank=rank, name=name, norm=norm, most=one["max"])
    if close(one["got"][name], row["want"][name]):
        return say("not-clipped/tied", rank=rank, name=name)
    return say("wrong-scale", rank=rank, name=name, scale=scale)


judge = judging(
    mistakes.not_waited, began, weights, others, embedding, order, clipped, only_first=True
)
