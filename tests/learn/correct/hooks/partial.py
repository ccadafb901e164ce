from functools import partial

import torch.distributed as dist


def reduce_gradient(params, i, _):
    work = dist.all_reduce(params[i].grad, op=dist.ReduceOp.AVG, async_op=True)
    work.wait()


def install_hooks(model):
    params = dict(model.named_parameters())
    for name, p in params.items():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(partial(reduce_gradient, params, name))
