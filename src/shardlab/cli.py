"""The commands: parse, call one function, print. torch is imported only by what needs it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

import shardlab
from shardlab import cli_checkpoint, cli_data, cli_learn, cli_measure, cli_trace
from shardlab.errors import Interrupted, RankFailure, UsageError

if TYPE_CHECKING:
    from shardlab.config import Config

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="A laboratory for distributed training in PyTorch: run every data-parallel strategy on "
    "one loop, compare them, and see that they equal one process.",
)
app.add_typer(cli_data.app, name="data")
app.add_typer(cli_trace.app, name="trace")
app.add_typer(cli_checkpoint.app, name="checkpoint")
app.add_typer(cli_learn.app, name="learn")


def main() -> None:
    """The console script. Exit codes: 0 done, 1 a rank failed, 2 wrong input, 130 interrupted."""
    # Before torch is imported: its profiler writes a line to stderr at each start below this level.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # A peer that is gone is told by us, in a line; c10d would add a page of its C++ frames.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        app()
    except UsageError as error:
        _end(2, f"error: {error}")
    except RankFailure as failure:
        if failure.traceback:
            print(failure.traceback, file=sys.stderr, end="")
        _end(1, f"error: {failure}")
    except Interrupted:
        _end(130, "interrupted: every rank was ended")


def _end(code: int, message: str) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(code)


def _command() -> str:
    """The command as typed, for the record."""
    return shlex.join(["shardlab", *sys.argv[1:]])


# ------------------------------------------------------------------ flags that commands share

CONFIG = typer.Option("--config", "-c", help="YAML file; flags override it.", metavar="FILE")
SET = typer.Option(
    "--set", "-s", help="Any setting: training.momentum=0.9, model.options.layers=6 (repeatable).",
    metavar="KEY=VALUE",
)  # fmt: skip
WORLD = typer.Option("--world", "-w", help="Number of ranks.  (default: 2)", show_default=False)
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
OPTIMIZER = typer.Option("--optimizer", help="adamw, adam or sgd.")
LEARNING_RATE = typer.Option("--learning-rate", "--lr")
WORLDS = typer.Option(
    "--world", "-w", help="Numbers of ranks: 2, or 1,2,4.  (default: 2)", show_default=False
)
ACCUMULATES = typer.Option("--accumulate", help="Micro-batches per rank and step: 1, or 1,4.")
PRECISION_AXIS = typer.Option(
    "--precision", help="fp32, bf16, fp16 or fp64; or several: fp32,bf16."
)
BUCKET_MB = typer.Option(
    "--bucket-mb", help="Bucket sizes, for the strategies that have buckets: 4, or 1,4,25."
)
PRECISION = typer.Option("--precision", help="fp32, bf16 (autocast) or fp64.")
EVALUATE = typer.Option(
    "--evaluate-every", help="Steps between evaluations on the held-out samples; 0: at the end."
)
SEED = typer.Option("--seed")
DEVICE = typer.Option("--device", help="auto, cpu or cuda.")
BACKEND = typer.Option("--backend", help="auto, gloo or nccl.")
PORT = typer.Option("--port", help="Where the ranks meet; 0: a free port.")
PROFILE = typer.Option(
    "--profile",
    help="Traces of some steps of each rank, in traces/rank<r>/: 1 step left alone, 1 warm-up, 3 "
    "kept (--set profile.active=5). A recorded step takes about 2 µs more per operator. --set "
    "profile.shapes=true or profile.memory=true: files 1.4 times as large; profile.stacks=true: "
    "2 times or more.",
)
PROFILE_AFTER = typer.Option(
    "--profile/--no-profile",
    help="Traces of each strategy, in <strategy>/traces/rank<r>/, taken after everything was timed "
    "and weighed, so that no number is of a profiled step. Options as in train.  (default: "
    "profile)",
    show_default=False,
)
CHECKPOINT_EVERY = typer.Option(
    "--checkpoint-every",
    help="Steps between checkpoints, in checkpoints/step-<n>/; the last step has one too. The "
    "newest 2 stay (--set checkpoint.keep_last=5, checkpoint.keep_every=1000).",
)
CHECKPOINT_ASYNC = typer.Option(
    "--checkpoint-async", help="Checkpoints are written by a thread while the run goes on."
)
RESUME = typer.Option(
    "--resume",
    help="A run folder: on in it, from its newest whole checkpoint. A checkpoint: from it, in a "
    "new folder. Settings are its own unless given. auto: the newest run of this config that did "
    "not finish (or the one in --out), else a new one.",
    metavar="auto|PATH",
)
MAX_RESTARTS = typer.Option(
    "--max-restarts", help="Start the ranks again when one dies, from the last checkpoint."
)
MIN_WORLD = typer.Option(
    "--min-world", help="A restart may have fewer ranks, one less each time, down to this."
)
HANG_AFTER = typer.Option(
    "--hang-after",
    help="End a run in which no rank has moved for so many seconds, and say who is missing; 0: "
    "never.  (default: 60, or ten times the longest pause)",
    metavar="SECONDS",
    show_default=False,
)
INJECT = typer.Option(
    "--inject",
    help="Break it on purpose: kill:rank=1,step=5; hang, slow:rank=1,ms=50, drop-collective, nan, "
    "corrupt-checkpoint, disk-full (repeatable; docs/reliability.md).",
    metavar="FAULT",
)
OUT = typer.Option("--out", "-o", help="Folder for the files; new or empty.", metavar="DIR")
QUIET = typer.Option("--quiet", "-q", help="No progress, no table: only where the files are.")
JSON = typer.Option("--json", help="Print the result as JSON, and nothing else, on stdout.")


def _config(
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


# ------------------------------------------------------------------ the commands


@app.command()
def train(
    config: Annotated[Path | None, CONFIG] = None,
    strategy: Annotated[
        str | None, typer.Option("--strategy", help="A name from `shardlab strategies`.")
    ] = None,
    world: Annotated[int | None, WORLD] = None,
    workload: Annotated[str | None, WORKLOAD] = None,
    size: Annotated[str | None, SIZE] = None,
    data: Annotated[str | None, DATA] = None,
    seq_len: Annotated[int | None, SEQ_LEN] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Optimizer steps.")] = None,
    global_batch: Annotated[int | None, GLOBAL_BATCH] = None,
    accumulate: Annotated[int | None, ACCUMULATE] = None,
    batch_split: Annotated[str | None, BATCH_SPLIT] = None,
    epoch: Annotated[
        str | None,
        typer.Option(help="How an epoch ends: continuous, padded, dropped or exact."),
    ] = None,
    audit_data: Annotated[
        bool, typer.Option("--audit-data", help="Say which samples were repeated or missed.")
    ] = False,
    optimizer: Annotated[str | None, OPTIMIZER] = None,
    learning_rate: Annotated[float | None, LEARNING_RATE] = None,
    precision: Annotated[str | None, PRECISION] = None,
    evaluate_every: Annotated[int | None, EVALUATE] = None,
    seed: Annotated[int | None, SEED] = None,
    device: Annotated[str | None, DEVICE] = None,
    backend: Annotated[str | None, BACKEND] = None,
    port: Annotated[int | None, PORT] = None,
    profile: Annotated[bool, PROFILE] = False,
    checkpoint_every: Annotated[int | None, CHECKPOINT_EVERY] = None,
    checkpoint_async: Annotated[bool, CHECKPOINT_ASYNC] = False,
    resume: Annotated[str | None, RESUME] = None,
    max_restarts: Annotated[int | None, MAX_RESTARTS] = None,
    min_world: Annotated[int | None, MIN_WORLD] = None,
    hang_after: Annotated[float | None, HANG_AFTER] = None,
    inject: Annotated[list[str] | None, INJECT] = None,
    settings: Annotated[list[str] | None, SET] = None,
    out: Annotated[str | None, OUT] = None,
    quiet: Annotated[bool, QUIET] = False,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Train with one strategy; the run folder keeps every step and every collective."""
    from shardlab import launch, record, restart
    from shardlab.checkpoint import start as starts
    from shardlab.report import console

    environment = launch.torchrun_environment()
    named = starts.named_by(config, workload, strategy)
    base = starts.settings_of(resume, named, keep_world=environment is None)
    if starts.is_restarted(environment):
        resume = starts.AUTO
    resolved = _config(
        config,
        settings,
        {
            "strategy.name": strategy,
            "launch.world": world,
            "model.workload": workload,
            "model.size": size,
            "data.source": data,
            "data.seq_len": seq_len,
            "training.steps": steps,
            "training.global_batch": global_batch,
            "training.accumulate": accumulate,
            "training.batch_split": batch_split,
            "data.epoch": epoch,
            "data.audit": audit_data or None,
            "training.optimizer": optimizer,
            "training.learning_rate": learning_rate,
            "precision.compute": precision,
            "training.evaluate_every": evaluate_every,
            "training.seed": seed,
            "launch.device": device,
            "launch.backend": backend,
            "launch.port": port,
            "profile.enabled": profile or None,
            "checkpoint.every": checkpoint_every,
            "checkpoint.asynchronous": checkpoint_async or None,
            "checkpoint.resume": resume,
            "launch.max_restarts": max_restarts,
            "launch.min_world": min_world,
            "guard.hang_s": hang_after,
            "faults": inject,
            "output.dir": out,
        },
        base,
    )
    if environment is not None and resolved.launch.max_restarts:
        raise UsageError("under torchrun its agent restarts the ranks: torchrun --max-restarts")
    if environment is None and resolved.launch.world is None:
        resolved = resolved.with_overrides({"launch.world": launch.default_world(resolved)})
    speaks = (environment is None or environment["rank"] == 0) and not (quiet or as_json)
    try:
        with console.training_progress(enabled=speaks) as on_event:
            result = restart.train(resolved, _command(), on_event)
    except (RankFailure, Interrupted) as failure:
        if (folder := getattr(failure, "folder", None)) is not None and speaks:
            again = f"shardlab train --resume {shlex.quote(str(folder))}"
            print(f"to go on from its last checkpoint: {again}", file=sys.stderr)
        raise
    if result is None:  # a rank of torchrun's, but not the first
        return
    if as_json:
        print(record.json_text(result))
    elif quiet:
        print(result["folder"])
    else:
        console.print_training(result)
    if (result["checkpoint"] or {}).get("error"):
        raise SystemExit(1)  # what was trained is not on the disk


