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
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from conformance import WORKERS
from shardlab import naming
from shardlab import world as worlds
from shardlab.errors import LOST_PEER, RankFailure, UsageError
from shardlab.naming import STRATEGIES
from shardlab.optim import factory
from shardlab.run.ranks import Ranks
from shardlab.strategies import groups
from shardlab.strategies.base import Setup
from shardlab.world import World
from zoo import MICRO, STEPS, Animal

CELL_S = 20.0  # no cell may take longer
PEER_S = 8.0  # no collective may take longer
STOPPED = 77  # exit code of a rank that was stopped after CELL_S

# The large epsilon: where the true gradient is zero, AdamW would make 1 of a rounding error.
OPTIMIZER = factory.of_class(torch.optim.AdamW, lr=0.05, weight_decay=0.1, eps=1e-3)
# Workers that exchange after every step of plain SGD are data parallelism.
PLAIN = factory.of_class(torch.optim.SGD, lr=0.05)
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"find_unused_parameters": True} for name in ("pytorch_ddp", "pytorch_zero1")},
    "local_sgd": {"every": 1},
    "diloco": {"every": 1, "outer_lr": 1.0, "outer_momentum": 0.0},
    "streaming_diloco": {
        "every": 1,
        "outer_lr": 1.0,
        "outer_momentum": 0.0,
        "fragments": 1,
        "delay": 0,
    },
}

_numbers = itertools.count(1)

Arrays = dict[str, np.ndarray | None]
Find = Callable[[str], Animal]  # an animal by its name: on a rank too


@dataclass
class Course:
    """What is seen of a run."""

    losses: list[float] = field(default_factory=list)  # of each step
    grads: Arrays = field(default_factory=dict)  # of the last step
    tensors: dict[int, Arrays] = field(default_factory=dict)  # after each step but the first
    evaluated: float | list[float] = 0.0  # before the last step; of one process: by rank


@dataclass
class Outcome:
    """How one rank fared in a cell."""

    kind: str  # "done", "refused" (text), "error" (text), "lost" its peer
    text: str = ""
    step: int = -1  # in which it was refused; -1: before the first
    course: Course | None = None


@dataclass(frozen=True)
class Verdict:
    """equal, refused, WRONG, CRASH or HANG, and why."""

    kind: str
    text: str = ""
    step: int = -1

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.text else self.kind


def arrays(tensors: dict[str, Tensor | None]) -> Arrays:
    return {name: None if t is None else _plain(t).numpy().copy() for name, t in tensors.items()}


def _plain(tensor: Tensor) -> Tensor:
    """What numpy takes: it has no bfloat16, and knows no sparse tensors."""
    tensor = tensor.detach()
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    return tensor.double() if tensor.dtype is torch.bfloat16 else tensor


# ------------------------------------------------------------------ one process


def optimizer_of(strategy: str) -> Any:
    return PLAIN if strategy in WORKERS else OPTIMIZER


def reference(animal: Animal, world: int, make_optimizer: Any = OPTIMIZER) -> Course:
    """A plain loop that sees every rank's micro-batches one after another.

    What forward changes beside the gradients (buffers, parameters, which of them train) it changes
    on each rank from the same start, and rank 0's is kept, as DDP does with buffers. Workers are
    evaluated as one, which leaves no trace in what each of them has.
    """
    model = animal.build(seed=0)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = make_optimizer(trained)
    course = Course()
    for step in range(STEPS):
        if step == STEPS - 1 and animal.evaluate is not None:
            course.evaluated, before = [], _state(model)
            for rank in _each_rank(model, world):
                with torch.no_grad():
                    value = animal.evaluate(model, animal.batch(step, rank, MICRO))
                course.evaluated.append(float(value))
            if make_optimizer is PLAIN:
                _set(model, {n: (before[n][0], trains) for n, (_, trains) in _state(model).items()})
        share = [[animal.batch(step, r, m) for m in range(MICRO)] for r in range(world)]
        count = max(1, sum(b.count for batches in share for b in batches))
        total = 0.0
        for rank in _each_rank(model, world):
            for batch in share[rank]:
                loss = animal.loss(model, batch)
                (loss / count).backward()
                total += float(loss.detach())
        course.losses.append(total / count)
        course.grads = arrays({n: p.grad for n, p in trained.items()})
        optimizer.step()
        optimizer.zero_grad()
        tensors = (*model.named_parameters(), *model.named_buffers())
        course.tensors[step] = arrays(dict(tensors))
    return course


