"""Exercise: measuring throughput.

Contract: ``throughput(step, synchronize, clock, profile, warmup, steps)`` is called on every rank
and returns the tokens per second of the whole job, one number, the same on every rank: the tokens
of all ranks in the timed steps, divided by the seconds that the slowest rank took for them.

- ``step()`` runs one training step of this rank and returns how many tokens it was. It returns when
  the work is *launched*, as on a GPU; the ranks may have different numbers of tokens.
- ``synchronize()`` returns when all that was launched is done (torch.cuda.synchronize).
- ``clock()`` is the time in seconds (time.perf_counter). Here it is simulated: read no other.
- ``profile`` is a context manager that records a trace, and slows down what runs in it.

Run ``warmup`` steps that are not timed, then ``steps`` steps that are: all of their time counts,
and nothing else. Also run one more step under ``profile``, which is not timed and not the first.

Check with:  shardlab learn check throughput
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist


def throughput(
    step: Callable[[], int],
    synchronize: Callable[[], None],
    clock: Callable[[], float],
    profile: AbstractContextManager[Any],
    warmup: int,
    steps: int,
) -> float:
    # TODO 1: the steps that do not count.
    # TODO 2: the timed steps: this rank's tokens and seconds.
    # TODO 3: one step for the trace.
    # TODO 4: what the ranks have together.
    raise NotImplementedError("TODO: tokens per second of all ranks")
