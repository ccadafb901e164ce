"""Planted bugs, each one that real code has had. The conformance suite must catch every one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab import comm
from shardlab.strategies import base, lowbit, steps
from shardlab.strategies.bucket_ddp_async import BucketDDPAsync
from shardlab.strategies.compress import Compressor, Then
from shardlab.strategies.diloco import DiLoCo
from shardlab.strategies.local_sgd import LocalSGD
from shardlab.strategies.overlap import InOrder
from shardlab.strategies.simple_ddp import all_reduce_gradients
from shardlab.strategies.simple_ddp_async import SimpleDDPAsync
from shardlab.strategies.simple_ddp_ga import SimpleDDPGradientAccumulation as Right
from shardlab.strategies.simple_ddp_hook import SimpleDDPHook
from shardlab.strategies.streaming_diloco import StreamingDiLoCo
from shardlab.strategies.table import Table
from shardlab.strategies.workers import Workers
from shardlab.strategies.zero1 import Zero1
from shardlab.workloads.base import Batch


class NoAveraging(Right):
    """Each rank divides by its own count, and the sum over ranks is n times too large."""

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        steps.broadcast_buffers(self.model, self.group)
        total = steps.global_count(microbatches, self.device, self.group)
        local = steps.local_count(microbatches, self.device).clamp(min=1)
        loss_sum = steps.accumulate(self.model, self.loss_fn, microbatches, local)
        all_reduce_gradients(self.params, self.group)
        return steps.global_mean(loss_sum, total, self.group)


class AveragesWeights(Right):
    """The hook's argument is taken for the gradient; it is the parameter."""

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        steps.broadcast_buffers(self.model, self.group)
        total = steps.global_count(microbatches, self.device, self.group)
        loss_sum = steps.accumulate(self.model, self.loss_fn, microbatches, total)
        for p in self.params.values():
            comm.all_reduce(p.data, self.group)
            p.data /= self.group.size()
        return steps.global_mean(loss_sum, total, self.group)


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
        self.compressor = Compressor()


class NoBufferBroadcast(Right):
    """Running statistics drift apart."""

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        total = steps.global_count(microbatches, self.device, self.group)
        loss_sum = steps.accumulate(self.model, self.loss_fn, microbatches, total)
        all_reduce_gradients(self.params, self.group)
        return steps.global_mean(loss_sum, total, self.group)

    def full_params(self) -> dict[str, Tensor]:
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        return {name: t.detach().clone() for name, t in tensors}


class MeanOfMeans(Right):
    """The mean over ranks of each rank's mean: wrong as soon as their counts differ."""

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        steps.broadcast_buffers(self.model, self.group)
        local = steps.local_count(microbatches, self.device).clamp(min=1)
        ranks = self.group.size()
        loss_sum = steps.accumulate(self.model, self.loss_fn, microbatches, local * ranks)
        all_reduce_gradients(self.params, self.group)
        return steps.global_mean(loss_sum / local, torch.tensor(float(ranks)), self.group)


class ReadsAnothersData(Right):
    """The local rank taken for the data rank: on a second host, the same samples again."""

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        box = [list(microbatches)]
        dist.broadcast_object_list(box, src=0)
        return super().gradients(box[0])


SABOTEURS = [
    NoAveraging,
    AveragesWeights,
    ReducesOnlyTheLast,
    NoBroadcast,
    NoBufferBroadcast,
    MeanOfMeans,
    ReadsAnothersData,
]


# ------------------------------------------------------------------ the higher rungs


class Careless(InOrder):
    """Does not mind what comes when its part was sent already."""

    def arrived(self, part: int, name: str) -> bool:
        super().arrived(part, name)
        return True


