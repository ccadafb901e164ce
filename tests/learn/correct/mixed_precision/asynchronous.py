"""All-reduces under way together; a loss that is scaled in the gradient of backward."""

import math

import torch
import torch.distributed as dist


class ScaledUpdate:
    def __init__(self, model, optimizer, scale, growth_interval, clip_norm):
        self.model, self.optimizer = model, optimizer
        self.scale, self.clip_norm = float(scale), clip_norm
        self.until_growth = self.growth_interval = growth_interval

    def step(self, loss):
        self.model.zero_grad()
        loss.backward(torch.tensor(self.scale))
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        works = [dist.all_reduce(g, async_op=True) for g in grads]
        for work in works:
            work.wait()
        torch._foreach_div_(grads, dist.get_world_size() * self.scale)
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
        if not math.isfinite(norm):
            self.until_growth = self.growth_interval
            self.scale /= 2
            return False
        if norm > self.clip_norm:
            torch._foreach_mul_(grads, self.clip_norm / norm)
        self.optimizer.step()
        self.until_growth -= 1
        if not self.until_growth:
            self.until_growth = self.growth_interval
            self.scale *= 2
        return True
