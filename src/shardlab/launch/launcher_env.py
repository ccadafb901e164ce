"""This process's place among ranks that a launcher has started: torchrun, srun or mpirun.

``resolve`` reads the launcher's variables and nothing else; it opens no socket and imports no
torch. Variables that contradict each other are refused here, before a rank waits for another.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from shardlab.errors import UsageError

Environment = Mapping[str, str]

LOOPBACK = "127.0.0.1"
PORTS = range(12000, 32000)  # below the ports that Linux gives to outgoing connections
MOST_NODES = 2**16  # a range with more is a slip, and would take all memory
# Steps that run no tasks of the user: Slurm's interactive, batch and external step.
RESERVED_STEPS = ("4294967290", "4294967291", "4294967292", "4294967293")


@dataclass(frozen=True)
class Place:
    launcher: str  # torchrun (or what sets its variables, as Ray does), srun or mpirun
    rank: int
    size: int
    local_rank: int
    local_size: int  # ranks on this node
    node: int | None  # None where the launcher does not say
    nodes: int
    address: str  # where rank 0 listens; empty where the launcher does not say
    port: int

    @property
    def is_torchruns(self) -> bool:
        return self.launcher == "torchrun"

    @property
    def is_joined(self) -> bool:
        """Whether this process is a rank. A single task of srun or mpirun starts its own ranks."""
        return self.is_torchruns or self.size > 1


def resolve(environ: Environment) -> Place | None:
    """The place that the environment gives this process; None if it is not a rank."""
    place = _of_torchrun(environ) or _of_mpi(environ) or _of_slurm(environ)
    if place is None:
        return None
    if place.size < 1:
        raise UsageError(f"{place.launcher} says that there are {place.size} ranks in all")
    for what, number, size in (
        ("rank", place.rank, place.size),
        ("local rank", place.local_rank, place.local_size),
    ):
        if not 0 <= number < size:
            raise UsageError(
                f"{place.launcher} says that this is {what} {number} of {size}: ranks go from 0 to "
                f"{size - 1}"
            )
    if place.local_size > place.size:
        raise UsageError(
            f"{place.launcher} says that {place.local_size} ranks are on this node, and "
            f"{place.size} in all"
        )
    return place


def joined() -> Place | None:
    """This process's place among the ranks that a launcher has started; None if it starts them."""
    place = resolve(os.environ)
    return place if place is not None and place.is_joined else None


def tasks_without_srun(environ: Environment) -> int:
    """The tasks of a Slurm job whose script or shell this is; 0 where srun started this process."""
    if "SLURM_JOB_ID" not in environ or _in_step(environ):
        return 0
    tasks = environ.get("SLURM_NTASKS") or environ.get("SLURM_JOB_NUM_NODES") or "1"
    return int(tasks) if tasks.isdecimal() else 1


def first_node(nodes: str) -> str:
    """The first name in one of Slurm's node lists: that of ``n[01-03,7],m2`` is n01."""
    first = re.match(r"(?:[^,\[\]]|\[\d+[^\[\]]*\])+(?=,|$)", nodes)
    if first is None:
        raise UsageError(f"Slurm's node list '{nodes}' cannot be read")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def tasks_per_node(text: str) -> list[int]:
    """Slurm's ``2(x3),1`` as 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise UsageError(f"Slurm's tasks per node '{text}' cannot be read at '{part}'")
        if (times := int(match[2] or 1)) > MOST_NODES:
            raise UsageError(f"Slurm's tasks per node '{text}' has too many nodes at '{part}'")
        counts += [int(match[1])] * times
    return counts


def port_of(job: str) -> int:
    """A port that all ranks of a job derive from what they know about it."""
    return PORTS[zlib.crc32(job.encode()) % len(PORTS)]


def is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or bool(re.fullmatch(r"127(\.\d+){3}", address))


def refuse_loopback(launcher: str, address: str, nodes: int, source: str) -> None:
    if nodes > 1 and is_loopback(address):
        raise UsageError(
            f"{source} is {address}, which every node takes for itself, and {launcher} has started "
            f"ranks on {nodes} nodes; name an address of the first node that the others reach"
        )


# ------------------------------------------------------------------ each launcher


def _of_torchrun(environ: Environment) -> Place | None:
    """The variables that torchrun sets, and Ray Train, and people by hand."""
    if not all(name in environ for name in ("RANK", "WORLD_SIZE")):
        return None
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
    others = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
    if len(missing) == 2 or (missing and (_in_step(environ) or any(n in environ for n in others))):
        return None  # ranks that we, srun or mpirun have started
    if missing:  # each process would train a world of its own
        raise UsageError(
            f"RANK {environ['RANK']} of WORLD_SIZE {environ['WORLD_SIZE']} is set and {missing[0]} "
            "is not: ranks that are started by hand need both to find each other"
        )
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    local_size = _number(environ, "LOCAL_WORLD_SIZE", size)
    is_own = "TORCHELASTIC_RUN_ID" in environ  # torchrun itself
    nodes = _number(environ, "GROUP_WORLD_SIZE", -(-size // max(local_size, 1)))
    if _in_step(environ) and not any(name.startswith("RAY_") for name in environ):
        _refuse_against_slurm(environ, rank, size, nodes, is_own)
    if not is_own:  # torchrun's agents of several nodes may be tried on one machine
        refuse_loopback("this job", environ["MASTER_ADDR"], nodes, "MASTER_ADDR")
    group = "GROUP_RANK" if "GROUP_RANK" in environ else "NODE_RANK"
    return Place(
        launcher="torchrun",
        rank=rank,
        size=size,
        local_rank=_number(environ, "LOCAL_RANK", rank),
        local_size=local_size,
        node=_number(environ, group, 0),
        nodes=nodes,
        address=environ["MASTER_ADDR"],
        port=_port(environ, ""),
    )


def _refuse_against_slurm(
    environ: Environment, rank: int, size: int, nodes: int, is_own: bool
) -> None:
    """One torchrun on each node is normal. Its variables, set by hand, must agree with srun's."""
    task, tasks = _task(environ), _tasks(environ)
    if not is_own and tasks > 1 and (rank, size) != (task, tasks):
        raise UsageError(
            f"RANK {rank} of WORLD_SIZE {size} contradicts srun, which has made this task {task} "
            f"of {tasks}: they were set before srun; leave them out"
        )
    # An elastic torchrun may have lost its other nodes; one that is not restarted has not.
    if is_own and nodes == 1 and tasks > 1 and environ.get("TORCHELASTIC_MAX_RESTARTS") == "0":
        raise UsageError(
            f"srun has started {tasks} torchruns, and each is a world of its own: give them "
            f"--nnodes={tasks} and one --rdzv-endpoint in place of --standalone, with one task "
            "for each node"
        )


