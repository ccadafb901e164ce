# cause: weights-averaged
import torch.distributed as dist


def average_gradients(model):
    for p in model.parameters():
        if p.requires_grad:
            dist.all_reduce(p.data)
            p.data /= dist.get_world_size()
