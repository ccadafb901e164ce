"""What strategies share whose ranks take steps of their own: a worker's step, and what all are.

A worker computes the mean loss of its own micro-batches, and clips, schedules and updates by that
alone. The only message of such a step is the loss with its count, 16 bytes, on their way while the
last backward computes: the lab reports the mean loss of the global batch, and a worker's weight in
the next exchange is the share of the targets that it has seen since the last one.

With ``min_workers`` a step has no message at all, and workers exchange at a table (``table.py``),
where nobody waits for long for who is late or lost. The loss is then this worker's own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardlab import comm
from shardlab.errors import UsageError
from shardlab.phases import BACKWARD, FORWARD, phase
from shardlab.strategies import base, refusals, steps
from shardlab.strategies.slots import Slots, whole
from shardlab.strategies.table import BUFFER, Table
from shardlab.workloads.base import Batch

PATIENCE_S = 10.0  # when min_workers are there, how long they wait for the others if nobody says
INNER = "inner/"  # in a checkpoint: the state of a worker's own optimizer


class Workers(base.Strategy):
    """Every rank trains a model of its own; ``exchange()`` makes them one again.

    Between two exchanges ``full_params()`` is the workers' average, weighed as the next exchange
    would weigh them, with worker 0's buffers. That is what is evaluated and what a checkpoint calls
    the model. The checkpoint also holds every worker's parameters, buffers and inner optimizer, so
    that as many workers continue exactly. Another number of workers starts from the average, all
    with worker 0's inner optimizer, in the same place of the same round.
    """

    rounds: base.Rounds

    def __init__(
        self, setup: base.Setup, rounds: base.Rounds, patience_s: float | None = None
    ) -> None:
        super().__init__(setup)
        self.rounds = rounds
        self.table = self._table(patience_s)  # None: all must be there, in collectives
        self.round = 0  # the one under way, since this process began
        self.rests = False  # it was late, and makes no steps in this round
        self.loss = torch.zeros((), device=self.device)  # its own, of the last step that it made
        steps.broadcast_model(self.model, self.group)
        self.since = 0  # steps of the round under way
        # Targets of this worker and of all, in the last step and since the last exchange: (2,)
        self.count = torch.zeros(2, dtype=torch.float64, device=self.device)
        self.seen = torch.zeros_like(self.count)

    def _table(self, patience_s: float | None) -> Table | None:
        least, workers = self.rounds.min_workers, self.group.size()
        if least is None:
            if patience_s is not None:
                raise UsageError("patience_s is for min_workers, and is not set without it")
            return None
        if least > workers:
            raise UsageError(f"min_workers is {least}, and there are {workers} workers")
        patience_s = PATIENCE_S if patience_s is None else patience_s
        refusals.refuse_number("patience_s", patience_s, patience_s >= 0, "0 or more")
        return Table(self.group.rank(), workers, least, patience_s)

    @abstractmethod
    def exchange(self) -> None:
        """Make the workers' models one. A collective, at the end of a round."""

    def bring(self) -> dict[str, Tensor]:
        """What this worker brings to a table: what is to be averaged, by parameter. It is for
        strategies that have ``min_workers``."""
        raise NotImplementedError

    def take(self, average: dict[str, Tensor]) -> None:
        """Continue from the average of what was brought to a table."""
        raise NotImplementedError

    # ------------------------------------------------------------ a step

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        if self.table is not None:
            return self._own_gradients(self.table, microbatches)
        mine = steps.local_count(microbatches, self.device)  # ()
        divisor = self.update.divisor(mine.clamp(min=1.0))
        *head, last = microbatches
        loss_sum = steps.accumulate(self.model, self.loss_fn, head, divisor)
        with phase(FORWARD):
            loss = self.loss_fn(self.model, last)  # ()
        told = torch.stack([loss_sum + loss.detach(), mine])  # (2,)
        pending = comm.all_reduce(told, self.group, label="loss and target count", async_op=True)
        with phase(BACKWARD):
            steps.backward(loss, divisor)
        pending.wait()
        self.count = torch.stack([mine, told[1]])
        return told[0] / told[1].clamp(min=1.0)

    def _own_gradients(self, table: Table, microbatches: Sequence[Batch]) -> Tensor:
        """Without a message. The loss is this worker's own; the last one's, while it rests."""
        if self.since == 0 and not self.rests:
            table.begin(self.round)
        mine = steps.local_count(microbatches, self.device)  # ()
        if self.rests:
            self.count.zero_()
            return self.loss
        divisor = self.update.divisor(mine.clamp(min=1.0))
        loss_sum = steps.accumulate(self.model, self.loss_fn, microbatches, divisor)
        self.count = torch.stack([mine, mine])
        self.loss = loss_sum / mine.clamp(min=1.0)
        return self.loss

    def mean_loss(self, loss: Tensor) -> Tensor:
        if self.table is None:
            return loss
        told = torch.stack([loss * self.count[0], self.count[0]])  # (2,)
        comm.all_reduce(told, self.group, label="loss and target count")
        return told[0] / told[1].clamp(min=1.0)

    def step(self) -> None:
        if self.rests:
            self.update.steps += 1  # the schedule goes on
        else:
            super().step()
        self.since = (self.since + 1) % self.rounds.every
        self.seen += self.count
        self.exchange_what_is_due()

    def exchange_what_is_due(self) -> None:
        """After each step. Override it where something is exchanged during a round."""
        if self.since == 0:
            if self.table is None:
                self.exchange()
            else:
                self._meet(self.table)
            self.seen.zero_()

    @torch.no_grad()
    def _meet(self, table: Table) -> None:
        """Exchange with whoever is there. A worker that came after the round was closed has worked
        in vain; it rests until it has come to a round before the others have closed it."""
        mine = None
        if not self.rests:
            buffers = {f"{BUFFER}{name}": b for name, b in self.model.named_buffers()}
            mine = self.bring() | buffers
        table.plan = self.rounds.without if self.rounds.absent else None
        closed = table.meet(self.round, mine, float(self.seen[0]), self.group)
        took_part = self.group.rank() in closed.who
        self.rests = closed.was_closed if self.rests else not took_part
        self.round += 1
        if self.rounds.absent:
            self.rests = self.rounds.rests(self.round, self.group.rank())
        self.take({n: t.to(self.device) for n, t in closed.tensors.items()})
        for name, buffer in self.model.named_buffers():
            buffer.copy_(closed.tensors[f"{BUFFER}{name}"])

    def seen_of(self, _name: str) -> Tensor:
        """The targets, of this worker and of all, since this parameter was exchanged: (2,)."""
        return self.seen

    def share(self, counts: Tensor) -> Tensor:
        """This worker's part of the targets that were counted; if there are none, all weigh the
        same: ()."""
        mine, everyones = counts
        if self.table is not None:  # nobody has told the others' counts yet
            everyones = mine.clone()
            comm.all_reduce(everyones, self.group, label="target count")
        return torch.where(everyones > 0, mine / everyones.clamp(min=1.0), 1 / self.group.size())

    # ------------------------------------------------------------ what all workers are

    def in_step(self) -> bool:
        return self.since == 0

    @torch.no_grad()
    def full_params(self) -> dict[str, Tensor]:
        self.settle()
        tensors = {n: t.detach().clone() for n, t in self._named_tensors()}
        if not self.in_step():
            for name in self.params:
                tensors[name] *= self.share(self.seen_of(name))
                comm.all_reduce(tensors[name], self.group, label=f"average of {name}")
        is_known = self.table is not None and self.in_step()  # after a table all have the same
        for name, _ in () if is_known else self.model.named_buffers():
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
        kept = self.full_params()
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

    def saved(self) -> Slots:
        """The average of the models, and worker 0's optimizer."""
        live = self.slots()
        trained = live.trained if self.group.rank() == 0 else {}
        return Slots(whole(self.full_params().items()), trained, live.optimizer)

    def shared_state(self) -> dict[str, Tensor]:
        return {"steps since the exchange": torch.tensor([self.since])}

    def load_shared_state(self, state: dict[str, Tensor]) -> None:
        self.since = int(state["steps since the exchange"]) if state else 0
        self.seen.zero_()

    def own_state(self) -> dict[str, Tensor]:
        self.settle()
        own = {} if self.in_step() else {f"model/{n}": t.detach() for n, t in self._named_tensors()}
        for name, p in self.params.items():
            for key, value in self.optimizer.state.get(p, {}).items():
                if value is not None:
                    own[f"{INNER}{name}/{key}"] = torch.as_tensor(value)
        update = self.update.state_dict()
        numbers = [
            update["steps"],
            update["scale"],
            update["good_steps"],
            *self.seen.flatten().tolist(),
        ]
        return own | {"numbers": torch.tensor(numbers, dtype=torch.float64)}

    @torch.no_grad()
    def load_own_state(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self._named_tensors():
            if f"model/{name}" in state:
                tensor.copy_(state[f"model/{name}"])
        self.optimizer.state.clear()
        for path, value in state.items():
            if path.startswith(INNER):
                name, _, key = path.removeprefix(INNER).rpartition("/")
                p = self.params[name]
                is_like_it = value.shape == p.shape and key != "step"
                held = torch.empty_like(p).copy_(value) if is_like_it else value
                self.optimizer.state[p][key] = held.to(p.device) if value.dim() else held
        done, scale, good_steps, *seen = state["numbers"].tolist()
        own = {"steps": int(done), "scale": scale, "good_steps": int(good_steps)}
        self.update.load_state_dict({**self.update.state_dict(), **own})
        self.seen.copy_(torch.tensor(seen).view_as(self.seen))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.load_shared_state({})