def _of_mpi(environ: Environment) -> Place | None:
    if "OMPI_COMM_WORLD_RANK" in environ:
        rank, size = (_number(environ, f"OMPI_COMM_WORLD_{name}") for name in ("RANK", "SIZE"))
    elif "PMI_RANK" in environ:
        rank, size = _number(environ, "PMI_RANK"), _number(environ, "PMI_SIZE")
        if _in_step(environ) and (rank, size) == (_task(environ), _tasks(environ)):
            return None  # srun --mpi=pmi2: Slurm's own variables say more
    else:
        return None
    local_rank = _first(
        environ, "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK",
        "PMI_LOCAL_RANK", default=0 if size == 1 else None,
    )  # fmt: skip
    local_size = _first(
        environ, "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE",
        "PMI_LOCAL_SIZE", default=1 if size == 1 else None,
    )  # fmt: skip
    nodes = -(-size // max(local_size, 1))  # where every node has as many ranks
    address = environ.get("MASTER_ADDR", "" if nodes > 1 else LOOPBACK)
    refuse_loopback("mpirun", address, nodes, "MASTER_ADDR")
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
    return Place(
        launcher="mpirun",
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node=0 if nodes == 1 else None,
        nodes=nodes,
        address=address,
        port=_port(environ, f"mpi {job}"),
    )


def _of_slurm(environ: Environment) -> Place | None:
    if not _in_step(environ):
        return None
    rank, size = _task(environ), _tasks(environ)
    if "SLURM_PTY_PORT" in environ:
        if size > 1:
            raise UsageError(
                f"srun --pty gives its terminal to the first of {size} tasks alone; ask for a "
                "shell with --ntasks=1, or start the command with srun without --pty"
            )
        return None  # a shell on a node: what is typed there starts its own ranks
    listed = _either(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    counted = _either(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    counts, node = tasks_per_node(counted), _number(environ, "SLURM_NODEID")
    first, nodes = first_node(listed), len(counts)
    if sum(counts) != size or node >= nodes:
        raise UsageError(
            f"Slurm contradicts itself: {size} tasks, {counted} per node, nodes {listed}, and this "
            f"is node {node}; were its variables set again in the script?"
        )
    address = environ.get("MASTER_ADDR", LOOPBACK if nodes == 1 else first)
    refuse_loopback("srun", address, nodes, "MASTER_ADDR")
    job = f"slurm {environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
    return Place(
        launcher="srun",
        rank=rank,
        size=size,
        local_rank=_number(environ, "SLURM_LOCALID"),
        local_size=counts[node],
        node=node,
        nodes=nodes,
        address=address,
        port=_port(environ, job),
    )


def _in_step(environ: Environment) -> bool:
    """Whether srun has started this. A batch script has a SLURM_PROCID too, but no step."""
    names = ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS")
    return all(name in environ for name in names) and environ["SLURM_STEP_ID"] not in RESERVED_STEPS


def _task(environ: Environment) -> int:
    return _number(environ, "SLURM_PROCID")


def _tasks(environ: Environment) -> int:
    return _number(environ, "SLURM_STEP_NUM_TASKS")


def _number(environ: Environment, name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise UsageError(f"{name} is not set, though the launcher's other variables are")
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name} is '{text}', which is no whole number") from None


def _first(environ: Environment, *names: str, default: int | None) -> int:
    for name in names:
        if name in environ:
            return _number(environ, name)
    if default is None:
        raise UsageError(
            f"this MPI does not say which rank of its node this is; set {names[1]} and the others "
            "that docs/clusters/mpi.md names"
        )
    return default


def _either(environ: Environment, *names: str) -> str:
    for name in names:
        if environ.get(name):
            return environ[name]
    raise UsageError(f"{names[0]} is not set, though srun's other variables are")


def _port(environ: Environment, job: str) -> int:
    port = _number(environ, "MASTER_PORT", port_of(job))
    if not 0 < port < 65536:
        raise UsageError(f"MASTER_PORT is {port}; a port is 1 to 65535")
    return port