class BucketTooEarly(BucketDDPAsync):
    """A bucket is sent when its first gradient is in, not its last."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, bucket_mb=1.0, **options)  # all of a toy in one bucket

    def _lay_out(self) -> None:
        super()._lay_out()
        first = [dict([*need.items()][:1]) for need in self.queue.needs]
        self.queue = Careless(first, self._launch)

    def _launch(self, bucket: int) -> None:
        super()._launch(bucket)
        self.under_way[-1].wait()  # not to be saved by luck: what comes later is not sent


class NobodyWaits(SimpleDDPAsync):
    """The update reads gradients that are still on their way."""

    def finish(self) -> None:
        self.under_way.clear()


class EveryMicrobatch(SimpleDDPHook):
    """The hook does not know the last micro-batch: what is summed already is summed again."""

    def _arrived(self, i: int, parameter: nn.Parameter) -> None:
        self.used.add(self.order[i])
        comm.all_reduce(parameter.grad, self.group)  # type: ignore[arg-type]

    def launch(self, i: int) -> None:
        name = self.order[i]
        p = self.params[name]
        self.sent[name] = torch.zeros_like(p) if p.grad is None else p.grad
        p.grad = None


class ShardOffByOne(Zero1):
    """A rank updates its shard with the gradient of the elements next to it."""

    def step(self) -> None:
        for unit in self.units:
            if unit.grad is not None:
                unit.grad = torch.roll(unit.grad, 1)
        super().step()


class ForgetsToGather(Zero1):
    """Each rank updates its own shard and goes on with the others' old parameters."""

    def step(self) -> None:
        self.update_shards()
        for unit in self.units:
            unit.grad = unit.full_grad = None
            for p in unit.params.values():
                p.grad = None


RUNG_SABOTEURS = [BucketTooEarly, NobodyWaits, EveryMicrobatch, ShardOffByOne, ForgetsToGather]


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

    def __init__(self, setup: base.Setup, *, every: int = 10) -> None:
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

    def __init__(self, setup: base.Setup, *, every: int = 10) -> None:
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


class FourBits(StreamingDiLoCo):
    """Right, and the base of those that are not: differences in 4 bits."""

    def __init__(self, setup: base.Setup, *, every: int = 10, bits: int = 4) -> None:
        super().__init__(setup, every=every, bits=bits)

    def encoded(self, tensors: list[Tensor]) -> Tensor:
        return lowbit.encode(tensors, self.rounds.bits)

    def decoded(self, message: Tensor, like: list[Tensor]) -> list[Tensor]:
        return lowbit.decode(message, like, self.rounds.bits)

    def _gather(self, number: int, differences: dict[str, Tensor]) -> Then:
        like = list(differences.values())
        mine = self.encoded(like)
        everyones = mine.new_empty(self.group.size() * len(mine))
        label = f"fragment {number}"
        pending = comm.all_gather(everyones, mine, self.group, label=label, async_op=True)

        def add_up() -> None:
            found = [self.decoded(m, like) for m in everyones.chunk(self.group.size())]
            self.sent |= {n: sum(v) for n, *v in zip(differences, *found, strict=True)}

        return Then(pending, add_up)


