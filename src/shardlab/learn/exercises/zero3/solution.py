"""ZeRO-3. In the package: strategies/sharded/zero3.py (it also prefetches a block)."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim import Optimizer


class Block:
    """A block's parameters are views of one flat buffer, which is here only while it is used."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.params = module, list(module.parameters())
        self.n = dist.get_world_size()
        flat = torch.cat([p.data.flatten() for p in self.params])
        self.full = pad(flat, (0, -len(flat) % self.n))  # (n * shard,)
        self.shard = self.full.chunk(self.n)[dist.get_rank()].clone()
        self.nbytes = self.full.untyped_storage().nbytes()
        for p, part in zip(self.params, self.split(self.full), strict=True):
            p.data = part
            p.register_post_accumulate_grad_hook(self.arrived)
        self.missing = len(self.params)
        self.free()

    def split(self, flat: Tensor) -> list[Tensor]:
        sizes = [p.numel() for p in self.params]
        parts = flat[: sum(sizes)].split(sizes)
        return [part.view(p.shape) for p, part in zip(self.params, parts, strict=True)]

    def gather(self, _grad: Tensor | None = None) -> None:
        self.full.untyped_storage().resize_(self.nbytes)
        dist.all_gather(list(self.full.chunk(self.n)), self.shard)

    def free(self) -> None:
        """What autograd saved shares the storage: it is empty too, until the next gather."""
        self.full.untyped_storage().resize_(0)

    def arrived(self, _p: nn.Parameter) -> None:
        self.missing -= 1
        if self.missing:
            return
        self.missing = len(self.params)
        self.free()
        grads = torch.cat([p.grad.flatten() for p in self.params])
        for p in self.params:
            p.grad = None
        mine = torch.empty_like(self.shard)
        dist.reduce_scatter(mine, list(pad(grads, (0, -len(grads) % self.n)).chunk(self.n)))
        mine /= self.n
        self.shard.grad = mine if self.shard.grad is None else self.shard.grad + mine


class Zero3:
    def __init__(
        self, model: nn.Sequential, make_optimizer: Callable[[list[Tensor]], Optimizer]
    ) -> None:
        self.model = model
        self.blocks = {m: Block(m) for m in model if list(m.parameters())}
        self.optimizer = make_optimizer([block.shard for block in self.blocks.values()])

    def forward(self, x: Tensor) -> Tensor:
        for module in self.model:
            block = self.blocks.get(module)
            if block is None:  # nothing to gather
                x = module(x)
                continue
            block.gather()
            x = module(x)
            block.free()
            x.register_hook(block.gather)  # backward comes to the block's output first
        return x

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def full_params(self) -> dict[str, Tensor]:
        for block in self.blocks.values():
            block.gather()
        params = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        for block in self.blocks.values():
            block.free()
        return params
