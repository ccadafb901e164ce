"""The outer optimizer is torch's own; the mean of the parameters is taken, then the difference."""

import torch
import torch.distributed as dist


class DiLoCo:
    def __init__(self, model, optimizer, every, outer_lr, outer_momentum):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.optimizer, self.left, self.every, self.seen = optimizer, every, every, 0
        self.anchors = [p.detach().clone().requires_grad_() for p in self.params]
        self.outer = torch.optim.SGD(
            self.anchors, lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0
        )

    def step(self, samples):
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.left, self.seen = self.left - 1, self.seen + samples
        counts = [None] * dist.get_world_size()
        dist.all_gather_object(counts, self.seen)
        if self.left:
            return
        with torch.no_grad():
            for p, anchor in zip(self.params, self.anchors, strict=True):
                mean = p * self.seen / sum(counts)
                dist.all_reduce(mean)
                anchor.grad = anchor.detach() - mean
            self.outer.step()
            for p, anchor in zip(self.params, self.anchors, strict=True):
                p.copy_(anchor)
        self.left, self.seen = self.every, 0
