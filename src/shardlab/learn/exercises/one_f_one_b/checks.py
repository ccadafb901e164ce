"""1F1B: the lists in a simulation, then real stages: gradients, order, what is kept."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from shardlab.learn import mistakes, toys
from shardlab.learn.exercise import Case, Finding, Rejected, Rows, Stage, each_step, judging, say
from shardlab.strategies.pipeline import schedule_analysis, schedules

CASES = (
    Case("the lists", 2, {"lists": True}),
    Case("two stages", 2, {"calls": [[4, 2, 3, 4]]}),  # rows of each micro-batch
    Case("three stages, two calls per update", 3, {"calls": [[4, 2, 3, 4, 1], [3, 5]]}),
)
ASKED = ((2, 4), (1, 3), (3, 5), (4, 8), (4, 2), (5, 7))  # ranks and micro-batches
WIDTH, CLASSES, IGNORED = 7, 5, -100
Actions = list[tuple[str, int]]
Batch = tuple[Tensor, Tensor]


def run(at: Stage) -> dict[str, Any]:
    if at.options.get("lists"):
        lists = [[_list(at, rank, *asked) for rank in range(asked[0])] for asked in ASKED]
        return {"asked": lists}
    stages = [toys.build(functools.partial(make_stage, r, at.world), r) for r in range(at.world)]
    one = copy.deepcopy(stages)
    watched, link = Watched(stages[at.rank]), Link(at.rank, at.world)
    calls = [[batch(c, m, rows) for m, rows in enumerate(call)]
             for c, call in enumerate(at.options["calls"])]  # fmt: skip
    total = sum(count(y) for call in calls for _, y in call)
    rows = []
    for batches in calls:
        actions = _list(at, at.rank, at.world, len(batches))
        watched.begin()
        at.submission.train_step(watched, list(actions), list(batches), loss_fn, total, link)
        link.finish()
        rows.append({"actions": actions, **watched.evidence()})
    sums = [[gradient_of(one, at.rank, pair) for pair in batches] for batches in calls]
    counts = [[count(y) for _, y in batches] for batches in calls]
    got = [p.grad for p in stages[at.rank].parameters()]
    missing = [n for n, p in stages[at.rank].named_parameters() if p.grad is None]
    flat = torch.cat([g.flatten() for g in got if g is not None]) if not missing else None
    fits = [key for key, wanted in expected(sums, counts).items() if _fits(flat, wanted)]
    right = expected(sums, counts)["right"]
    return {"steps": rows, "got": flat, "right": right, "missing": missing, "fits": fits,
            "total": total}  # fmt: skip


def _list(at: Stage, rank: int, ranks: int, micro: int) -> Actions:
    got = at.submission.schedule(rank, ranks, micro)
    try:
        actions = [(kind, number) for kind, number in got]
    except (TypeError, ValueError):
        raise Rejected(say("wrong-type/schedule", got=repr(got)[:100])) from None
    for action in actions:
        if action[0] not in ("F", "B") or type(action[1]) is not int:
            raise Rejected(say("wrong-type/schedule", got=repr(action)[:100]))
    return actions


def _fits(got: Tensor | None, wanted: Tensor) -> bool:
    return got is not None and torch.allclose(got, wanted, 1e-8, 1e-10)


# ------------------------------------------------------------------ stages and what they compute


def make_stage(rank: int, ranks: int) -> nn.Module:
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH if rank < ranks - 1 else CLASSES)
    return nn.Sequential(first, nn.Tanh(), last)


def batch(call: int, micro: int, rows: int) -> Batch:
    """Some targets do not count."""
    x, noise = toys.batch(call, 0, micro, rows=rows, width=WIDTH, out=1)
    y = (noise[:, 0].abs() * 1000).long() % CLASSES
    y[1::3] = IGNORED
    return x, y


def count(y: Tensor) -> int:
    return int((y != IGNORED).sum())


def loss_fn(output: Tensor, y: Tensor) -> Tensor:
    """The sum over the targets that count."""
    return F.cross_entropy(output, y, reduction="sum", ignore_index=IGNORED)


def gradient_of(stages: Sequence[nn.Module], rank: int, pair: Batch) -> Tensor:
    """What one process has for a stage from a micro-batch, not divided: (elements,)."""
    x = pair[0]
    for stage in stages:
        x = stage(x)
    found = torch.autograd.grad(loss_fn(x, pair[1]), list(stages[rank].parameters()))
    return torch.cat([g.flatten() for g in found])


def expected(sums: list[list[Tensor]], counts: list[list[int]]) -> dict[str, Tensor]:
    """The gradient of an update that is right, and what known mistakes give instead, by cause."""
    total = sum(map(sum, counts))
    each = [torch.stack(call).sum(0) for call in sums]  # of a call
    means = [torch.stack([g / max(1, k) for g, k in zip(call, number, strict=True)]).sum(0)
             for call, number in zip(sums, counts, strict=True)]  # fmt: skip
    micros = list(map(len, sums))

    def scaled(divisors: Sequence[float], parts: Sequence[Tensor] = each) -> Tensor:
        return torch.stack([g / d for g, d in zip(parts, divisors, strict=True)]).sum(0)

    divided_at_the_end = torch.zeros_like(each[0])  # all of p.grad, when a call ends
    for gradient in each:
        divided_at_the_end = (divided_at_the_end + gradient) / total
    return {
        "right": scaled([total] * len(each)),
        "not-divided/pipeline": scaled([1] * len(each)),
        "divided-by-micro-batches": scaled([total * m for m in micros]),
        "divided-by-micro-batches/alone": scaled(micros),
        "divided-twice/pipeline": scaled([total**2] * len(each)),
        "micro-batches-summed/pipeline": scaled([1] * len(each), means),
        "mean-of-means/pipeline": scaled(micros, means),
        "calls-divided-apart": scaled([sum(k) for k in counts]),
        "accumulation-wiped": each[-1] / total,
        "scaled-again": divided_at_the_end,
        "only-the-last/pipeline": torch.stack([call[-1] for call in sums]).sum(0) / total,
    }


class Box:
    """What autograd keeps for a backward: it goes when autograd lets go of it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Watched(nn.Module):
    """A stage that notes in which order it works, and how many of its activations are alive."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self.begin()

    def begin(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.kept: list[weakref.WeakSet[Box]] = []
        self.outputs: list[weakref.ref[Tensor]] = []
        self.peak = self.peak_outputs = 0

    def forward(self, x: Tensor) -> Tensor:
        number, boxes = len(self.kept), weakref.WeakSet[Box]()
        self.kept.append(boxes)

        def pack(tensor: Tensor) -> Box:
            box = Box(tensor)
            boxes.add(box)
            return box

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
            output: Tensor = self.layers(x)
        self.log.append(("F", number))
        output.register_hook(functools.partial(self._backward, number))
        self.outputs.append(weakref.ref(output))
        self.peak = max(self.peak, sum(len(kept) > 0 for kept in self.kept))
        self.peak_outputs = max(self.peak_outputs, sum(o() is not None for o in self.outputs))
        return output

    def _backward(self, number: int, _gradient: Tensor) -> None:
        self.log.append(("B", number))

    def evidence(self) -> dict[str, Any]:
        return {"log": self.log, "peak": self.peak, "outputs": self.peak_outputs}


class Link:
    """Messages to the stages before and behind: the shape, then the tensor."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.is_first, self.is_last = rank == 0, rank == ranks - 1
        self.under_way: list[tuple[Any, Tensor]] = []

    def send_forward(self, output: Tensor) -> None:
        self._send("send_forward", output, self.rank + 1)

    def send_backward(self, gradient: Tensor) -> None:
        self._send("send_backward", gradient, self.rank - 1)

    def recv_forward(self) -> Tensor:
        return self._receive("recv_forward", self.rank - 1)

    def recv_backward(self) -> Tensor:
        return self._receive("recv_backward", self.rank + 1)

    def _send(self, what: str, tensor: Tensor, to: int) -> None:
        self._other(what, to)
        is_right = isinstance(tensor, Tensor) and tensor.dtype == torch.float64
        if not is_right or tensor.dim() != 2:
            raise Rejected(say("nothing-to-send", what=what, got=_described(tensor)))
        value = tensor.detach().clone().contiguous()
        for message in (torch.tensor(value.shape), value):
            self.under_way.append((dist.isend(message, to), message))

    def _receive(self, what: str, source: int) -> Tensor:
        self._other(what, source)
        shape = torch.empty(2, dtype=torch.int64)
        dist.recv(shape, source)
        value = torch.empty(*shape.tolist(), dtype=torch.float64)
        dist.recv(value, source)
        return value

    def _other(self, what: str, rank: int) -> None:
        if not 0 <= rank < self.ranks:
            raise Rejected(say("no-neighbour", what=what, rank=self.rank, ranks=self.ranks))

    def finish(self) -> None:
        for handle, _ in self.under_way:
            handle.wait()
        self.under_way = []


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {list(value.shape)}, {value.dtype}"
    return repr(value)[:60]


