"""All-reduced gradients, copies in the optimizer, a heap for the loads."""

import heapq

import torch.distributed as dist


def assign(shapes, world):
    heap = [(0, rank) for rank in range(world)]
    owners = {}
    for name, (rows, columns) in sorted(
        shapes.items(), key=lambda item: item[1][0] * item[1][1], reverse=True
    ):
        load, rank = heapq.heappop(heap)
        owners[name] = rank
        heapq.heappush(heap, (load + rows * columns, rank))
    return owners


class ShardedMuon:
    def __init__(self, params, make_muon):
        self.params = params
        self.owners = assign({n: tuple(p.shape) for n, p in params.items()}, dist.get_world_size())
        self.copies = {
            n: p.detach().clone() for n, p in params.items() if self.owners[n] == dist.get_rank()
        }
        self.optimizer = make_muon(list(self.copies.values()))

    def step(self):
        for name, p in self.params.items():
            dist.all_reduce(p.grad)
            if name in self.copies:
                self.copies[name].grad = p.grad / dist.get_world_size()
        self.optimizer.step()
        handles = []
        for name, p in self.params.items():
            if name in self.copies:
                p.data.copy_(self.copies[name])
            handles.append(dist.broadcast(p.data, src=self.owners[name], async_op=True))
        for handle in handles:
            handle.wait()
        for p in self.params.values():
            p.grad = None
