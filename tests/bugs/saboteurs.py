"""Strategies with a planted bug, each one that real code has had. ``registry.py`` lists them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab import comm
from shardlab.strategies import base, steps
from shardlab.strategies.base import Setup
from shardlab.strategies.data_parallel.bucket_ddp_async import BucketDDPAsync
from shardlab.strategies.data_parallel.simple_ddp import SimpleDDP, all_reduce_gradients
from shardlab.strategies.data_parallel.simple_ddp_async import SimpleDDPAsync
from shardlab.strategies.data_parallel.simple_ddp_ga import SimpleDDPGradientAccumulation as Right
from shardlab.strategies.data_parallel.simple_ddp_hook import SimpleDDPHook
from shardlab.strategies.flat import Unit
from shardlab.strategies.local.diloco import DiLoCo
from shardlab.strategies.local.local_sgd import LocalSGD
from shardlab.strategies.local.streaming_diloco import StreamingDiLoCo
from shardlab.strategies.sharded.collective_order import CollectiveOrder
from shardlab.strategies.sharded.zero1 import Zero1
from shardlab.strategies.sharded.zero2 import Zero2
from shardlab.strategies.sharded.zero3 import Zero3
from shardlab.strategies.shards import Shard
from shardlab.strategies.update import Rule
from shardlab.workloads.base import Batch


class InParts(Right):
    """Right: a step in parts, of which each bug has one of its own."""

    def send_buffers(self) -> None:
        steps.broadcast_buffers(self.model, self.group)

    def divisor(self, _microbatches: Sequence[Batch], total: Tensor) -> Tensor:
        return total

    def reduce(self) -> None:
        all_reduce_gradients(self.params, self.group)

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        self.send_buffers()
        total = steps.global_count(microbatches, self.device, self.group)
        divisor = self.divisor(microbatches, total)
        loss_sum = steps.accumulate(self.model, self.loss_fn, microbatches, divisor)
        self.reduce()
        return steps.global_mean(loss_sum, total, self.group)


class NoAveraging(InParts):
    """Each rank divides by its own count, and the sum over ranks is n times too large."""

    def divisor(self, microbatches: Sequence[Batch], _total: Tensor) -> Tensor:
        return steps.local_count(microbatches, self.device).clamp(min=1)


class AveragesWeights(InParts):
    """The hook's argument is taken for the gradient; it is the parameter."""

    def reduce(self) -> None:
        for p in self.params.values():
            comm.all_reduce(p.data, self.group)
            p.data /= self.group.size()


class ReducesOnlyTheLast(Right):
    """The gradients of all micro-batches but the last stay on their rank."""

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        steps.broadcast_buffers(self.model, self.group)
        total = steps.global_count(microbatches, self.device, self.group)
        *head, last = microbatches
        loss_sum = steps.accumulate(self.model, self.loss_fn, head, total)
        kept = {name: p.grad for name, p in self.params.items()}
        for p in self.params.values():
            p.grad = None
        loss_sum += steps.accumulate(self.model, self.loss_fn, [last], total)
        all_reduce_gradients(self.params, self.group)
        for name, p in self.params.items():
            local = kept[name]
            if local is not None:
                p.grad = local if p.grad is None else p.grad + local
        return steps.global_mean(loss_sum, total, self.group)


class NoBroadcast(Right):
    """Each rank starts from its own weights (buffers are still sent, each step)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        base.Strategy.__init__(self, *args, **options)


class NoBufferBroadcast(InParts):
    """Running statistics drift apart."""

    def send_buffers(self) -> None:
        pass

    @contextmanager
    def as_one(self) -> Iterator[None]:
        yield


class MeanOfMeans(NoAveraging):
    """The mean over ranks of each rank's mean: wrong as soon as their counts differ."""

    def divisor(self, microbatches: Sequence[Batch], total: Tensor) -> Tensor:
        return super().divisor(microbatches, total) * self.group.size()


class ReadsAnothersData(Right):
    """The local rank taken for the data rank: on a second host, the same samples again."""

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        box = [list(microbatches)]
        dist.broadcast_object_list(box, src=0)
        return super().gradients(box[0])


# ------------------------------------------------------------------ the higher rungs


class BucketTooEarly(BucketDDPAsync):
    """A bucket is sent before its last gradient is in."""

    def _take(self, name: str, gradient: Tensor) -> Tensor:
        if self.flats and self.buckets.is_sending:
            i = self.buckets.bucket_of[name]
            self.buckets.missing[i] -= {self.buckets.names[i][-1]}
        return super()._take(name, gradient)

    def _launch(self, bucket: int) -> None:
        super()._launch(bucket)
        self.under_way[-1].wait()  # not to be saved by luck: what comes later is not sent


class NobodyWaits(SimpleDDPAsync):
    """The update reads gradients that are still on their way."""

    def finish(self) -> None:
        self.under_way.clear()


