"""The shortest way to bring a model: a function that returns model, data and loss.

shardlab compare --workload examples/short_form.py:workload

docs/workloads.md has a table of what data and loss may be.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def workload():
    x = torch.randn(1000, 64, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :10].argmax(1))  # or a list of pairs, or (x, x[:, :10].argmax(1))
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
    return model, DataLoader(data), nn.CrossEntropyLoss()
