"""Gradients leave asynchronously; the loss is a 0-dimensional tensor of its own."""

import torch
import torch.distributed as dist
from torch import nn


def train(make_model, make_optimizer, loss_fn, data, *, epochs, batch, micro, max_norm, seed, log):
    if not dist.is_initialized():
        dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    try:
        torch.manual_seed(seed)
        model = make_model()
        works = [dist.broadcast(t.data, 0, async_op=True) for t in model.state_dict().values()]
        for work in works:
            work.wait()
        optimizer = make_optimizer(model.parameters())
        steps = (
            chosen
            for epoch in range(epochs)
            for chosen in torch.randperm(
                len(data[0]), generator=torch.Generator().manual_seed(seed + epoch)
            ).split(batch)
        )
        for step, chosen in enumerate(steps):
            for p in model.parameters():
                p.grad = torch.zeros_like(p) if p.requires_grad else None
            total = torch.zeros((), dtype=torch.float64)
            count = torch.zeros((), dtype=torch.int64)
            mine = chosen[rank::world]
            while len(mine):
                part, mine = mine[:micro], mine[micro:]
                loss, number = loss_fn(model, *(t[part] for t in data))
                loss.backward()
                total += loss.detach()
                count += number
            grads = [p.grad for p in model.parameters() if p.requires_grad]
            for work in [dist.all_reduce(t, async_op=True) for t in (count, total, *grads)]:
                work.wait()
            torch._foreach_div_(grads, count.item())
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            if rank == 0:
                log(step, (total / count).item())
    finally:
        dist.destroy_process_group()
    return model
