"""`shardlab prove`: each strategy against one process, and against what it claims."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardlab.cli import flags
from shardlab.errors import UsageError


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
    config: Annotated[Path | None, flags.CONFIG] = None,
    world: Annotated[
        str | None,
        typer.Option(
            "--world", "-w", help="Numbers of ranks: 2,4.  (default: 2)", show_default=False
        ),
    ] = None,
    workload: Annotated[str | None, flags.WORKLOAD] = None,
    size: Annotated[str | None, flags.SIZE] = None,
    data: Annotated[str | None, flags.DATA] = None,
    seq_len: Annotated[int | None, flags.SEQ_LEN] = None,
    global_batch: Annotated[int | None, flags.GLOBAL_BATCH] = None,
    accumulate: Annotated[
        int | None,
        typer.Option(
            "--accumulate",
            help="Micro-batches per rank and step.  (default: 2)",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int | None, flags.SEED] = None,
    device: Annotated[str | None, flags.DEVICE] = None,
    backend: Annotated[str | None, flags.BACKEND] = None,
    port: Annotated[int | None, flags.PORT] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 3,
    limit: Annotated[
        float, typer.Option(min=1, help="Seconds for one strategy; then it has failed.")
    ] = 600,
    settings: Annotated[list[str] | None, flags.SET] = None,
    out: Annotated[str | None, flags.OUT] = None,
    quiet: Annotated[bool, flags.QUIET] = False,
    as_json: Annotated[bool, flags.JSON] = False,
) -> None:
    """Prove that strategies equal one process, and hold, send and overlap what they claim.

    The proof is of your model: name it with --workload (or --config), and each strategy is run on
    it and on a small model of ours, both beside a plain loop in one process, in float64. Random
    numbers in its forward are seeded alike in both. Workloads of ours are taken in their smallest
    size, unless you give --size.

    It takes a few seconds for each strategy, and with a large model as long as ten optimizer steps
    in float64; before the first strategy, as long as ten steps in one process.
    """
    from shardlab import launch, record
    from shardlab import prove as proofs
    from shardlab.report import console
    from shardlab.report import proof as report
    from shardlab.strategies import STRATEGIES

    if launch.torchrun_environment() is not None:
        raise UsageError("prove starts its own ranks; run it without torchrun")
    typed = {
        "model.workload": workload,
        "model.size": size,
        "data.source": data,
        "data.seq_len": seq_len,
        "training.global_batch": global_batch,
        "training.accumulate": accumulate,
        "training.seed": seed,
        "launch.device": device,
        "launch.backend": backend,
        "launch.port": port,
        "output.dir": out,
    }
    given = {key for key, value in typed.items() if value is not None}
    given |= {setting.partition("=")[0] for setting in settings or []}
    asked = flags.config_of(config, settings, typed)
    worlds = proofs.worlds_of(world, asked)
    resolved = proofs.small(asked, steps, worlds, given)
    specs = [s.strip() for s in strategies.split(",")] if strategies else list(STRATEGIES)
    cases = proofs.cases_of(resolved, specs, worlds)
    with console.comparison_progress(enabled=not (quiet or as_json)) as on_progress:
        result = proofs.prove(cases, worlds, flags.command(), on_progress, limit)
    folder = record.new_folder(
        Path(resolved.output.root), "prove", flags.path_of(resolved.output.dir)
    )
    record.write_json(folder / "prove.json", result)
    if as_json:
        print(record.json_text(result))
    elif quiet:
        print(folder)
    else:
        report.show(result, folder / "prove.json")
    if not result["verdicts"] or not all(v["pass"] for v in result["verdicts"]):
        raise SystemExit(1)
