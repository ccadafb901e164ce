"""Does a strategy do what it says? Every claim measured on real ranks, with the evidence.

For each strategy and world size, five checks: it equals one process; it holds, it sends and it
overlaps what it claims; two runs agree in every bit. This module runs in the parent and imports
no torch; ``proof.evidence`` runs in the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from msgspec import structs

from shardlab.axes import axes_of
from shardlab.config import NO_EVALUATION, Config
from shardlab.errors import RankFailure, UsageError
from shardlab.launch import launch as launching
from shardlab.launch.rank_set import RankSet
from shardlab.proof import TIMEOUT_S, judge
from shardlab.specs import BASELINE, parse_spec, whole_numbers
from shardlab.strategies.pipeline.schedules import chunks_of
from shardlab.text import count, duration

if TYPE_CHECKING:
    from shardlab.strategies.base import Strategy

SCHEMA = 1
# The size that is proved on, unless another is asked for.
SMALLEST = {"gpt2": "tiny", "resnet_cifar10": "tiny", "causal_lm": "tiny"}
LIMIT_S = 600.0  # for each strategy, unless another limit is given


def small(
    config: Config, steps: int = 3, worlds: Sequence[int] = (), given: Collection[str] = ()
) -> Config:
    """The config of a proof: small and telling, in whatever was not ``given`` by name.

    A file describes a run, which may be large; its proof is of the same workload in its smallest
    size, with few samples and steps.
    """
    training, workload = config.training, config.model.workload
    worlds = worlds or [config.launch.world or launching.default_ranks()]
    wanted: dict[str, Any] = {
        "training.global_batch": min(training.global_batch or 4 * max(worlds), 4 * max(worlds)),
        "training.micro_batch": None,
    }
    if workload in SMALLEST and "model.size" not in given:
        wanted["model.size"] = SMALLEST[workload]
        if config.model.size not in (None, SMALLEST[workload]):
            wanted["data.seq_len"] = None  # that of the small one
    overrides = {key: value for key, value in wanted.items() if key not in given}
    return config.with_overrides(
        {
            **overrides,
            "training.steps": steps,
            "training.warmup_steps": min(training.warmup_steps, steps - 1),
            **NO_EVALUATION,
            "profile.enabled": False,
        }
    )


def in_parts(config: Config) -> Config:
    """With one micro-batch a strategy that communicates in each looks right: so there are two."""
    return config if config.training.micro_batch is not None else config.in_parts(2)


def deep_enough(config: Config) -> Config:
    """A pipeline needs a block for each of its stages, and the smallest GPT-2 has two blocks."""
    name, options = config.strategy.name, config.strategy.options
    axes, _ = axes_of(name, options, config.launch.world or 1)
    given = config.model.options
    if axes is None or axes.pipeline == 1 or config.model.workload != "gpt2" or "layers" in given:
        return config
    stages = axes.pipeline * chunks_of(axes.schedule, axes.chunks or None)
    if config.model.size != SMALLEST["gpt2"] or stages <= 2:
        return config
    return config.with_overrides({"model.options": {**given, "layers": stages}})


def worlds_of(text: str | None, config: Config) -> list[int]:
    """``2,4`` as numbers; without a text, the config's."""
    return list(whole_numbers("--world", text)) or [
        config.launch.world or launching.default_ranks()
    ]


def cases_of(config: Config, specs: Sequence[str], worlds: Sequence[int]) -> list[Config]:
    """A config for each strategy and world; ``single`` is one process in any."""
    if config.precision.compute in ("bf16", "fp16"):
        raise UsageError("a proof is made in float64: leave precision.compute out")
    if config.model.workload == "gpt2" and config.model.options.get("head", "plain") != "plain":
        raise UsageError("a proof is made in float64: leave model.options.head out")
    cases: list[Config] = []
    for world, spec in product(worlds, specs):
        name, options = parse_spec(spec)
        refuse_rounding(options)
        if name == BASELINE and world != worlds[0]:
            continue
        case = config.with_overrides(
            {
                "strategy.name": name,
                "strategy.options": options,
                "launch.world": 1 if name == BASELINE else world,
                "precision.compute": "fp64",
                "output.dir": None,
            }
        )
        case = deep_enough(in_parts(case))
        if case in cases:
            raise UsageError(f"strategy {case.strategy.label} is named twice")
        cases.append(case)
    return cases


