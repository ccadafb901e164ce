"""Exercise: buckets. Few large messages instead of many small ones, still during backward.

The contract. Every rank has the same model (equal parameters) and its own data. The grader does:

    ddp = BucketDDP(model, bucket_bytes)                    # once
    for microbatches in steps:
        for i, (x, y) in enumerate(microbatches):
            ddp.is_last = i == len(microbatches) - 1
            (mse_loss(model(x), y) / len(microbatches)).backward()
        ddp.finish()
        # here it looks at p.grad, then it updates and sets p.grad = None

- After finish(), p.grad of every parameter that trains is the mean of the ranks' gradients.
- Gradients travel in buckets: one asynchronous all_reduce of one flat tensor for each bucket. A
  bucket holds whole parameters, at most bucket_bytes of them (a parameter larger than that has a
  bucket of its own), and the next bucket begins only when this one has no room.
- A bucket is sent as soon as its last gradient is there, so fill the buckets in the order in
  which gradients come: the last layer's first. On all but the last micro-batch nothing is sent.
- A parameter may be unused on one rank (no gradient there, no hook) and used on another: its mean
  counts a zero for the rank without. Unused on all ranks: p.grad may be None or zero.
  Whatever is unused where, every rank must send the same buckets in the same order.

You need: p.register_post_accumulate_grad_hook(f), torch.cat, tensor.split, and
dist.all_reduce(tensor, async_op=True).

Check with:  shardlab learn check buckets
"""

import torch.distributed as dist
from torch import nn


class BucketDDP:
    def __init__(self, model: nn.Module, bucket_bytes: int) -> None:
        self.is_last = True  # the grader sets it before each forward
        # TODO 1: lay out the buckets: which parameters are in which.
        # TODO 2: a hook on each parameter that knows its bucket.

    # TODO 3: count what has come; send a bucket when it is complete, and all before it are sent.

    def finish(self) -> None:
        # TODO 4: send what backward left, wait, divide, and put each mean into its p.grad.
        # TODO 5: be ready for the next step.
        raise NotImplementedError("TODO 4: finish()")
