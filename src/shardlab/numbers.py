"""Numbers from numbers, and numbers as people read and write them. Pure, no torch.

Statistics first: spread, throughput, ratios and how sure they are, bytes on the wire. Then texts.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from shardlab.errors import UsageError

Repeats = Sequence[Sequence[float]]  # (repeats, steps): one row for each visit

DRAWS = 2000
# How much wider than the normal interval Student's 95% interval is, by the number of repeats.
STUDENT = {2: 6.48, 3: 2.20, 4: 1.62, 5: 1.42, 6: 1.31, 7: 1.25, 8: 1.21, 9: 1.18, 10: 1.15}

NOTHING = "–"
BYTES = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}
# As people may write them, in small letters.
WRITTEN = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
WRITTEN |= {unit.lower(): size for unit, size in BYTES.items()}


# ------------------------------------------------------------------ statistics


class Spread(TypedDict):
    median: float
    p10: float
    p90: float
    n: int


class Throughput(TypedDict):
    samples_per_s: float
    tokens_per_s: float | None


def spread(values: Sequence[float]) -> Spread:
    """Median, 10th and 90th percentile (linear between neighbours), and how many."""
    p10, median, p90 = np.percentile(values, [10, 50, 90]).tolist()
    return {"median": median, "p10": p10, "p90": p90, "n": len(values)}


def throughput(
    step_ms: Sequence[float], samples_per_step: int, tokens_per_sample: int | None
) -> Throughput:
    """Computed at the median step, so that one stalled step does not move it."""
    samples_per_s = samples_per_step / (float(np.median(step_ms)) / 1e3)
    tokens_per_s = None if tokens_per_sample is None else samples_per_s * tokens_per_sample
    return {"samples_per_s": samples_per_s, "tokens_per_s": tokens_per_s}


def ratio(above: Repeats, below: Repeats) -> float:
    """The median of one divided by the median of the other."""
    return _median(above) / _median(below)


def can_tell(*measured: Repeats) -> bool:
    """Whether there are enough visits to know how much one differs from the next."""
    return all(len(repeats) > 1 for repeats in measured)


def ratio_interval(
    above: Repeats, below: Repeats, paired: bool = False, seed: int = 0
) -> tuple[float, float]:
    """The 95% interval of ``ratio``, by a bootstrap over repeats, then over the steps in them.

    Steps of one visit share its luck (what else the machine did meanwhile), so whole repeats are
    drawn first. ``paired``: repeat i of both was measured in the same minute, and is drawn for
    both. With few repeats a bootstrap draws too few extreme cases, so its deviations are widened
    as Student's are. With one repeat it goes by the steps alone.
    """
    draw = np.random.default_rng(seed)
    paired = paired and len(above) == len(below)
    first = draw.integers(len(above), size=(DRAWS, len(above)))
    second = first if paired else draw.integers(len(below), size=(DRAWS, len(below)))
    ratios = np.log(_medians(above, first, draw)) - np.log(_medians(below, second, draw))
    center = np.log(ratio(above, below))
    widening = _widening(min(len(above), len(below)))
    low, high = np.exp(center + widening * (np.percentile(ratios, [2.5, 97.5]) - center))
    return float(low), float(high)


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Student's 95% interval of the mean; None for one value, which says nothing of the next."""
    if len(values) < 2:
        return None
    center, error = float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))
    half = 1.96 * _widening(len(values)) * error
    return center - half, center + half


def _widening(repeats: int) -> float:
    return STUDENT.get(repeats, 1 + 1.3 / (repeats - 1)) if repeats > 1 else 1.0


def _median(repeats: Repeats) -> float:
    return float(np.median(np.concatenate([np.asarray(r, float) for r in repeats])))


def _medians(repeats: Repeats, chosen: Any, draw: np.random.Generator) -> Any:
    """For each row of chosen repeats, the median of as many steps, drawn from them."""
    steps = min(len(r) for r in repeats)
    times = np.array([list(r[:steps]) for r in repeats], float)  # (repeats, steps)
    which = draw.integers(steps, size=(*chosen.shape, steps))
    return np.median(times[chosen[..., None], which].reshape(len(chosen), -1), axis=1)


def wire_bytes(op: str, size: int, ranks: int) -> float:
    """Bytes one rank must send for a collective on ``size`` bytes, by the best algorithm."""
    share = (ranks - 1) / ranks
    factor = {
        "all_reduce": 2 * share,
        "all_gather": share,
        "reduce_scatter": share,
        "all_to_all": share,  # each rank sends every other its part of the tensor
        "broadcast": share,  # averaged over ranks: the tensor enters each rank but the source
        "reduce": share,  # and leaves each but one
        "gather": share,
        "scatter": share,
        "barrier": 0.0,
        "send": 1.0,  # from one rank to one other; it is counted where it is sent
        "recv": 0.0,
    }
    return factor[op] * size


