"""A comparison against an earlier one: has anything become slower, or larger? Pure, no torch.

Times are noisy, so a strategy has become slower only if the whole 95% interval of the ratio of its
step times lies beyond the limit. Memory is counted, not timed, and is compared as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, ValidationError, convert

from shardlab import stats
from shardlab import text as fmt
from shardlab.errors import UsageError, unknown
from shardlab.measure import fields
from shardlab.measure.cells import Cell

Positive = Annotated[float, Meta(gt=0, le=1e308)]
Visits = list[Annotated[list[Positive], Meta(min_length=1)]]  # milliseconds: (repeats, steps)
Limits = Mapping[str, float]  # by what is watched: the share by which it may grow
WATCHED = ("slower", "memory")
WRONG = "wrong"  # this word needs no earlier record: it is about the proofs
BAD = (*WATCHED, "broken")  # verdicts that fail the gate
MACHINE = {
    "cpu": "the CPU", "cores": "the number of cores", "gpus": "the GPUs", "torch": "PyTorch",
    "backend": "the backend", "threads_per_rank": "the number of threads",
}  # fmt: skip


def limits_of(texts: Sequence[str]) -> dict[str, float]:
    """``slower=5%`` or ``slower=5%,memory=10%`` as shares; of ``wrong``, none may be."""
    limits = {}
    for text in [part.strip() for whole in texts for part in whole.split(",")]:
        name, _, value = text.partition("=")
        if text == WRONG:
            limits[WRONG] = 0.0
            continue
        if name == WRONG:
            raise UsageError(f"--fail-if {text}: {WRONG} has no share; a strategy is wrong or not")
        if name not in WATCHED:
            raise unknown("limit of --fail-if", name, (*WATCHED, WRONG))
        if not re.fullmatch(r"\d+(\.\d+)?%", value):
            raise UsageError(f"--fail-if {text}: not a share, as in {name}=5%")
        limits[name] = float(value[:-1]) / 100
    return limits


@dataclass(frozen=True)
class _Median:
    median: Positive


@dataclass(frozen=True)
class _Cell:
    label: str
    strategy: str
    options: dict[str, Any]
    world: int
    accumulate: int
    status: str
    step_ms: _Median | None
    step_ms_repeats: Visits
    precision: str | None = None  # None in old records, whose config has it
    peak_bytes: dict[str, float | None] | None = None

    def __post_init__(self) -> None:
        if self.step_ms is not None and not self.step_ms_repeats:
            raise ValueError("step_ms_repeats is empty")


@dataclass(frozen=True)
class _Config:
    model: dict[str, Any]
    data: dict[str, Any]
    training: dict[str, Any]
    precision: dict[str, Any]


@dataclass(frozen=True)
class _Record:
    """What is read here from an earlier record. Every record that we wrote has it."""

    workload: str
    parameters: int
    global_batch: int
    command: str
    env: dict[str, Any]
    config: _Config
    cells: list[_Cell]


def read(path: Path) -> dict[str, Any]:
    """An earlier ``compare.json``, or the one in a folder."""
    path = path / "compare.json" if path.is_dir() else path
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is not JSON") from None
    if not isinstance(found, dict) or found.get("schema") != 1 or "cells" not in found:
        raise UsageError(f"{path} is not a compare.json of schema 1")
    try:
        convert(found, _Record)
    except ValidationError as error:
        raise UsageError(f"{path} is damaged: {error}") from None
    return found


def refuse_others(old: Mapping[str, Any], cells: Sequence[Cell]) -> None:
    """Refuse a record of another model or batch before anything is measured."""
    then, now = old["config"], cells[0].config.to_dict()
    for section, keys in {
        "model": ("workload", "size", "options"),
        "data": ("seq_len",),
        "training": (
            "global_batch", "optimizer", "activation_checkpointing", "compile", "clip_norm",
        ),
    }.items():  # fmt: skip
        for key in keys:
            was, is_ = then[section].get(key), now[section].get(key)
            if was != is_:
                raise UsageError(
                    f"--against was measured with {section}.{key} {was}, this is {is_}: its times "
                    "cannot be compared with these"
                )
    known = {_key(cell, old) for cell in old["cells"]}
    if not any(_key(cell.point, old) in known for cell in cells):
        raise _nothing_in_common(old)


def refuse_unsure(old: Mapping[str, Any], repeats: int, limits: Limits) -> None:
    """Refuse a single visit: it does not show the noise, so nothing could be called slower."""
    if "slower" not in limits:
        return
    if repeats < 2:
        raise UsageError(f"--fail-if slower needs --repeats 2 or more, got {repeats}")
    if not stats.can_tell(*(cell["step_ms_repeats"] for cell in fields.measured(old))):
        raise UsageError("--fail-if slower: --against has one visit to each; measure it again with "
                         "--repeats 2 or more")  # fmt: skip


def not_right(result: Mapping[str, Any]) -> list[str]:
    """What ran and was not proved right: found wrong, or without a proof. Each with the reason."""
    return [
        f"{cell['label']} ({proof['message'] if proof else 'there is no proof'})"
        for cell in result["cells"]
        if cell["status"] == "ok" and ((proof := cell.get("proof")) or {}).get("pass") is not True
    ]


def _nothing_in_common(old: Mapping[str, Any]) -> UsageError:
    have = fmt.names([f"{cell['label']} in world {cell['world']}" for cell in old["cells"]])
    return UsageError(f"--against has none of these strategies in this world; it has {have}")


def check(new: Mapping[str, Any], old: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    """Each cell against the same one of the earlier record, and whether all are within limits."""
    for key in ("workload", "parameters", "global_batch"):
        if new[key] != old[key]:
            raise UsageError(f"--against has {key} {old[key]}, this has {new[key]}")
    then, now = old["env"].get("device"), new["env"]["device"]
    if then != now:
        raise UsageError(f"--against was measured on {then}, this on {now}")
    before = {_key(cell, old): cell for cell in old["cells"]}
    found = [(cell, before.pop(_key(cell, new), None)) for cell in new["cells"]]
    if all(earlier is None for _, earlier in found):
        raise _nothing_in_common(old)
    rows = [_judge(cell, earlier, limits) for cell, earlier in found]
    warnings = list(_other_machine(new["env"], old["env"]))
    warnings += [f"{cell['label']} was in the earlier record, and is not in this one"
                 for cell in before.values()]  # fmt: skip
    return {
        "measured": old["env"].get("time"),
        "command": old["command"],
        "limits": dict(limits),
        "warnings": warnings,
        "cells": rows,
        "pass": all(row["verdict"] not in BAD for row in rows),
    }


def _key(cell: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """What makes two cells the same: all but the label, which depends on what else was asked."""
    precision = cell.get("precision") or result["config"]["precision"].get("compute")
    point = cell["strategy"], cell["options"], cell["world"], cell["accumulate"], precision
    return json.dumps(point, sort_keys=True)


def _judge(
    cell: Mapping[str, Any], then: Mapping[str, Any] | None, limits: Limits
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "label": cell["label"],
        "verdict": "ok",
        "reason": "",
        "step_ms": cell["step_ms"] and cell["step_ms"]["median"],
        "step_ms_before": then and then["step_ms"] and then["step_ms"]["median"],
        "time_ratio": None,
        "time_interval": None,
        "memory_ratio": None,
    }
    if then is None or then["step_ms"] is None:
        why = "not in the earlier record" if then is None else f"was {then['status']} before"
        return row | {"verdict": "new", "reason": why}
    if cell["step_ms"] is None:
        return row | {"verdict": "broken", "reason": f"{cell['status']}: {cell['reason']}"}
    times = cell["step_ms_repeats"], then["step_ms_repeats"]
    row["time_ratio"] = stats.ratio(*times)
    if stats.can_tell(*times):
        row["time_interval"] = list(stats.ratio_interval(*times))
    peaks = fields.peak(cell), fields.peak(then)
    if peaks[0] is not None and peaks[1]:
        row["memory_ratio"] = peaks[0] / peaks[1]
    reasons = []
    if "memory" in limits and (row["memory_ratio"] or 0) > 1 + limits["memory"]:
        row["verdict"] = "memory"
        more, limit = 100 * (row["memory_ratio"] - 1), 100 * limits["memory"]
        reasons.append(f"{more:.1f}% more memory, above {limit:g}%")
    low = (row["time_interval"] or [0.0])[0]
    if "slower" in limits and low > 1 + limits["slower"]:
        row["verdict"] = "slower"
        more, limit = 100 * (low - 1), 100 * limits["slower"]
        reasons.append(f"at least {more:.1f}% slower (95%), above {limit:g}%")
    return row | {"reason": "; ".join(reasons)}


def _other_machine(new: Mapping[str, Any], old: Mapping[str, Any]) -> Iterator[str]:
    for key, name in MACHINE.items():
        if new.get(key) != old.get(key):
            yield f"{name} was {old.get(key)}, now {new.get(key)}: times may differ for that alone"
    if new.get("data") != old.get("data", new.get("data")):  # earlier versions did not tell
        yield f"the data was {old['data']}, now {new['data']}: times and losses may differ for that"
