"""A small replicated run with dropout, a buffer and AdamW: stopped, resumed, and not stopped."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab.learn.exercise import Rejected
from shardlab.learn.spy import Spy

SAMPLES, INPUTS, WIDTH, BATCH = 20, 8, 160, 2
SAVES, LAST = (2, 6), 9  # steps after which is saved (the second in epoch 1), and the last one
RENAME_S = 0.25  # how long a rename takes here: whoever does not wait for it is found out
FULL_DISK = 48 << 10  # bytes that still fit into a file


class Toy(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(
            nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH),
            nn.Dropout(0.3), nn.Linear(WIDTH, 1),
        )  # fmt: skip
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:  # (batch, inputs)
        self.calls += 1
        result: Tensor = self.layers(x) / self.calls.sqrt()
        return result


class Loader:
    """Each step the next samples of this epoch's order, a share for each rank."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.samples = torch.randn(SAMPLES, INPUTS, generator=generator)
        self.epoch = 0
        self.position = 0  # samples of this epoch that all ranks together have taken

    def next(self) -> Tensor:
        rank, world = dist.get_rank(), dist.get_world_size()
        taken = BATCH * world
        if self.position + taken > SAMPLES:
            self.epoch, self.position = self.epoch + 1, 0
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch))
        first = self.position + BATCH * rank
        self.position += taken
        return self.samples[order[first : first + BATCH]]  # (BATCH, INPUTS)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = int(state["epoch"]), int(state["position"])


