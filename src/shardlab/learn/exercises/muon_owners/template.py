"""Exercise: Muon with sharded state. Every matrix has one owner, who updates it whole.

The contract. Every rank has the same matrices and its own data. The grader does:

    muon = ShardedMuon(params, make_muon)        # once; params: matrices by name
    for x, y in batches:
        mse_loss(model(x), y).backward()         # p.grad: this rank's own
        muon.step()

- assign(shapes, world) gives each matrix, by name, its owner: a rank from 0 to world-1. It depends
  on nothing but its arguments. ``shapes`` are pairs (rows, columns). The rank that owns the most
  elements owns at most 4/3 of what it would by the best assignment.
- make_muon(tensors) gives an optimizer that makes updates orthogonal, each tensor's by itself, and
  keeps a momentum for each. Call it once, in __init__, with this rank's own matrices, whole. The
  list may be empty.
- step() does what one process would do with the mean of all ranks' gradients. After it all ranks
  have the same new matrices, in the same tensors, and every p.grad is None.
- Sent per rank and step: at most 3Ψ(n-1)/n bytes. (2Ψ(n-1)/n is possible. Ψ: bytes of matrices.)

You need: dist.reduce(tensor, dst=rank), which leaves the sum there; dist.broadcast(tensor,
src=rank).

Check with:  shardlab learn check muon_owners
"""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn


def assign(shapes: Mapping[str, tuple[int, int]], world: int) -> dict[str, int]:
    # TODO 1: an owner for each name.
    raise NotImplementedError("TODO 1: assign()")


class ShardedMuon:
    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        make_muon: Callable[[list[Tensor]], torch.optim.Optimizer],
    ) -> None:
        self.params = params
        # TODO 2: who owns what; the optimizer over what this rank owns.

    def step(self) -> None:
        # TODO 3: each mean gradient to its owner; update; each new matrix to all.
        raise NotImplementedError("TODO 3: step()")
