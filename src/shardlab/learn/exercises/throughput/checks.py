"""Throughput: on a simulated device and clock, so that the right answer is exact on any machine.

A step takes the host no time and the device much; the host's clock advances while it waits for the
device, or in a collective for the other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from shardlab.learn import mistakes
from shardlab.learn.exercise import Case, Finding, Rejected, Row, Rows, Stage, judging, say

TOLERANCE = 0.01  # the clock also counts launches
LAUNCH_S = 1e-5  # of a step, on the host
FIRST_S = 2.0  # of the first step, on the host: it compiles
WARMING = 2  # times as long as later are the steps of the warm-up
SLOW = 3  # times as long as the others is the second of the timed steps
APART_S = 7.0  # two ranks' clocks: those of several hosts do not agree
PROFILED = 4  # times as long is a step under the profiler
POINT_TO_POINT = ("send", "recv", "isend", "irecv")
# tokens and seconds of a step, by rank.
CASES = (
    Case("two ranks", 2, {"warmup": 3, "timed": 5, "tokens": [512, 448], "seconds": [0.1, 0.1]}),
    Case("a slow rank", 2, {"warmup": 1, "timed": 4, "tokens": [512, 512], "seconds": [0.1, 0.16]}),
    Case("ranks with fewer tokens", 3, {"warmup": 1, "timed": 6, "tokens": [512, 300, 44],
                                        "seconds": [0.11, 0.1, 0.08]}),
)  # fmt: skip


class Device:
    """One rank's device, its host's clock, and its profiler (a context manager)."""

    def __init__(self, at: Stage) -> None:
        self.warmup = at.options["warmup"]
        self.tokens: int = at.options["tokens"][at.rank]
        self.seconds: float = at.options["seconds"][at.rank]
        self.now = 100.0 + APART_S * at.rank
        self.offset = self.now
        self.busy_until = self.now
        self.plain = self.profiled = 0  # steps
        self.is_profiling = False
        self.before_profiled: int | None = None  # plain steps
        self.reads: list[dict[str, Any]] = []

    def step(self) -> int:
        seconds = self.seconds
        if self.is_profiling:
            if self.before_profiled is None:
                self.before_profiled = self.plain
            self.profiled += 1
            seconds *= PROFILED
        else:
            self.now += FIRST_S if self.plain == 0 else 0.0
            seconds *= plain_factor(self.plain, self.warmup)
            self.plain += 1
        self.now += LAUNCH_S
        self.busy_until = max(self.now, self.busy_until) + seconds
        return self.tokens

    def synchronize(self) -> None:
        self.now = max(self.now, self.busy_until)

    def clock(self) -> float:
        pending = self.busy_until > self.now
        self.reads.append({"plain": self.plain, "pending": pending})
        return self.now

    def __enter__(self) -> Device:
        self.is_profiling = True
        return self

    def __exit__(self, *_error: object) -> None:
        self.is_profiling = False

    def meet(self, row: Row) -> None:
        """In a collective every rank waits for the last one to come."""
        if row["op"] not in POINT_TO_POINT:
            latest = torch.tensor(self.now - self.offset, dtype=torch.float64)
            dist.all_reduce(latest, op=dist.ReduceOp.MAX)
            self.now = self.offset + latest.item()


def plain_factor(number: int, warmup: int) -> int:
    """The device time of a step without the profiler, in units of the rank's usual step."""
    if number < warmup:
        return WARMING
    return SLOW if number == warmup + 1 else 1


def run(at: Stage) -> dict[str, Any]:
    device = Device(at)
    at.spy.before = device.meet
    got = at.submission.throughput(
        device.step, device.synchronize, device.clock, device,
        warmup=at.options["warmup"], steps=at.options["timed"],
    )  # fmt: skip
    try:
        number = float(got)
    except (TypeError, ValueError, RuntimeError):
        kind = type(got).__name__
        raise Rejected(say("wrong-type/throughput", type=kind, rank=at.rank)) from None
    return {
        "got": number,
        "reads": device.reads,
        "plain": device.plain,
        "profiled": device.profiled,
        "before_profiled": device.before_profiled,
        "steps": [{"calls": at.spy.calls}],
    }


# ------------------------------------------------------------------ what is wrong


def look(ranks: Rows) -> Finding | None:
    if found := _steps(ranks):
        return found
    n, case = len(ranks), ranks[0]
    got = [rank["got"] for rank in ranks]
    tokens = [case["timed"] * one for one in case["tokens"]]
    seconds = [_units(case, case["warmup"], case["timed"]) * one for one in case["seconds"]]
    right = sum(tokens) / max(seconds)
    wrong = [rank for rank in range(n) if not _close(got[rank], right)]
    if not wrong:
        return _profile(ranks)
    facts = {"got": got[wrong[0]], "right": right, "n": n, "rank": wrong[0]}
    if found := _not_synchronised(ranks, facts):
        return found
    for key, values in _candidates(case, tokens, seconds):
        if all(_close(a, b) for a, b in zip(got, values, strict=True)):
            return say(key, **facts)
    if len(wrong) < n:
        on = mistakes.ranks_text([r for r in range(n) if r not in wrong], n)
        return say("only-one-rank/throughput", on=on, **facts)
    return say("wrong-throughput", times=got[0] / right, **facts)


