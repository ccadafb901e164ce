"""PyTorch's own pipeline, and two calls of step() for one update (the book's chapter 24).

    torchrun --standalone --nproc-per-node=2 examples/scale_grads.py

``scale_grads=True``, the default, divides all of p.grad by the number of micro-batches when a
step() ends. What an earlier step() has left in p.grad is divided again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional as F

MICRO = 4  # micro-batches in a call of step()


def gradients(calls: Sequence[int], scale_grads: bool) -> Tensor:
    """What these calls leave in p.grad, laid end to end. The loss is a micro-batch's mean."""
    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double() for _ in range(ranks)]
    data = torch.randn(2, 2, 2 * MICRO, 8, dtype=torch.float64)  # (calls, x and y, rows, width)
    stage = PipelineStage(layers[rank], rank, ranks, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, MICRO, loss_fn=F.mse_loss, scale_grads=scale_grads)
    for call in calls:
        x, y = data[call]
        schedule.step(*([x] if rank == 0 else []), target=y)
    return torch.cat([p.grad.flatten() for p in layers[rank].parameters() if p.grad is not None])


def main() -> None:
    dist.init_process_group("gloo")
    first, second = (gradients([call], scale_grads=False) for call in (0, 1))  # sums
    left = gradients([0, 1], scale_grads=True)
    torch.testing.assert_close(left, first / MICRO**2 + second / MICRO)
    for what, gradient in (
        ("the mean of all micro-batches", (first + second) / (2 * MICRO)),
        ("the sum of both calls' means", (first + second) / MICRO),
        ("what step() leaves", left),
    ):
        share = (gradient.norm() / (first + second).norm()).item()
        print(f"stage {dist.get_rank()}: {what:30} {share:.3f} of the sum", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