# ------------------------------------------------------------------ the lists


def lists(ranks: Rows) -> Finding | None:
    if "asked" not in ranks[0]:
        return None
    for (number, micro), every in zip(ASKED, ranks[0]["asked"], strict=True):
        facts = {"ranks": number, "micro": micro}
        if found := next(filter(None, _wrong_list(every, facts)), None):
            return found
        those = [[schedules.Action(kind, rank, m) for kind, m in actions]
                 for rank, actions in enumerate(every)]  # fmt: skip
        if problems := schedule_analysis.check(those):
            return say("schedule-deadlock", problems="; ".join(problems), **facts)
        for rank, kept in enumerate(schedule_analysis.live(those)):
            if kept > min(number - rank, micro):
                should = min(number - rank, micro)
                return say("too-many-live", rank=rank, kept=kept, should=should, **facts)
        times = schedule_analysis.Times(1, 1, 1)
        took = schedule_analysis.end(schedule_analysis.timeline(those, times))
        should = 3 * (micro + number - 1)
        if took > should:
            bubble, least = schedule_analysis.bubble(those, times), (number - 1) / micro
            return say("bubble", took=took, should=should, bubble=bubble, least=least, **facts)
    return None


def _wrong_list(every: Sequence[Actions], facts: Mapping[str, int]) -> Iterator[Finding | None]:
    for rank, actions in enumerate(every):
        done: set[tuple[str, int]] = set()
        for kind, m in actions:
            if not 0 <= m < facts["micro"]:
                yield say("no-such-micro", rank=rank, kind=kind, number=m, **facts)
            if (kind, m) in done:
                yield say("action-twice", rank=rank, kind=kind, number=m, **facts)
            if kind == "B" and ("F", m) not in done:
                yield say("backward-first", rank=rank, number=m, **facts)
            done.add((kind, m))
        for kind in "FB":
            lost = [m for m in range(facts["micro"]) if (kind, m) not in done]
            if lost:
                yield say("incomplete-list", rank=rank, kind=kind, lost=lost, **facts)


