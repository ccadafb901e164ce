"""Does a strategy do what it says? Every claim measured on real ranks, with the evidence.

For each strategy and world size, five checks: it equals one process; it holds, it sends and it
overlaps what it claims; two runs agree in every bit. This module runs in the parent and imports
no torch; ``proof.evidence`` runs in the ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardlab.config import Config
from shardlab.errors import RankFailure, UsageError
from shardlab.proof import TIMEOUT_S, judge
from shardlab.run.launch import DEFAULT_WORLD
from shardlab.run.rankset import RankSet
from shardlab.specs import BASELINE, parse_spec

SCHEMA = 1
# The size that is proved on, unless another is asked for.
SMALLEST = {"gpt2": "tiny", "resnet_cifar10": "tiny", "causal_lm": "tiny"}
LIMIT_S = 600.0  # for each strategy, unless another limit is given


@dataclass(frozen=True)
class Case:
    """One verdict: a strategy in a world."""

    config: Config
    world: int

    @property
    def label(self) -> str:
        return self.config.strategy.label


def small(
    config: Config, steps: int = 3, worlds: Sequence[int] = (), given: Collection[str] = ()
) -> Config:
    """The config of a proof: small and telling, in whatever was not ``given`` by name.

    A file describes a run, which may be large; its proof is of the same workload in its smallest
    size, with few samples and steps. With one micro-batch a strategy that communicates in each
    looks right, so there are two.
    """
    training, workload = config.training, config.model.workload
    worlds = worlds or [config.launch.world or DEFAULT_WORLD]
    wanted: dict[str, Any] = {
        "training.global_batch": min(training.global_batch, 4 * max(worlds)),
        "training.accumulate": max(training.accumulate, 2),
    }
    if workload in SMALLEST and "model.size" not in given:
        wanted["model.size"] = SMALLEST[workload]
        if config.model.size not in (None, SMALLEST[workload]):
            wanted["data.seq_len"] = None  # that of the small one
    overrides = {key: value for key, value in wanted.items() if key not in given}
    return config.with_overrides(
        {
            **overrides,
            "training.batch_split": "uneven",
            "training.steps": steps,
            "training.warmup_steps": min(training.warmup_steps, steps - 1),
            "training.evaluate_every": None,
            "training.evaluate_samples": None,
            "profile.enabled": False,
        }
    )


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
    """The cases of one world size. ``single`` takes one of the first ranks that are started."""
    return [c for c in cases if c.world == size or (c.world not in worlds and size == worlds[0])]


def prove(
    cases: Sequence[Case],
    worlds: Sequence[int],
    command: str,
    on_progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
    limit_s: float = LIMIT_S,
) -> dict[str, Any]:
    """The content of ``prove.json``. A strategy that crashes fails; the others go on."""
    verdicts: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    env: dict[str, Any] | None = None
    launch = cases[0].config.launch
    launch = dataclasses.replace(launch, timeout_s=min(launch.timeout_s, TIMEOUT_S))
    done = 0
    for size in worlds:
        with RankSet(launch, size, deadline_s=limit_s) as ranks:
            run = ranks.run
            mine = cases_in(size, cases, worlds)
            # What is wrong with any case is wrong input, and refused before anything is measured.
            # So is what is wrong with the model, for which no strategy is to blame.
            for case in mine:
                run("shardlab.proof.subjects:check", case.config.to_dict())
                run("shardlab.run.preflight:check", case.config.to_dict())
            if env is None:
                env = run("shardlab.run.preflight:describe", mine[0].config.to_dict(), command)[0]
            on_progress(f"one process · world {size}", done, len(cases))
            largest = max(mine, key=lambda case: case.world)
            run("shardlab.proof.evidence:prepare", largest.config.to_dict())
            for case in mine:
                on_progress(f"{case.label} · world {case.world}", done, len(cases))
                done += 1
                try:
                    evidence = run("shardlab.proof.evidence:examine", case.config.to_dict())
                    checks = judge.judge([e for e in evidence if e is not None])
                except RankFailure as failure:
                    checks = judge.failed(f"it did not get through: {failure}")
                except UsageError as refusal:
                    skipped.append({**_of(case), "reason": str(refusal)})
                    continue
                verdicts.append({**_of(case), "pass": judge.passes(checks), "checks": checks})
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
