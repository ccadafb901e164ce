"""A loss or gradient that is NaN or infinite: where it arose, and what becomes of the step.

The loss is the mean over all ranks, so all of them see the same and decide alike. To find the
cause, the step's forward is run again, on each rank with its own batch, with a look at the output
of every module. That costs one forward. The check itself costs a step next to nothing: on a GPU the
number is sent to the host and read when it has arrived, some steps later.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardlab.errors import Halt, UsageError
from shardlab.guard.nodes import names
from shardlab.strategies.base import Strategy
from shardlab.strategies.shards import ModelSpec
from shardlab.strategies.update import NotFinite
from shardlab.workloads.base import Batch
from shardlab.world import World, sent_to_host

STATE = "not finite"
SKIPS = 10  # in a row, after which the run stops: one that only skips does not train


class NumbersGuard:
    """Looks at the loss and the gradients of each step. ``action`` is what the config asks for."""

    def __init__(self, strategy: Strategy, world: World, action: str) -> None:
        self.strategy = strategy
        self.world = world
        self.action = action  # "stop", "skip" or "ignore"
        self.number = -1  # of the step under way
        self.microbatches: Sequence[Batch] = ()
        self.seen_skipped = 0  # updates
        self.in_a_row = 0
        self.on_their_way: deque[tuple[int, Tensor, Any]] = deque()

    def check_loss(self, step: int, loss: Tensor, microbatches: Sequence[Batch]) -> None:
        """Between gradients and update: stop if the loss is not finite."""
        self.number, self.microbatches = step, microbatches
        if self.action != "stop":
            return
        if not loss.is_cuda:
            if not math.isfinite(float(loss)):
                raise self._halt_for_loss(float(loss), step, self.explain())
            return
        self.on_their_way.append((step, *sent_to_host(loss)))
        while self.on_their_way and self.on_their_way[0][2].query():
            earlier, copy, _ = self.on_their_way.popleft()
            if not math.isfinite(float(copy)):
                raise self._halt_for_loss(float(copy), earlier, None)

    def after_step(self, _step: int, _loss: Tensor) -> None:
        """Warn if the update was skipped; refuse a strategy that does not use the update."""
        if not self.strategy.update.calls:
            raise UsageError(
                f"{type(self.strategy).__name__}.step() does not call self.update(gradients): "
                "clipping, the schedule and training.on_nonfinite would be ignored"
            )
        skipped = self.strategy.update.skipped
        if self.action != "skip" or skipped == self.seen_skipped:
            self.in_a_row = 0
            return
        self.seen_skipped = skipped
        self.in_a_row += 1
        is_alone = self.strategy.rounds is not None  # the other workers know nothing of it
        found = [] if is_alone else self.explain()
        why = f"it is that of worker {self.world.rank} alone" if is_alone else sentence(found)
        if self.world.rank == 0 or is_alone:
            skip = f"update of step {self.number} skipped: its gradient is not finite; {why}"
            self.world.tell({"warning": skip})
        if self.in_a_row >= SKIPS:
            raise Halt(
                STATE,
                f"{SKIPS} updates in a row were skipped, the last in step {self.number}: {why}",
                details={"step": self.number, "number": "gradient", "found": found},
            )

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Around the loop: explain a gradient that the update found not to be finite."""
        try:
            yield
        except NotFinite as found:
            raise self._halt_for_gradient(found) from None

    def explain(self) -> list[dict[str, Any]]:
        """What a second forward of this step meets first, on each rank. A collective."""
        return self.world.gather(look(self.strategy, self.microbatches))

    def _halt_for_loss(self, value: float, step: int, found: list[dict[str, Any]] | None) -> Halt:
        """``found`` None: the loss arrived after the update, too late to look for the cause."""
        why = (
            "the layer is not known, since a GPU's number is read after the update; "
            "training.on_nonfinite: skip reads it before"
            if found is None
            else sentence(found)
        )
        bad = [rank for rank, f in enumerate(found or ()) if f["what"] is not None]
        return Halt(
            STATE,
            f"the loss of step {step} is {value}: {why}",
            rank=bad[0] if bad else 0,
            details={
                "step": step,
                "number": "loss",
                "value": str(value),
                "ranks": bad,
                "found": found,
                "was_updated": found is None,
            },
        )

    def _halt_for_gradient(self, found: NotFinite) -> Halt:
        """Under sharding only this rank has seen it, so it reports without asking the others."""
        known = self.strategy.updated_names()
        bad = {known[i] for i in found.positions} if len(known) == found.given else set()
        parameters = sorted(bad, key=list(self.strategy.params).index)
        where, ranks = "", []
        if self.strategy.KEEPS_PARTS:
            where = f"in the shard of rank {self.world.rank} "
        elif self.strategy.rounds is not None:
            where = f"on worker {self.world.rank}, whose gradient is its own, "
        else:
            alone = self.world.gather(self._is_bad_alone())
            ranks = [rank for rank, is_bad in enumerate(alone) if is_bad]
            where = f"it arose on {names(ranks)}, and " if ranks else ""
        # Backward goes from the last layer to the first: it met the last of them first.
        first = f"backward met it first at '{parameters[-1]}' " if parameters else ""
        count = f"({len(found.positions)} of {found.given} tensors)"
        return Halt(
            STATE,
            f"the gradient of step {self.number} is not finite, though the loss is finite: "
            f"{where}{first}{count}",
            rank=ranks[0] if ranks else self.world.rank,
            details={
                "step": self.number,
                "number": "gradient",
                "ranks": ranks,
                "parameters": parameters,
                "was_updated": False,
            },
        )

    def _is_bad_alone(self) -> bool:
        """Whether this rank's own batches give such a gradient, before any exchange."""
        strategy = self.strategy
        params = list(strategy.params.values())
        for batch in self.microbatches:
            loss = strategy.loss_fn(strategy.model, batch)
            if not is_finite(torch.autograd.grad(loss, params, allow_unused=True)):
                return True
        return False


