"""Everything that a rank owns in one message each way; the sum, which Muon does not mind."""

import torch
import torch.distributed as dist


def assign(shapes, world):
    owners, loads = {}, dict.fromkeys(range(world), 0)
    size = {name: rows * columns for name, (rows, columns) in shapes.items()}
    for name in sorted(size, key=size.get, reverse=True):
        owners[name] = min(loads, key=loads.get)
        loads[owners[name]] += size[name]
    return owners


class ShardedMuon:
    def __init__(self, params, make_muon):
        self.rank, world = dist.get_rank(), dist.get_world_size()
        owners = assign({n: tuple(p.shape) for n, p in params.items()}, world)
        self.of = [[p for n, p in params.items() if owners[n] == r] for r in range(world)]
        self.optimizer = make_muon(self.of[self.rank])

    def step(self):
        for owner, params in enumerate(self.of):
            if not params:
                continue
            flat = torch.cat([p.grad.flatten() for p in params])
            dist.reduce(flat, dst=owner)
            for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
                p.grad = part.view_as(p) if owner == self.rank else None
        self.optimizer.step()
        for owner, params in enumerate(self.of):
            if not params:
                continue
            flat = torch.cat([p.data.flatten() for p in params])
            dist.broadcast(flat, src=owner)
            for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
                p.data.copy_(part.view_as(p))
                p.grad = None
