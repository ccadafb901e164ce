"""Runs animals under strategies on real ranks, each beside a plain loop in one process.

Many cells share one call of the ranks. A cell that fails on one rank must not take the next ones
with it: each has a process group of its own, and a rank that fails cuts that group's connections,
so that its peers fail at once instead of waiting. What kills or stops a rank is laid to the cell
that was under way, the ranks are replaced, and the rest goes on.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
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
from torch.distributed import device_mesh

from shardlab import naming
from shardlab import world as worlds
from shardlab.errors import RankFailure, UsageError
from shardlab.launch import LOST_PEER, Ranks
from shardlab.strategies import STRATEGIES, pytorch_hsdp
from shardlab.world import World
from zoo import MICRO, STEPS, Animal

CELL_S = 20.0  # no cell may take longer
PEER_S = 8.0  # no collective may take longer
STOPPED = 77  # exit code of a rank that was stopped after CELL_S

# The large epsilon: where the true gradient is zero, AdamW would make 1 of a rounding error.
OPTIMIZER = functools.partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1, eps=1e-3)
OPTIONS = {name: {"find_unused_parameters": True} for name in ("pytorch_ddp", "pytorch_zero1")}

_numbers = itertools.count(1)

Arrays = dict[str, np.ndarray | None]
Find = Callable[[str], Animal]  # an animal by its name: on a rank too


@dataclass
class Course:
    """What can be seen of a run: losses and evaluations, gradients and tensors by step."""

    losses: list[float] = field(default_factory=list)
    grads: list[Arrays] = field(default_factory=list)
    tensors: list[Arrays] = field(default_factory=list)
    unseen: Arrays = field(default_factory=dict)  # tensors at the end of a run without looking


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


def reference(animal: Animal, world: int) -> Course:
    """A plain loop that sees every rank's micro-batches one after another.

    What forward changes beside the gradients (buffers, frozen parameters) it changes on each rank
    from the same start, and rank 0's is kept, as DDP does with buffers.
    """
    model = animal.build(seed=0)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = OPTIMIZER(list(trained.values()))
    course = Course()
    for step in range(STEPS):
        if step == STEPS - 1:
            course.losses += [_evaluated(animal, model, step, r) for r in range(world)]
        share = [[animal.batch(step, r, m) for m in range(MICRO)] for r in range(world)]
        count = max(1, sum(b.count for batches in share for b in batches))
        start = _state(model, trained)
        kept, total = start, 0.0
        for rank, batches in enumerate(share):
            _set(model, trained, start)
            for batch in batches:
                loss = animal.loss(model, batch)
                (loss / count).backward()
                total += float(loss.detach())
            if rank == 0:
                kept = _state(model, trained)
        _set(model, trained, kept)
        course.losses.append(total / count)
        course.grads.append(arrays({n: p.grad for n, p in trained.items()}))
        optimizer.step()
        optimizer.zero_grad()
        tensors = (*model.named_parameters(), *model.named_buffers())
        course.tensors.append(arrays(dict(tensors)))
    course.unseen = course.tensors[-1]
    return course


def _evaluated(animal: Animal, model: nn.Module, step: int, rank: int) -> float:
    if animal.evaluate is None:
        return 0.0
    with torch.no_grad():
        return float(animal.evaluate(model, animal.batch(step, rank, 7)))


def _state(model: nn.Module, trained: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: t.detach().clone() for name, t in tensors if name not in trained}


@torch.no_grad()
def _set(model: nn.Module, trained: dict[str, nn.Parameter], values: dict[str, Tensor]) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in trained and not torch.equal(tensor, values[name]):
            tensor.copy_(values[name])


# ------------------------------------------------------------------ on a rank


def _course(animal: Animal, strategy: str, world: World, at: list[int]) -> Course:
    course = Course()
    for looks in (True, False):
        model = animal.build(seed=world.rank)
        instance = _make(animal, strategy, model, world)
        for step in range(STEPS):
            at[0] = max(at[0], step)
            if step == STEPS - 1 and looks:
                evaluated = _infer(animal, instance, step, world.rank)
                course.losses += world.gather(evaluated)
            elif step == STEPS - 1:
                _infer(animal, instance, step, world.rank)
            batches = [animal.batch(step, world.rank, m) for m in range(MICRO)]
            loss = float(instance.gradients(batches))
            if looks:
                course.losses.append(loss)
                course.grads.append(arrays(instance.full_grads()))
            instance.step()
            if looks:
                course.tensors.append(arrays(instance.full_params()))
        if not looks:
            course.unseen = arrays(instance.full_params())
        at[0] = STEPS
    return course


def _infer(animal: Animal, instance: Any, step: int, rank: int) -> float:
    if animal.evaluate is None:
        return 0.0
    return float(instance.infer(animal.evaluate, animal.batch(step, rank, 7)))


def _make(animal: Animal, strategy: str, model: nn.Module, world: World) -> Any:
    make = naming.resolve(strategy, STRATEGIES, "strategy")
    known = inspect.signature(make).parameters
    options: dict[str, Any] = dict(OPTIONS.get(strategy, {}))
    if "blocks" in known:
        options["blocks"] = animal.blocks
    if "shards" in known:
        options["shards"] = world.size
    return make(model, OPTIMIZER, animal.loss, world.mesh, **options)


def run_cells(world: World, find: Find, cells: Sequence[tuple[int, str, str]]) -> None:
    """Each cell: its number, an animal, a strategy. The outcomes are told as they come."""
    warnings.simplefilter("ignore")  # PyTorch's own, of what a model does on purpose
    inner, before = None, set[int]()
    for number, name, strategy in cells:
        world.tell({"cell": number, "rank": world.rank})
        if inner is None:
            before = _sockets()
            inner = _apart(world)
        at = [-1]
        with _limited(CELL_S):
            try:
                outcome = Outcome("done", course=_course(find(name), strategy, inner, at))
            except UsageError as error:
                outcome = Outcome("refused", str(error), at[0])
            except Exception as error:
                outcome = _failure(error, at[0])
            if outcome.kind != "done":
                _cut(_sockets() - before)
            world.tell({"cell": number, "rank": world.rank, "outcome": outcome})
            if any(kind != "done" for kind in world.gather(outcome.kind)):
                inner = None  # on none of its connections can anything be sent any more


def _apart(world: World) -> World:
    """The same ranks with new connections.

    DTensor remembers how it did things by mesh, and takes two meshes of the same ranks for one,
    with the connections of the first. The thread is the one thing in which they can differ.
    """
    group = dist.new_group(timeout=timedelta(seconds=PEER_S))
    made: dict[Any, Any] = {}
    number = next(_numbers)

    def marked(mesh: Any) -> Any:
        mesh._thread_id, mesh._hash = number, None
        return mesh

    def init_device_mesh(kind: str, shape: tuple[int, ...], **names: Any) -> Any:
        if shape not in made:  # a group more for each cell would be slow
            made[shape] = marked(device_mesh.init_device_mesh(kind, shape, **names))
        return made[shape]

    pytorch_hsdp.init_device_mesh = init_device_mesh  # type: ignore[assignment]
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
) -> list[Verdict]:
    """A verdict for each (animal, strategy), in a world of this size."""
    references: dict[str, Course | Exception] = {}
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
            name = cells[number][0]
            if name not in references:
                references[name] = _refer(find(name), size)
            outcomes = heard.pop(number)
            ordered = [outcomes[r] for r in range(size)]
            verdicts[number] = judge(find(name), ordered, references[name])
            on_verdict(number, verdicts[number])

    while left := [(i, *cell) for i, cell in enumerate(cells) if i not in verdicts]:
        under_way = left[0][0]
        try:
            deadline = 2 * CELL_S + 2.0 * len(left)
            get_ranks(size).run(run_cells, find, left, on_event=hear, deadline_s=deadline)
        except (RankFailure, UsageError) as failure:
            number = next(i for i, *_ in left if i not in verdicts and i >= under_way)
            said = [o for o in heard.get(number, {}).values() if o.kind == "error"]
            text = said[0].text if said else str(failure)
            stopped = f"code {STOPPED}" in str(failure) or "no answer" in str(failure)
            verdicts[number] = Verdict("HANG" if stopped and not said else "CRASH", text)
            on_verdict(number, verdicts[number])
    return [verdicts[i] for i in range(len(cells))]


def _refer(animal: Animal, size: int) -> Course | Exception:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return reference(animal, size)
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
        difference = first_difference(outcome.course, expected, animal.tolerance)
        if difference:
            return Verdict("WRONG", f"rank {rank}: {difference}")
    return Verdict("equal")


def first_difference(got: Course, want: Course, tolerance: float) -> str | None:
    for step in range(STEPS):
        for what in ("grads", "tensors"):
            text = _difference(getattr(got, what)[step], getattr(want, what)[step], tolerance)
            if text:
                return f"step {step}: {what} {text}"
    for i, (a, b) in enumerate(zip(got.losses, want.losses, strict=True)):
        if not abs(a - b) <= tolerance * max(1.0, abs(b)):
            return f"loss {i} of {len(want.losses)} is {a}, not {b}"
    text = _difference(got.unseen, want.unseen, tolerance)
    return f"without looking: {text}" if text else None


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
