"""A command as a script or manifest for a cluster's own engine, for people to read and keep.

Nothing here imports Ray or Kubernetes: what is written is text.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field

import jinja2

from shardlab.errors import UsageError, unknown

# The file that is written for each engine.
FILES = {
    "slurm": "{name}.sbatch",
    "mpi": "{name}.mpi.sh",
    "torchrun": "{name}.torchrun.sh",
    "ray": "{name}.ray.py",
    "kubernetes": "{name}.trainjob.yaml",
}
# Commands that run as ranks of a launcher.
COMMANDS = ("train", "compare", "prove", "throughput", "memory", "network", "doctor")
# Their ranks do not start in the folder that this command is given in, nor always on its machines.
ELSEWHERE = ("ray", "kubernetes")
# Settings that only some engines can honour.
USED_BY = {
    "time": ("slurm",),
    "partition": ("slurm",),
    "account": ("slurm",),
    "gpus_per_node": ("slurm", "ray", "kubernetes"),
    "image": ("kubernetes",),
    "hosts": ("mpi", "torchrun"),
    "python": ("slurm", "mpi", "torchrun"),
}
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?")
TIME = re.compile(r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}")  # as sbatch takes it
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._,:/@-]*")


@dataclass(frozen=True)
class Job:
    engine: str
    args: tuple[str, ...]  # of the command
    nodes: int = 1
    ranks_per_node: int = 1
    name: str = "shardlab"
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    gpus_per_node: int | None = None
    image: str | None = None
    hosts: str | None = None  # comma-separated; the first is where rank 0 listens
    python: str | None = None
    folder: str = "runs"  # of the run, unless --out names one
    command: str = "train"
    interface: str | None = None  # launch.interface
    ranks: int = field(init=False)

    def __post_init__(self) -> None:
        if self.engine not in FILES:
            raise unknown("engine for --to", self.engine, FILES)
        object.__setattr__(self, "ranks", self.nodes * self.ranks_per_node)
        for name, engines in USED_BY.items():
            if getattr(self, name) is not None and self.engine not in engines:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(
                    f"{flag} is for {', '.join(engines)}; {self.engine} has no use for it"
                )
        for name, least in (("nodes", 1), ("ranks_per_node", 1), ("gpus_per_node", 1)):
            if (getattr(self, name) or least) < least or getattr(self, name) == 0:
                raise UsageError(f"--{name.replace('_', '-')} must be at least {least}")
        for name, form, words in (
            ("name", NAME, "small letters, digits and hyphens, at most 42 of them"),
            ("time", TIME, "as sbatch takes it: minutes, or 04:00:00, or 1-12"),
            *((n, WORD, "one word") for n in ("partition", "account", "image", "hosts")),
        ):
            value = getattr(self, name)
            if value is not None and not form.fullmatch(value):
                raise UsageError(f"--{name} '{value}' must be {words}")
        if self.hosts is not None and len(self.hosts.split(",")) != self.nodes:
            raise UsageError(f"--hosts names {len(self.hosts.split(','))} hosts, not {self.nodes}")
        if self.engine == "kubernetes" and self.image is None:
            raise UsageError("kubernetes needs an image with shardlab in it: --image NAME")

    @property
    def is_training(self) -> bool:
        """Whether it continues when it is started again: only a training run has checkpoints."""
        return self.command == "train"

    @property
    def file(self) -> str:
        return FILES[self.engine].format(name=self.name)


def script(job: Job) -> str:
    """The text of the job's file."""
    return _templates().get_template(f"{job.engine}.j2").render(job=job, args=arguments(job))


def arguments(job: Job) -> list[str]:
    """The command's arguments, with a folder, and what a training run that is started again needs.

    With ``--resume auto`` and a folder of its own it begins there, or continues from the newest
    checkpoint. A Slurm job keeps its number when it is requeued, so its folder carries it.
    """
    args = list(job.args)
    if job.command == "doctor":  # it writes nothing
        return args
    has = {word.partition("=")[0] for word in args}
    has_folder = has & {"--out", "-o"} or any("output.dir=" in word for word in args)
    if "--resume" in has or any("checkpoint.resume=" in word for word in args):
        return args
    if job.is_training:
        args += ["--resume", "auto"]
    if not has_folder:
        number = "-$SLURM_JOB_ID" if job.engine == "slurm" else ""
        args += ["--out", f"{job.folder}/{job.name}{number}"]
    return args


def quoted(args: Sequence[str], width: int = 90) -> str:
    """The arguments as lines for a shell. The job's number is the one variable that it expands."""
    ours = re.compile(r"[\w./-]*-\$SLURM_JOB_ID")
    lines = [""]
    for word in (f'"{arg}"' if ours.fullmatch(arg) else shlex.quote(arg) for arg in args):
        if word.startswith("-") and len(lines[-1]) + len(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".lstrip()
    return " \\\n    ".join(lines)


def run_command(job: Job, path: str) -> list[str]:
    """The command that submits the file; refused if it cannot be run here."""
    if job.engine == "torchrun" and job.nodes > 1:
        raise UsageError(
            f"torchrun has no queue: write the script without --run, and start it on each of the "
            f"{job.nodes} nodes: bash {path} FIRST_HOST"
        )
    if job.engine == "mpi" and job.nodes > 1 and job.hosts is None:
        raise UsageError("mpirun needs to know the nodes: --hosts first,second")
    command = {
        "slurm": ["sbatch", path],
        "mpi": ["bash", path],
        "torchrun": ["bash", path],
        "ray": ["ray", "job", "submit", "--working-dir", ".", "--", "python", path],
        "kubernetes": ["kubectl", "create", "-f", path],
    }[job.engine]
    program = "mpirun" if job.engine == "mpi" else command[0]
    if shutil.which(program) is None:
        raise UsageError(
            f"{program} is not on this machine; write the file without --run, and submit it where "
            "it is"
        )
    return command


def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("shardlab.run"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["sh"] = quoted
    return environment
