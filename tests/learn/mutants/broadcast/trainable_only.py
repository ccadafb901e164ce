# cause: frozen-forgotten
import torch.distributed as dist


def broadcast_model(model, src=0):
    for p in model.parameters():
        if p.requires_grad:
            dist.broadcast(p.data, src)
    for b in model.buffers():
        dist.broadcast(b, src)
