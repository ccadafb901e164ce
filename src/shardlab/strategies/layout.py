"""Which elements of the whole model a rank holds, where an axis of the mesh cuts it."""

from __future__ import annotations

from torch import nn

from shardlab.strategies import shards
from shardlab.strategies.shards import Runs

# Where the elements lie that this rank holds of each tensor of the whole model, by its first name.
# What is missing is not held here.
Layout = dict[str, Runs]


def whole_layout(model: nn.Module) -> Layout:
    """Everything, as before any cut."""
    return {s.name: s.runs for s in shards.of_model(model)}
