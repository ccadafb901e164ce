"""Exact resume: what was not put back, and which checkpoint survives.

A small replicated run with dropout, a buffer and AdamW: stopped, resumed, and not stopped.
"""

from __future__ import annotations

import hashlib
import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab.learn.exercise import Case, Evidence, Finding, Row, Rows, Stage, say

SAMPLES, INPUTS, WIDTH, BATCH = 20, 8, 160, 2
SAVES, LAST = (2, 6), 9  # steps after which is saved (the second in epoch 1), and the last one
RENAME_S = 0.25  # how long a rename takes here, so that a rank that does not wait for it shows
FULL_DISK = 48 << 10  # bytes that still fit into a file
TWICE = 1.6  # of the state's bytes, over all ranks: somebody has written what another has

RESUME, FEWER, MORE, FULL = "resume", "on fewer ranks", "on more ranks", "full disk"
SAVED_BY = 2  # ranks
CASES = (Case(RESUME, SAVED_BY), Case(FEWER, 1), Case(MORE, 3), Case(FULL, 1))


def run(at: Stage) -> dict[str, Any]:
    return {RESUME: resume, FULL: full_disk}.get(at.case.name, other_world)(at)


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
        taken = BATCH * dist.get_world_size()
        if self.position + taken > SAMPLES:
            self.epoch, self.position = self.epoch + 1, 0
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch))
        first = self.position + BATCH * dist.get_rank()
        self.position += taken
        return self.samples[order[first : first + BATCH]]  # (BATCH, INPUTS)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = int(state["epoch"]), int(state["position"])


