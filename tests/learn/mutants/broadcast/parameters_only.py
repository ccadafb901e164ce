# cause: buffers-forgotten
import torch.distributed as dist


def broadcast_model(model, src=0):
    for p in model.parameters():
        dist.broadcast(p.data, src)
