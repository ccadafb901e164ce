"""Smaller units than asked for, all parameters in the optimizer, state by two functions."""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=False)


class FSDP:
    def __init__(
        self, model, make_optimizer, mesh, *, strategy="FULL_SHARD", bf16=False, max_norm=None
    ):
        self.model, self.max_norm = model, max_norm
        dtypes = (torch.bfloat16, torch.float32) if bf16 else (None, None)
        for module in (*model.layers, model.first, model.head, model):
            fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward={"FULL_SHARD": True, "SHARD_GRAD_OP": False}[strategy],
                mp_policy=MixedPrecisionPolicy(*dtypes),
            )
        self.optimizer = make_optimizer(model.parameters())

    def step(self, microbatches, loss_fn):
        left = len(microbatches)
        for microbatch in microbatches:
            left -= 1
            self.model.set_is_last_backward(left == 0)
            self.model.set_requires_gradient_sync(left == 0)
            loss = loss_fn(self.model, microbatch)
            loss.backward()
        with torch.no_grad():
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            for grad in grads:
                grad /= len(microbatches)
        if self.max_norm:
            norm = nn.utils.get_total_norm(grads).full_tensor()
            nn.utils.clip_grads_with_norm_(self.model.parameters(), self.max_norm, norm)
        self.optimizer.step()
        self.model.zero_grad(set_to_none=False)

    def full_state(self):
        model = get_model_state_dict(self.model, options=WHOLE)
        optimizer = get_optimizer_state_dict(self.model, self.optimizer, options=WHOLE)
        return {"model": model, "optimizer": optimizer.get("state", {})}