class WaitsTooLate(SimpleDDPAsync):
    """The update reads gradients that have come by chance: nobody waits for them before it."""

    def finish(self) -> None:
        while not all(p._works[0].get_future().done() for p in self.under_way):
            time.sleep(0.001)

    def settle(self) -> None:
        super().finish()


class EveryMicrobatch(SimpleDDPHook):
    """The hook does not know the last micro-batch: what is summed already is summed again."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.buckets.take = self._send

    def _send(self, _name: str, gradient: Tensor) -> Tensor:
        comm.all_reduce(gradient, self.group)
        return gradient

    def launch(self, bucket: int) -> None:
        pass


class ShardOffByOne(Zero1):
    """A rank updates its shard with the gradient of the elements next to it."""

    def step(self) -> None:
        self.settle()
        for unit in self.units:
            if unit.grad is not None:
                unit.grad = torch.roll(unit.grad, 1)
        super().step()


class LosesTheEdge(Zero2):
    """The last element of each shard does not get its gradient."""

    def receive_all(self) -> None:
        super().receive_all()
        for unit in self.units:
            if unit.grad is not None:
                unit.grad[-1] = 0


class ForgetsToGather(Zero1):
    """Each rank updates its own shard and goes on with the others' old parameters."""

    def _gather(self, unit: Unit) -> None:
        pass


# ------------------------------------------------------------------ where nobody looks


