"""Several hosts on one machine, for tests: network namespaces, with links of a rate and a delay.

    with hosts.made(2, rate="1gbit", delay_s=0.005) as two:
        done = two.everywhere(lambda host: [sys.executable, "x.py", str(host)], timeout=60)

Without a delay the hosts are joined by a bridge, and ``tc tbf`` limits the rate of each host's link
in both directions. With one, each host has a TUN device, and a process of ours carries the packets
from one to the other when they are due; ``tc tbf`` on the device limits what a host sends. (The
kernel's own delay, netem, is often not built.) The bridge lies in a namespace of its own, so no
address is visible outside, and every test may use the same ones.

Namespaces are named after this process. Leaving the context ends what runs in them and removes
them; those of a process that was killed are removed by the next one that makes hosts.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import json
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pytest

import commands

DEVICE = "eth0"  # its name on every host
SUBNET = "10.77.0"
TUN = Path("/dev/net/tun")
NAME = re.compile(r"shardlab-(\d+)-\d+-")
AWAKE_S = 200e-6  # before a packet is due, the process that carries it does not sleep
OWN_S = 40e-6  # what carrying a packet takes beside the delay
_counter = itertools.count()


def why_not() -> str | None:
    """Why this machine cannot have such hosts, or None if it can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} not found (package iproute2)"
    if not TUN.exists():
        return f"no {TUN}, which a link with a delay needs"
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as script:
        script.write(
            "ip link add probe0 type veth peer name probe1 && ip link add bridge0 type bridge\n"
        )
        script.write("tc qdisc add dev probe0 root tbf rate 1gbit burst 100kb latency 50ms\n")
        script.flush()
        tried = subprocess.run(
            ["unshare", "--net", "sh", "-e", script.name], capture_output=True, text=True
        )
    return f"the kernel refuses: {tried.stderr.strip()}" if tried.returncode else None


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Hosts:
    """Hosts 0 to n-1, each with one address. Made by ``made``."""

    def __init__(self, count: int) -> None:
        self.name = f"shardlab-{os.getpid()}-{next(_counter)}-"
        self.count = count
        self._switch = f"{self.name}switch"
        self._namespaces: list[str] = []  # those that are there
        self._loop: subprocess.Popen[str] | None = None
        self._is_tun = False

    def address(self, host: int) -> str:
        return f"{SUBNET}.{host + 1}"

    def namespace(self, host: int) -> str:
        return f"{self.name}{host}"

    # ------------------------------------------------------------------ links

    def build(self, delays: Mapping[tuple[int, int], float]) -> None:
        """``delays``: seconds from one host to another; empty for a bridge without delay."""
        for name in [self.namespace(host) for host in range(self.count)]:
            self._add(name)
        self._is_tun = bool(delays)
        if delays:
            self._connect_by_tun(delays)
        else:
            self._connect_by_bridge()
        for host in range(self.count):
            inside = ("-n", self.namespace(host))
            _ip(*inside, "address", "add", f"{self.address(host)}/24", "dev", DEVICE)
            _ip(*inside, "link", "set", "lo", "up")
            _ip(*inside, "link", "set", DEVICE, "up")
            # A window that fills a fast link with a long delay: Linux's own stops at 4 and 6 MB.
            self.call(host, "sysctl", "-qw", "net.ipv4.tcp_wmem=4096 262144 67108864")
            self.call(host, "sysctl", "-qw", "net.ipv4.tcp_rmem=4096 262144 67108864")

    def _add(self, namespace: str) -> None:
        self._namespaces.append(namespace)  # first: Ctrl-C may come between the two
        _ip("netns", "add", namespace)

    def _connect_by_bridge(self) -> None:
        self._add(self._switch)
        inside = ("-n", self._switch)
        _ip(*inside, "link", "add", "bridge0", "mtu", "9000", "type", "bridge")
        _ip(*inside, "link", "set", "bridge0", "up")
        for host in range(self.count):
            link = ["link", "add", DEVICE, "mtu", "9000", "netns", self.namespace(host)]
            peer = ["peer", "name", f"port{host}", "mtu", "9000", "netns", self._switch]
            _ip(*link, "type", "veth", *peer)
            _ip(*inside, "link", "set", f"port{host}", "master", "bridge0", "up")

    def _connect_by_tun(self, delays: Mapping[tuple[int, int], float]) -> None:
        made = [f"sl{os.getpid() % 10**7}t{host}" for host in range(self.count)]
        rows = [[a, b, seconds] for (a, b), seconds in delays.items()]
        self._loop = subprocess.Popen(
            [sys.executable, __file__, json.dumps({"devices": made, "delays": rows})],
            stdin=subprocess.PIPE,  # it ends when this closes, and so when we do
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._loop.stdout is not None
        if self._loop.stdout.readline() != "ready\n":
            raise OSError("the process that carries the packets did not start")
        for host, name in enumerate(made):
            _ip("link", "set", name, "netns", self.namespace(host), "name", DEVICE, "mtu", "65000")
            _ip("-n", self.namespace(host), "link", "set", DEVICE, "txqueuelen", "10000")

    def limit(self, host: int, rate: str) -> None:
        """The rate of a host's link from now on, as tc writes it: 500mbit, 4gbit."""
        ends = [(self.namespace(host), DEVICE)]
        if not self._is_tun:
            ends.append((self._switch, f"port{host}"))
        for namespace, device in ends:
            # A bucket of 250 KB holds a few of the largest packets, and 4 Gbit/s are kept with it.
            # What waits longer than 200 ms is dropped.
            bucket = ["rate", rate, "burst", "250kb", "latency", "200ms"]
            words = ["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf"]
            subprocess.run([*words, *bucket], check=True, timeout=20)

    def cut(self, host: int) -> None:
        """The host's cable is pulled."""
        _ip("-n", self.namespace(host), "link", "set", DEVICE, "down")

    def mend(self, host: int) -> None:
        _ip("-n", self.namespace(host), "link", "set", DEVICE, "up")

    # ------------------------------------------------------------------ commands

    def start(self, host: int, *command: str, **options: Any) -> subprocess.Popen[str]:
        """A command on a host, in the background. ``options``: those of ``subprocess.Popen``."""
        words = ["ip", "netns", "exec", self.namespace(host), *command]
        options = {"env": commands.environment(), "text": True, "start_new_session": True} | options
        return subprocess.Popen(words, **options)

    def call(self, host: int, *command: str, timeout: float = 20) -> str:
        """What a short command printed on a host; an error if it fails."""
        words = ["ip", "netns", "exec", self.namespace(host), *command]
        return subprocess.run(
            words, check=True, capture_output=True, text=True, timeout=timeout
        ).stdout

    def everywhere(
        self,
        command: Callable[[int], Sequence[str]],
        *,
        timeout: float,
        cwd: Path | None = None,
        **env: str,
    ) -> list[subprocess.CompletedProcess[str]]:
        """``command(host)`` on every host at once; after the deadline all are ended."""
        limit = time.monotonic() + timeout
        running: list[tuple[subprocess.Popen[str], IO[str], IO[str]]] = []
        with contextlib.ExitStack() as stack:
            try:
                for host in range(self.count):
                    # Files: a pipe that nobody reads while another host is waited for may fill.
                    out, err = (
                        stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8"))
                        for _ in range(2)
                    )
                    process = self.start(
                        host, *command(host), cwd=cwd, stdout=out, stderr=err,
                        env=commands.environment(GLOO_SOCKET_IFNAME=DEVICE, **env),
                    )  # fmt: skip
                    running.append((process, out, err))
                for process, _, _ in running:
                    process.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                said = "\n".join(f"host {i}: {_text(r[2])}" for i, r in enumerate(running))
                raise TimeoutError(f"not done within {timeout:g} s\n{said}") from None
            finally:
                self.end_all()
                for process, _, _ in running:
                    process.wait()
            return [
                subprocess.CompletedProcess(p.args, p.returncode, _text(out), _text(err))
                for p, out, err in running
            ]

    def torchrun(
        self, *command: str, ranks: int = 1, timeout: float, cwd: Path, **env: str
    ) -> list[subprocess.CompletedProcess[str]]:
        """``python -m ...`` as the ranks of one world, so many on each host."""

        def agent(host: int) -> list[str]:
            return self.agent(host, *command, ranks=ranks)

        return self.everywhere(agent, timeout=timeout, cwd=cwd, OMP_NUM_THREADS="1", **env)

    def agent(self, host: int, *command: str, ranks: int = 1) -> list[str]:
        """torchrun's command on one host, for a world of all hosts."""
        return [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes={self.count}",
            f"--node-rank={host}", f"--nproc-per-node={ranks}",
            f"--master-addr={self.address(0)}", "--master-port=29500",
            f"--local-addr={self.address(host)}", *command,
        ]  # fmt: skip

    def start_torchrun(
        self, *command: str, ranks: int = 1, cwd: Path, log: IO[str], **env: str
    ) -> list[subprocess.Popen[str]]:
        """The same in the background; what the hosts print goes to one file."""
        variables = commands.environment(GLOO_SOCKET_IFNAME=DEVICE, OMP_NUM_THREADS="1", **env)
        return [
            self.start(
                host, *self.agent(host, *command, ranks=ranks),
                cwd=cwd, stdout=log, stderr=log, env=variables,
            )
            for host in range(self.count)
        ]  # fmt: skip

    # ------------------------------------------------------------------ the end

    def pids(self, host: int) -> list[int]:
        """What runs on a host."""
        return _alive(self.namespace(host))

    def end(self, host: int) -> None:
        """The host loses its power: every process of it is killed."""
        _end_processes(self.namespace(host))

    def end_all(self) -> None:
        """End whatever runs on the hosts."""
        for namespace in self._namespaces:
            _end_processes(namespace)

    def close(self) -> None:
        self.end_all()
        if self._loop is not None:  # before its devices go
            self._loop.kill()
            self._loop.communicate()
        for namespace in self._namespaces:
            _remove(namespace)


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _alive(namespace: str) -> list[int]:
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    return [int(pid) for pid in listed.stdout.split() if commands.is_alive(int(pid))]


def _end_processes(namespace: str) -> None:
    for _ in range(20):  # one that is ended may just have started another
        if not (alive := _alive(namespace)):
            return
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _remove(namespace: str) -> None:
    _end_processes(namespace)
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)


