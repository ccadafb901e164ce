"""The global count is known before backward; gradients travel in one flat tensor."""

import os
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def group():
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=world)
    try:
        yield rank, world
        dist.barrier()
    finally:
        dist.destroy_process_group()


def train(make_model, make_optimizer, loss_fn, data, *, epochs, batch, micro, max_norm, seed, log):
    with group() as (rank, world):
        torch.manual_seed(seed + rank)  # rank 0's counts
        model = make_model()
        state = [*model.parameters(), *model.buffers()]
        with torch.no_grad():
            flat = torch.cat([t.flatten() for t in state])
            dist.broadcast(flat, 0)
            for t, new in zip(state, flat.split([t.numel() for t in state]), strict=True):
                t.copy_(new.view_as(t))
        params = [p for p in model.parameters() if p.requires_grad]
        optimizer = make_optimizer(list(model.parameters()))
        step = 0
        for epoch in range(epochs):
            order = torch.randperm(
                len(data[0]), generator=torch.Generator().manual_seed(seed + epoch)
            ).tolist()
            for start in range(0, len(order), batch):
                chosen = order[start : start + batch]
                each = -(-len(chosen) // world)
                mine = chosen[rank * each : (rank + 1) * each]  # blocks, not every n-th
                optimizer.zero_grad(set_to_none=False)
                parts = []
                for i in range(0, len(mine), micro):
                    x, y = (t[mine[i : i + micro]] for t in data)
                    parts.append(loss_fn(model, x, y))
                count = torch.tensor(float(sum(c for _, c in parts)))
                dist.all_reduce(count)
                total = torch.zeros((), dtype=torch.float64)
                for loss, _ in parts:
                    (loss / count).backward()
                    total += loss.detach() / count
                grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
                message = torch.cat([*(g.flatten() for g in grads), total.view(1)])
                dist.all_reduce(message)
                *_, total = message.split([*(p.numel() for p in params), 1])
                scale = min(1.0, max_norm / (message[:-1].norm().item() + 1e-6))
                for p, g in zip(
                    params, message[:-1].split([p.numel() for p in params]), strict=True
                ):
                    p.grad = scale * g.view_as(p)
                optimizer.step()
                if not rank:
                    log(step, total.item())
                step += 1
        return model
