"""Spread, throughput and ratios of measured times, and how sure they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np

Repeats = Sequence[Sequence[float]]  # (repeats, steps): one row for each visit

DRAWS = 2000
# How much wider than the normal interval Student's 95% interval is, by the number of repeats.
STUDENT = {2: 6.48, 3: 2.20, 4: 1.62, 5: 1.42, 6: 1.31, 7: 1.25, 8: 1.21, 9: 1.18, 10: 1.15}


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
