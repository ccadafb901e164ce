"""Does a strategy do what it says? Every claim measured on real ranks, with the evidence.

For each strategy and world size, five checks: it equals one process; it holds, it sends and it
overlaps what it claims; two runs agree in every bit. This module runs in the parent and imports
no torch; ``proof.evidence`` runs in the ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardlab.config import Config
from shardlab.errors import RankFailure, UsageError
from shardlab.launch import DEFAULT_WORLD
from shardlab.measure.cells import BASELINE, parse_spec
from shardlab.measure.rankset import RankSet
from shardlab.proof import verdict

SCHEMA = 1
# The size that is proved on, unless another is asked for.
SMALLEST = {"gpt2": "tiny", "resnet_cifar10": "tiny", "causal_lm": "tiny"}
TIMEOUT_S = 60.0  # a collective of so small a model that waits longer hangs


@dataclass(frozen=True)
class Case:
    """One verdict: a strategy in a world."""

    config: Config
    world: int

    @property
    def label(self) -> str:
        return self.config.strategy.label


def small(config: Config, accumulate: int | None) -> Config:
    """The config of a proof, where nothing else was asked for: small, and telling.

    With one micro-batch a strategy that communicates in each looks right, so there are two.
    """
    overrides: dict[str, Any] = {"training.batch_split": "uneven"}
    if config.model.workload in SMALLEST and config.model.size is None:
        overrides["model.size"] = SMALLEST[config.model.workload]
    if accumulate is None and config.training.accumulate == 1:
        overrides["training.accumulate"] = 2
    return config.with_overrides(overrides)


def worlds_of(text: str | None, config: Config) -> list[int]:
    """``2,4`` as numbers."""
    if text is None:
        return [config.launch.world or DEFAULT_WORLD]
    try:
        worlds = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--world {text}: not numbers of ranks, as in 2 or 2,4") from None
    if min(worlds) < 1:
        raise UsageError(f"--world must be at least 1, got {min(worlds)}")
    return list(dict.fromkeys(worlds))


def cases_of(config: Config, specs: Sequence[str], worlds: Sequence[int]) -> list[Case]:
    """A case for each strategy and world; ``single`` is one process in any."""
    if config.precision.compute == "bf16":
        raise UsageError("a proof is made in float64: leave precision.compute out")
    cases = []
    for world in worlds:
        for spec in specs:
            name, options = parse_spec(spec)
            refuse_rounding(options)
            size = 1 if name == BASELINE else world
            case = Case(
                config.with_overrides(
                    {
                        "strategy.name": name,
                        "strategy.options": options,
                        "launch.world": size,
                        "precision.compute": "fp64",
                        "output.dir": None,
                    }
                ),
                size,
            )
            if name != BASELINE or world == worlds[0]:
                cases.append(case)
    for case in cases:
        if cases.count(case) > 1:
            raise UsageError(f"strategy {case.label} is named twice")
    return cases


def refuse_rounding(options: Mapping[str, Any]) -> None:
    """There is nothing to prove of a strategy that was asked to round."""
    for key, exact in (("compress", "none"), ("comm_dtype", "fp32")):
        if options.get(key, exact) != exact:
            raise UsageError(
                f"{key}={options[key]} rounds what is sent: it cannot equal one process, "
                "and there is nothing to prove; leave it out"
            )


def cases_in(size: int, cases: Sequence[Case], worlds: Sequence[int]) -> list[Case]:
    """Those that are run on so many ranks. ``single`` takes one of the first that are started."""
    return [c for c in cases if c.world == size or (c.world not in worlds and size == worlds[0])]


def prove(
    cases: Sequence[Case],
    worlds: Sequence[int],
    command: str,
    on_progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
) -> dict[str, Any]:
    """The content of ``prove.json``. A strategy that crashes fails; the others go on."""
    verdicts: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    env: dict[str, Any] | None = None
    launch = cases[0].config.launch
    launch = dataclasses.replace(launch, timeout_s=min(launch.timeout_s, TIMEOUT_S))
    done = 0
    for size in worlds:
        with RankSet(launch, size) as ranks:
            mine = cases_in(size, cases, worlds)
            # What is wrong with any case is wrong input: said before anything is measured.
            for case in mine:
                ranks.run("shardlab.proof.subjects:check", case.config.to_dict())
                ranks.run("shardlab.measure.compare:check_cell", case.config.to_dict())
            if env is None:
                values = mine[0].config.to_dict()
                env = ranks.run("shardlab.measure.compare:describe", values, command)[0]
            for case in mine:
                on_progress(f"{case.label} · world {case.world}", done, len(cases))
                done += 1
                try:
                    evidence = ranks.run("shardlab.proof.evidence:examine", case.config.to_dict())
                    checks = verdict.judge([e for e in evidence if e is not None])
                except RankFailure as failure:
                    checks = verdict.failed(f"it did not get through: {failure}")
                except UsageError as refusal:
                    skipped.append({**_of(case), "reason": str(refusal)})
                    continue
                verdicts.append({**_of(case), "pass": verdict.passes(checks), "checks": checks})
    on_progress("done", done, len(cases))
    return {
        "schema": SCHEMA,
        "command": command,
        "env": env,
        "config": cases[0].config.to_dict(),
        "verdicts": verdicts,
        "skipped": skipped,
    }


def _of(case: Case) -> dict[str, Any]:
    return {
        "strategy": case.config.strategy.name,
        "options": dict(case.config.strategy.options),
        "label": case.label,
        "world": case.world,
    }