def _each_rank(model: nn.Module, world: int) -> Iterator[int]:
    """The ranks in turn, each with the state that the first has found; the first one's stays."""
    start = kept = _state(model)
    for rank in range(world):
        _set(model, start)
        yield rank
        if rank == 0:
            kept = _state(model)
    _set(model, kept)


State = dict[str, tuple[Tensor, bool]]  # the value, and whether it trains now


def _state(model: nn.Module) -> State:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: (t.detach().clone(), t.requires_grad) for name, t in tensors}


@torch.no_grad()
def _set(model: nn.Module, state: State) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        value, trains = state[name]
        if not torch.equal(tensor, value):
            tensor.copy_(value)
        if tensor.is_leaf:
            tensor.requires_grad_(trains)


# ------------------------------------------------------------------ on a rank


def _course(animal: Animal, strategy: str, world: World, at: list[int]) -> Course:
    """Nobody looks before the end of step 1: what a step leaves behind by mistake is then still
    there for the next. After that everybody does, and it must not matter."""
    course = Course()
    instance = _make(animal, strategy, animal.build(seed=world.rank), world)
    for step in range(STEPS):
        at[0] = step
        if step == STEPS - 1 and animal.evaluate is not None:
            batch = animal.batch(step, world.rank, MICRO)
            with instance.as_one():
                course.evaluated = float(instance.infer(animal.evaluate, batch))
        batches = [animal.batch(step, world.rank, m) for m in range(MICRO)]
        course.losses.append(float(instance.gradients(batches)))
        if step == STEPS - 1:
            course.grads = arrays(instance.full_grads())
        instance.step()
        if step:
            course.tensors[step] = arrays(instance.full_params())
    return course


def _make(animal: Animal, strategy: str, model: nn.Module, world: World) -> Any:
    make = naming.resolve(strategy, STRATEGIES, "strategy")
    options: dict[str, Any] = dict(OPTIONS.get(strategy, {}))
    if strategy == "pytorch_hsdp":
        options["shards"] = world.size
    setup = Setup(model, optimizer_of(strategy), animal.loss, world.mesh, blocks=animal.blocks)
    return make(setup, **options)


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
                outcome = Outcome("done", course=_course(find(name), strategy, inner, at))
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

    groups._meshes.clear()  # those that were made on connections which are cut now
    groups.init_device_mesh = init_device_mesh  # type: ignore[assignment]
    return replace(world, mesh=marked(worlds._mesh(group, world.device)))


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
    on_verdict: Callable[[int, Verdict], None] = lambda _number, _verdict: None,
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
            verdicts[number] = judge(
                animal, ordered, refer(animal, size, optimizer_of(cells[number][1]))
            )
            on_verdict(number, verdicts[number])

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
            on_verdict(number, verdicts[number])
    return [verdicts[i] for i in range(len(cells))]


@functools.lru_cache(maxsize=1000)
def refer(animal: Animal, size: int, optimizer: Any = OPTIMIZER) -> Course | Exception:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return reference(animal, size, optimizer)
        except Exception as error:  # one process cannot do it either
            return error


def judge(animal: Animal, outcomes: Sequence[Outcome], expected: Course | Exception) -> Verdict:
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


def first_difference(got: Course, want: Course, rank: int, tolerance: float) -> str | None:
    for step, (a, b) in enumerate(zip(got.losses, want.losses, strict=True)):
        if not abs(a - b) <= tolerance * max(1.0, abs(b)):
            return f"the loss of step {step} is {a}, not {b}"
        if step in got.tensors:
            text = _difference(got.tensors[step], want.tensors[step], tolerance)
            if text:
                return f"after step {step} {text}"
    text = _difference(got.grads, want.grads, tolerance)
    if text:
        return f"the gradient {text}"
    if isinstance(want.evaluated, list):
        error = abs(got.evaluated - want.evaluated[rank])  # type: ignore[operator]
        if not error <= tolerance:
            return f"an evaluation is off by {error:.1e}"
    return None


def _difference(got: Arrays, want: Arrays, tolerance: float) -> str | None:
    if got.keys() != want.keys():
        return f"has names {sorted(got.keys() ^ want.keys())} too many or too few"
    for name in want:
        a, b = got[name], want[name]
        if (a is None) != (b is None):
            return f"{name} is {'None' if a is None else 'there'}, in one process it is not"
        if a is None or b is None:
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name} is {a.dtype} {a.shape}, not {b.dtype} {b.shape}"
        if a.size and not np.allclose(a, b, rtol=tolerance, atol=tolerance):
            return f"{name} is off by {np.abs(a - b).max():.1e}"
    return None
