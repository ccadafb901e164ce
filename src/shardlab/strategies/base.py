"""The contract of a strategy, and the plain functions that strategies share.

N ranks act as one. The gradient of a step is the sum of the losses of all targets, on all
ranks and in all micro-batches, divided by their number. The number is agreed on before
forward (it is known from the data), so unequal micro-batches, ragged labels and a rank with
no samples at all come out exact; a mean of per-rank means would not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from shardlab import comm
from shardlab.errors import UsageError, unknown
from shardlab.optim import factory
from shardlab.phases import BACKWARD, FORWARD, phase
from shardlab.strategies.slots import Slots, whole_slots
from shardlab.strategies.update import Rule, Update
from shardlab.workloads.base import Batch, LossFn

T = TypeVar("T")
Infer = Callable[[nn.Module, Batch], T]
# What this rank updates, by the parameter's name: the whole parameter, its rows (DTensor), or a 1-D
# piece of it. There may be nothing.
MakeOptimizer = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Setup:
    """What every strategy is built from. Its own options are keyword arguments beside this."""

    model: nn.Module
    make_optimizer: MakeOptimizer
    loss_fn: LossFn
    mesh: DeviceMesh  # its dimension "dp" holds the data-parallel ranks
    # What the update does beside the optimizer: clip, follow a schedule, scale the loss.
    rule: Rule = field(default_factory=Rule)
    blocks: Sequence[str] = ()  # names of the modules that may be sharded one by one


class Strategy(ABC):
    """N ranks acting as one. It owns the model and the optimizer from its construction on.

    After ``gradients()`` and ``step()``, ``full_params()`` equals what one plain process would hold
    had it seen every rank's micro-batches.

    This class is the whole contract: the lab calls nothing on a strategy that does not stand here.
    A new strategy must write ``gradients()``. The other methods are right where every rank keeps
    the whole model and the whole optimizer; a strategy that keeps parts of them on each rank
    overrides those that say so. Options are keyword-only arguments of ``__init__``; the lab refuses
    an option that is not listed there.
    """

    # The built-in strategy of which it claims to send, hold and overlap as much; `shardlab prove`
    # holds it to that (plan/claims.py). None: only that its result equals one process.
    claim: str | None = None
    WORKS_BY_BLOCK = False  # it uses Setup.blocks
    KEEPS_PARTS = False  # a rank keeps a part of the parameters or gradients; nobody has the whole
    LEARNS_LAYOUT = False  # its first step lays out buckets, so a resumed run rehearses one step

    optimizer: torch.optim.Optimizer
    update: Update  # step() must call it: it clips, follows the schedule, and skips bad gradients

    def __init__(self, setup: Setup, builds_optimizer: bool = True) -> None:
        """``builds_optimizer=False`` is for a strategy whose optimizer updates parts."""
        refuse_unsupported(setup.model, setup.mesh.size())
        self.model = setup.model
        self.loss_fn = setup.loss_fn
        self.group = dp_group(setup.mesh)
        self.params = trainable(self.model)
        self.device = next(iter(self.params.values())).device
        if builds_optimizer:
            refuse_sparse_gradients(self.params)
            self.own(setup, self.params)

    def own(self, setup: Setup, params: Mapping[str, nn.Parameter]) -> None:
        """Build the optimizer over what this rank updates, by the parameters' names. The setup is
        not kept: its factory holds a small tensor for each parameter."""
        self.optimizer = setup.make_optimizer(params)
        self.update = Update(self.optimizer, setup.rule)

    # ------------------------------------------------------------ a step

    @abstractmethod
    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        """Forward and backward of all micro-batches; returns the mean loss over the global batch.

        Afterwards the gradients are those of the global batch, or on their way: step() waits.
        Every rank calls with the same number of micro-batches, one or more. A rank that has no
        samples left passes batches of zero rows.
        """

    def step(self) -> None:
        """Update the parameters and drop the gradients. Override it where a rank keeps parts."""
        self.update([p.grad for p in self.params.values() if p.grad is not None])
        drop_gradients(self.params)

    def settle(self) -> None:  # noqa: B027
        """Wait for every collective that is under way, and free what is kept for a step only.

        The lab calls it between steps, before it measures or looks. Override it if ``step()`` or
        ``gradients()`` may return while something is still on its way.
        """

    @torch.no_grad()
    def infer(self, function: Infer[T], batch: Batch) -> T:
        """``function(model, batch)`` without gradients. Every rank calls it, perhaps with zero
        rows. Override it where parameters must be gathered first."""
        return function(self.model, batch)

    # ------------------------------------------------------------ what it holds

    def full_params(self) -> dict[str, Tensor]:
        """Copies of every parameter and buffer, whole, by name. A collective.
        Override it where a rank keeps parts."""
        broadcast_buffers(self.model, self.group)
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        return {name: t.detach().clone() for name, t in tensors}

    def full_grads(self) -> dict[str, Tensor | None]:
        """Copies of every gradient, whole, by name, before step() drops them. A collective.
        Override it where a rank keeps parts."""
        scale = self.update.scale
        return {n: None if p.grad is None else p.grad / scale for n, p in self.params.items()}

    def slots(self) -> Slots:
        """Where this rank keeps which part of the model and of the optimizer's state: checkpoints
        are written from it and read into it. Override it where a rank keeps parts."""
        return whole_slots(self.model, self.params, self.optimizer)

    def own_state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold beside model and optimizer, for this rank alone. It is given
        back only to the same strategy in a world of the same size."""
        return {}

    def load_own_state(self, state: dict[str, Tensor]) -> None:  # noqa: B027
        """What ``own_state()`` gave."""

    def state_dict(self) -> dict[str, Any]:
        """Model and optimizer as whole tensors by parameter name, which any strategy can load in a
        world of any size. A collective. Override it where a rank keeps parts."""
        optimizer = {
            name: {k: copied(v) for k, v in self.optimizer.state[p].items()}
            for name, p in self.params.items()
            if p in self.optimizer.state
        }
        update = self.update.state_dict()
        return {"model": self.full_params(), "optimizer": optimizer, "update": update}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What any strategy's ``state_dict()`` gave. Override it where a rank keeps parts."""
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            tensor.copy_(state["model"][name])
        # The optimizer numbers its parameters in the order of its groups.
        groups = self.optimizer.state_dict()["param_groups"]
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        names = {p: name for name, p in self.params.items()}
        numbered = {
            i: {k: copied(v) for k, v in state["optimizer"][names[p]].items()}
            for i, p in enumerate(held)
            if names.get(p) in state["optimizer"]
        }
        self.optimizer.load_state_dict({"state": numbered, "param_groups": groups})
        self.update.load_state_dict(state["update"])

    def exchange_averages(self) -> None:
        """Parameters and their moving average (training.ema_decay) change places, between steps.
        A collective. Override it where a rank keeps parts."""
        factory.exchange_averages(self.optimizer)

    def updated_names(self) -> list[str]:
        """The parameters whose gradients step() gives to the update, in that order. It is asked in
        the middle of a step, to name a gradient that is not finite."""
        return [n for n, p in self.params.items() if p.grad is not None] or list(self.params)


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def option(name: str, value: str, known: Mapping[str, T]) -> T:
    """What a strategy's option stands for, or its refusal with the nearest right word."""
    if value not in known:
        raise unknown(name, value, known)
    return known[value]


