"""What rank 0 takes from other nodes, and from whom."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardlab.run import collect
from shardlab.run.collect import Part, Receiver, Sender
from shardlab.run.place import LOOPBACK

KEY = "a key"


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    (tmp_path / "run").mkdir()
    made = Receiver(tmp_path / "run", [Part("n2", [1, 2])], LOOPBACK, KEY)
    yield made
    made.close()


def sender(receiver: Receiver, folder: Path, key: str = KEY) -> Sender:
    return Sender(folder, 0, receiver.at, key, first=False)


def fill(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_part_is_taken(receiver: Receiver, tmp_path: Path) -> None:
    """The files of its ranks, large ones too, and again what has grown."""
    large = "x" * (3 * collect.CHUNK + 1)
    files = {
        "rank1.jsonl": "a\n",
        "traces/rank2/rank2.gz": large,
        "status.json": "{}",
        "env.json": "",
    }
    part = fill(tmp_path / "part", **files)
    sender(receiver, part).send(failed=False)
    run = receiver.folder
    assert (run / "rank1.jsonl").read_text() == "a\n"
    assert (run / "traces" / "rank2" / "rank2.gz").read_text() == large
    assert {p.name for p in run.iterdir()} == {"rank1.jsonl", "traces", collect.NAME}
    (part / "rank1.jsonl").write_text("a\nb\n")
    sender(receiver, part).send(failed=True)
    assert (run / "rank1.jsonl").read_text() == "a\nb\n"
    record = json.loads((run / collect.NAME).read_text())
    (told,) = record["parts"]
    assert (told["collected"], told["files"], told["bytes"]) == (True, 2, 4 + len(large))


def test_who_does_not_know_the_key_is_not_heard(receiver: Receiver, tmp_path: Path) -> None:
    part = fill(tmp_path / "part", **{"rank1.jsonl": "a\n"})
    with pytest.raises(OSError, match=r"ended|reset"):
        sender(receiver, part, key="another").send(failed=False)
    assert receiver.missing() == ["rank 1, 2 on n2"]
    assert [p.name for p in receiver.folder.iterdir()] == [collect.NAME]


def test_a_sender_that_stops_in_the_middle(receiver: Receiver, tmp_path: Path) -> None:
    """Half a file is not taken, and another sender is."""
    with socket.create_connection(receiver.at) as cut:
        reading, writing = cut.makefile("rb"), cut.makefile("wb")
        collect._say(writing, collect._proof(KEY, collect._hear(reading)))
        files = [["rank1.jsonl", 100]]
        collect._say(writing, {"part": 0, "failed": False, "files": files, "status": {}})
        assert collect._hear(reading) == [0]
        writing.write(b"half")
        writing.flush()
        reading.close()
        writing.close()
    sender(receiver, fill(tmp_path / "part", **{"rank2.jsonl": "b"})).send(failed=False)
    assert sorted(p.name for p in receiver.folder.iterdir()) == [collect.NAME, "rank2.jsonl"]


@pytest.mark.parametrize(("name", "is_taken"), [
    ("rank1.jsonl", True),
    ("ledger.rank2.jsonl", True),
    ("traces/rank1/rank1.steps2-4.pt.trace.json.gz", True),
    ("rank3.jsonl", False),  # another node's
    ("rank0.jsonl", False),
    ("rank10.jsonl", False),
    ("traces/rank1/rank3.gz", False),
    ("config.yaml", False),
    ("frank1.jsonl", False),
    ("../rank1.jsonl", False),
    ("/etc/rank1.jsonl", False),
    ("rank1.jsonl/../../x", False),
    ("./rank1.jsonl", False),
    ("rank1.\njsonl", False),
    ("", False),
])  # fmt: skip
def test_files_of_ranks(name: str, is_taken: bool) -> None:
    assert collect.is_of(name, [1, 2]) == is_taken


def test_a_link_does_not_lead_out_of_the_folder(receiver: Receiver, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (receiver.folder / "traces").symlink_to(outside)
    part = fill(tmp_path / "part", **{"traces/rank1.gz": "x"})
    with pytest.raises(OSError, match=r"ended|reset"):
        sender(receiver, part).send(failed=False)
    assert list(outside.iterdir()) == []


CRASHED = {"state": "crashed", "rank": 1, "reason": "RuntimeError: planted"}
VICTIM = {"state": "crashed", "rank": 0, "reason": "RuntimeError: Connection closed by peer"}
RUNNING = {"state": "running"}


@pytest.mark.parametrize(("here", "there", "is_better"), [
    (RUNNING, CRASHED, True),
    (VICTIM, CRASHED, True),
    (CRASHED, CRASHED, False),
    (RUNNING, VICTIM, False),
    (RUNNING, RUNNING, False),
    (VICTIM, {}, False),
    ({"state": "hung", "reason": "rank 1 is missing"}, CRASHED, False),
])  # fmt: skip
def test_who_knows_why(here: dict[str, object], there: dict[str, object], is_better: bool) -> None:
    assert collect.knows_better(here, there) == is_better


def test_the_reason_comes_with_the_part(receiver: Receiver, tmp_path: Path) -> None:
    (receiver.folder / "status.json").write_text(json.dumps(VICTIM))
    told = {"status.json": json.dumps(CRASHED), "crash.txt": "why", "config.yaml": "not mine"}
    sender(receiver, fill(tmp_path / "part", **told)).send(failed=True)
    assert json.loads((receiver.folder / "status.json").read_text()) == CRASHED
    assert (receiver.folder / "crash.txt").read_text() == "why"
    assert not (receiver.folder / "config.yaml").exists()
