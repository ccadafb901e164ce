"""Token shards: which places of the stream each rank reads, told from the tokens it returns.

No token occurs twice in the stream, so a token says where it was read.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardlab.data.tokens import HEADER, MAGIC, write_shard
from shardlab.learn import mistakes, toys
from shardlab.learn.exercise import (
    Case,
    Finding,
    Rejected,
    Row,
    Rows,
    Stage,
    each_step,
    judging,
    say,
)

LEAST = 1000  # of the tokens; what a header has is below it, but for half of its magic number
IN_A_MAGIC = MAGIC % 2**16
SMALL = {"batch": 2, "seq_len": 5}
CASES = (
    Case("two shards", 2, {**SMALL, "sizes": [73, 64], "steps": 6}),
    Case("a shard shorter than a row", 2, {**SMALL, "sizes": [33, 41, 3, 58], "steps": 6}),
    Case("three ranks", 3, {"batch": 3, "seq_len": 4, "sizes": [50, 97, 40], "steps": 5}),
    Case("just enough for the last step", 2, {**SMALL, "sizes": [25, 16], "steps": 5}),
    Case("one token too few", 2, {**SMALL, "sizes": [25, 15], "steps": 3}),
    Case("continues", 2, {**SMALL, "sizes": [33, 41, 45], "steps": 4, "saved_by": 2}),
    Case("continues on more ranks", 3, {**SMALL, "sizes": [33, 41, 90], "steps": 3, "saved_by": 2}),
    Case("not a shard", 2, {"bad": True}),
)
SAVED_AFTER = 2  # steps
DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "has another magic number": lambda data: b"\x00" + data[1:],
    "has fewer tokens than its header says": lambda data: data[:-20],
    "has more tokens than its header says": lambda data: data + b"\x07\x07",
    "is empty": lambda _data: b"",
}


def stream(length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Token ids from LEAST to 65535, the largest first, none twice: (length,)."""
    ids = np.arange(LEAST, 2**16 - 1)
    order = np.random.default_rng(toys.SEED).permutation(ids[ids != IN_A_MAGIC])
    return np.concatenate([[2**16 - 1], order[: length - 1]])


def run(at: Stage) -> dict[str, Any]:
    folder = Path(f"shards.{at.rank}").absolute()
    folder.mkdir(exist_ok=True)
    return refusals(at, folder) if at.options.get("bad") else reads(at, folder)


def reads(at: Stage, folder: Path) -> dict[str, Any]:
    """The places of the stream that this rank reads in each step."""
    sizes, batch, seq_len = (at.options[key] for key in ("sizes", "batch", "seq_len"))
    tokens = stream(sum(sizes))
    paths = [folder / f"{at.case.name}.{i}.bin" for i in range(len(sizes))]
    for path, part in zip(paths, np.split(tokens, np.cumsum(sizes)[:-1]), strict=True):
        write_shard(path, part)
    loader = at.submission.TokenLoader(paths, batch, seq_len, at.rank, at.world)
    size = at.world * batch * seq_len
    position = 0
    if saved_by := at.options.get("saved_by"):
        # What rank 0 has saved, for every rank.
        saver = at.submission.TokenLoader(paths, batch, seq_len, 0, saved_by)
        for _ in range(SAVED_AFTER):
            saver.next()
        loader.load_state_dict(_plain(saver.state_dict()))
        position = SAVED_AFTER * saved_by * batch * seq_len
    places = {int(token): place for place, token in enumerate(tokens)}
    rows = []
    for _ in range(at.options["steps"]):
        position = 0 if position + size + 1 > len(tokens) else position
        row = {"start": position, "size": size, "seq_len": seq_len, "sizes": sizes}
        rows.append(row | _places(loader.next(), places, (batch, seq_len)))
        position += size
    return {"steps": rows}


def _plain(state: Any) -> Any:
    try:
        return json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise Rejected(say("state-not-plain", error=error)) from None


def _places(got: Any, places: dict[int, int], shape: tuple[int, int]) -> dict[str, Any]:
    if not isinstance(got, tuple | list) or len(got) != 2:
        raise Rejected(say("wrong-type/pair", type=type(got).__name__))
    found: dict[str, Any] = {"strange": None}
    for name, tensor in zip(("inputs", "targets"), got, strict=True):
        is_right = isinstance(tensor, Tensor) and tensor.dtype == torch.int64
        if not is_right or tuple(tensor.shape) != shape:
            kind = type(tensor).__name__
            if isinstance(tensor, Tensor):
                kind = f"{tensor.dtype} of {tuple(tensor.shape)}".removeprefix("torch.")
            raise Rejected(say("wrong-type/tokens", name=name, kind=kind, shape=shape))
        found[name] = [[places.get(token, -1) for token in row] for row in tensor.tolist()]
        if found["strange"] is None:
            every = tensor.flatten().tolist()
            found["strange"] = next((token for token in every if token not in places), None)
    return found