def dp_group(mesh: DeviceMesh) -> comm.Group:
    """The process group of the data-parallel ranks: the mesh's dimension "dp"."""
    if "dp" not in (mesh.mesh_dim_names or ()):
        names = ", ".join(mesh.mesh_dim_names or ()) or "none"
        raise UsageError(
            f"the device mesh needs a dimension named 'dp', and its names are: {names}; make it "
            "with init_device_mesh(device, (ranks,), mesh_dim_names=('dp',))"
        )
    return mesh.get_group("dp")


def local_count(microbatches: Sequence[Batch], device: torch.device) -> Tensor:
    """The number of targets on this rank: (), on the device.

    Made there: to send a GPU a number from the host is to wait until it has done all it was given.
    """
    count = sum(b.count for b in microbatches)
    return torch.full((), count, dtype=torch.float64, device=device)


def global_count(microbatches: Sequence[Batch], device: torch.device, group: comm.Group) -> Tensor:
    """The number of targets in the global batch, at least 1: (), on the device."""
    count = local_count(microbatches, device)
    comm.all_reduce(count, group, label="target count")
    return count.clamp_(min=1.0)


def global_mean(loss_sum: Tensor, total: Tensor, group: comm.Group) -> Tensor:
    """The mean loss over the global batch, the same on every rank: ()."""
    comm.all_reduce(loss_sum, group, label="loss")
    return loss_sum / total


class Used:
    """Which parameters got a gradient, on any rank: a small message under way.

    A rank that used them all knows that nobody's are unused, and need not wait to be told (on a
    GPU to look is to wait for the device). It must wait some time before the next step.
    """

    def __init__(
        self, names: Iterable[str], used: set[str], device: torch.device, group: comm.Group
    ) -> None:
        self.names = list(names)
        self.all_here = len(used) == len(self.names)
        self.mask = torch.ones(len(self.names), dtype=torch.uint8, device=device)
        if not self.all_here:
            self.mask.copy_(torch.tensor([name in used for name in self.names]))
        self.pending = comm.all_reduce(
            self.mask, group, op="max", label="used parameters", async_op=True
        )

    def unused(self) -> list[str]:
        """What got a gradient on no rank."""
        if self.all_here:
            return []
        self.pending.wait()
        return [n for n, is_used in zip(self.names, self.mask.tolist(), strict=True) if not is_used]


