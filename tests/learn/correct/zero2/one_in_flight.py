"""Asynchronous, with one message under way; all_to_all and a local sum."""

import torch
import torch.distributed as dist


class Share:
    def __init__(self, p):
        n = dist.get_world_size()
        self.p = p
        self.size = -(-p.numel() // n)
        self.values = self.padded(p.data)[dist.get_rank()].clone()

    def padded(self, tensor):
        rows = torch.zeros(dist.get_world_size(), self.size, dtype=tensor.dtype)
        rows.view(-1)[: tensor.numel()] = tensor.reshape(-1)
        return rows


class Zero2:
    def __init__(self, model, make_optimizer):
        self.shares = [Share(p) for p in model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer([share.values for share in self.shares])
        self.pending = None
        for share in self.shares:
            share.p.register_post_accumulate_grad_hook(lambda p, s=share: self.send(s, p))

    def send(self, share, p):
        self.receive()
        outgoing = share.padded(p.grad)
        p.grad = None
        incoming = torch.empty_like(outgoing)
        self.pending = share, incoming, dist.all_to_all_single(incoming, outgoing, async_op=True)

    def receive(self):
        if self.pending is None:
            return
        share, incoming, work = self.pending
        self.pending = None
        work.wait()
        mean = incoming.mean(0)
        if share.values.grad is None:
            share.values.grad = mean
        else:
            share.values.grad.add_(mean)

    def step(self):
        self.receive()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for share in self.shares:
            rows = share.padded(share.p.data)
            dist.all_gather(list(rows), share.values)
            share.p.data.copy_(rows.view(-1)[: share.p.numel()].view(share.p.shape))
