# cause: averaged
import torch.distributed as dist


def broadcast_model(model, src=0):
    for t in [*model.parameters(), *model.buffers()]:
        dist.all_reduce(t.data)
        t.data.copy_(t.data / dist.get_world_size())
