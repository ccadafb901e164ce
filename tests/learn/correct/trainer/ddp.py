"""With DistributedDataParallel, which divides by the ranks: the loss is multiplied by them. A rank
without samples computes an empty micro-batch."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(make_model, make_optimizer, loss_fn, data, *, epochs, batch, micro, max_norm, seed, log):
    dist.init_process_group("gloo")
    try:
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(seed)
        model = DistributedDataParallel(make_model())
        optimizer = make_optimizer(model.module.parameters())
        step = 0
        for epoch in range(epochs):
            generator = torch.Generator().manual_seed(seed + epoch)
            for chosen in torch.randperm(len(data[0]), generator=generator).split(batch):
                mine = chosen[rank::world]
                parts = mine.split(micro)
                count = torch.tensor(float((~data[1][mine].isnan()).sum()))
                dist.all_reduce(count)
                total = torch.zeros((), dtype=torch.float64)
                for i, part in enumerate(parts):
                    with model.no_sync() if i < len(parts) - 1 else nullcontext():
                        loss, _ = loss_fn(model, data[0][part], data[1][part])
                        (loss / count.item() * world).backward()
                    total += loss.item()
                dist.all_reduce(total)
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                optimizer.zero_grad()
                if rank == 0:
                    log(step, (total / count).item())
                step += 1
        return model.module
    finally:
        dist.destroy_process_group()
