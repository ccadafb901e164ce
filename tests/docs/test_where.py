"""docs/where.md has all that the five sources name, and its keys and names are understood."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

import commands
from commands import ROOT
from shardlab import config as configs

PAGE = (ROOT / "docs" / "where.md").read_text()
SOURCES = yaml.safe_load((Path(__file__).parent / "sources.yaml").read_text())
TYPED = "Names of strategies, typed here"


class Row(NamedTuple):
    section: str
    there: str
    here: str


def rows() -> list[Row]:
    """The rows of the page's tables; a cell may have a bar as ``\\|``."""
    found = []
    for part in re.split(r"^## ", PAGE, flags=re.M)[1:]:
        section, _, text = part.partition("\n")
        for line in text.splitlines():
            cells = [c.replace("\\|", "|").strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]]
            if len(cells) == 2 and set(cells[0]) != {"-"} and cells[0] not in ("there", "you type"):
                found.append(Row(section, *cells))
    return found


ROWS = rows()


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# ------------------------------------------------------------------ everything is on the page


def test_the_page_has_every_name_of_the_sources() -> None:
    """In the left columns: names as code, titles as text."""
    absent = []
    for source, kinds in SOURCES.items():
        cells = [row.there for row in ROWS if row.section == source]
        names = {name for cell in cells for name in code(cell)}
        text = " ".join(cells).lower()
        for kind, wanted in kinds.items():
            for name in wanted:
                is_there = name.lower() in text if kind == "results" else name in names
                absent += [] if is_there else [f"{source}: {kind}: {name}"]
    assert absent == []


def test_every_row_leads_somewhere() -> None:
    """To a command, a page, a flag or a key; or to an answer, which is typed below."""
    for row in ROWS:
        assert row.section == TYPED or code(row.here) or "](" in row.here, row


def told() -> Iterator[str]:
    """The commands of the right columns, once each: test_commands.py runs them."""
    spans = [span for row in ROWS if row.section != TYPED for span in code(row.here)]
    known = [span for span in spans if re.match(r"shardlab [a-z]+ |shardlab [a-z]+$", span)]
    bare = ("shardlab train", "shardlab compare")  # the command's name, in a sentence
    return (line for line in dict.fromkeys(known) if line not in bare)


# ------------------------------------------------------------------ the lab's keys, and names

LAB = "The CIFAR-10 lab"


def keys_of_the_lab() -> dict[str, object]:
    """What the table says to write for the keys of the CIFAR-10 lab's config."""
    spans = [span for row in ROWS if row.section == LAB for span in code(row.here)]
    found = [match for span in spans if (match := re.fullmatch(r"([a-z_.]+): (.+)", span))]
    return {match[1]: yaml.safe_load(match[2]) for match in found}


@pytest.mark.long
def test_the_keys_of_the_lab_are_a_config(tmp_path: Path) -> None:
    keys = keys_of_the_lab()
    assert len(keys) == 6
    (tmp_path / "lab.yaml").write_text(yaml.safe_dump(configs.with_settings({}, keys)))
    # Fewer of its images, and not its ten epochs.
    less = "--data synthetic --micro-batch 2 --set training.epochs=null --steps 1 --world 2"
    words = ["train", "--config", "lab.yaml", *less.split(), "--out", "lab"]
    done = commands.here(*words, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load((tmp_path / "lab" / "config.yaml").read_text())
    assert config["model"]["workload"] == "resnet_cifar10"
    assert config["model"]["options"] == {"depth": 18}
    assert config["training"]["optimizer"] == "sgd"


WORDS = [(code(row.there)[0], row.here) for row in ROWS if row.section == TYPED]


@pytest.mark.long
@pytest.mark.parametrize(("line", "answer"), WORDS, ids=[line for line, _ in WORDS])
def test_names_are_understood_or_answered(line: str, answer: str, tmp_path: Path) -> None:
    words = shlex.split(line)[1:]
    if answer.startswith("runs"):
        less = ["--size", "tiny", "--seq-len", "16", "--steps", "1", "--world", "2", "--out", "run"]
        done = commands.here(*words, *less, cwd=tmp_path, OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stderr
        config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
        assert code(answer) == [config["strategy"]["name"]]
    else:
        (said,) = re.findall(r"prints: \*(.+)\*", answer)
        done = commands.here(*words, cwd=tmp_path)
        assert done.returncode == 2, done.stdout
        assert said in done.stderr
        assert done.stderr.count("\n") == 1