class ScaleOfAnotherBlock(FourBits):
    """Every block is decoded with the scale of the one before it."""

    def decoded(self, message: Tensor, like: list[Tensor]) -> list[Tensor]:
        size = lowbit.SCALE.itemsize * sum(-(-t.numel() // lowbit.BLOCK) for t in like)
        scales = message[:size].roll(lowbit.SCALE.itemsize)
        return super().decoded(torch.cat([scales, message[size:]]), like)


class SignLost(FourBits):
    """The whole numbers are sent without their sign."""

    def encoded(self, tensors: list[Tensor]) -> Tensor:
        return super().encoded([t.abs() for t in tensors])


class AddsWholeNumbers(FourBits):
    """Whole numbers are added as they are, and the sum is decoded with this worker's scales."""

    def _gather(self, number: int, differences: dict[str, Tensor]) -> Then:
        like = list(differences.values())
        size = lowbit.SCALE.itemsize * sum(-(-t.numel() // lowbit.BLOCK) for t in like)
        mine = self.encoded(like)
        everyones = mine.new_empty(self.group.size() * len(mine))
        label = f"fragment {number}"
        pending = comm.all_gather(everyones, mine, self.group, label=label, async_op=True)

        def add_up() -> None:
            messages = everyones.chunk(self.group.size())
            found = [self.decoded(torch.cat([mine[:size], m[size:]]), like) for m in messages]
            self.sent |= {n: sum(v) for n, *v in zip(differences, *found, strict=True)}

        return Then(pending, add_up)


class HalvesSwapped(FourBits):
    """The two numbers of a byte change places."""

    def encoded(self, tensors: list[Tensor]) -> Tensor:
        message = super().encoded(tensors)
        size = lowbit.SCALE.itemsize * sum(-(-t.numel() // lowbit.BLOCK) for t in tensors)
        numbers = message[size:]
        return torch.cat([message[:size], numbers >> 4 | numbers << 4])


class RoundsDown(FourBits):
    """Whole numbers are cut off and not rounded: every difference shrinks."""

    def encoded(self, tensors: list[Tensor]) -> Tensor:
        cut = []
        for t in tensors:
            (near,) = lowbit.decode(lowbit.encode([t], self.rounds.bits), [t], self.rounds.bits)
            scale = t.abs().max() / lowbit.top(self.rounds.bits)
            cut.append(torch.where(near.abs() > t.abs(), near - scale * near.sign(), near))
        return super().encoded(cut)


class OwnIsExact(FourBits):
    """A worker adds its own difference as it is, and the others' rounded: the anchors part."""

    def decoded(self, message: Tensor, like: list[Tensor]) -> list[Tensor]:
        found = super().decoded(message, like)
        mine = super().decoded(self.encoded(like), like)
        is_mine = all(torch.equal(a, b) for a, b in zip(found, mine, strict=True))
        return list(like) if is_mine else found


WORKER_SABOTEURS: list[type[Workers]] = [
    WrongAnchor, AnchorNotMoved, WrongSign, MomentumNotKept, NoNesterov, EqualWeights, OneStepEarly,
    CountsAllSteps, InnerStateReset, BuffersForgotten, TiedTwice, DividesByAll, OwnLoss,
    FragmentSkipped, DelayIgnored, MixIgnored, TakesWhatIsThere, ScaleOfAnotherBlock, SignLost,
    AddsWholeNumbers, HalvesSwapped, RoundsDown, OwnIsExact,
]  # fmt: skip


# ------------------------------------------------------------------ workers that may be absent


class MayBeAbsent(DiLoCo):
    """Right, and the base of those that are not: the proof lets the last worker be late."""

    def __init__(self, setup: base.Setup, *, every: int = 10, min_workers: int = 1) -> None:
        super().__init__(setup, every=every, min_workers=min_workers)


class LateCounts(MayBeAbsent):
    """What a late worker has done enters the next round."""

    def _meet(self, table: Table) -> None:
        kept = {name: p.detach().clone() for name, p in self.params.items()}
        was_resting = self.rests
        super()._meet(table)
        if self.rests and not was_resting:
            self.rests = False
            with torch.no_grad():
                for name, p in self.params.items():
                    p.copy_(kept[name])


class NeverRests(MayBeAbsent):
    """A late worker goes on at once, from the anchor."""

    def _meet(self, table: Table) -> None:
        super()._meet(table)
        self.rests = False


class KeepsItsAnchor(MayBeAbsent):
    """A late worker takes the others' average as it is, and its anchor stays behind."""

    def take(self, average: dict[str, Tensor]) -> None:
        before = {name: t.clone() for name, t in self.anchor.items()}
        super().take(average)
        if self.rests:
            self.anchor = before


class LosesMomentumWhenLate(MayBeAbsent):
    """A late worker begins with no outer momentum."""

    def _meet(self, table: Table) -> None:
        super()._meet(table)
        if self.rests:
            for momentum in self.momentum.values():
                momentum.zero_()


ABSENCE_SABOTEURS: list[type[Workers]] = [
    MayBeAbsent, LateCounts, NeverRests, KeepsItsAnchor, LosesMomentumWhenLate,
]  # fmt: skip
