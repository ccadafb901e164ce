import torch
from torch.distributed import ReduceOp, all_reduce


def average_gradients(model):
    for parameter in reversed([p for p in model.parameters() if p.requires_grad]):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        all_reduce(parameter.grad, op=ReduceOp.AVG)
