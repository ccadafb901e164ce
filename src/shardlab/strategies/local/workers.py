"""What strategies share whose ranks take steps of their own: a worker's step, and what all are.

A worker computes the mean loss of its own micro-batches, and clips, schedules and updates by that
alone. The only message of such a step is the loss with its count, 16 bytes, on their way while the
last backward computes: the lab reports the mean loss of the global batch, and a worker's weight in
the next exchange is the share of the targets that it has seen since the last one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from shardlab import comm
from shardlab.phases import BACKWARD, FORWARD, phase
from shardlab.strategies import base, steps
from shardlab.strategies.local.rounds import checked
from shardlab.strategies.update_state import put_back, state_of
from shardlab.workloads.base import Batch

INNER = "inner/"  # in a checkpoint: the state of a worker's own optimizer


class Workers(base.Strategy):
    """Every rank trains a model of its own; ``exchange()`` makes them one again.

    Between two exchanges ``full_tensors()`` is the workers' average, weighed as the next exchange
    would weigh them, with worker 0's buffers. That is what is evaluated and what a checkpoint calls
    the model. The checkpoint also holds every worker's parameters, buffers and inner optimizer, so
    that the same number of workers continues exactly. Another number of workers starts from the
    average, all with worker 0's inner optimizer, in the same place of the same round.
    """

    rounds: base.Rounds

    def __init__(self, setup: base.Setup, rounds: base.Rounds) -> None:
        super().__init__(setup)
        self.rounds = checked(rounds)
        steps.broadcast_model(self.model, self.group)
        self.since = 0  # steps of the round under way
        # Targets of this worker and of all, in the last step and since the last exchange: (2,)
        self.count = torch.zeros(2, dtype=torch.float64, device=self.device)
        self.seen = torch.zeros_like(self.count)

    @abstractmethod
    def exchange(self) -> None:
        """Make the workers' models one. A collective, at the end of a round."""

    # ------------------------------------------------------------ a step

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        mine = steps.local_count(microbatches, self.device)  # ()
        divisor = self.update.divisor(mine.clamp(min=1.0))
        *head, last = microbatches
        loss_sum = steps.accumulate(self.model, self.loss_fn, head, divisor)
        with phase(FORWARD):
            loss = self.loss_fn(self.model, last)  # ()
        loss_and_count = torch.stack([loss_sum + loss.detach(), mine])  # (2,)
        pending = comm.all_reduce(
            loss_and_count, self.group, label="loss and target count", async_op=True
        )
        with phase(BACKWARD):
            steps.backward(loss, divisor)
        pending.wait()
        self.count = torch.stack([mine, loss_and_count[1]])
        return loss_and_count[0] / loss_and_count[1].clamp(min=1.0)

    def step(self) -> None:
        super().step()
        self.since = (self.since + 1) % self.rounds.every
        self.seen += self.count
        self.exchange_what_is_due()

    def exchange_what_is_due(self) -> None:
        """After each step. Override it where something is exchanged during a round."""
        if self.since == 0:
            self.exchange()
            self.seen.zero_()

    def seen_of(self, _name: str) -> Tensor:
        """The targets, of this worker and of all, since this parameter was exchanged: (2,)."""
        return self.seen

    def share(self, counts: Tensor) -> Tensor:
        """This worker's part of the targets that were counted; if there are none, all weigh the
        same: ()."""
        mine, everyones = counts
        return torch.where(everyones > 0, mine / everyones.clamp(min=1.0), 1 / self.group.size())

    # ------------------------------------------------------------ what all workers are

    def in_step(self) -> bool:
        return self.since == 0

    @torch.no_grad()
    def _averages(self) -> dict[str, Tensor]:
        """What a checkpoint calls the model: copies. A collective."""
        self.settle()
        tensors = {n: t.detach().clone() for n, t in self._named_tensors()}
        if not self.in_step():
            for name in self.params:
                tensors[name] *= self.share(self.seen_of(name))
                comm.all_reduce(tensors[name], self.group, label=f"average of {name}")
        for name, _ in self.model.named_buffers():
            comm.broadcast(tensors[name], self.group, label=f"buffer {name}")
        return tensors

    def full_grads(self) -> dict[str, Tensor | None]:
        """The mean over the global batch, each worker's part of it taken at its own parameters."""
        used = [p.grad is not None for p in self.params.values()]
        used = steps.any_rank(used, self.group, label="used parameters")
        found: dict[str, Tensor | None] = {}
        for (name, p), is_used in zip(self.params.items(), used, strict=True):
            found[name] = None
            if is_used:
                own = torch.zeros_like(p) if p.grad is None else p.grad / self.update.scale
                mean = own.detach() * self.share(self.count)
                comm.all_reduce(mean, self.group, label=f"average of grad {name}")
                found[name] = mean
        return found

    @contextmanager
    def as_one(self) -> Iterator[None]:
        kept = self._averages()
        self._exchange_with(kept)
        try:
            yield
        finally:
            self._exchange_with(kept)

    @torch.no_grad()
    def _exchange_with(self, others: dict[str, Tensor]) -> None:
        """The model's tensors and these change places."""
        for name, tensor in self._named_tensors():
            mine = tensor.detach().clone()
            tensor.copy_(others[name])
            others[name] = mine

    def _named_tensors(self) -> list[tuple[str, Tensor]]:
        return [*self.model.named_parameters(), *self.model.named_buffers()]

    # ------------------------------------------------------------ checkpoints

    def extra_state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        self.settle()
        own: dict[str, Tensor] = {}
        if not self.in_step():  # copies: a checkpoint is written while the model is the average
            own = {f"model/{n}": t.detach().clone() for n, t in self._named_tensors()}
        for name, p in self.params.items():
            for key, value in self.optimizer.state.get(p, {}).items():
                if value is not None:
                    own[f"{INNER}{name}/{key}"] = torch.as_tensor(value)
        update = state_of(self.update)
        own_update = [update[key] for key in ("steps", "scale", "good_steps")]
        numbers = [*own_update, *self.seen.flatten().tolist()]
        own["numbers"] = torch.tensor(numbers, dtype=torch.float64)
        return {"steps since the exchange": torch.tensor([self.since])}, own

    @torch.no_grad()
    def load_extra_state(self, shared: dict[str, Tensor], own: dict[str, Tensor] | None) -> None:
        self.since = int(shared["steps since the exchange"]) if shared else 0
        self.seen.zero_()
        if own is None:
            return
        for name, tensor in self._named_tensors():
            if f"model/{name}" in own:
                tensor.copy_(own[f"model/{name}"])
        self.optimizer.state.clear()
        for path, value in own.items():
            if path.startswith(INNER):
                name, _, key = path.removeprefix(INNER).rpartition("/")
                p = self.params[name]
                is_like_it = value.shape == p.shape and key != "step"
                held = torch.empty_like(p).copy_(value) if is_like_it else value
                self.optimizer.state[p][key] = held.to(p.device) if value.dim() else held
        done, scale, good_steps, *seen = own["numbers"].tolist()
        numbers = {"steps": int(done), "scale": scale, "good_steps": int(good_steps)}
        put_back(self.update, {**state_of(self.update), **numbers})
        self.seen.copy_(torch.tensor(seen).view_as(self.seen))
