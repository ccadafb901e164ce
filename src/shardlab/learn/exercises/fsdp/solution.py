"""FSDP2. In the package: strategies/sharded/pytorch_fsdp.py, whose loss is a sum divided by the
global count, and which looks after what fully_shard expects of a model."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer


class FSDP:
    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[Iterable[Tensor]], Optimizer],
        mesh: DeviceMesh,
        *,
        strategy: str = "FULL_SHARD",
        bf16: bool = False,
        max_norm: float | None = None,
    ) -> None:
        self.model, self.max_norm = model, max_norm
        policy = MixedPrecisionPolicy()
        if bf16:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        reshard = strategy == "FULL_SHARD"
        for block in model.layers:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        # The root takes what no block has.
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        # fully_shard has put new parameters in the place of the old ones.
        self.optimizer = make_optimizer(p for p in model.parameters() if p.requires_grad)

    def step(
        self, microbatches: Sequence[Any], loss_fn: Callable[[nn.Module, Any], Tensor]
    ) -> None:
        for number, microbatch in enumerate(microbatches, start=1):
            self.model.set_requires_gradient_sync(number == len(microbatches))
            loss = loss_fn(self.model, microbatch)
            (loss / len(microbatches)).backward()
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def full_state(self) -> dict[str, Any]:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return {"model": model, "optimizer": optimizer.get("state", {})}
