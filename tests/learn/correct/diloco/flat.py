"""Everything as one vector, with the samples in the same message, divided at the end."""

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class DiLoCo:
    def __init__(self, model, optimizer, every, outer_lr, outer_momentum):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.optimizer, self.every, self.counts = optimizer, every, []
        self.lr, self.momentum = outer_lr, outer_momentum
        self.anchor = parameters_to_vector(self.params).detach().clone()
        self.velocity = 0

    def step(self, samples):
        self.optimizer.step()
        for p in self.params:
            p.grad = None
        self.counts.append(samples)
        if len(self.counts) == self.every:
            with torch.no_grad():
                seen = sum(self.counts)
                difference = seen * (self.anchor - parameters_to_vector(self.params))
                message = torch.cat([difference, torch.tensor([seen], dtype=torch.float64)])
                handle = dist.all_reduce(message, async_op=True)
                handle.wait()
                difference = message[:-1] / message[-1]
                self.velocity = self.momentum * self.velocity + difference
                step = self.momentum * self.velocity + difference
                self.anchor = self.anchor - self.lr * step
                vector_to_parameters(self.anchor.clone(), self.params)
            self.counts = []
