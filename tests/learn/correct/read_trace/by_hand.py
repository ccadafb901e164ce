"""From the files alone, without shardlab.trace: intervals are merged and cut by hand."""

import gzip
import json
import re
from collections import Counter

from shardlab.learn.exercises.read_trace import TRACE


def merged(spans):
    result = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1][1] = max(end, result[-1][1])
        else:
            result.append([begin, end])
    return result


def length(spans):
    return sum(end - begin for begin, end in merged(spans))


def both(a, b):
    """What lies in a and in b: their lengths, less that of their union."""
    return length(a) + length(b) - length([*a, *b])


class Rank:
    def __init__(self, number):
        (path,) = (TRACE / "traces" / f"rank{number}").glob("*.json.gz")
        events = [
            e
            for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
            if e.get("ph") == "X"
        ]
        self.base = json.loads(gzip.decompress(path.read_bytes()))["baseTimeNanoseconds"] / 1000
        self.events = events
        begin = {
            int(e["name"].partition("#")[2]): e["ts"]
            for e in events
            if e["name"].startswith("ProfilerStep#") and e["cat"] == "user_annotation"
        }
        end = {
            int(e["name"].partition("#")[2]): e["ts"] + e["dur"]
            for e in events
            if e["name"].startswith("ProfilerStep#") and e["cat"] == "user_annotation"
        }
        self.steps = sorted(begin)[1:]
        self.first, self.last = begin[self.steps[0]], end[self.steps[-1]]
        self.gloo = self.named("gloo:")
        gloo_threads = {e["tid"] for e in self.gloo}
        blocked = self.named("shardlab::wait")
        free = [
            e
            for e in events
            if e["cat"] == "cpu_op"
            and e["tid"] not in gloo_threads
            and not e["name"].startswith("c10d::")
            and "AccumulateGrad" not in e["name"]
        ]
        spans = self.spans(free)
        # Without the waits that lie inside an operator.
        self.compute = cut(spans, self.spans(blocked))

    def named(self, prefix):
        return [e for e in self.events if e["name"].startswith(prefix)]

    def spans(self, events):
        return [
            (max(e["ts"], self.first), min(e["ts"] + e["dur"], self.last))
            for e in events
            if e["ts"] < self.last and e["ts"] + e["dur"] > self.first
        ]

    def per_step(self, microseconds):
        return microseconds / len(self.steps) / 1000


def cut(a, b):
    """a without b."""
    result, b = [], merged(b)
    for begin, end in merged(a):
        for left, right in b:
            if right <= begin or left >= end:
                continue
            if left > begin:
                result.append((begin, left))
            begin = max(begin, right)
        if begin < end:
            result.append((begin, end))
    return result


ranks = [Rank(0), Rank(1)]
ledger = [json.loads(line) for line in (TRACE / "ledger.rank0.jsonl").read_text().splitlines()]
ledger = [row for row in ledger if row["step"] in ranks[0].steps]

STEP_MS = ranks[0].per_step(ranks[0].last - ranks[0].first)
BYTES_PER_STEP = sum(row["bytes"] for row in ledger) / len(ranks[0].steps)
COMM_MS = ranks[1].per_step(length(ranks[1].spans(ranks[1].gloo)))
OVERLAP_PERCENT = (
    100 * ranks[1].per_step(both(ranks[1].spans(ranks[1].gloo), ranks[1].compute)) / COMM_MS
)

# The first collective of a step, on each rank: when it began there.
first = [
    [
        min(e["ts"] for e in rank.gloo if e["ts"] >= begin) + rank.base
        for begin in sorted(e["ts"] for e in rank.named("ProfilerStep#"))[1:]
    ]
    for rank in ranks
]
late = [one - zero for zero, one in zip(*first)]
LATE_RANK = int(sum(late) > 0)


def WAIT_MS():  # noqa: N802
    """Each collective of rank 0 until rank 1 is in it, too, where rank 0 does not compute."""
    a, b = (sorted(r.gloo, key=lambda e: e["ts"]) for r in ranks)
    spans = []
    for x, y in zip(a, b):
        until = min(y["ts"] + ranks[1].base - ranks[0].base, x["ts"] + x["dur"])
        if until > x["ts"] >= ranks[0].first:
            spans.append((x["ts"], until))
    return ranks[0].per_step(length(cut(spans, ranks[0].compute)))


BUSY = [length([*rank.compute, *rank.spans(rank.gloo)]) for rank in ranks]
FREE = [rank.last - rank.first - busy for rank, busy in zip(ranks, BUSY)]
LATE_BECAUSE = "host" if FREE[1] > 2 * FREE[0] else "compute"


def TOP_OPERATOR():  # noqa: N802
    rank, own, around = ranks[0], Counter(), []
    ops = [e for e in rank.events if e["cat"] == "cpu_op" and e["ts"] >= rank.first]
    for e in sorted(ops, key=lambda e: (e["tid"], e["ts"], -e["dur"])):
        while around and (
            around[-1]["tid"] != e["tid"] or around[-1]["ts"] + around[-1]["dur"] <= e["ts"]
        ):
            around.pop()
        if around:
            own[around[-1]["name"]] -= e["dur"]
        own[e["name"]] += e["dur"]
        around.append(e)
    return own.most_common(1)[0][0]


def EXPOSED_BUCKET():  # noqa: N802
    rank, totals = ranks[1], Counter()
    calls = [e for e in rank.events if re.match(r"shardlab::(?!wait)", e["name"])]
    for call, work in zip(
        sorted(calls, key=lambda e: e["ts"]), sorted(rank.gloo, key=lambda e: e["ts"])
    ):
        span = rank.spans([work])
        label = call["name"].split(" ", 2)[2]
        if span and label.startswith("bucket"):
            totals[label] += length(span) - both(span, rank.compute)
    return totals.most_common(1)[0][0]
