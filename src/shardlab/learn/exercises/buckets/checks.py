"""Buckets: the mean, in few large messages, each launched when its gradients are in."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.learn import mistakes, overlapped, toys
from shardlab.learn.exercise import Case, Evidence, Finding
from shardlab.learn.spy import Spy

LAYER = (36 + 6) * 8  # bytes of a layer of ``Skipping``
CASES = (
    Case("two ranks", 2, {"toy": "deep", "micros": 1, "bucket_bytes": 700}),
    Case("three micro-batches", 2, {"toy": "frozen", "micros": 3, "bucket_bytes": 400}),
    Case("a large parameter", 2, {"toy": "deep", "micros": 1, "bucket_bytes": 200}),
    Case("unused parameters", 2, {"toy": "skipping", "micros": 1, "bucket_bytes": LAYER}),
    Case("unused, two micro-batches", 2, {"toy": "skipping", "micros": 2, "bucket_bytes": 500}),
    Case("many layers", 2, {"toy": "many", "micros": 1, "bucket_bytes": 1000}),
)
STEPS = 2


class Skipping(nn.Module):
    """Layers of one size; ``extra`` is used by rank 0's batches alone, ``never`` by nobody's.

    Of one size, so that ranks that send in different orders mix the layers up without a word, as
    they do in real models, which have many layers of one size.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.never = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:  # (rows, 6)
        hidden = torch.tanh(self.first(x))
        if x[0, 0] > 0:
            hidden = hidden + self.extra(hidden)
        out: Tensor = self.last(torch.tanh(self.middle(hidden)))[:, :3]
        return out


