"""`shardlab submit`: a command as a script for Slurm, MPI, torchrun, Ray or Kubernetes."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardlab import output
from shardlab.cli import flags
from shardlab.cli import train as training
from shardlab.errors import UsageError

if TYPE_CHECKING:
    from shardlab.config import Config
    from shardlab.run.submit import Job


def submit(
    to: Annotated[str, typer.Option(help="slurm, mpi, torchrun, ray or kubernetes.")],
    words: Annotated[
        list[str],
        typer.Argument(
            help="After --, the command (train, compare, network …) and its flags.",
            metavar="COMMAND",
            show_default=False,
        ),
    ],
    nodes: Annotated[int, typer.Option(help="Machines.")] = 1,
    ranks_per_node: Annotated[int, typer.Option(help="Ranks on each machine.")] = 1,
    name: Annotated[str, typer.Option(help="Of the job, its file and its folder.")] = "shardlab",
    time: Annotated[str | None, typer.Option(help="Slurm: the time limit, 04:00:00.")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="Slurm, Ray, Kubernetes.")] = None,
    image: Annotated[str | None, typer.Option(help="Kubernetes: with shardlab in it.")] = None,
    hosts: Annotated[
        str | None, typer.Option(help="MPI, torchrun: the machines, with commas.")
    ] = None,
    python: Annotated[
        str | None, typer.Option(help="Slurm, MPI, torchrun: on the nodes.  (default: this one)")
    ] = None,
    file: Annotated[str | None, typer.Option(help="Where to write.  (default: by name)")] = None,
    run: Annotated[bool, typer.Option("--run", help="Submit it, too.")] = False,
) -> None:
    """Write a command as a script or manifest that a cluster runs, and that you can keep.

    shardlab submit --to slurm --nodes 2 --ranks-per-node 4 -- train --checkpoint-every 100
    """
    from shardlab import files
    from shardlab.errors import unknown
    from shardlab.run import submit as submitting

    if python is None and to in submitting.USED_BY["python"]:
        python = sys.executable
    command, *args = words
    if command not in submitting.COMMANDS:
        raise unknown("command to submit", command, submitting.COMMANDS)
    job = submitting.Job(
        to, tuple(args), nodes, ranks_per_node, name, time, partition, account, gpus_per_node,
        image, hosts, python, _folder(to), command,
    )  # fmt: skip
    asked = read(job)
    notes: list[str] = []
    if asked is not None:
        config, notes = check(job, asked)
        job = dataclasses.replace(job, interface=config.launch.interface)
    path = Path(file or job.file)
    if path.exists():
        raise UsageError(f"{path} exists; choose another --name or --file, or remove it")
    starting = submitting.run_command(job, str(path)) if run else None
    try:
        files.write_text(path, submitting.script(job))
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    output.say(path)
    for note in notes:
        output.note("info", f"note: {note}")
    if starting is not None:
        raise SystemExit(
            subprocess.run(starting, stdout=output.descriptor(), check=False).returncode
        )


def _folder(engine: str) -> str:
    """Where runs go: Ray's workers and containers do not start in this folder."""
    if engine == "ray":
        return str(Path.cwd() / "runs")
    return "/runs" if engine == "kubernetes" else "runs"


def read(job: Job) -> flags.Asked | None:
    """The flags of the job's command, refused now if it would refuse them; None if it has none."""
    from shardlab import cli
    from shardlab.config import StrategyConfig
    from shardlab.specs import parse_spec

    group = typer.main.get_command(cli.app)
    assert isinstance(group, typer.core.TyperGroup)
    command, name = group.commands[job.command], f"shardlab {job.command}"
    found = command.make_context(name, list(job.args)).params
    if "settings" not in found:  # doctor
        return None
    if found.get("strategies") is not None:
        for spec in flags.specs_of(found["strategies"]):
            name, options = parse_spec(spec)
            StrategyConfig(name=name, options=options)  # refuses a name that is unknown
    # What typer would make of it: a flag that may be repeated is a list, or None.
    values = {n: (list(v) or None) if isinstance(v, tuple) else v for n, v in found.items()}
    names = (*training.FLAGS, "out") if job.is_training else [n for n in ("data",) if n in values]
    return flags.asked_in(values, names)


def check(job: Job, asked: flags.Asked) -> tuple[Config, list[str]]:
    """Refuse now what the ranks would refuse on the cluster; return the config, and notes on it."""
    from shardlab.config import SYNTHETIC, is_data_here
    from shardlab.run import submit as submitting

    notes: list[str] = []
    if job.engine in submitting.ELSEWHERE and not is_data_here(source := asked.data_source()):
        notes.append(f"{source} is not on this machine; the nodes must have it")
        asked = dataclasses.replace(asked, flags={**asked.flags, "data.source": SYNTHETIC})
    config = training.config_of(asked, keep_world=False) if job.is_training else asked.config()
    launch = config.launch
    if launch.world not in (None, job.ranks):
        raise UsageError(
            f"--world {launch.world} contradicts {job.nodes} nodes with {job.ranks_per_node} ranks "
            "each; leave it out"
        )
    launcher = {"slurm": "srun", "mpi": "mpirun"}.get(job.engine, "torchrun")
    if launch.max_restarts:
        raise UsageError(training.RESTARTED_BY[launcher])
    if launch.address is not None and launcher == "torchrun":
        raise UsageError(f"launch.address is for slurm and mpi; {job.engine} finds the first node")
    if job.is_training:
        config.with_overrides({"launch.world": job.ranks})  # can they share the batch?
        if config.checkpoint.every is None:
            notes.append(
                "without --checkpoint-every a run that is started again begins at its first step"
            )
    return config, notes