def rounding(options: Mapping[str, Any]) -> str | None:
    """That a strategy was asked to round what it sends; None: it was not."""
    dtype = options.get("comm_dtype", "fp32")
    return None if dtype == "fp32" else f"comm_dtype={dtype} rounds what is sent"


def changes(options: Mapping[str, Any], strategy: Strategy) -> str | None:
    """How the steps of a strategy differ from one process's, which ms per step says nothing about;
    None: they are the same."""
    if strategy.rounds is None:
        return rounding(options)
    return f"its ranks take {count(strategy.rounds.every, 'step')} of their own between exchanges"


def refuse_rounding(options: Mapping[str, Any]) -> None:
    """There is nothing to prove of a strategy that was asked to round."""
    if found := rounding(options):
        raise UsageError(
            f"{found}: it cannot equal one process, and there is nothing to prove; leave it out"
        )


def cases_in(size: int, cases: Sequence[Config], worlds: Sequence[int]) -> list[Config]:
    """The cases of one world size. ``single`` takes one of the first ranks that are started."""
    sizes = [size, 1] if size == worlds[0] and 1 not in worlds else [size]
    return [case for case in cases if case.launch.world in sizes]


def prove(
    cases: Sequence[Config],
    worlds: Sequence[int],
    command: str,
    on_progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
    limit_s: float = LIMIT_S,
) -> dict[str, Any]:
    """The content of ``prove.json``. A strategy that crashes has failed; the others are proved."""
    verdicts: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    env: dict[str, Any] | None = None
    launch = cases[0].launch
    launch = structs.replace(launch, timeout_s=min(launch.timeout_s, TIMEOUT_S))
    done, done_ranks, spent_s = 0, 0, 0.0
    all_ranks = sum(case.launch.world or 1 for case in cases)
    for size in worlds:
        with RankSet(launch, size, deadline_s=limit_s) as ranks:
            run = ranks.run
            mine = cases_in(size, cases, worlds)
            # What is wrong with any case is wrong input, and refused before anything is measured.
            # So is what is wrong with the model, for which no strategy is to blame.
            for case in mine:
                run("shardlab.proof.subjects:check", case)
                run("shardlab.training.preflight:check", case)
            if env is None:
                env = run("shardlab.training.preflight:describe", mine[0], command)[0]
            on_progress(f"one process · world {size}", done, len(cases))
            largest = max(mine, key=lambda case: case.launch.world or 1)
            run("shardlab.proof.evidence:prepare", largest)
            for case in mine:
                about = {
                    "strategy": case.strategy.name,
                    "options": dict(case.strategy.options),
                    "label": case.strategy.label,
                    "world": case.launch.world,
                }
                what = f"{about['label']} · world {about['world']}"
                if done:  # a case takes as long as it has ranks: they share the processors
                    left_s = spent_s / done_ranks * (all_ranks - done_ranks)
                    what += f" · about {duration(left_s)} left"
                on_progress(what, done, len(cases))
                done, done_ranks = done + 1, done_ranks + (case.launch.world or 1)
                begun = time.monotonic()
                try:
                    evidence = run("shardlab.proof.evidence:examine", case)
                    checks = judge.judge([e for e in evidence if e is not None])
                except RankFailure as failure:
                    checks = judge.failed(f"it did not get through: {failure}")
                except UsageError as refusal:
                    skipped.append({**about, "reason": str(refusal)})
                    continue
                finally:
                    spent_s += time.monotonic() - begun
                verdicts.append({**about, "pass": judge.passes(checks), "checks": checks})
    on_progress("done", done, len(cases))
    return {
        "schema": SCHEMA,
        "command": command,
        "env": env,
        "config": cases[0].to_dict(),
        "verdicts": verdicts,
        "skipped": skipped,
    }