def refusals(at: Stage, folder: Path) -> dict[str, Any]:
    """How a loader refuses a good shard beside one that is not a shard; None: it does not."""
    good, bad = folder / "good.bin", folder / "bad.bin"
    write_shard(good, stream(200))
    answers: dict[str, str | None] = {}
    for what, damage in DAMAGED.items():
        bad.write_bytes(damage(good.read_bytes()))
        try:
            at.submission.TokenLoader([good, bad], 2, 5, at.rank, at.world)
            answers[what] = None
        except Exception as error:
            is_right = isinstance(error, ValueError)
            answers[what] = "ValueError" if is_right else type(error).__name__
    return {"answers": answers, "steps": []}


# ------------------------------------------------------------------ what is wrong


def refused(ranks: Rows) -> Finding | None:
    for what, answer in ranks[0].get("answers", {}).items():
        if answer is None:
            return say("not-refused", what=what)
        if answer == "AssertionError":
            return say("refused-otherwise/assert", what=what)
        if answer != "ValueError":
            return say("refused-otherwise", what=what, type=answer)
    return None


def reading(ranks: Rows) -> Finding | None:
    saved_by = ranks[0].get("saved_by")

    @each_step
    def look(rows: Rows, step: int) -> Finding | None:
        found = _strange(rows) or _broken(rows)
        if found is None and _read(rows) == _wanted(rows[0]):
            return _targets(rows)
        if found is None and saved_by and step == 0:
            found = _resumed(rows, saved_by)
        return found or _inputs(rows, step)

    return look(ranks)


def _read(rows: Rows) -> list[int]:
    """The places that all ranks' inputs are from, in order; what is read twice is there twice."""
    return sorted(place for row in rows for line in row["inputs"] for place in line)


def _wanted(row: Row) -> list[int]:
    return list(range(row["start"], row["start"] + row["size"]))


def _strange(rows: Rows) -> Finding | None:
    token = next((row["strange"] for row in rows if row["strange"] is not None), None)
    if token is None:
        return None
    if token < 0:
        return say("signed", token=token, right=token + 2**16)
    is_header = token == IN_A_MAGIC or token < LEAST
    return say("header-read" if is_header else "not-the-tokens", token=token, bytes=HEADER)


def _broken(rows: Rows) -> Finding | None:
    for rank, row in enumerate(rows):
        for line in row["inputs"]:
            for a, b in itertools.pairwise(line):
                if b != a + 1:
                    is_end = b == 0 and a == sum(row["sizes"]) - 1
                    return say("row-broken/end" if is_end else "row-broken", rank=rank, a=a, b=b)
    return None


def _targets(rows: Rows) -> Finding | None:
    """The inputs are right."""
    pairs = [
        (rank, column, target - place)
        for rank, row in enumerate(rows)
        for line, targets in zip(row["inputs"], row["targets"], strict=True)
        for column, (place, target) in enumerate(zip(line, targets, strict=True))
    ]
    wrong = [(rank, column, by) for rank, column, by in pairs if by != 1]
    if not wrong:
        return None
    if all(by == 0 for _, _, by in pairs):
        return say("targets-not-shifted")
    if {column for _, column, _ in wrong} == {rows[0]["seq_len"] - 1}:
        return say("last-target", rank=wrong[0][0])
    return say("targets-off", rank=wrong[0][0], column=wrong[0][1], by=wrong[0][2])


def _resumed(rows: Rows, saved_by: int) -> Finding | None:
    """Wrong in the first step after a state was loaded."""
    start, first, n = rows[0]["start"], min(_read(rows)), len(rows)
    facts = {"first": first, "start": start, "saved_by": saved_by, "n": n}
    if all(row["inputs"] == rows[0]["inputs"] for row in rows):
        return say("rank-in-state")
    if first == 0:
        return say("position-lost", **facts)
    if n != saved_by and first == SAVED_AFTER * rows[0]["size"]:
        return say("state-in-steps", **facts)
    if first != start:
        return say("resume-repeats" if first < start else "resume-skips", **facts)
    return None


def _inputs(rows: Rows, step: int) -> Finding:
    start, size = rows[0]["start"], rows[0]["size"]
    places = _read(rows)
    first, last = places[0], places[-1]
    facts = {"step": step, "start": start, "end": start + size - 1, "first": first, "last": last}
    if all(row["inputs"] == rows[0]["inputs"] for row in rows):
        return say("same-on-every-rank", **facts)
    for a, b in itertools.pairwise(places):
        if a == b:
            where = [r for r, row in enumerate(rows) if a in itertools.chain(*row["inputs"])]
            return say("overlap", place=a, on=mistakes.ranks_text(where, len(rows) + 1), **facts)
    if start == 0 and step > 0 and first > 0:
        return say("not-begun-again", total=sum(rows[0]["sizes"]), **facts)
    if first == 0 and start > 0 and last == size - 1:
        left = sum(rows[0]["sizes"]) - start
        return say("begun-again-early", left=left, needed=size + 1, **facts)
    if first < start:
        return say("overlap/steps", **facts)
    lost = next(place for place in _wanted(rows[0]) if place not in places)
    after = next((place for place in places if place > lost), lost)
    if after in itertools.accumulate(rows[0]["sizes"]) and after - lost < size:
        return say("lost-at-shard-end", lost=lost, to=after - 1, **facts)
    if 0 < after - lost <= (step + 1) * len(rows):
        return say("lost-between", lost=lost, **facts)
    return say("not-the-next", **facts)


judge = judging(refused, reading, only_first=True)
