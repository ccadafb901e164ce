"""A data-parallel strategy on a model that several ranks hold together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardlab import comm
from shardlab.axes import Axes
from shardlab.errors import UsageError
from shardlab.optim import factory
from shardlab.strategies import base, layout, refusals, steps
from shardlab.strategies.layout import Cut, Layout
from shardlab.strategies.rehearsal import Rehearsal
from shardlab.strategies.slots import Slot, Slots
from shardlab.strategies.whole import Whole
from shardlab.workloads import batchnorm
from shardlab.workloads.base import Batch, LossFn

if TYPE_CHECKING:
    from shardlab.strategies.pipeline import Pipeline

# The groups of each world, by their ranks. They live as long as the world, with threads and sockets
# of their own: a second strategy in the same process uses those of the first.
_groups: WeakKeyDictionary[comm.Group, dict[tuple[int, ...], comm.Group]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Groups:
    """This rank's process groups. Ranks are those of the strategy's world."""

    data: comm.Group  # same part of the model, other samples: gradients are summed over it
    pipeline: comm.Group
    context: comm.Group
    tensor: comm.Group
    cut: comm.Group  # the ranks whose parts of the model are together the whole


def groups_of(axes: Axes, world: comm.Group) -> Groups:
    """A collective of each group that is made."""
    ranks, rank = dist.get_process_group_ranks(world), world.rank()
    assert dist.group.WORLD is not None
    made = _groups.setdefault(dist.group.WORLD, {})

    def along(*names: str) -> comm.Group:
        members = tuple(ranks[peer] for peer in axes.peers(rank, *names))
        if len(members) == len(ranks):
            return world
        if members not in made:
            made[members] = dist.new_group(list(members), use_local_synchronization=True)
        return made[members]

    return Groups(
        # A slice of a sequence is to the gradients what another sample is.
        data=along("data", "context"),
        pipeline=along("pipeline"),
        context=along("context"),
        tensor=along("tensor"),
        cut=along("pipeline", "tensor"),
    )


class OnMesh(base.Strategy):
    """A data-parallel strategy, ``inner``, on this rank's part of the model.

    Each axis changes the model in place and says what this rank holds of it now (``Cut``). The
    inner strategy knows nothing of that: to it, the part is the model, and its ranks are those that
    hold the same part. This class translates where the lab asks for whole tensors, and lets the
    norm of the gradient see every part once.

    Schedule of a step:

        at construction     broadcast the whole model from rank 0; cut it; then the inner strategy's
        each micro-batch    the collectives of the axes (tensor_parallel, context_parallel), or of
                            all micro-batches together (pipeline)
        else                the inner strategy's, among the ranks that hold the same part

    The tensor axis cuts first, then context, then pipeline: each sees the model that the one before
    has made of it.
    """

    KEEPS_PARTS = True
    SENDS_BY_COMM = True  # all that its axes send is in the ledger
    ONE_SHAPE = False  # the micro-batches of a step must be equal in shape

    def __init__(
        self, setup: base.Setup, axes: Axes, inner: Callable[[base.Setup], base.Strategy]
    ) -> None:
        refusals.refuse_unsupported(setup.model, setup.mesh.size())
        self.axes = axes
        self.model = setup.model
        self.loss_fn = setup.loss_fn  # for infer(); the inner strategy has that of the part
        self.group = refusals.dp_group(setup.mesh)
        self.groups = groups_of(axes, self.group)
        steps.broadcast_model(self.model, self.group)
        self.whole_model = Whole.of(self.model)
        self.layout: Layout = layout.whole_layout(self.model)
        self.joins_microbatches = False  # the inner strategy is given all of a step as one batch
        self.share: Callable[[Batch], Batch] | None = None  # cuts this rank's part from a batch
        self.inferred: Callable[[base.Infer[Any], Batch], Any] | None = None
        self.pipeline: Pipeline | None = None  # runs the stages, if there are several
        loss = self._cut(setup)
        batchnorm.join(self.model, self.groups.data)  # those that look at other samples
        self._refuse_parts_of_whole(setup)
        self.inner = inner(
            replace(
                setup,
                loss_fn=loss,
                mesh=DeviceMesh.from_group(
                    self.groups.data, setup.mesh.device_type, mesh_dim_names=("dp",)
                ),
                blocks=[b for b in setup.blocks if _has_parameters(self.model, b)],
            )
        )
        if self.inner.rounds is not None:
            raise UsageError(
                f"{type(self.inner).__name__} has workers with a model each; it cannot be combined "
                "with tensor, context or pipeline"
            )
        self.params = self.inner.params
        self.device = self.inner.device
        self.optimizer = self.inner.optimizer
        self.update = self.inner.update
        everyone: list[Layout] = [{}] * self.groups.cut.size()
        dist.all_gather_object(everyone, self.layout, group=self.groups.cut)
        self.holders = {  # how many ranks hold the same part
            name: sum(other.get(name) == held for other in everyone)
            for name, held in self.layout.items()
        }
        before = everyone[: self.groups.cut.rank()]
        self.is_first = {  # whether no rank before this one holds it
            name: not any(other.get(name) == held for other in before)
            for name, held in self.layout.items()
        }
        self.update.across(self.groups.cut, self._shares)

    def _cut(self, setup: base.Setup) -> LossFn:
        """Cut the model along each axis. Returns the loss of what is left."""
        loss = setup.loss_fn
        if self.axes.tensor > 1:
            from shardlab.strategies import splits

            tensor, sequence = self.groups.tensor, self.axes.sequence
            cut = splits.cut(self.model, setup.splits, tensor, loss, sequence, setup.sample)
            loss = self._note(cut)
        if self.axes.context > 1:
            from shardlab.strategies import context_parallel

            whole, sample = loss, setup.sample
            rehearsal = Rehearsal.of(self.model, whole, sample) if sample is not None else None
            cut = context_parallel.cut(setup, self.axes, self.groups.context, loss)
            self.share, loss = cut.share, self._note(cut)
            if self.share is not None and sample is not None:
                setup = replace(setup, sample=self.share(sample))
                if rehearsal is not None:
                    self._rehearse_parts(rehearsal, loss, setup.sample)
        return self._into_stages(setup, loss) if self.axes.pipeline > 1 else loss

    def _rehearse_parts(self, rehearsal: Rehearsal, loss: LossFn, part: Batch | None) -> None:
        """The ranks' parts of one sample together have the loss of the whole."""

        def of_all() -> float:
            assert part is not None
            total = torch.tensor(rehearsal.again(self.model, loss, part), dtype=torch.float64)
            total = total.to(next(self.model.parameters()).device)
            comm.all_reduce(total, self.groups.context, label="loss of one sample")
            return float(total)

        rehearsal.hold(
            of_all,
            "context parallelism",
            "does the workload's context cut all that lies along the sequence, positions too, and "
            "can the model be given as few tokens as a rank gets?",
        )

    def _into_stages(
        self, setup: base.Setup, loss: LossFn, executor: type[Pipeline] | None = None
    ) -> LossFn:
        from shardlab.strategies import pipeline

        cut = pipeline.cut(setup, self.axes, self.groups.pipeline, loss, executor)
        self.joins_microbatches, self.inferred = True, cut.infer
        self.pipeline = cut.executor
        cut.ask_divisor(lambda: self.update.last_divisor)
        return self._note(cut)

    def _note(self, cut: Cut) -> LossFn:
        self.layout = {n: layout.inside(self.layout[n], held) for n, held in cut.layout.items()}
        params = dict(self.model.named_parameters())
        for name, group in cut.partial.items():
            if params[name].requires_grad:
                params[name].register_hook(_summed_over(group, name))
        return cut.loss

    def _refuse_parts_of_whole(self, setup: base.Setup) -> None:
        """An optimizer that needs a matrix whole (Muon) cannot be given a part of it, and one that
        needs all parameters at once cannot be given some."""
        if self.axes.pipeline > 1:
            factory.check(setup.make_optimizer, factory.DEALT, "pipeline")
        if self.axes.tensor == 1:
            return
        needed = factory.kept_whole(setup.make_optimizer, "tensor")
        for name, held in self.layout.items():
            if name in needed and sum(length for _, length in held.runs) != held.shape.numel():
                raise UsageError(
                    f"the optimizer needs '{name}' whole, and tensor parallelism cuts it; use "
                    "pipeline, zero1 or zero2 with this optimizer"
                )

    def _shares(self) -> list[float]:
        """The share of each gradient's square that this rank adds to that of the whole."""
        return [1 / self.holders[name] for name in self.inner.updated_names()]

    # ------------------------------------------------------------ a step

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        if self.share is not None:
            microbatches = [self.share(batch) for batch in microbatches]
        if self.joins_microbatches:
            microbatches = [joined(microbatches)]
        return self.inner.gradients(microbatches)

    def step(self) -> None:
        self.inner.step()

    def settle(self) -> None:
        self.inner.settle()

    def infer(self, function: base.Infer[base.T], batch: Batch) -> base.T:
        """The function must call ``model(...)`` once, on every rank of a pipeline."""
        if self.inferred is None:
            return self.inner.infer(function, batch)
        self.settle()
        with torch.no_grad():
            result: base.T = self.inferred(function, batch)
        return result

    @contextmanager
    def as_one(self) -> Iterator[None]:
        with self.inner.as_one():
            yield

    # ------------------------------------------------------------ what it holds

    def in_step(self) -> bool:
        return self.inner.in_step()

    def whole(self) -> Whole:
        return self.whole_model

    def part_of(self, name: str) -> str:
        return str(hash(self.layout[name].runs))  # of numbers: the same in every process

    def full_params(self) -> dict[str, Tensor]:
        return self._put_together(self.inner.full_params())

    def full_grads(self) -> dict[str, Tensor | None]:
        mine = self.inner.full_grads()
        names = list(self.whole_model.trained)
        used = [mine.get(name) is not None for name in names]
        used = steps.any_rank(used, self.groups.cut, label="used parameters")

        def nothing(name: str) -> Tensor:  # the parameter itself may be elsewhere now (zero3)
            length = sum(length for _, length in self.layout[name].runs)
            dtype = self.whole_model.tensors[name].dtype
            return torch.zeros(length, dtype=dtype, device=self.device)

        found = {n: nothing(n) if gradient is None else gradient for n, gradient in mine.items()}
        some = [name for name, is_used in zip(names, used, strict=True) if is_used]
        whole = self._put_together(found, some)
        return {name: whole.get(name) for name in names}

    def _put_together(
        self, parts: Mapping[str, Tensor], names: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Whole tensors from every rank's parts: a sum in which each element is there once."""
        found = {}
        for name in self.whole_model.tensors if names is None else names:
            like = self.whole_model.tensors[name]
            found[name] = self._together(name, parts.get(name), like.dtype, f"full {name}")
        return found

    def _together(self, name: str, part: Tensor | None, dtype: torch.dtype, label: str) -> Tensor:
        shape = self.whole_model.tensors[name].shape
        is_bool = dtype == torch.bool
        whole = torch.zeros(
            shape.numel(), dtype=torch.uint8 if is_bool else dtype, device=self.device
        )
        if part is not None and self.is_first[name]:
            layout.put(whole, self.layout[name].runs, part.detach().reshape(-1).to(whole.dtype))
        comm.all_reduce(whole, self.groups.cut, label=label)
        return whole.to(dtype).view(shape)

    def _in_whole(self, slot: Slot) -> Slot:
        held = self.layout[slot.name]
        runs = held.between(slot.start, slot.tensor.numel())
        start = runs[0][0] if runs else 0
        return Slot(slot.name, held.shape, start, slot.tensor, runs if len(runs) > 1 else None)

    def _all_in_whole(self, slots: Slots) -> Slots:
        return Slots(
            [self._in_whole(slot) for slot in slots.model if slot.name in self.layout],
            {p: self._in_whole(slot) for p, slot in slots.trained.items()},
            slots.optimizer,
        )

    def slots(self) -> Slots:
        return self._all_in_whole(self.inner.slots())

    def saved(self) -> Slots:
        return self._all_in_whole(self.inner.saved())

    def chosen(self) -> dict[str, float]:
        return self.inner.chosen()

    def shared_state(self) -> dict[str, Tensor]:
        return self.inner.shared_state()

    def load_shared_state(self, state: dict[str, Tensor]) -> None:
        self.inner.load_shared_state(state)

    def own_state(self) -> dict[str, Tensor]:
        return self.inner.own_state()

    def load_own_state(self, state: dict[str, Tensor]) -> None:
        self.inner.load_own_state(state)

    def state_dict(self) -> dict[str, Any]:
        mine = self.inner.state_dict()
        kinds = {
            (name, key): _kind(value)
            for name, state in mine["optimizer"].items()
            for key, value in state.items()
        }
        everyone: list[dict[tuple[str, str], Any]] = [{}] * self.groups.cut.size()
        dist.all_gather_object(everyone, kinds, group=self.groups.cut)
        optimizer: dict[str, dict[str, Any]] = {}
        for (name, key), kind in {k: v for found in everyone for k, v in found.items()}.items():
            value = mine["optimizer"].get(name, {}).get(key)
            if isinstance(kind, torch.dtype):
                value = self._together(name, value, kind, f"state {key} {name}")
            optimizer.setdefault(name, {})[key] = kind if value is None else value
        model = self._put_together(mine["model"])
        return {"model": model, "optimizer": optimizer, "update": mine["update"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        def cut(name: str, value: Any, shape: torch.Size) -> Any:
            held = self.layout[name]
            if not isinstance(value, Tensor) or value.shape != held.shape:
                return value
            return layout.take(value.reshape(-1), held.runs).view(shape)

        shapes = self.part_shapes()
        model = {name: cut(name, state["model"][name], shapes[name]) for name in self.layout}
        optimizer = {
            name: {key: cut(name, value, shapes[name]) for key, value in held.items()}
            for name, held in state["optimizer"].items()
            if name in self.layout
        }
        self.inner.load_state_dict({**state, "model": model, "optimizer": optimizer})

    def part_shapes(self) -> dict[str, torch.Size]:
        """The shapes of this rank's parts."""
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        return {name: tensor.shape for name, tensor in tensors}

    def exchange_averages(self) -> None:
        self.inner.exchange_averages()

    def updated_names(self) -> list[str]:
        return self.inner.updated_names()


def joined(microbatches: Sequence[Batch]) -> Batch:
    """All of a step as one batch, whose inputs are the micro-batches."""
    count = sum(batch.count for batch in microbatches)
    samples = sum(batch.samples for batch in microbatches)
    return Batch(inputs=list(microbatches), targets=None, count=count, samples=samples)


def _has_parameters(model: nn.Module, block: str) -> bool:
    return any(True for _ in model.get_submodule(block).parameters())


def _summed_over(group: comm.Group, name: str) -> Callable[[Tensor], Tensor]:
    def sum_up(gradient: Tensor) -> Tensor:
        summed = gradient.clone(memory_format=torch.contiguous_format)
        comm.all_reduce(summed, group, label=f"grad {name}")
        return summed

    return sum_up


def _kind(value: Any) -> Any:
    """A tensor's dtype, if it has a part on each rank; else the value, which all ranks have."""
    return value.dtype if isinstance(value, Tensor) and value.dim() else value
