"""The shortest way to bring a model: a function that returns model, data and loss.

shardlab compare --workload examples/short_form.py:workload
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset


def workload():
    x = torch.randn(1000, 64, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :10].argmax(1))  # anything with a length that gives pairs
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
    return model, data, nn.CrossEntropyLoss(reduction="sum")  # a sum, not a mean
