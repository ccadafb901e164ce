# cause: not-in-place
import torch.distributed as dist
from torch import nn


def broadcast_model(model, src=0):
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                data = p.detach().clone()
                dist.broadcast(data, src)
                setattr(module, name, nn.Parameter(data, requires_grad=p.requires_grad))
    for b in model.buffers():
        dist.broadcast(b, src)