@app.command()
def compare(
    ctx: typer.Context,
    strategies: Annotated[
        str | None,
        typer.Option(
            "--strategies",
            help="Comma-separated; an option follows a colon: pytorch_ddp:bucket_mb=4.  "
            "(default: all)",
            show_default=False,
        ),
    ] = None,
    config: Annotated[Path | None, CONFIG] = None,
    world: Annotated[str | None, WORLDS] = None,
    workload: Annotated[str | None, WORKLOAD] = None,
    size: Annotated[str | None, SIZE] = None,
    data: Annotated[str | None, DATA] = None,
    seq_len: Annotated[int | None, SEQ_LEN] = None,
    global_batch: Annotated[int | None, GLOBAL_BATCH] = None,
    accumulate: Annotated[str | None, ACCUMULATES] = None,
    batch_split: Annotated[str | None, BATCH_SPLIT] = None,
    precision: Annotated[str | None, PRECISION_AXIS] = None,
    bucket_mb: Annotated[str | None, BUCKET_MB] = None,
    seed: Annotated[int | None, SEED] = None,
    device: Annotated[str | None, DEVICE] = None,
    backend: Annotated[str | None, BACKEND] = None,
    port: Annotated[int | None, PORT] = None,
    repeats: Annotated[int, typer.Option(help="Interleaved visits to each strategy.")] = 4,
    warmup: Annotated[int, typer.Option(help="Steps before the clock counts, per visit.")] = 2,
    steps: Annotated[int, typer.Option(help="Timed steps per visit.")] = 3,
    prove: Annotated[
        bool, typer.Option(help="Prove each strategy on a small float64 model, after the timing.")
    ] = True,
    profile: Annotated[bool | None, PROFILE_AFTER] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Go on with an interrupted comparison; what it has measured is kept.",
            metavar="DIR",
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="An earlier compare.json to hold this one against.", metavar="FILE"),
    ] = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            help="With --against, exit 1 beyond a limit: slower=5%, memory=10% (repeatable).",
            metavar="LIMIT",
        ),
    ] = None,
    settings: Annotated[list[str] | None, SET] = None,
    out: Annotated[str | None, OUT] = None,
    quiet: Annotated[bool, QUIET] = False,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Measure strategies side by side: same model, data, seed and global batch."""
    from shardlab import launch, record
    from shardlab.measure import compare as comparison
    from shardlab.measure import gate
    from shardlab.measure import resume as resuming
    from shardlab.report import compare as report
    from shardlab.report import console
    from shardlab.strategies import STRATEGIES

    if launch.torchrun_environment() is not None:
        raise UsageError("compare starts its own ranks; run it without torchrun")
    if fail_if and against is None:
        raise UsageError("--fail-if is for a comparison with an earlier one; add --against FILE")
    if resume is not None and out is not None:
        raise UsageError("--resume goes on in its own folder; leave out --out")
    limits = gate.limits_of(fail_if or [])
    earlier = None if against is None else gate.read(against)
    store = None if resume is None else resuming.Store(resume)
    begun = None if store is None else store.planned()
    if begun is not None and _only_given(ctx, {"resume", "quiet", "as_json", "against", "fail_if"}):
        cells, plan, command = begun
        output = cells[0].config.output
    else:
        resolved = _config(
            config,
            settings,
            {
                "model.workload": workload,
                "model.size": size,
                "data.source": data,
                "data.seq_len": seq_len,
                "training.global_batch": global_batch,
                "training.batch_split": batch_split,
                "training.seed": seed,
                "launch.device": device,
                "launch.backend": backend,
                "launch.port": port,
                "profile.enabled": profile or None,
                "output.dir": out,
            },
        )
        output, command = resolved.output, _command()
        plan = comparison.Plan(
            repeats=repeats,
            warmup=warmup,
            steps=steps,
            prove=prove,
            profile=None if profile is False else replace(resolved.profile, enabled=True),
        )
        specs = [s.strip() for s in strategies.split(",")] if strategies else list(STRATEGIES)
        axes = comparison.axes_of(
            resolved, world, precision, accumulate, bucket_mb, launch.DEFAULT_WORLD
        )
        cells = comparison.cells_of(resolved, specs, axes, plan)
        if begun is not None:
            assert resume is not None
            resuming.refuse_others((cells, plan), begun[:2], resume)
            cells, plan, command = begun
    if earlier is not None:
        gate.refuse_others(earlier, cells)

    @functools.cache  # made when there is something to write, so a refusal leaves nothing behind
    def folder() -> Path:
        return resume or record.new_folder(Path(output.root), "compare", _path(output.dir))

    try:
        with (
            console.comparison_progress(enabled=not (quiet or as_json)) as on_progress,
            _interrupted_by_terminate(),
        ):
            result = comparison.compare(cells, plan, command, on_progress, folder)
    except (Interrupted, KeyboardInterrupt):
        if folder.cache_info().currsize:
            again = f"shardlab compare --resume {shlex.quote(str(folder()))}"
            print(f"to go on where it stopped: {again}", file=sys.stderr)
        raise Interrupted from None
    try:
        if earlier is not None:
            result["gate"] = gate.check(result, earlier, limits)
    finally:  # what was measured is not lost to a record that cannot be compared with it
        files = report.write(folder(), result)
    if as_json:
        print(record.json_text(result))
    elif quiet:
        print(folder())
    else:
        console.print_comparison(result, files)
    if earlier is not None and not quiet and not as_json:
        console.print_gate(result["gate"])
    if all(cell["status"] != "ok" for cell in result["cells"]):
        raise SystemExit(1)
    if earlier is not None and not result["gate"]["pass"]:
        raise SystemExit(1)


def _only_given(ctx: typer.Context, names: set[str]) -> bool:
    """Whether no other flags were given than these."""
    given = {name for name in ctx.params if ctx.get_parameter_source(name).name != "DEFAULT"}  # type: ignore[union-attr]
    return given <= names


@contextlib.contextmanager
def _interrupted_by_terminate() -> Iterator[None]:
    """``kill`` ends a comparison as Ctrl-C does: every rank is ended, and how to go on is said."""

    def stop(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@app.command()
def prove(
    strategies: Annotated[
        str | None,
        typer.Option(
            "--strategies",
            help="Comma-separated, with options as in compare; your own by import path.  "
            "(default: all)",
            show_default=False,
        ),
    ] = None,
    config: Annotated[Path | None, CONFIG] = None,
    world: Annotated[
        str | None,
        typer.Option(
            "--world", "-w", help="Numbers of ranks: 2,4.  (default: 2)", show_default=False
        ),
    ] = None,
    workload: Annotated[str | None, WORKLOAD] = None,
    size: Annotated[str | None, SIZE] = None,
    data: Annotated[str | None, DATA] = None,
    seq_len: Annotated[int | None, SEQ_LEN] = None,
    global_batch: Annotated[int | None, GLOBAL_BATCH] = None,
    accumulate: Annotated[
        int | None,
        typer.Option(
            "--accumulate",
            help="Micro-batches per rank and step.  (default: 2)",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int | None, SEED] = None,
    device: Annotated[str | None, DEVICE] = None,
    backend: Annotated[str | None, BACKEND] = None,
    port: Annotated[int | None, PORT] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 3,
    settings: Annotated[list[str] | None, SET] = None,
    out: Annotated[str | None, OUT] = None,
    quiet: Annotated[bool, QUIET] = False,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Prove that strategies equal one process, and hold, send and overlap what they claim."""
    from shardlab import launch, record
    from shardlab import prove as proofs
    from shardlab.report import console
    from shardlab.report import proof as report
    from shardlab.strategies import STRATEGIES

    if launch.torchrun_environment() is not None:
        raise UsageError("prove starts its own ranks; run it without torchrun")
    resolved = proofs.small(
        _config(
            config,
            settings,
            {
                "model.workload": workload,
                "model.size": size,
                "data.source": data,
                "data.seq_len": seq_len,
                "training.steps": steps,
                "training.global_batch": global_batch,
                "training.accumulate": accumulate,
                "training.seed": seed,
                "launch.device": device,
                "launch.backend": backend,
                "launch.port": port,
                "output.dir": out,
            },
        ),
        accumulate,
    )
    specs = [s.strip() for s in strategies.split(",")] if strategies else list(STRATEGIES)
    worlds = proofs.worlds_of(world, resolved)
    cases = proofs.cases_of(resolved, specs, worlds)
    with console.comparison_progress(enabled=not (quiet or as_json)) as on_progress:
        result = proofs.prove(cases, worlds, _command(), on_progress)
    folder = record.new_folder(Path(resolved.output.root), "prove", _path(resolved.output.dir))
    record.write_json(folder / "prove.json", result)
    if as_json:
        print(record.json_text(result))
    elif quiet:
        print(folder)
    else:
        report.show(result, folder / "prove.json")
    if not result["verdicts"] or not all(v["pass"] for v in result["verdicts"]):
        raise SystemExit(1)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


