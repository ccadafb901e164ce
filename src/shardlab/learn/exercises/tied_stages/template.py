"""Exercise: one embedding on the first and the last stage of a pipeline.

The contract. A model uses its embedding twice: the first stage looks tokens up in it, the last one
computes the logits with it. It is one parameter, and both stages hold it. There may be several such
pipelines, replicas, each with its own samples. On every rank the grader does:

    begin(shared, tied)                                   # once
    ...                                                   # the pipeline: forward and backward
    reduce_gradients(params, shared, tied, data)
    norm = clip(params, shared, tied, pipe, max_norm)

- shared is the embedding on the first and on the last stage, None on those between.
- tied is the group of the two ranks of this pipeline that have it, the first stage's first; None on
  those between. data is the group of the ranks with the same stage in all replicas, perhaps only
  this one. pipe is the group of this pipeline's ranks.
- begin: the two stages have drawn different values. Afterwards both have the first stage's.
- After backward each p.grad is what this rank's stage gave: for the embedding one part on the first
  stage, the other on the last. reduce_gradients leaves in each p.grad what one process would have
  that sees the samples of all replicas: the mean over the replicas. The two parts of the embedding
  are summed first: a reduction over the replicas that leaves each rank a share, as ZeRO's does,
  leaves no whole gradient to sum.
- clip returns the norm of the whole model's gradient, every parameter counted once, and if it is
  larger than max_norm multiplies all gradients by max_norm / norm.

You need: dist.all_reduce(tensor, group=group), dist.broadcast(tensor, src=..., group=group), whose
src is dist.get_global_rank(group, 0) for the first of the group; dist.get_rank(group).

Check with:  shardlab learn check tied_stages
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn


def begin(shared: nn.Parameter | None, tied: dist.ProcessGroup | None) -> None:
    # TODO 1: both stages begin with the first one's values.
    raise NotImplementedError("TODO 1: begin()")


def reduce_gradients(
    params: Sequence[nn.Parameter],  # of this rank's stage, the embedding among them
    shared: nn.Parameter | None,
    tied: dist.ProcessGroup | None,
    data: dist.ProcessGroup,
) -> None:
    # TODO 2: the embedding's two parts, then the replicas.
    raise NotImplementedError("TODO 2: reduce_gradients()")


def clip(
    params: Sequence[nn.Parameter],
    shared: nn.Parameter | None,
    tied: dist.ProcessGroup | None,
    pipe: dist.ProcessGroup,
    max_norm: float,
) -> float:
    # TODO 3: the norm over all stages, each parameter once.
    raise NotImplementedError("TODO 3: clip()")
