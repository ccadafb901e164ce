"""`shardlab prove`: each strategy against one process, and against what it claims."""

from __future__ import annotations

import typer

from shardlab.cli import flags


@flags.configured(
    "workload", "size", "data", "seq_len", "global_batch", "micro_batch", "optimizer",
    "activation_checkpointing", "compile", "seed", "device",
    micro_batch="Most samples that a rank takes at a time.  (default: half of its share)",
)  # fmt: skip
def prove(
    asked: flags.Asked,
    strategies: str | None = typer.Option(
        None,
        help="Comma-separated, with options as in compare; your own by import path.  "
        "(default: all)",
    ),
    world: str | None = typer.Option(
        None, "--world", "-w", help="Numbers of ranks: 2,4.  (default: 2)"
    ),
    steps: int = typer.Option(3, min=1, help="Optimizer steps."),
    time_limit: float = typer.Option(
        600, min=1, help="Seconds for one strategy; then it has failed."
    ),
) -> None:
    """Prove that strategies equal one process, and hold, send and overlap what they claim.

    The proof is of your model: name it with --workload (or --config), and each strategy is run on
    it and on a small model of ours, both beside a plain loop in one process. Both compute in
    float64, as rounding would hide what is wrong: so there is no --precision. Random numbers in its
    forward are seeded alike in both. Workloads of ours are taken in their smallest size, unless you
    give --size.

    It takes a few seconds for each strategy, and with a large model as long as ten optimizer steps
    in float64; before the first strategy, as long as ten steps in one process. From the second
    strategy on, the progress says how long the rest will take.

    \b
    Examples:
      shardlab prove --strategies zero1,zero2 --world 2,4
      shardlab prove --workload my_model.py:workload --strategies simple_ddp
    """
    from shardlab import files
    from shardlab.launch import launch
    from shardlab.proof import prove as proofs
    from shardlab.report import console
    from shardlab.report import proof as report

    config = asked.config()
    launch.lead(config.launch)
    worlds = proofs.worlds_of(world, config)
    resolved = proofs.small(config, steps, worlds, asked.keys)
    cases = proofs.cases_of(resolved, flags.specs_of(strategies), worlds)
    with console.comparison_progress(enabled=asked.tells) as on_progress:
        result = proofs.prove(cases, worlds, flags.command(), on_progress, time_limit)
    folder = resolved.new_folder("prove")
    files.write_json(folder / "prove.json", result)
    asked.print(result, folder, lambda: report.show(result, folder / "prove.json"))
    if not result["verdicts"] or not all(v["pass"] for v in result["verdicts"]):
        raise SystemExit(1)
