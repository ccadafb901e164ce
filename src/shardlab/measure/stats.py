"""Numbers from numbers: spread and throughput. Pure, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import numpy as np


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
    """At the median step: one stalled step does not move it."""
    samples_per_s = samples_per_step / (float(np.median(step_ms)) / 1e3)
    tokens_per_s = None if tokens_per_sample is None else samples_per_s * tokens_per_sample
    return {"samples_per_s": samples_per_s, "tokens_per_s": tokens_per_s}