class ForgetsToClip(Right):
    """And takes the same rate in every step."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(replace(setup, rule=Rule()))


class RightWhenSeen(Right):
    """The new weights arrive when somebody looks at them, and not before."""

    def step(self) -> None:
        old = [p.detach().clone() for p in self.params.values()]
        super().step()
        self.new = [p.detach().clone() for p in self.params.values()]
        self._put(old)

    def shards(self) -> list[Shard]:
        self._put(getattr(self, "new", []))
        return super().shards()

    @torch.no_grad()
    def _put(self, values: list[Tensor]) -> None:
        for p, value in zip(self.params.values(), values or self.params.values(), strict=True):
            p.copy_(value)


# ------------------------------------------------------------------ right, but not as claimed


class WholeOptimizer(Right):
    """Calls itself ZeRO-1, and shards nothing. Its results are right."""

    claim = "zero1"


class FreesAtTheEnd(Zero2):
    """All buckets stay until backward is over."""

    claim = "zero2"
    IN_FLIGHT = 1000


class GathersEverything(Zero3):
    """No blocks: the whole model is one unit."""

    claim = "zero3"

    def __init__(self, setup: Setup) -> None:
        super().__init__(replace(setup, blocks=()))


class Leaks(Right):
    """Keeps the gradients of the step before."""

    claim = "simple_ddp_ga"

    def step(self) -> None:
        self.old = [p.grad for p in self.params.values()]
        super().step()


class SendsEachTime(SimpleDDP):
    """Right, but all is sent for each micro-batch."""

    claim = "simple_ddp_ga"


class HookEachTime(EveryMicrobatch):
    claim = "simple_ddp_hook"


class SendsUnseen(Right):
    """Tells all ranks its gradients besides, by a call that takes a list."""

    claim = "simple_ddp_ga"

    def step(self) -> None:
        for p in self.params.values():
            parts = [torch.empty_like(p) for _ in range(self.group.size())]
            dist.all_gather(parts, p.grad)  # type: ignore[arg-type]
        super().step()


class SendsOnceMore(Right):
    """Sends all of it once more in its second step."""

    claim = "simple_ddp_ga"
    steps = 0

    def step(self) -> None:
        self.steps += 1
        for p in self.params.values():
            if self.steps == 2:
                comm.all_reduce(torch.zeros_like(p), self.group)
        super().step()


class BuffersEachTime(Right):
    """Buffers are sent before each micro-batch."""

    claim = "simple_ddp_ga"

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        for _ in microbatches[1:]:
            steps.broadcast_buffers(self.model, self.group)
        return super().gradients(microbatches)


class AlwaysAnew(CollectiveOrder):
    """The last block, with which backward begins, is gathered for it once more."""

    def finish(self, unsent: Sequence[bool], extras: Sequence[bool]) -> list[bool]:
        is_learning = self.is_learning
        found = super().finish(unsent, extras)
        if is_learning:
            self.plans[self.kind] = self.started
        return found


class GathersAgain(Zero3):
    claim = "zero3"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.order.__class__ = AlwaysAnew


class LaunchesAtTheEnd(SimpleDDPAsync):
    """Every gradient is launched in the hook of the last one: backward hides nothing."""

    claim = "simple_ddp_async"
    EARLY = 0

    def launch(self, bucket: int) -> None:
        if bucket < self.EARLY:
            super().launch(bucket)
        if bucket == len(self.buckets.names) - 1:
            for late in range(self.EARLY, len(self.buckets.names)):
                super().launch(late)


class HalfAtTheEnd(LaunchesAtTheEnd):
    EARLY = 8  # of 15


class SendsLate(Right):
    claim = "simple_ddp_async"


class SendsEarly(SimpleDDPAsync):
    claim = "simple_ddp_ga"


class Noisy(Right):
    """Right up to the last bits, which are random."""

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        loss = super().gradients(microbatches)
        noise = 1 + torch.tensor(os.urandom(1)[0] * 1e-15, dtype=torch.float64)
        comm.broadcast(noise, self.group)
        for p in self.params.values():
            assert p.grad is not None
            p.grad *= noise
        return loss


# ------------------------------------------------------------------ workers


class WrongAnchor(DiLoCo):
    """The next difference is taken from where this worker was, not from the moved anchor."""

    def exchange(self) -> None:
        before = {name: p.detach().clone() for name, p in self.params.items()}
        super().exchange()
        self.anchor = before


class AnchorNotMoved(DiLoCo):
    """The workers continue from the moved anchor, and the anchor stays."""

    def _move(self, name: str, outer_gradient: Tensor) -> None:
        before = self.anchor[name].clone()
        super()._move(name, outer_gradient)
        self.anchor[name].copy_(before)


class WrongSign(DiLoCo):
    """The outer gradient is parameters less anchor: the anchor goes away from the workers."""

    def _move(self, name: str, outer_gradient: Tensor) -> None:
        super()._move(name, outer_gradient.neg_())


class MomentumNotKept(DiLoCo):
    """The outer momentum begins anew in each round."""

    def exchange(self) -> None:
        super().exchange()
        for momentum in self.momentum.values():
            momentum.zero_()


class NoNesterov(DiLoCo):
    """Plain momentum."""

    def _move(self, name: str, outer_gradient: Tensor) -> None:
        anchor, momentum = self.anchor[name], self.momentum[name]
        momentum.mul_(self.rounds.outer_momentum).add_(outer_gradient)
        anchor.sub_(momentum, alpha=self.rounds.outer_lr)
        outer_gradient.copy_(anchor)


class EqualWeights(LocalSGD):
    """Every worker weighs the same, though they have seen different numbers of targets."""

    def share(self, counts: Tensor) -> Tensor:
        del counts
        return torch.tensor(1 / self.group.size(), dtype=torch.float64)


class OneStepEarly(LocalSGD):
    """The first round is one step short."""

    def __init__(self, setup: Setup, *, every: int = 10) -> None:
        super().__init__(setup, every=every)
        self.since = 1


class CountsAllSteps(LocalSGD):
    """The counts go on over exchanges: a worker that had much once weighs more for ever."""

    def exchange(self) -> None:
        kept = self.seen.clone()
        super().exchange()
        self.total = kept

    def exchange_what_is_due(self) -> None:
        super().exchange_what_is_due()
        if self.since == 0:
            self.seen += self.total


class InnerStateReset(DiLoCo):
    """The inner optimizer begins anew with each round."""

    def exchange(self) -> None:
        super().exchange()
        self.optimizer.state.clear()


class BuffersForgotten(LocalSGD):
    """Parameters are averaged, running statistics are not."""

    def exchange(self) -> None:
        share = self.share(self.seen)
        for p in self.params.values():
            comm.all_reduce(p.data.mul_(share), self.group)


class TiedTwice(LocalSGD):
    """A tied parameter is met under both of its names, and shared out twice."""

    def exchange(self) -> None:
        names = [
            n for n, p in self.model.named_parameters(remove_duplicate=False) if p.requires_grad
        ]
        for name in names:
            if name not in self.params:  # another name of one that is
                self.model.get_parameter(name).data.mul_(self.share(self.seen))
        super().exchange()


class DividesByAll(LocalSGD):
    """A worker's loss is divided by the count of all workers, as in data parallelism."""

    def step(self) -> None:
        for p in self.params.values():
            if p.grad is not None:
                p.grad *= self.share(self.count)
        super().step()


class OwnLoss(LocalSGD):
    """Each worker reports its own loss."""

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        return super().gradients(microbatches) * (1 + self.group.rank())


class FragmentSkipped(StreamingDiLoCo):
    """The last fragment is never sent."""

    def __init__(self, setup: Setup, *, every: int = 10) -> None:
        super().__init__(setup, every=every)
        self.fragments = [*self.fragments[:-1], []]


class DelayIgnored(StreamingDiLoCo):
    """What was sent is waited for at once."""

    def _send(self, number: int, names: list[str]) -> None:
        super()._send(number, names)
        self._merge(names)


class MixIgnored(StreamingDiLoCo):
    """A worker forgets what it has done since the fragment was sent."""

    def _merge(self, names: list[str]) -> None:
        super()._merge(names)
        with torch.no_grad():
            for name in names:
                self.params[name].copy_(self.anchor[name])


class TakesWhatIsThere(StreamingDiLoCo):
    """The difference is read again when it arrives, from parameters that have gone on."""

    def _merge(self, names: list[str]) -> None:
        self.settle()
        for name in names:
            self.sent[name] = self.anchor[name] - self.params[name].detach()
            comm.all_reduce(self.sent[name].div_(self.group.size()), self.group)
        super()._merge(names)
