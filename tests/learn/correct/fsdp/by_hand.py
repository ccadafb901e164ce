"""The state gathered by full_tensor, the norm of all shards by hand, sync set in two places."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class FSDP:
    def __init__(
        self, model, make_optimizer, mesh, *, strategy="FULL_SHARD", bf16=False, max_norm=None
    ):
        options = {"mesh": mesh, "reshard_after_forward": strategy != "SHARD_GRAD_OP"}
        if bf16:
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for module in reversed(list(model.layers)):
            fully_shard(module, **options)
        fully_shard(model, **options)
        self.model, self.max_norm = model, max_norm
        self.named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.optimizer = make_optimizer(list(self.named.values()))

    def step(self, microbatches, loss_fn):
        self.optimizer.zero_grad()
        *head, last = microbatches
        self.model.set_requires_gradient_sync(False)
        for microbatch in head:
            loss_fn(self.model, microbatch).div(len(microbatches)).backward()
        self.model.set_requires_gradient_sync(True)
        loss_fn(self.model, last).div(len(microbatches)).backward()
        if self.max_norm is not None:
            shards = [p.grad.to_local() for p in self.named.values()]
            squares = sum(shard.square().sum() for shard in shards)
            dist.all_reduce(squares)
            for shard in shards:
                shard.mul_((self.max_norm / (squares.sqrt() + 1e-6)).clamp(max=1))
        self.optimizer.step()

    def full_state(self):
        def whole(value):
            return value.full_tensor().cpu() if hasattr(value, "full_tensor") else value

        return {
            "model": {name: whole(t) for name, t in self.model.state_dict().items()},
            "optimizer": {
                name: {key: whole(v) for key, v in self.optimizer.state[p].items()}
                for name, p in self.named.items()
            },
        }
