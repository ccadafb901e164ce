"""The script of examples/plain_script.py under a strategy of the lab, here zero2.

torchrun --nproc-per-node=2 examples/parallel_script.py
"""

import math
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import shardlab

STEPS, BATCH, SAVE_EVERY = 60, 32, 20
RUN = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/script")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(64, 10))


def make_data():
    x = torch.randn(2048, 64, generator=torch.Generator().manual_seed(1))
    return x, x[:, :10].argmax(1)


def samples_of(step):
    """The numbers of the samples of a step: they follow from the step alone."""
    order = torch.Generator().manual_seed(step)
    return torch.randperm(2048, generator=order)[:BATCH]


def cosine(step):
    return 0.5 * (1 + math.cos(math.pi * step / STEPS))


def workload():
    """For `shardlab compare --workload examples/parallel_script.py:workload`."""
    return make_model(), make_data(), nn.CrossEntropyLoss()


def main():
    strategy = shardlab.strategy(
        "zero2", make_model(), lambda params: torch.optim.AdamW(params, lr=3e-3),
        lambda model, batch: F.cross_entropy(model(batch.inputs), batch.targets, reduction="sum"),
        clip_norm=1.0, schedule=cosine, ema_decay=0.95,
    )  # fmt: skip
    rank, ranks = strategy.group.rank(), strategy.group.size()
    x, y = (tensor.to(strategy.device) for tensor in make_data())
    first = shardlab.load_checkpoint(strategy, RUN)
    for step in range(first, STEPS):
        ids = samples_of(step)[rank::ranks]
        loss = strategy.gradients([shardlab.Batch(x[ids], y[ids], len(ids), len(ids))])
        strategy.step()
        if (step + 1) % SAVE_EVERY == 0:
            if rank == 0:
                print(f"step {step + 1}: loss {loss.item():.4f}")
            shardlab.save_checkpoint(strategy, RUN, step + 1)
    strategy.exchange_averages()
    averages = strategy.full_params()
    if rank == 0:
        torch.save(averages, RUN / "average.pt")


if __name__ == "__main__":
    main()
