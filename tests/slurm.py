"""A Slurm of two nodes on this machine, for tests: its own daemons, key, ports and folder.

Both nodes are this machine, under other names and ports. Their jobs see an /etc/hosts of their own
(in a mount namespace), in which the nodes' names are loopback addresses. Or each node is a host of
its own (tests/hosts.py): then the controller and whoever submits are on the first.
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
    def __init__(self, folder: Path, two: hosts.Hosts | None = None) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"
        self.hosts = two

    def inside(self, node: int, command: str) -> list[str]:
        """A shell command on a node, with the names of all nodes."""
        own = f"mount --bind {self.folder}/hosts /etc/hosts"
        if self.hosts is None:
            return ["unshare", "-m", "sh", "-c", f"{own} && {command}"]
        named = f"hostname {NODES[node]} && {own} && {command}"
        # Not by `ip netns exec`, which mounts a /sys without the cgroups that slurmd looks for.
        there = ["nsenter", f"--net=/run/netns/{self.hosts.namespace(node)}"]
        return [*there, "unshare", "-m", "--uts", "sh", "-c", named]

    def run(
        self, *command: str, cwd: Path, timeout: float = 100
    ) -> subprocess.CompletedProcess[str]:
        if self.hosts is not None:
            command = (*self.inside(0, 'exec "$@"'), "sh", *command)
        return commands.run(
            *command, cwd=cwd, timeout=timeout, SLURM_CONF=str(self.conf), OMP_NUM_THREADS="1"
        )

    def field(self, job: str, name: str) -> str:
        shown = self.run("scontrol", "show", "job", "-o", job, cwd=self.folder).stdout
        return next((w.split("=", 1)[1] for w in shown.split() if w.startswith(f"{name}=")), "")

    def wait_for(self, job: str, states: tuple[str, ...], timeout: float = 90) -> str:
        limit = time.monotonic() + timeout
        while (state := self.field(job, "JobState")) not in states:
            if time.monotonic() > limit:
                raise TimeoutError(f"job {job} is {state}, not {states}\n{self.logs()}")
            time.sleep(0.3)
        return state

    def logs(self) -> str:
        return "\n".join(f"{p.name}:\n{p.read_text()[-2000:]}" for p in self.folder.glob("*.log"))


@contextlib.contextmanager
def started(two: hosts.Hosts | None = None) -> Iterator[Slurm]:
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
        addresses = ["127.0.0.1"] * 2 if two is None else [two.address(node) for node in range(2)]
        names = [f"{address} {name}\n" for address, name in zip(addresses, NODES, strict=True)]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(names))
        slurm.conf.write_text(configuration(folder, addresses, is_hosts=two is not None))
        (folder / "state").mkdir()
        _wait(lambda: (munge / "socket").exists(), slurm)
        controller = f"exec slurmctld -D -f {slurm.conf}"
        start("slurmctld", *slurm.inside(0, controller))
        for node, name in enumerate(NODES):
            (folder / f"spool-{name}").mkdir()
            start(
                f"slurmd-{name}", *slurm.inside(node, f"exec slurmd -D -N {name} -f {slurm.conf}")
            )
        _wait(lambda: idle(slurm) == 2, slurm)
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


def configuration(folder: Path, addresses: list[str], is_hosts: bool) -> str:
    host = NODES[0] if is_hosts else socket.gethostname()
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={name if is_hosts else host} NodeAddr={address} "
        f"Port={free_port()} CPUs=8"
        for name, address in zip(NODES, addresses, strict=True)
    )
    # cred_expire is also how long a requeued job waits before it starts again.
    return f"""ClusterName=test
SlurmctldHost={host}({addresses[0]})
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


def _wait(is_so: object, slurm: Slurm, timeout: float = 30) -> None:
    assert callable(is_so)
    limit = time.monotonic() + timeout
    while not is_so():
        if time.monotonic() > limit:
            raise TimeoutError(f"Slurm did not start\n{slurm.logs()}")
        time.sleep(0.2)
