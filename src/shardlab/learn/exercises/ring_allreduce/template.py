"""Exercise: ring all-reduce, from send and receive alone.

The contract. Every rank calls ring_all_reduce(tensor) with a tensor of the same shape and dtype.
When it returns, the tensor holds, on every rank, the sum of all ranks' tensors: in place.

- Only point-to-point messages: dist.send, dist.recv, dist.isend, dist.irecv,
  dist.batch_isend_irecv. No collective, no barrier.
- Each rank sends to one neighbour only, and receives from the other.
- The tensor is cut into n chunks (n ranks). They go round twice, n-1 hops each time: first the
  chunks are added up on their way (reduce-scatter), then the sums are handed on (all-gather). So a
  rank sends 2(n-1) chunks, 2(n-1)/n of the tensor. Rounding a chunk up is allowed.
- The tensor is contiguous; it may have any shape and dtype, a size that n does not divide, and
  fewer elements than there are ranks.

You need: tensor.view(-1), which is the same memory, flat; tensor_split(n), which gives n views.

Check with:  shardlab learn check ring_allreduce
"""

import torch.distributed as dist
from torch import Tensor


def ring_all_reduce(tensor: Tensor) -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    right, left = (rank + 1) % n, (rank - 1) % n
    # TODO 1: cut the tensor into n chunks.
    # TODO 2: n-1 hops: send a chunk to the right, receive one from the left, add it.
    # TODO 3: n-1 hops: hand the finished chunks on.
    raise NotImplementedError("TODO: ring_all_reduce()")
