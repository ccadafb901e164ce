# cause: buffers-forgotten
import torch.distributed as dist


def broadcast_model(model, src=0):
    for tensor in model.state_dict().values():  # has no buffers that are not saved
        dist.broadcast(tensor, src)
