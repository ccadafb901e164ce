"""`shardlab submit`: a training run as a script for Slurm, MPI, torchrun, Ray or Kubernetes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from shardlab.cli import flags
from shardlab.cli import train as training
from shardlab.errors import UsageError


def submit(
    to: Annotated[str, typer.Option(help="slurm, mpi, torchrun, ray or kubernetes.")],
    train: Annotated[
        list[str],
        typer.Argument(help="After --, the command: train, and its flags.", show_default=False),
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
    """Write a training run as a script or manifest that a cluster runs, and that you can keep.

    shardlab submit --to slurm --nodes 2 --ranks-per-node 4 -- train --checkpoint-every 100
    """
    from shardlab import files
    from shardlab.run import submit as submitting

    if python is None and to in submitting.USED_BY["python"]:
        python = sys.executable
    if train[0] != "train":
        raise UsageError(f"submit writes a training run: -- train …, not '{train[0]}'")
    job = submitting.Job(
        to, tuple(train[1:]), nodes, ranks_per_node, name, time, partition, account,
        gpus_per_node, image, hosts, python, folder=_folder(to),
    )  # fmt: skip
    notes = check(job)
    path = Path(file or job.file)
    if path.exists():
        raise UsageError(f"{path} exists; choose another --name or --file, or remove it")
    command = submitting.run_command(job, str(path)) if run else None
    try:
        files.write_text(path, submitting.script(job))
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    print(path)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if command is not None:
        raise SystemExit(subprocess.run(command, check=False).returncode)


def _folder(engine: str) -> str:
    """Where runs go: Ray's workers and containers do not start in this folder."""
    if engine == "ray":
        return str(Path.cwd() / "runs")
    return "/runs" if engine == "kubernetes" else "runs"


def check(job: Any) -> list[str]:
    """Refuse now what the ranks would refuse on the cluster; what else there is to say."""
    checker = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    checker.command()(flags.configured(*training.FLAGS)(_asked))
    asked = typer.main.get_command(checker)(
        list(job.train), prog_name="shardlab train", standalone_mode=False
    )
    if not isinstance(asked, flags.Asked):  # --help has been printed
        raise SystemExit(0)
    config = training.config_of(asked, keep_world=False)
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
    config.with_overrides({"launch.world": job.ranks})  # can they share the batch?
    if config.checkpoint.every is None:
        return ["without --checkpoint-every a run that is started again begins at its first step"]
    return []


def _asked(asked: flags.Asked) -> flags.Asked:
    """A `train` that only reads its flags."""
    return asked