# ------------------------------------------------------------------ where it arose


def look(strategy: Strategy, microbatches: Sequence[Batch]) -> dict[str, Any]:
    """The first thing on this rank that is not finite: input, a module's output, or the loss.

    All ranks do this together: under a sharded strategy a forward needs every rank.
    """
    found: list[tuple[str, str]] = []
    worst: dict[str, Any] = {"what": None}
    with torch.no_grad(), _noting(strategy, found):
        for i, batch in enumerate(microbatches):
            found.clear()
            loss = strategy.infer(strategy.loss_fn, batch)
            if worst["what"] is not None:
                continue  # the other ranks still need this rank's forward
            if not is_finite(batch.inputs):
                worst = {"what": "input", "name": "", "microbatch": i}
            elif found:
                name, kind = found[0]
                worst = {"what": "module", "name": name, "kind": kind}
            elif not is_finite(loss):
                worst = {"what": "loss", "name": "", "microbatch": i}
    return worst


@contextmanager
def _noting(strategy: Strategy, found: list[tuple[str, str]]) -> Iterator[None]:
    """Put the first module whose output is not finite, the innermost of several, into ``found``.

    This wraps the call itself: a hook would not see what other hooks make of the output. In a
    stage of a pipeline, modules of other stages are NaN: only those with parameters count there.
    """
    model = strategy.model
    known = {module: name or type(model).__name__ for name, module in model.named_modules()}
    if strategy.model_spec().tensors.keys() != ModelSpec.of(model).tensors.keys():
        known = {m: name for m, name in known.items() if m is not model and list(m.parameters())}
    call = nn.Module.__call__

    def noted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = call(module, *args, **kwargs)
        if not found and module in known and not is_finite(output):
            found.append((known[module], type(module).__name__))
        return output

    nn.Module.__call__ = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]


def is_finite(value: Any) -> bool:
    """Whether every tensor in it is finite."""
    return all(bool(t.isfinite().all()) for t in tree_leaves(value) if isinstance(t, Tensor))


def sentence(found: Sequence[dict[str, Any]]) -> str:
    """``it arose on rank 1, first in the output of 'blocks.2' (Block)``. Pure."""
    bad = {rank: f for rank, f in enumerate(found) if f["what"] is not None}
    # Every rank of a pipeline knows the loss, and one of them may know more.
    bad = {rank: f for rank, f in bad.items() if f["what"] != "loss"} or bad
    if not bad:
        return "a second forward of the same batch is finite on every rank"
    first = next(iter(bad.values()))
    where = {
        "input": f"in its input (micro-batch {first.get('microbatch')})",
        "module": f"first in the output of '{first['name']}' ({first.get('kind')})",
        "loss": "in the loss function, after every module",
    }[first["what"]]
    return f"it arose on {names(list(bad))}, {where}"
