"""The flags that commands share: each stands here once, with the config key that it sets.

A command names the flags that it takes (``@configured("workload", "size")``) and is called with
what was given for them, as one ``Asked``.
"""

from __future__ import annotations

import functools
import inspect
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardlab import output
from shardlab.cli.common import taking
from shardlab.errors import UsageError

if TYPE_CHECKING:
    from shardlab.config import Config

CONFIG = typer.Option("--config", "-c", help="YAML file; flags override it.", metavar="FILE")
SET = typer.Option(
    "--set", "-s", help="Any setting: training.momentum=0.9, model.options.layers=6 (repeatable).",
    metavar="KEY=VALUE",
)  # fmt: skip
QUIET = typer.Option("--quiet", "-q", help="No progress, no table: only where the files are.")
JSON = typer.Option("--json", help="Print the result as JSON, and nothing else, on stdout.")


STRATEGIES = typer.Option(
    None,
    "--strategies",
    help="Comma-separated; an option follows a colon: pytorch_ddp:bucket_mb=4.  (default: all)",
)


@dataclass(frozen=True)
class Flag:
    key: str  # what it sets in the config
    kind: Any
    help: str | None = None
    also: str | None = None  # a second name
    metavar: str | None = None


FLAGS = {
    "strategy": Flag(
        "strategy.name", str,
        "A name from `shardlab strategies`; options follow colons: zero1:tensor=2.",
    ),
    "world": Flag("launch.world", int, "Number of ranks.  (default: 2)", "-w"),
    "tensor": Flag("strategy.options.tensor", int, "Ranks that share each layer of one model."),
    "pipeline": Flag("strategy.options.pipeline", int, "Ranks that share one model, by its depth."),
    "context": Flag("strategy.options.context", int, "Ranks that share each sequence."),
    "workload": Flag(
        "model.workload", str,
        "A name from `shardlab workloads`, or your own: path/to/file.py:attr.",
    ),
    "size": Flag("model.size", str, "The workload's size, e.g. gpt2's tiny, mini, small, xl."),
    "data": Flag(
        "data.source", str,
        "Token shards, images or reviews: a file, a folder, a glob; or synthetic.", metavar="PATH",
    ),
    "seq_len": Flag("data.seq_len", int, "Tokens per sample."),
    "steps": Flag("training.steps", int, "Optimizer steps."),
    "epochs": Flag(
        "training.epochs", float, "Passes over the data, instead of steps."
    ),
    "global_batch": Flag("training.global_batch", int, "Samples per step, over all ranks.", "-b"),
    "micro_batch": Flag(
        "training.micro_batch", int,
        "Samples per rank and micro-batch: accumulation follows from the global batch, or that "
        "from the ranks.",
    ),
    "accumulate": Flag("training.accumulate", int, "Micro-batches per rank and step."),
    "batch_split": Flag(
        "training.batch_split", str,
        "exact: refuse a batch the ranks cannot share evenly; or uneven.",
    ),
    "epoch": Flag("data.epoch", str, "How an epoch ends: continuous, padded or exact."),
    "optimizer": Flag(
        "training.optimizer", str, "adamw, sgd, any class of torch.optim, or module:Class."
    ),
    "learning_rate": Flag("training.learning_rate", float, also="--lr"),
    "precision": Flag("precision.compute", str, "fp32, bf16, fp16 (autocast) or fp64."),
    "activation_checkpointing": Flag(
        "training.activation_checkpointing", bool,
        "Blocks are computed again in backward, not kept.",
    ),
    "compile": Flag(
        "training.compile", str, "torch.compile: none, blocks (each by itself) or model (as one)."
    ),
    "evaluate_every": Flag(
        "training.evaluate_every", int,
        "Steps between evaluations on the held-out samples; 0: at the end.",
    ),
    "seed": Flag("training.seed", int),
    "device": Flag("launch.device", str, "auto, cpu or cuda."),
    "backend": Flag("launch.backend", str, "auto, gloo or nccl."),
    "port": Flag("launch.port", int, "Of rank 0, under srun and mpirun; 0: the job gives it."),
    "profile": Flag(
        "profile.enabled", bool,
        "Traces of some steps of each rank, in traces/rank<r>/: 1 step left alone, 1 warm-up, "
        "3 kept (--set profile.active=5). A recorded step takes about 2 µs more per operator. "
        "--set profile.shapes=true or profile.memory=true: files 1.4 times as large; "
        "profile.stacks=true: 2 times or more.",
    ),
    "checkpoint_every": Flag(
        "checkpoint.every", int,
        "Steps between checkpoints, in checkpoints/step-<n>/; the last step has one too. The "
        "newest 2 stay (--set checkpoint.keep_last=5, checkpoint.keep_every=1000).",
    ),
    "checkpoint_async": Flag(
        "checkpoint.asynchronous", bool,
        "Checkpoints are written by a thread while the run continues.",
    ),
    "resume": Flag(
        "checkpoint.resume", str,
        "Run folder: continue there from its newest valid checkpoint. Checkpoint: begin with it in "
        "a new folder. Settings are its own unless given. auto: the newest run of this config that "
        "did not finish (or the one in --out), else a new one.", metavar="auto|PATH",
    ),
    "max_restarts": Flag(
        "launch.max_restarts", int,
        "Start the ranks again when one dies, from the last checkpoint.",
    ),
    "min_world": Flag(
        "launch.min_world", int,
        "A restart may have fewer ranks, one less each time, down to this.",
    ),
    "hang_after": Flag(
        "guard.hang_s", float,
        "End a run in which no rank has moved for this many seconds, and say who is missing; 0: "
        "never.  (default: 60, or ten times the longest pause)", metavar="SECONDS",
    ),
    "inject": Flag(
        "faults", list[str],
        "Break it on purpose: kill:rank=1,step=5; hang, slow:rank=1,ms=50, drop-collective, nan, "
        "corrupt-checkpoint, disk-full (repeatable; docs/reliability.md).", metavar="FAULT",
    ),
    "out": Flag("output.dir", str, "Folder for the files; new or empty.", "-o", "DIR"),
}  # fmt: skip


