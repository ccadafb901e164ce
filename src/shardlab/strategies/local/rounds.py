"""Rounds of workers that take steps of their own: which numbers are refused, and what follows.

After every ``every`` steps the difference between the anchor (what all workers had after the
last exchange) and each worker's parameters is averaged. A worker weighs as much as the targets
that it has seen since. The average is the gradient of an outer SGD with Nesterov momentum. It
moves the anchor, and all workers continue from there. With rate 1 and no momentum the anchor
becomes the average of the workers. Buffers follow worker 0's at the end of a round.

With several ``fragments`` the parameters are cut into that number of parts of about the same
size, in the model's order. They are exchanged in turn during a round, each by itself. What is
sent after a step may arrive ``delay`` steps later. The anchor moves then, and a worker keeps
``mix`` of its own parameters beside what the anchor has become.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from shardlab import axes
from shardlab.errors import UsageError
from shardlab.strategies.base import Rounds


def checked(rounds: Rounds) -> Rounds:
    """These rounds, if they can be made."""
    every, delay = rounds.every, rounds.delay
    _refuse("every", every, every >= 1, "1 or more")
    _refuse("outer_lr", rounds.outer_lr, rounds.outer_lr > 0, "above 0")
    momentum = rounds.outer_momentum
    _refuse("outer_momentum", momentum, 0 <= momentum < 1, "from 0 to below 1")
    within = f"from 1 to every, which is {every}"
    _refuse("fragments", rounds.fragments, 1 <= rounds.fragments <= every, within)
    _refuse("delay", delay, 0 <= delay < every, f"from 0 to below {every} (every)")
    is_right = 0 <= rounds.mix < 1 if delay else rounds.mix == 0
    _refuse("mix", rounds.mix, is_right, "from 0 to below 1" if delay else "0 without a delay")
    return rounds


def _refuse(name: str, value: float, is_right: bool, wanted: str) -> None:
    if not is_right:
        raise UsageError(f"{name} must be {wanted}, got {value}")


def shortest(rounds: Rounds) -> int:
    """The fewest steps of a round that shows everything which this one does."""
    return max(2, rounds.fragments, rounds.delay + 1)


def due(rounds: Rounds, fragment: int) -> int:
    """After which step of a round a fragment is sent, from 1 to ``every``."""
    return (fragment + 1) * rounds.every // rounds.fragments


def cut(rounds: Rounds, params: Mapping[str, Tensor]) -> list[list[str]]:
    """The names of the parameters in each fragment."""
    sizes = {name: p.numel() * p.element_size() for name, p in params.items()}
    return axes.cut_evenly(sizes, rounds.fragments)