def many() -> nn.Module:
    """Enough small layers to tell a full bucket from one per parameter."""
    layers = [m for _ in range(24) for m in (nn.Linear(6, 6), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(6, 3))


def run(case: Case, rank: int, submission: ModuleType, spy: Spy) -> dict[str, Any]:
    options = dict(case.options)
    toy, bucket_bytes = options.pop("toy"), options.pop("bucket_bytes")
    torch.manual_seed(0)
    own = {"skipping": Skipping, "many": many}
    model = own[toy]().double() if toy in own else toys.build(toy)
    spy.watch(model)
    ddp = submission.BucketDDP(model, bucket_bytes)
    evidence = overlapped.run(ddp, model, rank, case.world, steps=STEPS, spy=spy, **options)
    return evidence | {"bucket_bytes": bucket_bytes, "all_used": toy != "skipping"}


def judge(evidence: Evidence) -> list[Finding]:
    for case, ranks in evidence.items():
        looks = [overlapped.weights, overlapped.every_microbatch, overlapped.waits]
        if ranks[0]["all_used"]:
            looks += [_Early(ranks[0]["sizes"])]
        looks += [_mixed_up, _forgotten, overlapped.gradients]
        found: list[Finding] = []
        for look in looks:
            found = found or overlapped.first(case, ranks, look)
        found = found or _messages(case, ranks)
        if ranks[0]["all_used"]:
            found = found or overlapped.first(case, ranks, overlapped.overlap)
            found = found or _order(case, ranks)
        if found:
            return found  # one thing at a time: the cases after it are harder
    return []


class _Early:
    """More bytes on their way than there were gradients yet."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes

    def __call__(self, case: str, ranks: list[dict[str, Any]], _step: int) -> list[Finding]:
        for rank, row in enumerate(ranks):
            come = sent = 0
            for kind, value in row["events"]:
                if kind == "mark":
                    come = sent = 0
                elif kind == "ready":
                    come += self.sizes[value]
                elif kind == "call" and row["calls"][value]["in_backward"]:
                    sent += row["calls"][value]["bytes"]
                    if sent > come:
                        message = (
                            f"rank {rank} has launched {sent} bytes of gradients when only {come} "
                            f"had come ({mistakes.described(row['calls'][value])}): a bucket "
                            "leaves when its last gradient is in, not its first"
                        )
                        return [Finding("launched-early", message, case)]
        return []


def _mixed_up(case: str, ranks: list[dict[str, Any]], _step: int) -> list[Finding]:
    """One layer's gradient added to another's; or the right numbers in the wrong places."""
    n = len(ranks)
    names = [name for name, value in ranks[0]["want"].items() if value is not None]
    wrong = [
        (r, name)
        for r, row in enumerate(ranks)
        for name in names
        if not _same(row["got"][name], row["want"][name])
    ]
    for r, name in wrong:
        mine = _numbers(ranks[r], name)
        others = [(s, name) for s, row in enumerate(ranks) if s != r for name in row["own"]]
        for s, other in others:
            theirs = _numbers(ranks[s], other)
            if other == name or len(theirs) != len(mine) or not any(theirs):
                continue
            if _same(
                ranks[r]["got"][name], [(a + b) / n for a, b in zip(mine, theirs, strict=True)]
            ):
                message = (
                    f"on rank {r} `{name}` is the mean of its own gradient and of rank {s}'s "
                    f"`{other}`: the ranks sent their buckets in different orders (a parameter "
                    "that one of them does not use). Collectives are paired by order alone: send "
                    "bucket i only after bucket i-1, and what is left in finish()"
                )
                return [Finding("order-differs", message, case)]
    if wrong and all(
        _same(_sorted(row, "got", names), _sorted(row, "want", names)) for row in ranks
    ):
        message = (
            f"every mean is there, but not in its place: {mistakes.listed({n for _, n in wrong})} "
            "have other parameters' numbers. Unpack a bucket in the order in which it was packed"
        )
        return [Finding("wrong-place", message, case)]
    return []


def _forgotten(case: str, ranks: list[dict[str, Any]], _step: int) -> list[Finding]:
    names = [name for name, value in ranks[0]["own"].items() if value is not None]
    kept = [n for n in names if all(_same(row["got"][n], row["own"][n]) for row in ranks)]
    sent = sum(c["bytes"] for c in ranks[0]["calls"])
    if len(kept) == len(names) and sent:
        message = (
            f"{sent} bytes were all-reduced, and every p.grad is still the rank's own: the means "
            "are in the flat tensors. Put them back into p.grad after the wait"
        )
        return [Finding("not-copied-back", message, case)]
    unused = sorted({n for row in ranks for n, g in row["own"].items() if g is None})
    if kept and sent and unused:
        message = (
            f"{mistakes.listed(kept)} never left, and each rank still has its own gradient of "
            f"them: {mistakes.listed(unused)} got no gradient on some rank, and what waits for it "
            "waits for ever. In finish(), send the buckets that backward left, complete or not"
        )
        return [Finding("bucket-forgotten", message, case)]
    if kept and sent:
        message = (
            f"{mistakes.listed(kept)} never left: each rank still has its own gradient of them. "
            "The last bucket travels too, full or not"
        )
        return [Finding("bucket-forgotten", message, case)]
    return []


def _messages(case: str, ranks: overlapped.Ranks) -> list[Finding]:
    """Neither too large nor too many: two buckets in a row hold more than one may."""
    sizes, limit = ranks[0]["sizes"], ranks[0]["bucket_bytes"]
    psi = sum(sizes.values())
    for row in ranks[0]["steps"]:
        largest = max((c["bytes"] for c in row["calls"]), default=0)
        if largest > max(limit, *sizes.values()):
            message = f"a message of {largest} bytes; bucket_bytes is {limit}: begin a new bucket"
            return [Finding("bucket-too-large", message, case)]
        if len(row["calls"]) > 2 * math.ceil(psi / limit) + 1 and limit > max(sizes.values()):
            message = (
                f"{len(row['calls'])} messages for {psi} bytes in buckets of {limit}: each pays "
                "the latency. Fill a bucket before you begin the next"
            )
            return [Finding("too-many-messages", message, case)]
        if sum(c["bytes"] for c in row["calls"]) > psi + 64:
            message = f"{sum(c['bytes'] for c in row['calls'])} bytes for gradients of {psi}"
            return [Finding("too-many-bytes", message, case)]
    return []


def _order(case: str, ranks: overlapped.Ranks) -> list[Finding]:
    total = len(ranks[0]["sizes"])
    for row in ranks[0]["steps"]:
        if len(row["calls"]) > 1 and row["calls"][0]["ready"] == total:
            message = (
                f"the first of {len(row['calls'])} buckets left when all {total} gradients had "
                "come: it holds the layer whose gradient comes last. Fill the buckets from the "
                "last parameter to the first"
            )
            return [Finding("forward-order", message, case)]
    return []


def _numbers(row: dict[str, Any], name: str) -> list[float]:
    """A rank's own gradient; zeros where it has none."""
    if row["own"][name] is not None:
        return mistakes.flat(row["own"][name])
    return [0.0] * len(mistakes.flat(row["want"][name] or []))


def _same(a: Any, b: Any) -> bool:
    return a is not None and b is not None and mistakes.close(a, b)


def _sorted(row: dict[str, Any], which: str, names: list[str]) -> list[float]:
    return sorted(x for name in names for x in mistakes.flat(row[which][name] or []))