def normalized(word: str) -> str:
    """The name of a flag, without its dashes: --global_batch is --global-batch."""
    return word.replace("_", "-")


@dataclass(frozen=True)
class Asked:
    """What the shared flags of a command were given."""

    file: Path | None  # --config
    settings: list[str]  # --set
    flags: dict[str, Any]  # by config key; only those that were given
    quiet: bool
    as_json: bool

    @property
    def shows(self) -> bool:
        """Whether tables are wanted."""
        return not (self.quiet or self.as_json)

    @property
    def tells(self) -> bool:
        """Whether progress is wanted."""
        return output.tells("info", quiet=not self.shows)

    @property
    def keys(self) -> set[str]:
        """The config keys that the command line sets."""
        return self.flags.keys() | {setting.partition("=")[0] for setting in self.settings}

    def overrides(self) -> dict[str, Any]:
        """What --set and the flags say, by config key; flags come last."""
        from shardlab import config as configs

        overrides: dict[str, Any] = {}
        for setting in self.settings:
            key, equals, value = setting.partition("=")
            if not equals:
                raise UsageError(f"--set {setting}: not KEY=VALUE, as in training.steps=5")
            overrides[key] = configs.parse_value(value)
        return overrides | self.flags

    def config(self, base: Mapping[str, Any] | None = None) -> Config:
        """Defaults < those of the run that is resumed < file < --set < the flags."""
        from shardlab import config as configs

        config = configs.load(self.file, self.overrides(), base)
        config.refuse_unwritable()
        return config

    def print(self, result: Any, folder: Any, show: Callable[[], None]) -> None:
        """The result as it was asked for: as JSON, the folder of its files alone, or in words."""
        if self.as_json:
            output.say_json(result)
        elif self.quiet:
            output.say(folder)
        else:
            show()


def asked_in(values: Mapping[str, Any], names: Iterable[str]) -> Asked:
    """What a command's parameters say; ``names`` are those of the shared flags."""
    given = {FLAGS[name].key: values[name] for name in names}
    if ":" in (given.get("strategy.name") or ""):  # zero1:tensor=2, as in a list of strategies
        from shardlab.specs import parse_spec

        given["strategy.name"], options = parse_spec(given["strategy.name"])
        for key, value in options.items():
            before = given.setdefault(f"strategy.options.{key}", value)
            if before not in (None, value):
                raise UsageError(f"--strategy says {key}={value}, and --{key} {before}")
            given[f"strategy.options.{key}"] = value
    return Asked(
        file=values["config"],
        settings=values["settings"] or [],
        # A switch that is off was not given.
        flags={k: v for k, v in given.items() if v is not None and v is not False},
        quiet=values["quiet"],
        as_json=values["as_json"],
    )


Command = Callable[..., Any]


def configured(*names: str, **instead: str) -> Callable[[Command], Command]:
    """Give a command these flags in addition to its own; their values are its first argument.

    Every such command also has --config, --set, --out, --quiet and --json. ``instead`` holds
    other help texts for some of the flags.
    """

    def decorate(command: Command) -> Command:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        shared = {name: FLAGS[name] for name in (*names, "out")}
        parameters = [
            *own,
            _parameter("config", Path, CONFIG),
            *(
                _parameter(name, flag.kind, _option(name, flag, instead.get(name, flag.help)))
                for name, flag in shared.items()
            ),
            _parameter("settings", list[str], SET),
            _parameter("quiet", bool, QUIET),
            _parameter("as_json", bool, JSON),
        ]

        @functools.wraps(command)
        def run(**values: Any) -> Any:
            return command(asked_in(values, shared), **{p.name: values[p.name] for p in own})

        return taking(run, parameters)

    return decorate


def _option(name: str, flag: Flag, text: str | None) -> Any:
    names = [f"--{name.replace('_', '-')}", *([flag.also] if flag.also else [])]
    return typer.Option(*names, help=text, metavar=flag.metavar)


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    """None stands for a flag that was not given, False for a switch."""
    default, hint = (False, bool) if kind is bool else (None, kind | None)
    annotation = Annotated[hint, option]  # type: ignore[valid-type]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def command() -> str:
    """The command as typed, for the record."""
    return shlex.join(["shardlab", *sys.argv[1:]])


def specs_of(strategies: str | None) -> list[str]:
    """The strategies of a comma-separated flag; without it, all."""
    from shardlab.naming import STRATEGIES

    return [s.strip() for s in strategies.split(",")] if strategies else list(STRATEGIES)
