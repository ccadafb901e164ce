"""Your own model, data and loss in shardlab:

shardlab compare --workload examples/your_model.py:workload
"""

import torch
from torch import nn

from shardlab.workloads.base import Batch, Workload, classification_loss, classify


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Data:
    """Samples by number. No numbers make a batch of no rows: a rank may have nothing to do."""

    def __init__(self, samples: int, seed: int) -> None:
        self.x = torch.randn(samples, 64, generator=torch.Generator().manual_seed(seed))
        self.y = self.x[:, :10].argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, ids) -> Batch:
        return Batch(inputs=self.x[ids], targets=self.y[ids], count=len(ids), samples=len(ids))


workload = Workload(
    name="my-model", make_model=Model, dataset=Data(10_000, seed=0), held_out=Data(1_000, seed=1),
    loss=classification_loss,  # the sum over the batch: shardlab divides by the global count
    evaluate=classify,  # more sums: loss and correct answers
)  # fmt: skip
