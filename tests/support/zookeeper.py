"""Runs animals under strategies on real ranks, each beside a plain loop in one process.

Many cells share one call of the ranks. A cell that fails on one rank must not take the next ones
with it: each has a process group of its own, and a rank that fails cuts that group's connections,
so that its peers fail at once instead of waiting. What kills or stops a rank is laid to the cell
that was under way, the ranks are replaced, and the rest goes on.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import socket
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import conformance
from conformance import WORKERS, Trajectory, arrays, each_rank, one_process, set_state, state_of
from shardlab import naming
from shardlab import world as worlds
from shardlab.errors import LOST_PEER, RankFailure, UsageError
from shardlab.launch.ranks import Ranks
from shardlab.naming import STRATEGIES
from shardlab.optim import optimizers
from shardlab.strategies import model_checks
from shardlab.strategies.base import Setup
from shardlab.strategies.sharded import pytorch_fsdp
from shardlab.world import World
from zoo import MICRO, STEPS, ZOO, Animal, Sample

CELL_S = 40.0  # no cell may take longer; on a busy machine some FSDP ones need over 20
PEER_S = 8.0  # no collective may take longer
STOPPED = 77  # exit code of a rank that was stopped after CELL_S

# The large epsilon: where the true gradient is zero, AdamW would make 1 of a rounding error.
OPTIMIZER = optimizers.of_class(torch.optim.AdamW, lr=0.05, weight_decay=0.1, eps=1e-3)
# Workers that exchange after every step of plain SGD are data parallelism.
PLAIN = optimizers.of_class(torch.optim.SGD, lr=0.05)
AS_SGD = {"every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
OPTIONS: dict[str, dict[str, Any]] = {
    **conformance.OPTIONS,
    "local_sgd": {"every": 1},
    "diloco": AS_SGD,
    "streaming_diloco": {**AS_SGD, "fragments": 1, "delay": 0},
}

_numbers = itertools.count(1)

Find = Callable[[str], Animal]  # an animal by its name: on a rank too


def of_the_zoo(name: str) -> Animal:
    return ZOO[name]


@dataclass
class Outcome:
    """How one rank fared in a cell."""

    kind: str  # "done", "refused" (text), "error" (text), "lost" its peer
    text: str = ""
    step: int = -1  # in which it was refused; -1: before the first
    course: Trajectory | None = None


@dataclass(frozen=True)
class Verdict:
    """equal, refused, WRONG, CRASH or HANG, and why."""

    kind: str
    text: str = ""
    step: int = -1

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.text else self.kind


# ------------------------------------------------------------------ one process


def optimizer_of(strategy: str) -> Any:
    return PLAIN if strategy in WORKERS else OPTIMIZER


def reference(animal: Animal, world: int, make_optimizer: Any = OPTIMIZER) -> Trajectory:
    """One process. Workers are evaluated as one, which leaves no trace in what each of them has."""
    model = animal.build(seed=0)
    evaluated: list[float] = []

    def shares(step: int) -> list[list[Sample]]:
        return [[animal.batch(step, r, m) for m in range(MICRO)] for r in range(world)]

    def evaluate(step: int) -> None:
        if step < STEPS - 1 or animal.evaluate is None:
            return
        before = state_of(model)
        for rank in each_rank(model, world):
            with torch.no_grad():
                value = animal.evaluate(model, animal.batch(step, rank, MICRO))
            evaluated.append(float(value))
        if make_optimizer is PLAIN:
            after = {n: (before[n][0], trains) for n, (_, trains) in state_of(model).items()}
            set_state(model, after)

    found = one_process(model, make_optimizer, animal.loss, shares, STEPS, before_step=evaluate)
    return replace(found, evaluated=evaluated)


# ------------------------------------------------------------------ on a rank


def train(animal: Animal, strategy: str, world: World, at: list[int]) -> Trajectory:
    """Nobody looks before the end of step 1: what a step leaves behind by mistake is then still
    there for the next. After that everybody does, and it must not matter."""
    course = Trajectory()
    instance = _make(animal, strategy, animal.build(seed=world.rank), world)
    for step in range(STEPS):
        at[0] = step
        if step == STEPS - 1 and animal.evaluate is not None:
            batch = animal.batch(step, world.rank, MICRO)
            with instance.as_one():
                course.evaluated.append(float(instance.infer(animal.evaluate, batch)))
        batches = [animal.batch(step, world.rank, m) for m in range(MICRO)]
        course.losses.append(float(instance.gradients(batches)))
        is_last = step == STEPS - 1
        course.grads.append(arrays(instance.full_grads()) if is_last else None)
        instance.step()
        course.params.append(arrays(instance.full_tensors()) if step else None)
    return course


def _make(animal: Animal, strategy: str, model: nn.Module, world: World) -> Any:
    make = naming.resolve(strategy, STRATEGIES, "strategy")
    options: dict[str, Any] = dict(OPTIONS.get(strategy, {}))
    if strategy == "pytorch_hsdp":
        options["shards"] = world.size
    setup = Setup(model, optimizer_of(strategy), animal.loss, world.mesh, blocks=animal.blocks)
    model_checks.refuse_unsupported(model, world.size)
    made = make(setup, **options)
    model_checks.refuse_sparse_gradients(made.params)
    return made


def run_cells(
    world: World, find: Find, cells: Sequence[tuple[int, str, str]], limit_s: float
) -> None:
    """Each cell: its number, an animal, a strategy. The outcomes are told as they come."""
    warnings.simplefilter("ignore")  # PyTorch's own, of what a model does on purpose
    inner, before = None, set[int]()
    for number, name, strategy in cells:
        world.tell({"cell": number, "rank": world.rank})
        if inner is None:
            before = _sockets()
            inner = _apart(world)
        at = [-1]
        with _limited(limit_s):
            try:
                outcome = Outcome("done", course=train(find(name), strategy, inner, at))
            except UsageError as error:
                outcome = Outcome("refused", str(error), at[0])
            except Exception as error:
                outcome = _failure(error, at[0])
            # A refusal at the start finds every rank at the same place, and nothing under way.
            is_clean = outcome.kind == "done" or (outcome.kind == "refused" and at[0] < 0)
            if not is_clean:
                _cut(_sockets() - before)
            world.tell({"cell": number, "rank": world.rank, "outcome": outcome})
            failed = torch.tensor(not is_clean, dtype=torch.int32)  # ()
            dist.all_reduce(failed, group=world.group)
            if failed:
                inner = None  # on none of its connections can anything be sent any more


def _apart(world: World) -> World:
    """The same ranks with new connections.

    DTensor remembers how it did things by mesh, and takes two meshes of the same ranks for one,
    with the connections of the first. The thread is the one thing in which they can differ.
    """
    group = dist.new_group(timeout=timedelta(seconds=PEER_S))
    number = next(_numbers)
    made: list[Any] = []

    def marked(mesh: Any) -> Any:
        mesh._thread_id, mesh._hash = number, None
        return mesh

    def init_device_mesh(kind: str, shape: tuple[int, int], mesh_dim_names: tuple[str, str]) -> Any:
        """One group of all ranks, as _make() asks for. PyTorch would take the world's own."""
        assert shape == (1, world.size)
        if not made:
            alone = [dist.new_group([rank]) for rank in range(world.size)][world.rank]
            ranks = torch.arange(world.size).reshape(shape)
            made.append(
                DeviceMesh.from_group(
                    [alone, group], kind, mesh=ranks, mesh_dim_names=mesh_dim_names
                )
            )
        return marked(made[0])

    pytorch_fsdp._meshes.clear()  # those that were made on connections which are cut now
    pytorch_fsdp.init_device_mesh = init_device_mesh  # type: ignore[assignment]
    return replace(world, mesh=marked(worlds.data_mesh(group, world.device)))