def _sweep() -> None:
    """Remove the namespaces of processes that are gone."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for line in listed.splitlines():
        match = NAME.match(line)
        if match and not Path(f"/proc/{match[1]}").exists():
            _remove(line.split()[0])


@contextlib.contextmanager
def made(
    count: int,
    rate: str | None = None,
    delay_s: float = 0.0,
    delays: Mapping[tuple[int, int], float] | None = None,
) -> Iterator[Hosts]:
    """Hosts, for as long as the context lasts; the test is skipped where they cannot be had.

    ``rate``: of every link. ``delay_s``: from any host to any other, one way; ``delays`` holds the
    pairs (a, b) whose delay is another one, in both directions.
    """
    if (reason := why_not()) is not None:
        pytest.skip(f"no hosts: {reason}")
    _sweep()
    one_way: dict[tuple[int, int], float] = {}
    if delay_s or delays:
        one_way = {(a, b): delay_s for a in range(count) for b in range(count) if a != b}
        for (a, b), seconds in (delays or {}).items():
            one_way |= {(a, b): seconds, (b, a): seconds}
    hosts = Hosts(count)
    try:
        hosts.build(one_way)
        if rate is not None:
            for host in range(count):
                hosts.limit(host, rate)
        yield hosts
    finally:
        hosts.close()


# ------------------------------------------------------------------ the loop that carries packets


def _open_tun(name: str) -> int:
    fd = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    set_interface, tun, no_header = 0x400454CA, 0x0001, 0x1000
    fcntl.ioctl(fd, set_interface, struct.pack("16sH", name.encode(), tun | no_header))
    return fd


def _carry(devices: Sequence[str], delays: Sequence[tuple[int, int, float]]) -> None:
    """Read packets from every host's device, and write each to its receiver's when it is due."""
    fds = [_open_tun(name) for name in devices]
    delay = {(a, b): seconds for a, b, seconds in delays}
    print("ready", flush=True)
    with contextlib.suppress(OSError):  # the ranks take every core that there is
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    with contextlib.suppress(OSError):  # else a wait may last 50 µs longer than asked
        ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK
    place = {fd: host for host, fd in enumerate(fds)}
    # Due times grow in each queue, as its delay is always the same.
    queues: dict[tuple[int, int], list[tuple[float, bytes]]] = {pair: [] for pair in delay}
    heads = dict.fromkeys(delay, 0)
    while True:
        waiting = [queues[p][heads[p]][0] for p in queues if heads[p] < len(queues[p])]
        left = None if not waiting else max(0.0, min(waiting) - time.perf_counter())
        # It takes a while to wake up: the last part of a wait is spent awake.
        if left is not None:
            left = max(0.0, left - AWAKE_S)
        ready = select.select([*fds, 0], [], [], left)[0]
        if 0 in ready:  # whoever started us is gone
            return
        now = time.perf_counter()
        for fd in ready:
            sender = place[fd]
            with contextlib.suppress(BlockingIOError):
                for _ in range(64):
                    packet = os.read(fd, 65536)
                    receiver = packet[19] - 1 if packet[0] >> 4 == 4 else -1
                    if (sender, receiver) in delay:
                        due = now + delay[sender, receiver] - OWN_S
                        queues[sender, receiver].append((due, packet))
        now = time.perf_counter()
        for pair, queue in queues.items():
            head = heads[pair]
            while head < len(queue) and queue[head][0] <= now:
                try:
                    os.write(fds[pair[1]], queue[head][1])
                except OSError as error:  # its device is down: the packet is lost, as on a cut line
                    if error.errno not in (errno.EIO, errno.EAGAIN, errno.EINVAL):
                        raise
                head += 1
            if head > 512 or head == len(queue):
                del queue[:head]
                head = 0
            heads[pair] = head


if __name__ == "__main__":
    _carry(**json.loads(sys.argv[1]))
