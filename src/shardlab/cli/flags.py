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

MODEL, BATCH, PARALLELISM, CHECKPOINTS, OUTPUT = (
    "Model", "Batch", "Parallelism", "Checkpoints", "Output",
)  # fmt: skip
CONFIG = typer.Option(
    "--config", "-c", help="YAML file with any settings; flags override it.", metavar="FILE",
    rich_help_panel=MODEL,
)  # fmt: skip
SET = typer.Option(
    "--set", "-s", help="Any setting, repeatable: training.schedule=cosine, guard.hang_s=30, "
    "model.options.layers=6. docs/workloads.md lists them.", metavar="KEY=VALUE",
    rich_help_panel=MODEL,
)  # fmt: skip
QUIET = typer.Option(
    "--quiet", "-q", help="No progress, no table: only where the files are.",
    rich_help_panel=OUTPUT,
)  # fmt: skip
JSON = typer.Option(
    "--json", help="Print the result as JSON, and nothing else, on stdout.", rich_help_panel=OUTPUT
)


STRATEGIES = typer.Option(
    None,
    "--strategies",
    help="Comma-separated; an option follows a colon: pytorch_ddp:bucket_mb=4.  (default: all)",
    rich_help_panel=PARALLELISM,
)


@dataclass(frozen=True)
class Flag:
    key: str  # what it sets in the config
    kind: Any
    panel: str
    help: str  # without the default, which `default` says
    default: Any = None  # the config's own; None: the help says what is done
    also: str | None = None  # a second name
    metavar: str | None = None


FLAGS = {
    "workload": Flag(
        "model.workload", str, MODEL,
        "A name from `shardlab list`, or your own: path/to/file.py:attr.", "gpt2",
    ),
    "size": Flag(
        "model.size", str, MODEL,
        "The workload's size: gpt2 has tiny, mini, small … xl.  (default: the workload's own)",
    ),
    "data": Flag(
        "data.source", str, MODEL,
        "Token shards, images or reviews: a file, a folder, a glob; or synthetic.", "auto",
        metavar="PATH",
    ),
    "seq_len": Flag(
        "data.seq_len", int, MODEL, "Tokens per sample.  (default: the model's context)"
    ),
    "precision": Flag(
        "precision.compute", str, MODEL, "fp32, bf16, fp16 (autocast) or fp64.", "fp32"
    ),
    "activation_checkpointing": Flag(
        "training.activation_checkpointing", bool, MODEL,
        "Recompute activations in backward (activation checkpointing).",
    ),
    "compile": Flag(
        "training.compile", str, MODEL,
        "torch.compile: none, blocks (each by itself) or model (as one).", "none",
    ),
    "seed": Flag("training.seed", int, MODEL, "Of the model and of the data's order.", 0),
    "steps": Flag("training.steps", int, BATCH, "Optimizer steps.", 20),
    "epochs": Flag(
        "training.epochs", float, BATCH, "Passes over the data, instead of --steps: 0.5, 3."
    ),
    "global_batch": Flag(
        "training.global_batch", int, BATCH, "Samples per step, over all ranks.", 8, "-b"
    ),
    "micro_batch": Flag(
        "training.micro_batch", int, BATCH,
        "Most samples that a rank takes at a time. With --global-batch, sets accumulation; "
        "otherwise sets the global batch.  (default: a rank's share at once)",
    ),
    "optimizer": Flag(
        "training.optimizer", str, BATCH, "adamw, sgd, any class of torch.optim, or module:Class.",
        "adamw",
    ),
    "learning_rate": Flag(
        "training.learning_rate", float, BATCH, "Learning rate.", 1e-3, also="--lr"
    ),
    "strategy": Flag(
        "strategy.name", str, PARALLELISM,
        "A name from `shardlab list`; options follow colons: zero1:tensor=2.", "simple_ddp",
    ),
    "world": Flag(
        "launch.world", int, PARALLELISM, "Number of ranks.  (default: 2)", also="-w"
    ),
    "device": Flag("launch.device", str, PARALLELISM, "auto, cpu or cuda.", "auto"),
    "checkpoint_every": Flag(
        "checkpoint.every", int, CHECKPOINTS,
        "Steps between checkpoints, in checkpoints/step-<n>/; the last step has one too. The "
        "newest 2 stay (--set checkpoint.keep_last=5).  (default: no checkpoints)",
    ),
    "resume": Flag(
        "checkpoint.resume", str, CHECKPOINTS,
        "Run folder: continue there from its newest valid checkpoint. Checkpoint: begin with it in "
        "a new folder. Settings are its own unless given. auto: the newest run of this config that "
        "did not finish (or the one in --out), else a new one.", metavar="auto|PATH",
    ),
    "max_restarts": Flag(
        "launch.max_restarts", int, CHECKPOINTS,
        "Start the ranks again when one dies, from the last checkpoint.", 0,
    ),
    "inject": Flag(
        "faults", list[str], CHECKPOINTS,
        "Break it on purpose: kill:rank=1,step=5; hang, slow:rank=1,ms=50, drop-collective, nan, "
        "corrupt-checkpoint, disk-full (repeatable; docs/reliability.md).", metavar="FAULT",
    ),
    "profile": Flag(
        "profile.enabled", bool, OUTPUT,
        "Record traces of 3 steps of each rank, in traces/rank<r>/ (--set profile.active=5; "
        "docs/capture.md has what it costs).",
    ),
    "out": Flag(
        "output.dir", str, OUTPUT,
        "Folder for the files; new or empty.  (default: runs/<time>-<what it is>)", None, "-o",
        "DIR",
    ),
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

    @functools.cached_property
    def of_file(self) -> dict[str, Any]:
        """What the file says. It is read once: it may be a pipe."""
        from shardlab import config as configs

        return {} if self.file is None else configs.settings_in(self.file)

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

        config = configs.load(self.of_file, self.overrides(), base)
        config.check_paths()
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
        given |= {f"strategy.options.{key}": value for key, value in options.items()}
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


def _option(name: str, flag: Flag, text: str) -> Any:
    names = [f"--{name.replace('_', '-')}", *([flag.also] if flag.also else [])]
    if flag.default is not None and "(default:" not in text:
        text += f"  (default: {flag.default})"
    return typer.Option(*names, help=text, metavar=flag.metavar, rich_help_panel=flag.panel)


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
