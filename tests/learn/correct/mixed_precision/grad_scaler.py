"""PyTorch's own scaler, with the all-reduce between backward and unscaling."""

import torch
import torch.distributed as dist


class ScaledUpdate:
    def __init__(self, model, optimizer, scale, growth_interval, clip_norm):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = optimizer
        self.clip_norm = clip_norm
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)

    @property
    def scale(self):
        return self.scaler.get_scale()

    def step(self, loss):
        before = self.scale
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        for p in self.params:
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad.div_(dist.get_world_size())
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.params, self.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scale >= before
