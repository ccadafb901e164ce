"""Each rank looks at its own gradients and shares a flag; one flat all-reduce for the rest."""

import torch
import torch.distributed as dist


class ScaledUpdate:
    def __init__(self, model, optimizer, scale, growth_interval, clip_norm):
        self.optimizer, self.clip_norm = optimizer, clip_norm
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.scale, self.interval, self.streak = scale, growth_interval, 0

    def step(self, loss):
        loss.mul(self.scale).backward()
        used = [p for p in self.params if p.grad is not None]
        flat = torch.cat([p.grad.reshape(-1) for p in used])
        overflow = torch.tensor([0.0 if flat.isfinite().all() else 1.0])
        dist.all_reduce(overflow, dist.ReduceOp.MAX)
        if overflow.item():
            self._forget(used)
            self.scale, self.streak = self.scale * 0.5, 0
            return False
        flat /= self.scale * dist.get_world_size()
        dist.all_reduce(flat)
        flat *= min(1.0, self.clip_norm / (flat.norm().item() + 1e-6))
        for p, piece in zip(used, flat.split([p.numel() for p in used]), strict=True):
            p.grad.copy_(piece.view_as(p))
        self.optimizer.step()
        self._forget(used)
        self.streak += 1
        if self.streak % self.interval == 0:
            self.scale *= 2.0
        return True

    def _forget(self, params):
        for p in params:
            p.grad = None
