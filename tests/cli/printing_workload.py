"""A model that prints wherever it can, as people's models do: what scripts read must stay JSON."""

import atexit
import ctypes
import os
import sys

import torch
from torch import nn

from shardlab.workloads.base import Batch, Workload, classification_loss, classify

LIBC = ctypes.CDLL(None)


def shout(where: str) -> None:
    """By every way there is: Python, what was stdout before, the descriptor, C, another process."""
    print(f"{where}: print")
    sys.__stdout__.write(f"{where}: __stdout__\n")
    sys.__stdout__.flush()
    os.write(1, f"{where}: descriptor\n".encode())
    LIBC.puts(f"{where}: C".encode())
    LIBC.fflush(None)


shout("import")
os.system("echo import: another process")
atexit.register(lambda: print("at exit"))


class Loud(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shout("init")
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shout("forward")
        print("half a line, and {no end", end="")
        return self.layers(x)


class Data:
    def __init__(self, samples: int) -> None:
        self.x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(0))
        self.y = self.x[:, :4].argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, ids) -> Batch:
        print(f"rank {os.environ.get('RANK')} reads its own samples")
        return Batch(inputs=self.x[ids], targets=self.y[ids], count=len(ids), samples=len(ids))


workload = Workload(
    name="loud", make_model=Loud, dataset=Data(64), held_out=Data(16), loss=classification_loss,
    evaluate=classify,
)  # fmt: skip