cli_measure.add_to(app)


@app.command()
def strategies(as_json: Annotated[bool, JSON] = False) -> None:
    """List the strategies, in the order of the ladder."""
    from shardlab.strategies import STRATEGIES

    _list_names(STRATEGIES, "strategy", as_json)


@app.command()
def workloads(as_json: Annotated[bool, JSON] = False) -> None:
    """List what can be trained."""
    from shardlab.workloads import WORKLOADS

    _list_names(WORKLOADS, "workload", as_json)


def _list_names(known: dict[str, str], kind: str, as_json: bool) -> None:
    from shardlab import naming
    from shardlab.report import console

    rows = {name: naming.summary(path) for name, path in known.items()}
    if as_json:
        print(json.dumps(rows))
    else:
        console.print_names(rows, kind)


@app.command()
def doctor(as_json: Annotated[bool, JSON] = False) -> None:
    """Say what this machine can run, and why not the rest. Starts two ranks to see."""
    from shardlab import diagnosis
    from shardlab.report import console

    checks = diagnosis.examine()
    if as_json:
        print(json.dumps(checks))
    else:
        console.print_diagnosis(checks)
    if any(check["status"] == "failed" for check in checks):
        raise SystemExit(1)


@app.command()
def version() -> None:
    """Print the version."""
    print(shardlab.__version__)
