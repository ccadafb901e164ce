"""Exercise: the loss of the global batch.

Contract: ``global_loss(microbatches)`` is called on every rank, once per step. It returns the mean
cross-entropy over every target of the step that counts, of all micro-batches of all ranks: one
number (a float, or a tensor without a graph), the same on every rank.

- ``microbatches`` are this rank's: a list of (logits, targets), (rows, classes) and (rows,). It may
  be empty, and ranks may have different numbers of them, of different sizes.
- A target of IGNORED does not count. A micro-batch may have no other.
- If no rank has a target that counts, the loss is 0.
- Logits may be bfloat16; the loss is computed and added up in float32 or better.
- Once or twice a few bytes are communicated, however many micro-batches or targets there are.

Check with:  shardlab learn check global_loss
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100


def global_loss(microbatches: Sequence[tuple[Tensor, Tensor]]) -> float | Tensor:
    # TODO 1: this rank's sum of losses, and the number of targets that it is a sum of.
    # TODO 2: both over all ranks.
    # TODO 3: one division.
    raise NotImplementedError("TODO: the mean loss over every target of every rank")
