"""Your own model, data and loss in shardlab:

shardlab compare --workload examples/your_model.py:workload
"""

import torch
from torch import nn
from torch.nn import functional as F

from shardlab.workloads.base import Batch, Workload


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Data:
    """Samples by number. No numbers make a batch of no rows: a rank may have nothing to do."""

    x = torch.randn(10_000, 64, generator=torch.Generator().manual_seed(0))
    y = x[:, :10].argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, ids) -> Batch:
        return Batch(inputs=self.x[ids], targets=self.y[ids], count=len(ids), samples=len(ids))


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The sum over the batch, not its mean: shardlab divides by the count of the global batch."""
    return F.cross_entropy(model(batch.inputs), batch.targets, reduction="sum")


workload = Workload(name="my-model", make_model=Model, loss=loss, dataset=Data())