class Run:
    """What a training script holds. ``fresh``: as a new process has it before loading."""

    def __init__(self, spy: Spy, *, fresh: bool = False) -> None:
        self.spy = spy
        self.model = Toy(seed=77 if fresh else 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.loader = Loader()
        torch.manual_seed((900 if fresh else 100) + dist.get_rank())

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.model(self.loader.next()).square().mean()
        loss.backward()
        with self.spy.paused():
            for p in self.model.parameters():
                assert p.grad is not None
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        self.optimizer.step()

    def save(self, submission: ModuleType, folder: Path, step: int) -> None:
        _function(submission, "save")(folder, step, self.model, self.optimizer, self.loader)

    def load(self, submission: ModuleType, folder: Path) -> Any:
        return _function(submission, "load")(folder, self.model, self.optimizer, self.loader)

    def state(self) -> dict[str, Any]:
        """All that the next step depends on, copied; tensors as numbers that tell them apart."""
        held = self.optimizer.state_dict()["state"]
        return {
            "parameters": [_print(p) for p in self.model.parameters()],
            "buffers": [_print(b) for b in self.model.buffers()],
            "optimizer": [
                [_print(v) if isinstance(v, Tensor) else v for _, v in sorted(row.items())]
                for _, row in sorted(held.items())
            ],
            "loader": self.loader.state_dict(),
            "rng": _print(torch.get_rng_state()),
        }

    @property
    def bytes(self) -> int:
        """Of parameters and Adam's two moments."""
        return 3 * sum(p.numel() * p.element_size() for p in self.model.parameters())


def _function(submission: ModuleType, name: str) -> Callable[..., Any]:
    function = getattr(submission, name, None)
    if not callable(function):
        raise Rejected("missing", f"your file has no function {name}")
    result: Callable[..., Any] = function
    return result


def _print(tensor: Tensor) -> list[int]:
    """A fingerprint: equal for equal bits, and hardly otherwise."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).to(torch.int64)
    places = torch.arange(1, len(data) + 1)
    return [len(data), int(data.sum()), int((data * places % 1000003).sum())]


# ------------------------------------------------------------------ on a rank


def resume(submission: ModuleType, spy: Spy) -> dict[str, Any]:
    """Without a stop; with saves; from the last save."""
    whole = Run(spy)
    states = {}
    for step in range(1, LAST + 1):
        whole.step()
        states[step] = whole.state()
    folder = _shared("run", spy)
    saving = Run(spy)
    saves = []
    for step in range(1, LAST + 1):
        saving.step()
        if step in SAVES:
            before = saving.state()
            saves.append(_timed_save(saving, submission, folder, step, spy))
            saves[-1]["disturbs"] = _differences(saving.state(), before)
    resumed = Run(spy, fresh=True)
    returned = resumed.load(submission, folder)
    loaded = resumed.state()
    for _ in range(SAVES[-1], LAST):
        resumed.step()
    rngs = _everyones(states[SAVES[-1]]["rng"], spy)
    return {
        "saves": saves,
        "bytes": whole.bytes,
        "folder_bytes": sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()),
        "returned": returned if isinstance(returned, int) else repr(returned),
        "wanted_step": SAVES[-1],
        "loaded": loaded,
        "wanted": states[SAVES[-1]],
        "rng_of": [r for r, state in enumerate(rngs) if state == loaded["rng"]],
        "final": resumed.state(),
        "wanted_final": states[LAST],
    }


def other_world(submission: ModuleType, spy: Spy) -> dict[str, Any]:
    """The files that the first case has written, loaded by another number of ranks."""
    run = Run(spy, fresh=True)
    try:
        returned = run.load(submission, Path("run").absolute())
    except Exception as error:
        return {
            "error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
        }
    loaded = run.state()
    run.step()
    return {"error": None, "returned": returned, "loaded": loaded}


def full_disk(submission: ModuleType, spy: Spy) -> dict[str, Any]:
    """A good save, then one for which the disk has no room, then load."""
    folder = _shared("full", spy)
    run = Run(spy)
    run.step()
    run.save(submission, folder, 1)
    first = run.state()
    run.step()
    second = run.state()
    raised = None
    with _file_limit(FULL_DISK):
        try:
            run.save(submission, folder, 2)
        except Exception as error:
            raised = type(error).__name__
    fresh = Run(spy, fresh=True)
    try:
        returned = fresh.load(submission, folder)
    except Exception as error:
        text = str(error).strip().partition("\n")[0][:200]
        return {"raised": raised, "load_error": f"{type(error).__name__}: {text}"}
    loaded = fresh.state()
    return {
        "raised": raised,
        "load_error": None,
        "returned": returned,
        "is_first": loaded["parameters"] == first["parameters"],
        "is_second": loaded["parameters"] == second["parameters"],
    }


def _timed_save(
    run: Run, submission: ModuleType, folder: Path, step: int, spy: Spy
) -> dict[str, Any]:
    """A save in which renames are slow; who wrote how much, and who returned before it was done."""
    written, calls = _written(), len(spy.calls)
    with _slow_renames():
        run.save(submission, folder, step)
    returned_ns = time.time_ns()
    # Gloo writes to its sockets, which are counted, too: what the calls may have sent is not ours.
    sent = sum(call["bytes"] for call in spy.calls[calls:])
    written = -1 if written < 0 else max(0, _written() - written - sent)
    with spy.paused():
        dist.barrier()
    done_ns = max((p.stat().st_ctime_ns for p in folder.rglob("*") if p.is_file()), default=0)
    return {"step": step, "written": written, "early_ms": (done_ns - returned_ns) / 1e6}


def _differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [name for name in a if a[name] != b[name]]


def _everyones(value: Any, spy: Spy) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    with spy.paused():
        dist.all_gather_object(values, value)
    return values


def _shared(name: str, spy: Spy) -> Path:
    """A folder in the place where all ranks of this check work."""
    folder = Path(name).absolute()
    folder.mkdir(exist_ok=True)
    with spy.paused():
        dist.barrier()
    return folder


def _written() -> int:
    """Bytes that this process has given to write(), where the system says so; else -1."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return -1
    return int(next(line for line in lines if line.startswith("wchar")).split()[1])


@contextlib.contextmanager
def _slow_renames() -> Iterator[None]:
    functions = {name: getattr(os, name) for name in ("replace", "rename")}

    def slow(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            time.sleep(RENAME_S)
            return original(*args, **kwargs)

        return wrapper

    for name, original in functions.items():
        setattr(os, name, slow(original))
    try:
        yield
    finally:
        for name, original in functions.items():
            setattr(os, name, original)


@contextlib.contextmanager
def _file_limit(size: int) -> Iterator[None]:
    """Writing beyond ``size`` fails, as on a full disk. (Python ignores the signal that comes.)"""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
