"""The small CNN of PyTorch's MNIST example."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from shardlab.config import DataConfig
from shardlab.workloads import images
from shardlab.workloads.base import Workload, classification_loss, classify

SHAPE = (1, 28, 28)


class CNN(nn.Module):
    """Two convolutions, two linear layers: 1,199,882 parameters."""

    def __init__(self, dropout: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25 if dropout else 0.0)
        self.fc1 = nn.Linear(64 * 12 * 12, 128)
        self.dropout2 = nn.Dropout(0.5 if dropout else 0.0)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:  # (batch, 1, 28, 28)
        x = F.relu(self.conv1(x))  # (batch, 32, 26, 26)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)  # (batch, 64, 12, 12)
        x = F.relu(self.fc1(self.dropout1(x).flatten(1)))
        logits: Tensor = self.fc2(self.dropout2(x))  # (batch, 10)
        return logits


def cnn_mnist(data: DataConfig, *, dataset: str | None = None, dropout: bool = False) -> Workload:
    """A small CNN on MNIST, or on fashion_mnist or digits (option dataset).

    Dropout is off unless asked for: ranks drop other elements than one process would.
    """
    found = images.datasets("cnn_mnist", "mnist", dataset, data, SHAPE)
    return Workload(
        name=f"cnn-{found.name}",
        make_model=lambda: CNN(dropout),
        loss=classification_loss,
        dataset=found.train,
        blocks=("conv1", "conv2", "fc1", "fc2"),
        held_out=found.test,
        evaluate=classify,
        flops_per_sample=images.flops(CNN, SHAPE),
        data=found.about,
        chosen=found.chosen,
    )
