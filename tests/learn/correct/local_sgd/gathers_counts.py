"""Flat, with the counts gathered as objects and the sum divided at the end."""

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class LocalSGD:
    def __init__(self, model, optimizer, every):
        self.model, self.optimizer, self.every = model, optimizer, every
        self.counts = []

    def step(self, samples):
        self.optimizer.step()
        for p in self.model.parameters():
            p.grad = None
        self.counts.append(samples)
        if len(self.counts) < self.every:
            return
        params = [p for p in self.model.parameters() if p.requires_grad]
        with torch.no_grad():
            mine = sum(self.counts)
            flat = parameters_to_vector(params) * mine
            everybody = torch.tensor([float(mine)], dtype=torch.float64)
            for handle in [dist.all_reduce(t, async_op=True) for t in (flat, everybody)]:
                handle.wait()
            vector_to_parameters(flat / everybody, params)
        self.counts = []
