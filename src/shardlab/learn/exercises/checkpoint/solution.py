"""Exact resume of a replicated run; in the package: checkpoint/files.py and its neighbours, where
each rank writes its own part of a sharded state.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def save(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any
) -> None:
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, torch.get_rng_state())
    if dist.get_rank() == 0:
        content = {
            "step": step,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "loader": loader.state_dict(),
            "rng": states,
        }
        temporary = folder / "checkpoint.tmp"
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(folder / "checkpoint.pt")
    dist.barrier()


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> int:
    content = torch.load(folder / "checkpoint.pt", weights_only=True)
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    loader.load_state_dict(content["loader"])
    if dist.get_rank() < len(content["rng"]):
        torch.set_rng_state(content["rng"][dist.get_rank()])
    step: int = content["step"]
    return step
