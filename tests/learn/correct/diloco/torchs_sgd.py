"""The outer optimizer is torch's own; the mean of the parameters is taken, then the difference."""

import torch
import torch.distributed as dist


class DiLoCo:
    def __init__(self, model, optimizer, every, outer_lr, outer_momentum):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.optimizer, self.every, self.count = optimizer, every, 0
        self.anchors = [p.detach().clone().requires_grad_() for p in self.params]
        self.outer = torch.optim.SGD(
            self.anchors, lr=outer_lr, momentum=outer_momentum, nesterov=True
        )

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.count += 1
        if self.count % self.every:
            return
        with torch.no_grad():
            for p, anchor in zip(self.params, self.anchors, strict=True):
                mean = p / dist.get_world_size()
                dist.all_reduce(mean)
                anchor.grad = anchor.detach() - mean
            self.outer.step()
            for p, anchor in zip(self.params, self.anchors, strict=True):
                p.copy_(anchor)
