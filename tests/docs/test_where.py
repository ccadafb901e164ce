"""docs/where.md has all that the five sources name, and what it says to type instead works."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import test_docs
import test_site
import yaml

import commands
from commands import ROOT

PAGE = (ROOT / "docs" / "where.md").read_text()
SOURCES = yaml.safe_load((Path(__file__).parent / "sources.yaml").read_text())
TYPED = "Their words, typed here"


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


def missing(table: list[Row]) -> list[str]:
    """What the sources name and the left columns do not have: names as code, titles as text."""
    absent = []
    for source, kinds in SOURCES.items():
        cells = [row.there for row in table if row.section == source]
        names = {name for cell in cells for name in code(cell)}
        text = " ".join(cells).lower()
        for kind, wanted in kinds.items():
            for name in wanted:
                is_there = name.lower() in text if kind == "results" else name in names
                absent += [] if is_there else [f"{source}: {kind}: {name}"]
    return absent


def test_the_page_has_every_name_of_the_sources() -> None:
    assert missing(ROWS) == []
    assert sum(len(names) for kinds in SOURCES.values() for names in kinds.values()) > 130


def test_a_row_that_is_gone_is_noticed() -> None:
    for row in ROWS:
        if row.section in SOURCES and (gone := code(row.there)):
            rest = [Row(r.section, r.there.replace(f"`{gone[0]}`", ""), r.here) for r in ROWS]
            if any(gone[0] in names for names in SOURCES[row.section].values()):
                assert missing(rest), row


def test_every_row_leads_somewhere() -> None:
    """To a command, a page, a flag or a key; or to an answer, which is typed below."""
    for row in ROWS:
        assert row.section == TYPED or code(row.here) or "](" in row.here, row


def test_it_is_linked_from_the_top() -> None:
    """Before the first screen ends: from the README and the site's home page."""
    for page, link in (("README.md", "(docs/where.md)"), ("docs/index.md", "(where.md)")):
        top = "".join((ROOT / page).read_text().splitlines(keepends=True)[:45])
        assert link in top, page


# ------------------------------------------------------------------ what it says to type works

TRACED = ["--size", "tiny", "--seq-len", "32", "--steps", "4", "--set", "profile.active=1"]
SMALL = {
    "gpt2": ["--size", "tiny", "--seq-len", "32"],
    "yelp": ["--size", "tiny", "--data", "synthetic"],
    "causal": ["--size", "tiny", "--data", "synthetic"],
    "resnet": ["--size", "tiny", "--data", "synthetic"],
    "cnn": ["--data", "synthetic"],
}
FETCHES = re.compile(r"shardlab data (fineweb|yelp|cifar10|mnist)")


def smaller(line: str) -> list[str]:
    """The command with less to do, all else as it is."""
    words = shlex.split(line)[1:]
    kind = words[0]
    of = next((flags for name, flags in SMALL.items() if name in line), ["--size", "tiny"])
    if kind == "train":
        if "--profile" in words:
            return [*words, *TRACED]
        less = ["--steps", "2"]
        if "examples/experiments" in line:
            less += ["--global-batch", "8", "--world", "1" if "baseline" in line else "2"]
        if "yelp" in line or "cifar10" in line or "cnn" in line:
            less += ["--evaluate-every", "0", "--set", "training.evaluate_samples=8"]
        return [*words, *of, *less]
    if kind == "compare":  # one of its strategies
        at = words.index("--strategies") + 1
        words[at] = words[at].split(",")[-1]
        less = ["--global-batch", "8", "--set", "training.evaluate_every=null"]
        less += ["--set", "training.evaluate_samples=null", "--world", "2", "--no-profile"]
        return [*words, *of, *less, *test_docs.FEW[:4], "--steps", "1", "--no-prove"]
    if kind == "throughput":
        sizes = ["--max-micro-batch", "2"] if "--sweep" in words else ["--micro-batch", "1"]
        return [*words, "--size", "tiny", *sizes, "--seq-len", "32", "--steps", "1"]
    if kind == "memory":
        return [*words, "--size", "tiny", "--seq-len", "32", "--world", "1"]
    return [*words, *test_docs.fewer(line)]


def lines() -> Iterator[str]:
    """The commands of the right columns, once each, in their order: later ones read what earlier
    ones wrote."""
    spans = [span for row in ROWS if row.section != TYPED for span in code(row.here)]
    known = [span for span in spans if re.match(r"shardlab [a-z]+ |shardlab [a-z]+$", span)]
    bare = ("shardlab train", "shardlab compare")  # the command's name, in a sentence
    return (line for line in dict.fromkeys(known) if line not in bare)


