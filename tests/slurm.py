"""A Slurm of two nodes on this machine, for tests: its own daemons, key, ports and folder.

Both nodes are this machine, under other names and ports. Their jobs see an /etc/hosts of their own
(in a mount namespace), in which the nodes' names are loopback addresses.
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
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"

    def run(
        self, *command: str, cwd: Path, timeout: float = 100
    ) -> subprocess.CompletedProcess[str]:
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
def started() -> Iterator[Slurm]:
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    daemons: list[subprocess.Popen[bytes]] = []
    slurm = Slurm(folder)

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
        (folder / "hosts").write_text("127.0.0.1 localhost n1 n2\n")
        slurm.conf.write_text(configuration(folder))
        (folder / "state").mkdir()
        _wait(lambda: (munge / "socket").exists(), slurm)
        start("slurmctld", "slurmctld", "-D", "-f", str(slurm.conf))
        for node in NODES:
            (folder / f"spool-{node}").mkdir()
            inside = f"mount --bind {folder}/hosts /etc/hosts && exec slurmd -D -N {node}"
            start(f"slurmd-{node}", "unshare", "-m", "sh", "-c", f"{inside} -f {slurm.conf}")
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


def configuration(folder: Path) -> str:
    host = socket.gethostname()
    nodes = "\n".join(
        f"NodeName={n} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=8"
        for n in NODES
    )
    # cred_expire is also how long a requeued job waits before it starts again.
    return f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
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
