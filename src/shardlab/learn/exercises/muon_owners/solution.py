"""Muon with sharded state. In the package: strategies/flat.py deals out the matrices, zero1.py and
zero2.py send them in buckets."""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn


def assign(shapes: Mapping[str, tuple[int, int]], world: int) -> dict[str, int]:
    sizes = {name: rows * columns for name, (rows, columns) in shapes.items()}
    owners, loads = {}, [0] * world
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return owners


class ShardedMuon:
    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        make_muon: Callable[[list[Tensor]], torch.optim.Optimizer],
    ) -> None:
        self.params = params
        self.n, self.rank = dist.get_world_size(), dist.get_rank()
        self.owners = assign({name: tuple(p.shape) for name, p in params.items()}, self.n)
        mine = [p for name, p in params.items() if self.owners[name] == self.rank]
        self.optimizer = make_muon(mine)

    def step(self) -> None:
        for name, p in self.params.items():
            dist.reduce(p.grad, dst=self.owners[name])
            p.grad /= self.n
        self.optimizer.step()
        for name, p in self.params.items():
            dist.broadcast(p.data, src=self.owners[name])
            p.grad = None
