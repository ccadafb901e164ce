"""The learning rate over a run: a factor for each step. Pure numbers, no torch."""

from __future__ import annotations

import math

SCHEDULES = ("constant", "cosine")


def learning_rate_factor(step: int, total: int, warmup: int, kind: str, floor: float) -> float:
    """What the learning rate of ``step`` (from 0, of ``total``) is multiplied by: 0 to 1.

    It rises in a line over ``warmup`` steps and is 1 at the one after; never 0, for a first
    step at rate 0 would be wasted. Then it stays ("constant"), or falls along half a cosine
    to ``floor``, which the first step after the run would have ("cosine").
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if kind == "constant":
        return 1.0
    if step >= total:
        return floor
    progress = (step - warmup) / (total - warmup)
    return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2
