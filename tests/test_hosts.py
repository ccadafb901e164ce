"""The hosts that tests are given: they exist, they are apart, and nothing of them stays."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

import commands
import hosts

pytestmark = pytest.mark.long

SERVER = """
import socket
listening = socket.create_server(("0.0.0.0", 5000))
print(listening.accept()[0].recv(100).decode())
"""
CLIENT = """
import socket, time
for _ in range(100):
    try:
        socket.create_connection(("10.77.0.1", 5000), timeout=5).sendall(b"hello")
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
"""


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return [line.split()[0] for line in listed.splitlines()]


@pytest.mark.parametrize("delay_s", [0.0, 0.002])
def test_hosts_reach_each_other(delay_s: float) -> None:
    with hosts.made(2, rate="1gbit", delay_s=delay_s) as two:
        done = two.everywhere(
            lambda host: [sys.executable, "-c", (SERVER, CLIENT)[host]], timeout=20
        )
        assert [d.returncode for d in done] == [0, 0], done
        assert done[0].stdout == "hello\n"
        name = two.name
    assert not [n for n in namespaces() if n.startswith(name)]


def test_a_failure_leaves_nothing() -> None:
    """Not the namespaces, nor a process in them, nor the one that carries the packets."""
    with pytest.raises(RuntimeError, match="planted"), hosts.made(2, delay_s=0.001) as two:  # noqa: PT012
        sleeping = two.start(0, "sleep", "60", stdout=subprocess.DEVNULL)
        assert two._loop is not None
        started = [sleeping.pid, two._loop.pid]
        raise RuntimeError("planted")
    assert sleeping.wait(5) != 0
    assert commands.wait_until_gone(started) == []
    assert not [n for n in namespaces() if n.startswith(two.name)]


def test_a_deadline_ends_every_command() -> None:
    with hosts.made(2) as two:
        begin = time.monotonic()
        with pytest.raises(TimeoutError, match="not done within 1 s"):
            two.everywhere(lambda _host: ["sh", "-c", "echo said >&2; sleep 60 & wait"], timeout=1)
        assert time.monotonic() - begin < 10
        for host in range(2):
            pids = ["ip", "netns", "pids", two.namespace(host)]
            assert subprocess.check_output(pids) == b""


def test_a_killed_process_leaves_work_for_the_next() -> None:
    """Nobody can clean up after SIGKILL but the next one that makes hosts."""
    if (reason := hosts.why_not()) is not None:
        pytest.skip(f"no hosts: {reason}")
    script = "import hosts, os, signal\nwith hosts.made(2): os.kill(os.getpid(), signal.SIGKILL)"
    child = subprocess.Popen([sys.executable, "-c", script], env=commands.environment())
    child.wait(30)
    left = f"shardlab-{child.pid}-"
    assert any(name.startswith(left) for name in namespaces())
    with hosts.made(1):
        assert not any(name.startswith(left) for name in namespaces())


def test_a_cut_link_is_mended() -> None:
    with hosts.made(2) as two:
        probe = "import socket; socket.create_connection(('10.77.0.1', 9), timeout=0.5)"
        answers = []
        for act in (two.cut, two.mend):
            act(0)
            try:
                two.call(1, sys.executable, "-c", probe)
            except subprocess.CalledProcessError as error:
                answers.append("refused" if "ConnectionRefused" in error.stderr else "no answer")
        assert answers == ["no answer", "refused"]


def test_why_not_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(pytest.skip.Exception, match="no hosts: network namespaces need root"):
        hosts.made(2).__enter__()