def _units(case: Row, first: int, count: int) -> int:
    return sum(plain_factor(number, case["warmup"]) for number in range(first, first + count))


def _steps(ranks: Rows) -> Finding | None:
    """Whether the right number of steps was run, and the clock read."""
    warmup, timed = ranks[0]["warmup"], ranks[0]["timed"]
    should = warmup + timed
    for rank, row in enumerate(ranks):
        facts = {"plain": row["plain"], "warmup": warmup, "timed": timed, "rank": rank}
        if row["plain"] < should <= row["plain"] + row["profiled"]:
            return say("profiled", missing=min(should - row["plain"], timed), **facts)
        if row["plain"] != should:
            return say("wrong-steps", should=should, **facts)
    return None if any(len(row["reads"]) > 1 for row in ranks) else say("own-clock")


def _profile(ranks: Rows) -> Finding | None:
    for rank, row in enumerate(ranks):
        if not row["profiled"]:
            return say("not-profiled", rank=rank)
        if row["before_profiled"] == 0:
            return say("profiled-first")
    return None


def _not_synchronised(ranks: Rows, facts: dict[str, Any]) -> Finding | None:
    """A clock was read while its device was at work, and the number is wrong."""
    warmup, timed = ranks[0]["warmup"], ranks[0]["timed"]
    for row in ranks:
        ends = [read for read in row["reads"] if read["plain"] == warmup + timed]
        begins = [read for read in row["reads"] if read["plain"] == warmup]
        if ends and ends[0]["pending"]:
            return say("not-synchronised", **facts)
        if begins and begins[-1]["pending"]:
            return say("not-synchronised/begin", **facts)
    return None


def _candidates(
    case: Row, tokens: list[int], seconds: list[float]
) -> Iterator[tuple[str, list[float]]]:
    """What each rank returns under a known mistake; each of them may divide by its own time."""
    n, steps, total, longest = len(tokens), case["timed"], sum(tokens), max(seconds)
    warm = [_units(case, 0, case["warmup"]) * one + FIRST_S for one in case["seconds"]]
    warm_tokens = [case["warmup"] * one for one in case["tokens"]]
    profiled = [PROFILED * one for one in case["seconds"]]
    every = list(range(n))

    def rates(amounts: list[int], times: list[float]) -> Iterator[list[float]]:
        """The rate of all ranks by the slowest; of each rank by its own time; the sum of these."""
        yield [sum(amounts) / max(times)] * n
        yield [amounts[r] / times[r] for r in every]
        yield [sum(amounts[r] / times[r] for r in every)] * n

    for extra in ([0] * n, warm_tokens):
        amounts = [a + b for a, b in zip(tokens, extra, strict=True)]
        for values in rates(amounts, [a + b for a, b in zip(warm, seconds, strict=True)]):
            yield "warm-up-counted", values
    yield "warm-up-counted/tokens", [(total + sum(warm_tokens)) / longest] * n
    for extra in ([0] * n, case["tokens"]):
        amounts = [a + b for a, b in zip(tokens, extra, strict=True)]
        for values in rates(amounts, [a + b for a, b in zip(profiled, seconds, strict=True)]):
            yield "profiled/counted", values
    own = [tokens[r] / seconds[r] for r in every]
    yield "one-rank", own
    yield "one-rank", [tokens[r] / longest for r in every]
    yield from (("one-rank", [one] * n) for one in (*own, tokens[0] / longest))
    for mean in (sum(own) / n, total / sum(seconds), total / n / longest):
        yield "mean-of-ranks", [mean] * n
    yield "sum-of-rates", [sum(own)] * n
    yield "not-the-slowest", [total / seconds[r] for r in every]
    yield from (("not-the-slowest", [total / one] * n) for one in (*seconds, sum(seconds) / n))
    for time in (*seconds, None):
        yield "times-the-world", [n * tokens[r] / (time or seconds[r]) for r in every]
    yield "times-the-world", [n * tokens[0] / longest] * n
    yield "clocks-compared", [total / (longest + APART_S * (n - 1))] * n
    yield "one-step", [total / steps / longest] * n
    for units in (1, SLOW):  # of the median step, or the fastest; of the slowest
        yield "median-step", [total / steps / (units * max(case["seconds"]))] * n
    mean = (steps - 1 + 1 / SLOW) / steps  # of a step's rate, in units of the usual one
    step_rates = [mean * case["tokens"][r] / case["seconds"][r] for r in every]
    yield "mean-of-steps", step_rates
    yield "mean-of-steps", [sum(step_rates)] * n
    yield "mean-of-steps", [sum(step_rates) / n] * n
    yield "steps-per-second", [steps / longest] * n
    yield "upside-down", [longest / total] * n
    yield "milliseconds", [total / longest / 1000] * n


def _close(a: float, b: float) -> bool:
    return math.isfinite(a) and abs(a - b) <= TOLERANCE * abs(b)


judge = judging(mistakes.not_waited, look, only_first=True)
