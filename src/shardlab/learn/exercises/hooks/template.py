"""Exercise: backward hooks.

Contract: ``install_hooks(model)`` is called once, on every rank. From then on every
``loss.backward()`` leaves the mean over the ranks in each ``.grad``, without another call: each
gradient is all-reduced inside backward, by a hook, as soon as it is there.

- The process group is there already. Every rank has a copy of the same model and its own batch.
- ``p.register_post_accumulate_grad_hook(hook)`` calls ``hook`` when ``p.grad`` is ready.
- Parameters that do not train have no gradient, and take no hook.
- Every parameter that trains is used on every rank.

Check with:  shardlab learn check hooks
"""

import torch.distributed as dist
from torch import nn


def install_hooks(model: nn.Module) -> None:
    # TODO: a hook on each parameter that trains, which averages its gradient over the ranks.
    raise NotImplementedError("TODO: register a hook on each parameter that trains")
