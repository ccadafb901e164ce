# cause: deadlock
import torch.distributed as dist


def broadcast_model(model, src=0):
    if dist.get_rank() == src:
        for t in [*model.parameters(), *model.buffers()]:
            dist.broadcast(t.data, src)