def _failure(error: Exception, step: int) -> Outcome:
    text = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0][:300]
    if any(words in text.lower() for words in LOST_PEER):
        return Outcome("lost", text, step)
    if "timed out" in text.lower():
        return Outcome("stuck", text, step)
    where = traceback.extract_tb(error.__traceback__)
    ours = [
        f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in where if "shardlab" in f.filename
    ]
    return Outcome("error", f"{text} (at {ours[-1]})" if ours else text, step)


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    timer = threading.Timer(seconds, os._exit, (STOPPED,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _sockets() -> set[int]:
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(descriptor.readlink()).startswith("socket:"):
                found.add(int(descriptor.name))
    return found


def _cut(descriptors: set[int]) -> None:
    """Gloo has no way to give a group up: without this, peers wait for their time-out."""
    for number in descriptors:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            connection.getpeername()  # not a listening socket: Gloo would abort
            connection.shutdown(socket.SHUT_RDWR)


# ------------------------------------------------------------------ in the parent


def run(
    get_ranks: Callable[[int], Ranks],
    size: int,
    find: Find,
    cells: Sequence[tuple[str, str]],
    limit_s: float = CELL_S,
) -> list[Verdict]:
    """A verdict for each (animal, strategy), in a world of this size."""
    verdicts: dict[int, Verdict] = {}
    heard: dict[int, dict[int, Outcome]] = {}
    under_way = -1

    def hear(event: Any) -> None:
        nonlocal under_way
        number = event["cell"]
        if "outcome" not in event:
            under_way = max(under_way, number)
            heard.setdefault(number, {})
            return
        heard[number][event["rank"]] = event["outcome"]
        if len(heard[number]) == size:
            animal, outcomes = find(cells[number][0]), heard.pop(number)
            ordered = [outcomes[r] for r in range(size)]
            expected = refer(animal, size, optimizer_of(cells[number][1]))
            verdicts[number] = judge(animal, ordered, expected)

    while left := [(i, *cell) for i, cell in enumerate(cells) if i not in verdicts]:
        under_way = left[0][0]
        try:
            deadline = 2 * limit_s + 2.0 * len(left)
            get_ranks(size).run(run_cells, find, left, limit_s, on_event=hear, deadline_s=deadline)
        except (RankFailure, UsageError) as failure:
            number = next(i for i, *_ in left if i not in verdicts and i >= under_way)
            said = [o for o in heard.get(number, {}).values() if o.kind == "error"]
            text = said[0].text if said else str(failure)
            stopped = f"code {STOPPED}" in str(failure) or "no answer" in str(failure)
            verdicts[number] = Verdict("HANG" if stopped and not said else "CRASH", text)
    return [verdicts[i] for i in range(len(cells))]


@functools.lru_cache(maxsize=1000)
def refer(animal: Animal, size: int, optimizer: Any = OPTIMIZER) -> Trajectory | Exception:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return reference(animal, size, optimizer)
        except Exception as error:  # one process cannot do it either
            return error


def judge(animal: Animal, outcomes: Sequence[Outcome], expected: Trajectory | Exception) -> Verdict:
    """What the ranks' outcomes amount to."""
    kinds = [o.kind for o in outcomes]
    by_kind = {o.kind: o for o in reversed(outcomes)}
    if "error" in kinds:
        return Verdict("CRASH", by_kind["error"].text)
    if "refused" in kinds:
        refusal = by_kind["refused"]
        if "done" in kinds:
            return Verdict("WRONG", f"only some ranks are refused: {refusal.text}")
        return Verdict("refused", refusal.text, refusal.step)
    if "stuck" in kinds or "lost" in kinds:
        return Verdict("HANG", by_kind.get("stuck", by_kind.get("lost", outcomes[0])).text)
    if isinstance(expected, Exception):
        return Verdict("WRONG", f"one process fails, {type(expected).__name__}: {expected}"[:300])
    for rank, outcome in enumerate(outcomes):
        assert outcome.course is not None
        difference = first_difference(outcome.course, expected, rank, animal.tolerance)
        if difference:
            return Verdict("WRONG", f"rank {rank}: {difference}")
    return Verdict("equal")


def first_difference(got: Trajectory, want: Trajectory, rank: int, tolerance: float) -> str | None:
    """One process was evaluated as each of the ranks."""
    own = replace(want, evaluated=want.evaluated[rank : rank + 1])
    return conformance.first_difference(got, own, tolerance)


_difference = conformance.difference
