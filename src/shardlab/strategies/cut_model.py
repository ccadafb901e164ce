"""A data-parallel strategy on a model that several ranks hold together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardlab import comm
from shardlab.axes import Axes
from shardlab.errors import UsageError
from shardlab.optim import traits
from shardlab.strategies import base, shards, steps
from shardlab.strategies.layout import Layout, inside
from shardlab.strategies.shards import ModelSpec, Shard, every
from shardlab.workloads import batchnorm
from shardlab.workloads.base import Batch, LossFn

# An attribute of a block: what is called with its arguments where a stage does not run it.
WHEN_SKIPPED = "_when_skipped"
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


@dataclass
class Cut:
    """What an axis has done to the model of this rank."""

    # Every parameter and buffer that this rank holds now; None: the same as before.
    layout: Layout | None
    loss: LossFn  # the loss to use from now on
    # Parameters whose gradient here is a part of a sum over a group. Their sum is made in backward.
    partial: dict[str, comm.Group] = field(default_factory=dict)
    # This rank's part of a micro-batch, where an axis cuts that, too; None: all of it.
    take_part: Callable[[Batch], Batch] | None = None
    # Around a step: compares what the ranks of the axis are about to send.
    around_step: Callable[[], AbstractContextManager[None]] = nullcontext
    pipeline: Any = None  # what runs the stages, if there are several: a ``pipeline.Pipeline``


class CutModel(base.Strategy):
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

    ``cuts`` has a function for each axis, in their order: tensor, then context, then pipeline. Each
    sees the model, the loss and the sample that the one before has made.
    """

    KEEPS_PARTS = True
    ONE_SHAPE = False  # the micro-batches of a step must be equal in shape

    def __init__(
        self,
        setup: base.Setup,
        axes: Axes,
        inner: Callable[[base.Setup], base.Strategy],
        cuts: Sequence[CutAxis],
    ) -> None:
        self.axes = axes
        self.model = setup.model
        self.loss_fn = setup.loss_fn  # for infer(); the inner strategy has that of the part
        self.group = setup.group
        self.groups = groups_of(axes, self.group)
        steps.broadcast_model(self.model, self.group)
        self.whole_model = ModelSpec.of(self.model)
        self.trained = tuple(steps.trained_params(self.model))
        self.layout: Layout = {s.name: s.runs for s in shards.of_model(self.model)}
        self.take_part: Callable[[Batch], Batch] | None = None  # this rank's of a batch
        self.around_step: Callable[[], AbstractContextManager[None]] = nullcontext
        self.pipeline: Any = None
        for cut in cuts:
            setup = self._after(cut(self, setup), setup)
        batchnorm.join(self.model, self.groups.data)  # those that look at other samples
        self._refuse_optimizer(setup)
        self.inner = inner(
            replace(
                setup,
                mesh=DeviceMesh.from_group(
                    self.groups.data, setup.mesh.device_type, mesh_dim_names=("dp",)
                ),
                blocks=[b for b in setup.blocks if [*self.model.get_submodule(b).parameters()]],
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
            name: sum(other.get(name) == runs for other in everyone)
            for name, runs in self.layout.items()
        }
        self.update.across(self.groups.cut, self._shares)

    def _after(self, cut: Cut, setup: base.Setup) -> base.Setup:
        """Note what an axis has done. Returns what the next one begins with."""
        if cut.layout is not None:
            self.layout = {n: inside(self.layout[n], runs) for n, runs in cut.layout.items()}
        params = dict(self.model.named_parameters())
        for name, group in cut.partial.items():
            if params[name].requires_grad:
                params[name].register_hook(_summed_over(group, name))
        sample = setup.sample
        if cut.take_part is not None:
            self.take_part, self.around_step = cut.take_part, cut.around_step
            sample = None if sample is None else cut.take_part(sample)
        if cut.pipeline is not None:
            self.pipeline = cut.pipeline
            self.pipeline.divisor = lambda: self.update.last_divisor
        return replace(setup, loss_fn=cut.loss, sample=sample)

    def _refuse_optimizer(self, setup: base.Setup) -> None:
        """One that needs a matrix whole (Muon) cannot be given a part of it, and one that takes a
        rate from all gradients cannot be given one stage's."""
        if self.axes.pipeline > 1:
            traits.check_some(setup.make_optimizer, "pipeline")
        if self.axes.tensor == 1:
            return
        needed = traits.kept_whole(setup.make_optimizer, "tensor")
        for name, runs in self.layout.items():
            if name in needed and runs != every(self.whole_model.tensors[name].shape):
                raise UsageError(
                    f"the optimizer needs '{name}' whole, and tensor parallelism cuts it; use "
                    "pipeline, zero1 or zero2 with this optimizer"
                )

    def _shares(self) -> list[float]:
        """The share of each gradient's square that this rank adds to that of the whole."""
        return [1 / self.holders[name] for name in self.inner.updated_names()]

    # ------------------------------------------------------------ a step

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        if self.take_part is not None:
            microbatches = [self.take_part(batch) for batch in microbatches]
        if self.pipeline is not None:  # all of a step is one batch to the inner strategy
            microbatches = [joined(microbatches)]
        with self.around_step():
            return self.inner.gradients(microbatches)

    def step(self) -> None:
        self.inner.step()

    def settle(self) -> None:
        self.inner.settle()

    def infer(self, function: base.Infer[base.T], batch: Batch) -> base.T:
        """The function must call ``model(...)`` once, on every rank of a pipeline."""
        if self.pipeline is None:
            return self.inner.infer(function, batch)
        self.settle()
        with torch.no_grad():  # each call of the model passes through all stages
            return function(self.model, batch)

    @contextmanager
    def as_one(self) -> Iterator[None]:
        with self.inner.as_one():
            yield

    # ------------------------------------------------------------ what it holds

    def shards(self) -> list[Shard]:
        """Those of the inner strategy, to which its part is the whole."""
        return [
            s._replace(
                shape=self.whole_model.tensors[s.name].shape,
                runs=inside(self.layout[s.name], s.runs),
            )
            for s in self.inner.shards()
            if s.name in self.layout
        ]

    def model_spec(self) -> ModelSpec:
        return self.whole_model

    def chosen(self) -> dict[str, float]:
        return self.inner.chosen()

    def extra_state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return self.inner.extra_state()

    def load_extra_state(self, shared: dict[str, Tensor], own: dict[str, Tensor] | None) -> None:
        self.inner.load_extra_state(shared, own)


CutAxis = Callable[[CutModel, base.Setup], Cut]


def joined(microbatches: Sequence[Batch]) -> Batch:
    """All of a step as one batch, whose inputs are the micro-batches."""
    count = sum(batch.count for batch in microbatches)
    samples = sum(batch.samples for batch in microbatches)
    return Batch(inputs=list(microbatches), targets=None, count=count, samples=samples)


def _summed_over(group: comm.Group, name: str) -> Callable[[Tensor], Tensor]:
    def sum_up(gradient: Tensor) -> Tensor:
        summed = gradient.clone(memory_format=torch.contiguous_format)
        comm.all_reduce(summed, group, label=f"grad {name}")
        return summed

    return sum_up