def any_rank(flags: Sequence[bool], group: comm.Group, label: str) -> list[bool]:
    """For each flag, whether it is set on any rank. On a GPU the hosts agree among themselves: to
    read the answer from the device would be to wait for all it was given to do."""
    mask = torch.tensor([int(flag) for flag in flags], dtype=torch.uint8)
    comm.all_reduce(mask, comm.host_group(group), op="max", label=label)
    return [bool(flag) for flag in mask.tolist()]


def came_again(strategy: str, name: str) -> UsageError:
    return UsageError(
        f"{strategy}: the gradient of '{name}' came again after its bucket was sent, which it did "
        "not in the first step: use checkpoint(..., use_reentrant=False), or the strategy zero2"
    )


def accumulate(
    model: nn.Module, loss_fn: LossFn, microbatches: Sequence[Batch], divisor: Tensor
) -> Tensor:
    """Forward and backward of each micro-batch in turn; the gradients add up in ``p.grad``.

    Each loss (a sum) is divided by ``divisor`` before backward. Returns their plain sum.
    """
    loss_sum = torch.zeros((), dtype=torch.float64, device=divisor.device)
    for batch in microbatches:
        with phase(FORWARD):
            loss = loss_fn(model, batch)  # ()
        with phase(BACKWARD):
            backward(loss, divisor)
        loss_sum = loss_sum + loss.detach()
    return loss_sum


def last_of_step(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Batch,
    divisor: Tensor,
    loss_sum: Tensor,
    group: comm.Group,
) -> comm.Pending:
    """Forward and backward of a step's last micro-batch, whose loss is added to ``loss_sum``: ().

    The sum is known before backward: it is all-reduced in place while that computes.
    """
    with phase(FORWARD):
        loss = loss_fn(model, batch)  # ()
    loss_sum += loss.detach()
    pending = comm.all_reduce(loss_sum, group, label="loss", async_op=True)
    with phase(BACKWARD):
        backward(loss, divisor)
    return pending


def backward(loss: Tensor, divisor: Tensor) -> None:
    if not loss.requires_grad:
        raise UsageError(
            "the loss of a micro-batch depends on no parameter that requires a gradient; one "
            "process could not train on it either"
        )
    (loss / divisor).backward()


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that train, by name; a tied one once, under its first name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def refuse_unsupported(model: nn.Module, ranks: int | None = None) -> None:
    """Refuse, by name, a model that no strategy can train, before anything is done with it."""
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(f"the model ({type(model).__name__}) has no parameter that trains")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise UsageError(
                f"'{name}' has no shape yet (a lazy module): call the model once on a sample in "
                "make_model, or give the module its sizes"
            )
    for name, p in model.named_parameters():
        if ranks != 1 and getattr(p, "_post_accumulate_grad_hooks", None):
            raise UsageError(
                f"parameter '{name}' has a hook of the model's own that runs after its gradient is "
                "added up; on several ranks that is not the whole gradient: use p.register_hook"
            )
    for name, module in model.named_modules():
        is_sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        if is_sparse and module.weight.requires_grad:
            raise UsageError(
                f"module '{name}' has sparse=True, and no strategy sends sparse gradients; "
                "build it with sparse=False"
            )
        if ranks != 1 and getattr(module, "max_norm", None) is not None:
            raise UsageError(
                f"module '{name}' has max_norm: its forward changes the weight by the rows that it "
                "looks up, which differ from rank to rank; leave max_norm out, or use one rank"
            )


def refuse_sparse(name: str, gradient: Tensor | None) -> None:
    """F.embedding may give a sparse gradient, and no module shows that it will."""
    if gradient is not None and gradient.layout != torch.strided:
        raise UsageError(
            f"parameter '{name}' got a sparse gradient, and no strategy sends these; call "
            "F.embedding with sparse=False"
        )


def refuse_sparse_gradients(params: Mapping[str, nn.Parameter]) -> None:
    """Look at each parameter's first gradient, once."""
    handles: dict[str, Any] = {}
    for name, p in params.items():

        def look(gradient: Tensor, name: str = name) -> None:
            refuse_sparse(name, gradient)
            handles.pop(name).remove()

        handles[name] = p.register_hook(look)


def make_whole_buffers(model: nn.Module) -> None:
    """Give a buffer whose elements share memory (``expand``) memory that can be written to."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and 0 in buffer.stride() and buffer.numel() > 1:
                module._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)


def drop_gradients(params: Mapping[str, nn.Parameter]) -> None:
    """Drop them all. An optimizer's zero_grad() leaves those that it was not given."""
    for p in params.values():
        p.grad = None


def broadcast_model(model: nn.Module, group: comm.Group) -> None:
    """Every rank starts from rank 0's parameters and buffers, whatever it was initialised with."""
    make_whole_buffers(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        comm.broadcast(tensor.data, group, label=f"init {name}")


def broadcast_buffers(model: nn.Module, group: comm.Group) -> None:
    """Buffers (BatchNorm's running statistics) follow rank 0's, as in DDP."""
    for name, buffer in model.named_buffers():
        comm.broadcast(buffer, group, label=f"buffer {name}")
