# cause: not-communicated
import torch.distributed as dist


def broadcast_model(model, src=0):
    for t in [*model.parameters(), *model.buffers()]:
        dist.broadcast(t.detach().clone(), src)  # into a copy that nobody keeps
