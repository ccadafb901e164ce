"""The whole of it in one file. In the package the parts are apart: the loop, training/loop.py,
cannot tell one strategy from another, and training/run.py sets up."""

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer


def train(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[Iterable[Tensor]], Optimizer],
    loss_fn: Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, int]],
    data: tuple[Tensor, Tensor],
    *,
    epochs: int,
    batch: int,
    micro: int,
    max_norm: float,
    seed: int,
    log: Callable[[int, float], None],
) -> nn.Module:
    dist.init_process_group("gloo")
    try:
        torch.manual_seed(seed)
        model = make_model()
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        optimizer = make_optimizer(model.parameters())
        x, y = data
        for step, mine in enumerate(shares(len(x), epochs, batch, seed)):
            totals = torch.zeros(2, dtype=torch.float64)  # the sum of the losses, the targets
            for part in mine.split(micro):
                if len(part):  # nothing was left for this rank
                    loss, count = loss_fn(model, x[part], y[part])
                    loss.backward()
                    totals += torch.tensor([loss.item(), count])
            dist.all_reduce(totals)
            loss_sum, count = totals.tolist()
            for p in model.parameters():
                if p.requires_grad:
                    if p.grad is None:  # the others send theirs, and wait for ours
                        p.grad = torch.zeros_like(p)
                    dist.all_reduce(p.grad)
                    p.grad /= count
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                log(step, loss_sum / count)
        return model
    finally:
        dist.destroy_process_group()


def shares(samples: int, epochs: int, batch: int, seed: int) -> Iterator[Tensor]:
    """This rank's samples of each step."""
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(seed + epoch)
        for chosen in torch.randperm(samples, generator=generator).split(batch):
            yield chosen[dist.get_rank() :: dist.get_world_size()]
