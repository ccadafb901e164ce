"""What a run has really read, counted from the samples that were fed, not from the formula."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardlab.data import sampler

SHOWN = 8  # ids of repeated or missed samples that are listed


class Audit:
    """One rank's notes: the samples of every step that the loop has taken."""

    def __init__(self) -> None:
        self.ids: list[npt.NDArray[np.int64]] = []
        self.epochs: list[npt.NDArray[np.int64]] = []
        self.targets = 0
        self.steps = 0

    def note(self, read: Sequence[sampler.Draw], targets: int) -> None:
        self.ids += [part.ids for part in read]
        self.epochs += [part.epochs for part in read]
        self.targets += targets
        self.steps += 1

    def state(self) -> dict[str, Any]:
        """The notes as arrays, for a checkpoint."""
        notes = self.notes()
        counts = np.array([notes.pop("targets"), notes.pop("steps")], dtype=np.int64)
        return {**notes, "counts": counts}

    def add(self, state: Mapping[str, Any]) -> None:
        """Take over what a rank noted before a checkpoint."""
        self.ids.append(np.asarray(state["ids"]))
        self.epochs.append(np.asarray(state["epochs"]))
        self.targets += int(state["counts"][0])

    def notes(self) -> dict[str, Any]:
        """The notes in a form that is sent to the other ranks."""
        empty = [np.empty(0, dtype=np.int64)]
        return {
            "ids": np.concatenate(self.ids or empty),
            "epochs": np.concatenate(self.epochs or empty),
            "targets": self.targets,
            "steps": self.steps,
        }


def judge(
    notes: Sequence[Mapping[str, Any]],
    *,
    length: int,
    global_batch: int,
    mode: str,
    tokens_per_sample: int | None = None,
    left_over_tokens: int | None = None,
) -> dict[str, Any]:
    """The notes of all ranks against "each sample exactly once in each finished epoch"."""
    ids = np.concatenate([n["ids"] for n in notes])
    epochs = np.concatenate([n["epochs"] for n in notes])
    steps = min(n["steps"] for n in notes)
    finished = sampler.finished_epochs(steps, global_batch, length, mode)
    seen = [_epoch(ids[epochs == e], e, length, e < finished) for e in np.unique(epochs).tolist()]
    return {
        "mode": mode,
        "steps": steps,
        "length": length,
        "samples": len(ids),
        "samples_of_ranks": [len(n["ids"]) for n in notes],
        "targets": sum(n["targets"] for n in notes),
        "tokens": None if tokens_per_sample is None else len(ids) * tokens_per_sample,
        "left_over_tokens": left_over_tokens,  # at the stream's end, in no sample
        "finished_epochs": finished,
        "exactly_once": all(e["exactly_once"] for e in seen if e["finished"]) and finished > 0,
        "epochs": seen,
    }


def _epoch(ids: npt.NDArray[np.int64], epoch: int, length: int, finished: bool) -> dict[str, Any]:
    times = np.bincount(ids, minlength=length)
    repeated = np.flatnonzero(times > 1)
    missed = np.flatnonzero(times == 0)
    return {
        "epoch": epoch,
        "finished": finished,
        "samples": len(ids),
        "distinct": int(np.count_nonzero(times)),
        "exactly_once": len(times) == length and bool((times == 1).all()),
        "repeated": len(repeated),
        "repeated_ids": {str(i): int(times[i]) for i in repeated[:SHOWN].tolist()},  # id: times
        "missed": len(missed),
        "missed_ids": missed[:SHOWN].tolist(),
    }
