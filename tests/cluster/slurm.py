"""A Slurm of two nodes on this machine, for tests: its own daemons, key, ports and folder.

Each node is a host of its own (hosts.py); the controller and whoever submits are on the
first. Jobs see an /etc/hosts of their own (in a mount namespace), with the names of the nodes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import commands
import hosts

NODES = ("n1", "n2")
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "unshare", "runuser")


def why_not() -> str:
    """Why no Slurm can be started here; empty if it can."""
    if os.geteuid() != 0:
        return "slurmd needs root"
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        return f"{', '.join(missing)} missing: apt-get install slurm-wlm munge"
    return ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Slurm:
    def __init__(self, folder: Path, two: hosts.Hosts) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"
        self.hosts = two

    def inside(self, node: int, command: str) -> list[str]:
        """A shell command on a node, with the names of all nodes."""
        own = f"mount --bind {self.folder}/hosts /etc/hosts"
        named = f"hostname {NODES[node]} && {own} && {command}"
        # Not by `ip netns exec`, which mounts a /sys without the cgroups that slurmd looks for.
        there = ["nsenter", f"--net=/run/netns/{self.hosts.namespace(node)}"]
        return [*there, "unshare", "-m", "--uts", "sh", "-c", named]

    def run(
        self, *command: str, cwd: Path, timeout: float = 100
    ) -> subprocess.CompletedProcess[str]:
        command = (*self.inside(0, 'exec "$@"'), "sh", *command)
        return commands.run(
            *command, cwd=cwd, timeout=timeout, SLURM_CONF=str(self.conf), OMP_NUM_THREADS="1"
        )

    def field(self, job: str, name: str) -> str:
        shown = self.run("scontrol", "show", "job", "-o", job, cwd=self.folder).stdout
        return next((w.split("=", 1)[1] for w in shown.split() if w.startswith(f"{name}=")), "")

    def wait_for(self, job: str, states: tuple[str, ...]) -> str:
        commands.wait_for(
            lambda: self.field(job, "JobState") in states,
            90,
            lambda: f"job {job} is none of {states}\n{self.logs()}",
        )
        return self.field(job, "JobState")

    def logs(self) -> str:
        return "\n".join(f"{p.name}:\n{p.read_text()[-2000:]}" for p in self.folder.glob("*.log"))


@contextlib.contextmanager
def started(two: hosts.Hosts) -> Iterator[Slurm]:
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    daemons: list[subprocess.Popen[bytes]] = []
    slurm = Slurm(folder, two)

    def start(name: str, *command: str) -> None:
        with (folder / f"{name}.out.log").open("wb") as log:
            environ = {**os.environ, "SLURM_CONF": str(slurm.conf)}
            daemons.append(subprocess.Popen(
                command, env=environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                start_new_session=True,
            ))  # fmt: skip

    try:
        munge = folder / "munge"
        munge.mkdir(mode=0o755)
        (munge / "key").write_bytes(os.urandom(64))
        (munge / "key").chmod(0o400)
        for path in (munge, munge / "key"):
            shutil.chown(path, "munge", "munge")
        names = [f"--{kind}-file={munge}/{kind}" for kind in ("key", "pid", "log", "seed")]
        start("munged", "runuser", "-u", "munge", "--", "munged", "--foreground", *names,
              f"--socket={munge}/socket")  # fmt: skip
        addresses = [two.address(node) for node in range(2)]
        names = [f"{address} {name}\n" for address, name in zip(addresses, NODES, strict=True)]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(names))
        slurm.conf.write_text(configuration(folder, addresses))
        (folder / "state").mkdir()
        commands.wait_for((munge / "socket").exists, 30, slurm.logs)
        controller = f"exec slurmctld -D -f {slurm.conf}"
        start("slurmctld", *slurm.inside(0, controller))
        for node, name in enumerate(NODES):
            (folder / f"spool-{name}").mkdir()
            start(
                f"slurmd-{name}", *slurm.inside(node, f"exec slurmd -D -N {name} -f {slurm.conf}")
            )
        commands.wait_for(lambda: idle(slurm) == 2, 30, slurm.logs)
        yield slurm
    finally:
        if daemons[1:]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                slurm.run("scancel", "--user=root", cwd=folder, timeout=10)
                limit = time.monotonic() + 10
                while slurm.run("squeue", "-h", cwd=folder, timeout=10).stdout.strip():
                    if time.monotonic() > limit:
                        break
                    time.sleep(0.3)
        for daemon in reversed(daemons):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGTERM)
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(daemon.pid, signal.SIGKILL)
                daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)


def configuration(folder: Path, addresses: list[str]) -> str:
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={name} NodeAddr={address} Port={free_port()} CPUs=8"
        for name, address in zip(NODES, addresses, strict=True)
    )
    # cred_expire is also how long a requeued job waits before it starts again.
    return f"""ClusterName=test
SlurmctldHost={NODES[0]}({addresses[0]})
SlurmctldPort={free_port()}
SlurmUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=20
SchedulerParameters=sched_interval=2
InactiveLimit=0
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def idle(slurm: Slurm) -> int:
    found = slurm.run("sinfo", "-h", "-N", "-o", "%T", cwd=slurm.folder, timeout=20).stdout.split()
    return found.count("idle")