# ------------------------------------------------------------------ the steps


@each_step
def in_order(rows: Rows, _step: int) -> Finding | None:
    for rank, row in enumerate(rows):
        asked = [tuple(action) for action in row["actions"]]
        forwards = [m for kind, m in asked if kind == "F"]
        did = [(kind, forwards[i] if i < len(forwards) else i) for kind, i in row["log"]]
        for place, (want, got) in enumerate(zip(asked, did, strict=False)):
            if want != got:
                return say("not-the-actions", rank=rank, place=place, want=" ".join(map(str, want)),
                           got=" ".join(map(str, got)))  # fmt: skip
        if len(asked) != len(did):
            return say("actions-left", rank=rank, asked=len(asked), did=len(did))
    return None


def gradients(ranks: Rows) -> Finding | None:
    if "steps" not in ranks[0] or all("right" in rank["fits"] for rank in ranks):
        return None
    total, last = ranks[0]["total"], len(ranks) - 1
    for number, rank in enumerate(ranks):
        if rank["missing"]:
            return say("no-gradient/stage", rank=number, names=mistakes.listed(rank["missing"]))
    common = [key for key in ranks[0]["fits"] if all(key in rank["fits"] for rank in ranks)]
    if common:
        return say(common[0], total=total)
    others = all("not-divided/pipeline" in rank["fits"] for rank in ranks[:last])
    if others and "right" in ranks[last]["fits"]:
        return say("last-stage-only", last=last, total=total)
    number = next(n for n, rank in enumerate(ranks) if "right" not in rank["fits"])
    off = mistakes.error(ranks[number]["got"], ranks[number]["right"])
    return say("wrong-gradient/pipeline", rank=number, error=off)


@each_step
def kept(rows: Rows, _step: int) -> Finding | None:
    for rank, row in enumerate(rows):
        micro = len(row["actions"]) // 2
        should = min(len(rows) - rank, micro)
        if row["peak"] > should:
            return say("kept-too-long", rank=rank, kept=row["peak"], should=should)
        # One more may still have a name in the loop that made it.
        if row["outputs"] > should + 1:
            return say("kept-too-long/outputs", rank=rank, kept=row["outputs"], should=should)
    return None


judge = judging(lists, in_order, gradients, kept, only_first=True)