LINES = list(lines())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("reader")
    for name in ("examples", "src", "README.md"):
        (made / name).symlink_to(ROOT / name)
    return made


def test_there_is_much_to_type() -> None:
    assert len(LINES) > 50
    for source in SOURCES:
        here = " ".join(row.here for row in ROWS if row.section == source)
        assert here.count("`shardlab ") >= 5, source


def makers(line: str) -> Iterator[tuple[str, str]]:
    """The commands before it whose files this one reads, and these files."""
    for earlier in LINES[: LINES.index(line)]:
        start = re.fullmatch(r"shardlab learn start (\w+) --dir (\S+)", earlier)
        out = re.search(r"--out (\S+)", earlier)
        made = f"{start[2]}/{start[1]}.py" if start else out[1] if out else ""
        if made and made in line.split():
            yield earlier, made


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("line", LINES)
def test_it_runs(line: str, folder: Path) -> None:
    test_site.parse(line)  # each command and option of it exists
    if FETCHES.match(line):
        return  # from a network, which tests do not use
    for earlier, made in makers(line):  # this test may have been asked for alone
        if not (folder / made).exists():
            commands.here(*smaller(earlier), cwd=folder, OMP_NUM_THREADS="1")
    done = commands.here(*smaller(line), cwd=folder, OMP_NUM_THREADS="1")
    said = f"{line}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr, said
    if line.startswith("shardlab learn check"):  # a template: the TODOs are the reader's
        assert done.returncode == 1, said
    elif "--snapshot" in line and done.returncode:
        assert "CUDA allocator" in done.stderr, said
    else:
        assert done.returncode == 0, said
    for written in re.findall(r"--out (\S+)", line):
        assert any((folder / written).iterdir()), said


# ------------------------------------------------------------------ their words, typed here


def keys_of_the_lab() -> str:
    """A config of the keys that the CIFAR-10 lab's has, from the table."""
    sections: dict[str, dict[str, object]] = {}
    for row in ROWS:
        for name in code(row.there):
            if row.section == "The CIFAR-10 lab" and (
                found := re.fullmatch(r"(\w+)\.(\w+): (.+)", name)
            ):
                sections.setdefault(found[1], {})[found[2]] = yaml.safe_load(found[3])
    assert {key: len(inside) for key, inside in sections.items()} == {"model": 2, "training": 4}
    return yaml.safe_dump(sections)


WORDS = [(code(row.there)[0], row.here) for row in ROWS if row.section == TYPED]


@pytest.mark.long
@pytest.mark.parametrize(("line", "answer"), WORDS, ids=[line for line, _ in WORDS])
def test_their_words_are_understood_or_answered(line: str, answer: str, folder: Path) -> None:
    (folder / "lab.yaml").write_text(keys_of_the_lab())
    words = shlex.split(line)[1:]
    if answer.startswith("runs"):
        is_image = "resnet" in line or "lab.yaml" in line
        data = ["--data", "synthetic"] if is_image else ["--seq-len", "16"]
        run = f"typed/{len(list(folder.glob('typed/*')))}"
        less = ["--size", "tiny", "--steps", "1", "--world", "2", "--out", run]
        if "lab.yaml" in line:  # fewer of its images, and not its ten epochs
            less += ["--batch-size", "2", "--set", "training.epochs=null"]
        done = commands.here(*words, *data, *less, cwd=folder, OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stderr
        config = yaml.safe_load((folder / run / "config.yaml").read_text())
        known = [config["strategy"]["name"], config["model"]["workload"]]
        for name in set(
            re.findall(r"simple_ddp|pytorch_zero\d|pytorch_ddp|resnet_cifar10", answer)
        ):
            assert name in known
        if "--micro-batch 4" in answer:
            assert config["training"]["micro_batch"] == 4
        if "lab.yaml" in line:
            assert config["model"]["options"] == {"depth": 18}
            assert (config["training"]["learning_rate"], config["training"]["optimizer"]) == (
                0.1,
                "sgd",
            )
    else:
        (told,) = re.findall(r"is told: \*(.+)\*", answer)
        done = commands.here(*words, cwd=folder)
        assert done.returncode == 2, done.stdout
        assert told in done.stderr
        assert done.stderr.count("\n") == 1