def bus_bytes(op: str, size: int, ranks: int) -> float:
    """Bytes for the bus bandwidth, as nccl-tests count it: what one link must carry.

    A tensor of one root crosses a link whole, although not every rank sends it.
    """
    is_whole = op in ("broadcast", "reduce", "send", "recv")
    return float(size) if is_whole else wire_bytes(op, size, ranks)


def cut_evenly(sizes: Mapping[str, int], parts: int) -> list[list[str]]:
    """Names in their order, cut into runs of about the same size: each goes where its middle lies.
    A run may be empty."""
    total, before = max(1, sum(sizes.values())), 0
    runs: list[list[str]] = [[] for _ in range(parts)]
    for name, size in sizes.items():
        middle = min(before + size / 2, total * (1 - 1e-9))
        runs[int(parts * middle / total)].append(name)
        before += size
    return runs


def cut_range(length: int, parts: int) -> list[range]:
    """The numbers below ``length`` in so many runs. The first are longer by one, if any are."""
    low = [length // parts * i + min(i, length % parts) for i in range(parts + 1)]
    return [range(low[i], low[i + 1]) for i in range(parts)]


def ranks_per_node(places: Sequence[tuple[int, int]]) -> int:
    """From each rank's (local rank, ranks on its node): how many ranks each node has.

    0 stands for one node, and for nodes that cannot be told from the rank's number: with other
    numbers of ranks, or whose ranks are not neighbours.
    """
    count = places[0][1]
    is_even = all(place == (rank % count, count) for rank, place in enumerate(places))
    return count if is_even and count < len(places) and len(places) % count == 0 else 0


@functools.cache
def link_shares(
    op: str, nodes: tuple[int, ...], rank: int, backend: str = "gloo", ours: bool = True
) -> tuple[float, float]:
    """What one rank sends inside its node, and to other nodes, in units of the tensor's size.

    ``nodes``: the node of each rank of the group; ``rank``: this rank's place in it. (0.5, 2.0) is
    half of the tensor to its own node and twice the tensor to others. Of a message ("send" and
    "recv") the sender and the receiver are the group.
    """
    sent = [0.0, 0.0]
    for sender, receiver, share in _messages(op, len(nodes), backend, ours):
        if sender == rank:
            sent[nodes[sender] != nodes[receiver]] += share
    return sent[0], sent[1]


def _messages(op: str, n: int, backend: str, ours: bool) -> Iterator[tuple[int, int, float]]:
    """Who sends whom how much of a collective's tensor: sender, receiver, share.

    These are the algorithms that Gloo has; interface counters of two and three hosts agree
    (tests/strategies/test_wire.py). Over Gloo our all_gather is a broadcast from each rank and our
    reduce_scatter an all-to-all; PyTorch's own (``ours=False``) are a ring and an all-reduce. For
    NCCL, which chooses between rings and trees, it is a ring in the order of the ranks.
    """
    is_gloo = backend == "gloo"
    step = -1 if is_gloo else 1  # the way around the ring
    if op == "all_to_all" or (op == "reduce_scatter" and is_gloo and ours):
        yield from ((a, b, 1 / n) for a in range(n) for b in range(n) if a != b)
    elif op in ("broadcast", "all_gather") and is_gloo and (ours or op == "broadcast"):
        roots = range(n) if op == "all_gather" else range(1)
        for root in roots:  # a binomial tree: each rank that has it sends it to one more
            for has in (1 << i for i in range(n.bit_length())):
                for a in range(min(has, max(0, n - has))):
                    yield (root + a) % n, (root + a + has) % n, 1 / len(roots)
    elif op in ("send", "recv"):
        yield 0, 1, 1.0
    elif op == "broadcast":
        yield from ((a, a + 1, 1.0) for a in range(n - 1))
    elif op != "barrier":
        rounds = 2 if op == "all_reduce" or (op == "reduce_scatter" and is_gloo) else 1
        yield from ((a, (a + step) % n, rounds * (n - 1) / n) for a in range(n) if n > 1)


# ------------------------------------------------------------------ texts


def number(value: float | None, like: float | None = None) -> str:
    """Three significant digits (as many as ``like`` has, if given), or all the whole ones: 0.273,
    6,295."""
    if value is None:
        return NOTHING
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    rounded = float(f"{like or value:.3g}")  # 9.996 is 10.0, not 10.00
    decimals = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{value:,.{decimals}f}"


def part_of_step(ms: float) -> str:
    """As ``number``, with two decimals at most: 0.0588 would take a strategy's name its room in a
    terminal, and nobody needs its last digits."""
    return number(ms, max(abs(ms), 1.0))


def ms(us: float | None) -> str:
    """Microseconds as milliseconds."""
    return number(None if us is None else us / 1000)


def unit_of(value: float, units: Mapping[str, float] = BYTES) -> tuple[str, float]:
    """The first of some units, the largest first, that a value reaches; else the last."""
    return next((unit for unit in units.items() if abs(value) >= unit[1]), [*units.items()][-1])


def compact(value: float | None) -> str:
    """As ``number``, with M, B and T for what is long: parameters, tokens per second."""
    unit, one = unit_of(value or 0, {"T": 1e12, "B": 1e9, "M": 1e6, "": 1})
    if value is not None and not unit and float(value).is_integer():
        return f"{value:,.0f}"
    return number(value) if value is None else number(value / one) + unit


def size(value: float | None) -> str:
    """Bytes, in powers of 1024."""
    unit, one = unit_of(value or 0)
    return NOTHING if value is None else f"{number(value / one)} {unit}"


def parse_bytes(text: str, flag: str) -> int:
    """``24GB`` (powers of 1000), ``24GiB`` (of 1024), ``500 MB``, ``1e9``."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e\+?[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    try:
        amount = int(float(match[1]) * WRITTEN[match[2]]) if match else 0
    except (KeyError, ValueError, OverflowError):
        amount = 0
    if amount < 1:
        raise UsageError(f"{flag} {text}: not a size, as in 24GB or 500MiB")
    return amount


def duration(seconds: float) -> str:
    """``0.4 s``, ``58.3 s``, ``12 min 5 s``, ``3 h 2 min``, ``2 d 4 h``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    seconds = round(seconds)
    for unit, one, part, smaller in (("d", 86400, "h", 3600), ("h", 3600, "min", 60)):
        if seconds >= one:
            return f"{seconds // one:.0f} {unit} {seconds % one // smaller:.0f} {part}"
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


def p10_p90(step_ms: Mapping[str, float]) -> str:
    return f"{number(step_ms['p10'], like=step_ms['p90'])}–{number(step_ms['p90'])}"


def speed(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}×"


def interval(values: Sequence[float] | None) -> str:
    """A speed's interval, as ``1.18–1.25``. It is empty for the baseline itself."""
    if values is None or values[0] == values[1]:
        return ""
    return f"{values[0]:.2f}–{values[1]:.2f}"


def mark(passed: bool | None) -> str:
    """✓ proved, ✗ found wrong, – not proved."""
    return NOTHING if passed is None else "✓" if passed else "✗"


def at_least(amount: float | None, known: float) -> str:
    """A sum of bytes: ``≥`` what is known of it where a part is not, – where nothing is."""
    return size(amount) if amount is not None or not known else f"≥ {size(known)}"


def gbps(value: float | None) -> str:
    """A bandwidth. That of a few bytes that took milliseconds is not worth its digits."""
    return "<0.001" if value is not None and value < 0.001 else number(value)


def percent(value: float | None, decimals: int = 0) -> str:
    return NOTHING if value is None else f"{value:.{decimals}f}%"


def loss(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4f}"


def difference(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2g}"


def count(amount: int, noun: str, plural: str | None = None) -> str:
    """``1 step``, ``10 steps``."""
    return f"{amount:,} {noun if amount == 1 else plural or noun + 's'}"


def beside(batch: int, parts: int) -> str:
    """How many other samples are with each in its part of a batch: ``7``, ``7 or 8``."""
    least, is_more = divmod(batch, parts)
    return f"{least - 1:,} or {least:,}" if is_more else f"{least - 1:,}"


def names(labels: Sequence[str], at_most: int = 3) -> str:
    """``a``, ``a and b``, ``a, b, c and 4 others``."""
    shown = list(labels)
    if len(shown) > at_most + 1:  # "and 1 other" would be no shorter than its name
        shown = [*shown[:at_most], f"{len(shown) - at_most} others"]
    return " and ".join(part for part in (", ".join(shown[:-1]), shown[-1]) if part)


def nodes(of: Sequence[Mapping[str, Any]]) -> str:
    """``2 nodes: alpha with ranks 0, 1; beta with ranks 2, 3``."""
    hosts = (
        f"{node['host']} with rank{'s' * (len(node['ranks']) > 1)} "
        f"{', '.join(map(str, node['ranks']))}"
        for node in of
    )
    return f"{count(len(of), 'node')}: {'; '.join(hosts)}"
