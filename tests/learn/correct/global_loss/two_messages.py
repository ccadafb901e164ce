"""Logarithms by hand, and the sum and the count in two messages."""

import torch
import torch.distributed as dist

IGNORED = -100


def global_loss(microbatches):
    loss, count = torch.zeros(()), torch.zeros((), dtype=torch.long)
    for logits, targets in microbatches:
        counts = targets != IGNORED
        logs = torch.log_softmax(logits.detach().to(torch.float32), dim=1)[counts]  # (counted, C)
        loss -= logs[torch.arange(len(logs)), targets[counts]].sum()
        count += counts.sum()
    handle = dist.all_reduce(loss, async_op=True)
    dist.all_reduce(count)
    handle.wait()
    return loss / count if count else torch.zeros(())
