"""Each parameter has its own storage and share; hooks of the modules; the last block is not freed
between its forward and its backward."""

import torch
import torch.distributed as dist


class Sharded:
    """One parameter."""

    def __init__(self, p):
        self.p = p
        self.n, self.rank = dist.get_world_size(), dist.get_rank()
        self.each = -(-p.numel() // self.n)
        self.full = torch.zeros(self.n * self.each, dtype=p.dtype)
        self.full[: p.numel()] = p.data.reshape(-1)
        self.share = self.full[self.rank * self.each : (self.rank + 1) * self.each].clone()
        p.data = self.full[: p.numel()].view(p.shape)
        self.bytes = self.full.untyped_storage().nbytes()
        self.release()
        p.register_post_accumulate_grad_hook(self.scatter)

    def release(self):
        self.full.untyped_storage().resize_(0)

    def fetch(self):
        if self.full.untyped_storage().nbytes() == 0:
            self.full.untyped_storage().resize_(self.bytes)
            dist.all_gather(list(self.full.split(self.each)), self.share)

    def scatter(self, p):
        self.release()
        padded = torch.zeros(self.n * self.each, dtype=p.dtype)
        padded[: p.numel()] = p.grad.reshape(-1)
        p.grad = None
        received = torch.empty_like(self.share)
        dist.reduce_scatter(received, list(padded.split(self.each)))
        received.div_(self.n)
        if self.share.grad is None:
            self.share.grad = received
        else:
            self.share.grad.add_(received)


class Zero3:
    def __init__(self, model, make_optimizer):
        self.model = model
        self.shards = [[Sharded(p) for p in block.parameters()] for block in model]
        self.optimizer = make_optimizer([s.share for group in self.shards for s in group])
        last = [group for group in self.shards if group][-1]
        for group, block in zip(self.shards, model, strict=True):
            if group:
                self.attach(block, group, is_last=group is last)

    def attach(self, block, group, is_last):
        def fetch_all(*_):
            for sharded in group:
                sharded.fetch()

        def after(_module, _inputs, output):
            if not is_last:
                for sharded in group:
                    sharded.release()
                output.register_hook(fetch_all)

        block.register_forward_pre_hook(fetch_all)
        block.register_forward_hook(after)

    def forward(self, x):
        return self.model(x)

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def full_params(self):
        copies = {}
        for (i, _), group in zip(enumerate(self.model), self.shards, strict=True):
            for sharded in group:
                sharded.fetch()
            for name, p in self.model[i].named_parameters():
                copies[f"{i}.{name}"] = p.detach().clone()
            for sharded in group:
                sharded.release()
        return copies
