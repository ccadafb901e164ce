"""Exercise: FSDP with PyTorch's own API, fully_shard.

The contract. Every rank has the same model and its own data. ``model.layers`` (an nn.ModuleList)
are its blocks; it has parameters outside of them, too, and one layer that does not train:

    fsdp = FSDP(model, make_optimizer, mesh, strategy="FULL_SHARD", bf16=False, max_norm=None)
    for microbatches in steps:
        fsdp.step(microbatches, loss_fn)
        fsdp.full_state()                     # now and then, for a checkpoint

- Every block is a unit of its own, and the root is one for what is left: no message ever gathers
  more than a block, or what lies outside of the blocks.
- strategy: "FULL_SHARD" frees a block's parameters after its forward and gathers them again in
  backward; "SHARD_GRAD_OP" keeps them whole from forward to backward.
- bf16: parameters are gathered, and forward and backward compute, in torch.bfloat16. Gradients are
  reduced in torch.float32, and the parameters that the optimizer updates stay torch.float32. If
  bf16 is False, everything is in the model's own dtype.
- make_optimizer(tensors) gives an optimizer over these tensors: call it once, in __init__.
- step() makes one update with the mean gradient over all ranks and micro-batches. Gradients are
  sent once, in the last micro-batch's backward. loss_fn(model, microbatch) is a mean; all
  micro-batches have the same size. Another step has another number of them.
- max_norm: before the update, clip the whole gradient, all ranks' shards together, to this norm.
- full_state() is called by all ranks. On rank 0 it returns plain tensors, whole, by the names of
  the unsharded model: {"model": {"first.weight": …, all of model.state_dict()}, "optimizer":
  {"first.weight": {"exp_avg": …, "exp_avg_sq": …}, …}}. What other ranks return does not matter.

You need, from torch.distributed.fsdp: fully_shard(module, mesh=…, reshard_after_forward=…,
mp_policy=MixedPrecisionPolicy(…)), which changes the module in place and gives it
set_requires_gradient_sync(bool). From torch.distributed.checkpoint.state_dict: get_state_dict with
StateDictOptions(full_state_dict=True, …); or tensor.full_tensor(), a collective.

Check with:  shardlab learn check fsdp
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
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
        # TODO 1: the precision and what happens after forward, as options of fully_shard.
        # TODO 2: fully_shard every block, then the root.
        # TODO 3: the optimizer. When?
        raise NotImplementedError("TODO 1: __init__()")

    def step(
        self, microbatches: Sequence[Any], loss_fn: Callable[[nn.Module, Any], Tensor]
    ) -> None:
        # TODO 4: forward and backward of every micro-batch; send gradients in the last one only.
        # TODO 5: clip, update, drop the gradients.
        raise NotImplementedError("TODO 4: step()")

    def full_state(self) -> dict[str, Any]:
        # TODO 6: whole tensors of the model and of the optimizer, by name.
        raise NotImplementedError("TODO 6: full_state()")
