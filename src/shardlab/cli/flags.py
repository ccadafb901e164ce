"""The flags that commands share, and the config that they and a file make."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shardlab.errors import UsageError

if TYPE_CHECKING:
    from shardlab.config import Config

CONFIG = typer.Option("--config", "-c", help="YAML file; flags override it.", metavar="FILE")
SET = typer.Option(
    "--set", "-s", help="Any setting: training.momentum=0.9, model.options.layers=6 (repeatable).",
    metavar="KEY=VALUE",
)  # fmt: skip
WORKLOAD = typer.Option(
    "--workload", help="A name from `shardlab workloads`, or your own: path/to/file.py:attr."
)
SIZE = typer.Option("--size", help="The workload's size, e.g. gpt2's tiny, mini, small, xl.")
DATA = typer.Option(
    "--data", help="Token shards, images or reviews: a file, a folder, a glob; or synthetic.",
    metavar="PATH",
)  # fmt: skip
SEQ_LEN = typer.Option("--seq-len", help="Tokens per sample.")
GLOBAL_BATCH = typer.Option("--global-batch", "-b", help="Samples per step, over all ranks.")
ACCUMULATE = typer.Option("--accumulate", help="Micro-batches per rank and step.")
BATCH_SPLIT = typer.Option(
    "--batch-split", help="exact: refuse a batch the ranks cannot share evenly; or uneven."
)
OPTIMIZER = typer.Option(
    "--optimizer", help="adamw, sgd, any class of torch.optim, or module:Class."
)
PRECISION = typer.Option("--precision", help="fp32, bf16, fp16 (autocast) or fp64.")
SEED = typer.Option("--seed")
DEVICE = typer.Option("--device", help="auto, cpu or cuda.")
BACKEND = typer.Option("--backend", help="auto, gloo or nccl.")
PORT = typer.Option("--port", help="Where the ranks meet; 0: a free port.")
OUT = typer.Option("--out", "-o", help="Folder for the files; new or empty.", metavar="DIR")
QUIET = typer.Option("--quiet", "-q", help="No progress, no table: only where the files are.")
JSON = typer.Option("--json", help="Print the result as JSON, and nothing else, on stdout.")


def config_of(
    config: Path | None,
    settings: list[str] | None,
    flags: dict[str, Any],
    base: dict[str, Any] | None = None,
) -> Config:
    """Defaults < those of the run that is resumed < file < --set < the flags that were given."""
    from shardlab import config as configs

    overrides: dict[str, Any] = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals:
            raise UsageError(f"--set {setting}: not KEY=VALUE, as in training.steps=5")
        overrides[key] = configs.parse_value(value)
    overrides |= {key: value for key, value in flags.items() if value is not None}
    return configs.load(config, overrides, base)


def command() -> str:
    """The command as typed, for the record."""
    return shlex.join(["shardlab", *sys.argv[1:]])


def path_of(text: str | None) -> Path | None:
    return None if text is None else Path(text)