class Run:
    """What a training script holds. ``fresh``: as a new process has it before loading."""

    def __init__(self, at: Stage, *, fresh: bool = False) -> None:
        self.at = at
        self.model = Toy(seed=77 if fresh else 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.loader = Loader()
        torch.manual_seed((900 if fresh else 100) + dist.get_rank())

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.model(self.loader.next()).square().mean()
        loss.backward()
        with self.at.spy.paused():
            for p in self.model.parameters():
                assert p.grad is not None
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        self.optimizer.step()

    def save(self, folder: Path, step: int) -> None:
        self.at.submission.save(folder, step, self.model, self.optimizer, self.loader)

    def load(self, folder: Path) -> Any:
        returned = self.at.submission.load(folder, self.model, self.optimizer, self.loader)
        return returned if isinstance(returned, int) else repr(returned)

    def state(self) -> dict[str, Any]:
        """All that the next step depends on; tensors as fingerprints."""
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


def _print(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


# ------------------------------------------------------------------ on a rank


def resume(at: Stage) -> dict[str, Any]:
    """Without a stop; with saves; from the last save."""
    whole = Run(at)
    states = {}
    for step in range(1, LAST + 1):
        whole.step()
        states[step] = whole.state()
    folder = _shared("run", at)
    saving = Run(at)
    saves = []
    for step in range(1, LAST + 1):
        saving.step()
        if step in SAVES:
            saves.append(_watched_save(saving, folder, step))
    resumed = Run(at, fresh=True)
    returned = resumed.load(folder)
    loaded = resumed.state()
    for _ in range(SAVES[-1], LAST):
        resumed.step()
    return {
        "saves": saves,
        # What the parameters and Adam's two moments take.
        "bytes": 3 * sum(p.numel() * p.element_size() for p in whole.model.parameters()),
        "returned": returned,
        "loaded": loaded,
        "wanted": states[SAVES[-1]],
        "is_exact": resumed.state() == states[LAST],
    }


def other_world(at: Stage) -> dict[str, Any]:
    """The files that the first case has written, loaded by another number of ranks."""
    run = Run(at, fresh=True)
    try:
        run.load(Path("run").absolute())
    except Exception as error:
        return {"error": _in_a_line(error)}
    loaded = run.state()
    run.step()
    return {"error": None, "loaded": loaded}


def full_disk(at: Stage) -> dict[str, Any]:
    """A good save, then one for which the disk has no room, then load."""
    folder = _shared("full", at)
    run = Run(at)
    run.step()
    run.save(folder, 1)
    first = run.state()
    run.step()
    second = run.state()
    found: dict[str, Any] = {"raised": False, "error": None}
    # Writing beyond the limit fails, as on a full disk. (Python ignores the signal that comes.)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_DISK, limits[1]))
    try:
        run.save(folder, 2)
    except Exception:
        found["raised"] = True
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    fresh = Run(at, fresh=True)
    try:
        found["returned"] = fresh.load(folder)
    except Exception as error:
        return found | {"error": _in_a_line(error)}
    loaded = fresh.state()["parameters"]
    return found | {
        "is_first": loaded == first["parameters"],
        "is_second": loaded == second["parameters"],
    }


def _watched_save(run: Run, folder: Path, step: int) -> dict[str, Any]:
    """A save in which renames are slow: what it wrote and changed, and was it done on return?"""
    spy = run.at.spy
    before, written, calls = run.state(), _written(), len(spy.calls)
    with mock.patch.multiple(os, replace=_slow(os.replace), rename=_slow(os.rename)):
        run.save(folder, step)
    returned_ns = time.time_ns()
    # Gloo writes to its sockets, which are counted, too: what the calls may have sent is not ours.
    sent = sum(call["bytes"] for call in spy.calls[calls:])
    written = -1 if written < 0 else max(0, _written() - written - sent)
    with spy.paused():
        dist.barrier()
    done_ns = max((p.stat().st_ctime_ns for p in folder.rglob("*") if p.is_file()), default=0)
    after = run.state()
    return {
        "step": step,
        "written": written,
        "early_ms": (done_ns - returned_ns) / 1e6,
        "disturbs": [name for name in after if after[name] != before[name]],
    }


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def _shared(name: str, at: Stage) -> Path:
    """A folder in the place where all ranks of this check work."""
    folder = Path(name).absolute()
    folder.mkdir(exist_ok=True)
    with at.spy.paused():
        dist.barrier()
    return folder


def _written() -> int:
    """Bytes that this process has given to write(); -1 where the system does not count them."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return -1
    return int(next(line for line in lines if line.startswith("wchar")).split()[1])


def _slow(original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        time.sleep(RENAME_S)
        return original(*args, **kwargs)

    return wrapper


# ------------------------------------------------------------------ what is wrong


def judge(evidence: Evidence) -> list[Finding]:
    findings: list[Finding] = []
    if ranks := evidence.get(RESUME):
        found = list(_put_back(ranks))
        if not found and not all(row["is_exact"] for row in ranks):
            found = [say("not-exact")]
        findings += [replace(f, case=RESUME) for f in (*found, *_saving(ranks))]
    for name in (FEWER, MORE):
        if name in evidence and not findings:
            wanted = evidence[RESUME][0]["wanted"]
            findings += [replace(f, case=name) for f in _other_world(evidence[name], wanted)][:1]
    if FULL in evidence:
        forgot_model = any(f.cause == "forgot-model" for f in findings)
        findings += [replace(f, case=FULL) for f in _full(evidence[FULL][0], forgot_model)]
    return findings


def _put_back(ranks: Rows) -> Iterator[Finding]:
    """Everything that the next step depends on, against the run that was not stopped."""
    for rank, row in enumerate(ranks):
        if row["returned"] != SAVES[-1]:
            yield say("wrong-step", step=SAVES[-1], returned=row["returned"], rank=rank)
            break
    wrong = {
        what: [r for r, row in enumerate(ranks) if row["loaded"][what] != row["wanted"][what]]
        for what in ranks[0]["wanted"]
    }
    numbers = {what: " and ".join(map(str, bad)) for what, bad in wrong.items()}
    if wrong["parameters"]:
        yield say("forgot-model", ranks=numbers["parameters"])
    elif wrong["buffers"]:
        yield say("forgot-buffers", ranks=numbers["buffers"])
    if bad := wrong["optimizer"]:
        has_state = ranks[bad[0]]["loaded"]["optimizer"]
        key = "forgot-optimizer/other" if has_state else "forgot-optimizer"
        yield say(key, ranks=numbers["optimizer"])
    if bad := wrong["loader"]:
        at, wanted = (ranks[bad[0]][which]["loader"] for which in ("loaded", "wanted"))
        yield say("forgot-data", ranks=numbers["loader"], at=at, wanted=wanted)
    if bad := wrong["rng"]:
        loaded = ranks[bad[0]]["loaded"]["rng"]
        owners = [r for r, row in enumerate(ranks) if row["wanted"]["rng"] == loaded]
        if owners:
            yield say("rng-of-another-rank", rank=bad[0], owner=owners[0])
        else:
            yield say("forgot-rng", ranks=numbers["rng"])


def _saving(ranks: Rows) -> Iterator[Finding]:
    """What the saves did."""
    for saves in zip(*(row["saves"] for row in ranks), strict=True):
        ms, rank = max((save["early_ms"], r) for r, save in enumerate(saves))
        if ms > 0:
            yield say("returned-early", rank=rank, ms=ms, step=saves[0]["step"])
            break
    names = sorted({name for row in ranks for save in row["saves"] for name in save["disturbs"]})
    if names:
        yield say("save-disturbs", names=", ".join(names))
    written = [row["saves"][-1]["written"] for row in ranks]
    if min(written) >= 0 and sum(written) > TWICE * ranks[0]["bytes"]:
        each = ", ".join(f"{size / 1000:.0f} kB (rank {rank})" for rank, size in enumerate(written))
        yield say("written-by-all", each=each, whole=ranks[0]["bytes"] / 1000)


def _other_world(ranks: Rows, wanted: Row) -> Iterator[Finding]:
    """A rank that has a saved random state takes it; the others keep theirs."""
    for rank, row in enumerate(ranks):
        facts = {"saved_by": SAVED_BY, "n": len(ranks), "rank": rank}
        if row["error"]:
            yield say("world-fixed", error=row["error"], **facts)
            continue
        for what in ("parameters", "buffers", "optimizer", "loader"):
            if row["loaded"][what] != wanted[what]:
                yield say("world-fixed/other", what=what, **facts)


def _full(row: Row, forgot_model: bool) -> Iterator[Finding]:
    if row["error"]:
        yield say("not-atomic", error=row["error"])
    elif row["is_second"] or forgot_model:
        return  # written in pieces that did fit; or there is no way to tell what was loaded
    elif not row["is_first"]:
        yield say("not-atomic/neither", returned=row["returned"])
    elif not row["raised"]:
        yield say("error-hidden")
