"""Everything as one vector, with the new velocity written out; average by the backend's sum."""

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class DiLoCo:
    def __init__(self, model, optimizer, every, outer_lr, outer_momentum):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.optimizer, self.every, self.made = optimizer, every, 0
        self.lr, self.momentum = outer_lr, outer_momentum
        self.anchor = parameters_to_vector(self.params).detach().clone()
        self.velocity = 0

    def step(self):
        self.optimizer.step()
        for p in self.params:
            p.grad = None
        self.made += 1
        if self.made == self.every:
            with torch.no_grad():
                difference = self.anchor - parameters_to_vector(self.params)
                handle = dist.all_reduce(difference, async_op=True)
                handle.wait()
                difference = difference / dist.get_world_size()
                self.velocity = self.momentum * self.velocity + difference
                step = self.momentum * self.velocity + difference
                self.anchor = self.anchor - self.lr * step
                vector_to_parameters(self.anchor.clone(), self.params)
            self.made = 0
