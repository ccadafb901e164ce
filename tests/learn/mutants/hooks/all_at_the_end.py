# cause: too-late
import torch.distributed as dist


def install_hooks(model):
    params = [p for p in model.parameters() if p.requires_grad]
    ready = []

    def count(p):
        ready.append(p)
        if len(ready) == len(params):
            for q in ready:
                dist.all_reduce(q.grad)
                q.grad /= dist.get_world_size()
            ready.clear()

    for p in params:
        p.register_post_accumulate_grad_hook(count)
