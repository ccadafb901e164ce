"""Thousands of damaged inputs: no traceback, no hang, no file elsewhere, no HTML from a file.

``SHARDLAB_CORPUS=50000 pytest tests/data/test_corpus.py`` is the long form. A failure names its
case: ``SHARDLAB_CORPUS_CASE="traces:1234"`` runs that one alone.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import commands
import mutations
from corpus import SUBJECTS, Subject
from shardlab.errors import UsageError

CASES = int(os.environ.get("SHARDLAB_CORPUS", "2400"))  # over all subjects
ONLY = os.environ.get("SHARDLAB_CORPUS_CASE")
DEADLINE_S = 5.0  # of one case: a thousand times what most take
LONGEST = 2100  # characters of a refusal


class TookTooLong(BaseException):
    """Not an Exception: a reader that catches everything must not catch this."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TookTooLong

    before = signal.signal(signal.SIGALRM, stop)
    # Beside pytest-timeout's own alarm: what was left of it is set again.
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    began = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(0.1, left - (time.monotonic() - began)))


def tree(folder: Path) -> set[str]:
    found = set()
    for at, folders, files in os.walk(folder):
        found.update(os.path.join(at, name) for name in (*folders, *files))  # noqa: PTH118
    return found


def run_case(subject: Subject, number: int, place: Path) -> str:
    """How the case ended: "read", "refused", or what is wrong."""
    rng = random.Random(f"{subject.name}:{number}")
    inside, out = place / "in", place / "out"
    for folder in (inside, out):
        folder.mkdir()
    files = rng.choice(subject.examples)
    if number < len(subject.examples):
        mutations.lay_out(subject.examples[number], inside)  # as they are: they must be read
    elif rng.random() < 0.1:
        mutations.lay_out(files, inside)
        mutations.disturb(inside, place.parent / "outside", rng, pipes=not subject.is_named)
    else:
        mutations.lay_out(mutations.mutate(files, rng), inside)
    before = tree(place.parent)
    try:
        with deadline(DEADLINE_S):
            subject.read(inside, out)
        outcome = "read"
    except UsageError as error:
        outcome = "refused"
        text = str(error)
        if not text.strip() or len(text) > LONGEST:
            outcome = f"refused in {len(text)} characters: {text[:200]!r}"
        elif "\n" in text:
            outcome = f"refused in several lines: {text[:400]!r}"
    except TookTooLong:
        outcome = f"no end within {DEADLINE_S} s:\n{traceback.format_exc(limit=-8)}"
    except BaseException:
        outcome = traceback.format_exc(limit=-6)
    strangers = {p for p in tree(place.parent) - before if not p.startswith(str(out))}
    if strangers:
        outcome = f"wrote elsewhere: {sorted(strangers)[:3]}"
    if number < len(subject.examples) and outcome != "read":
        outcome = f"a valid example was not read: {outcome}"
    for page in out.rglob("*.html"):
        if b"<script>alert" in page.read_bytes():
            outcome = "HTML from a file is in the page"
    return outcome


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
@pytest.mark.timeout(max(120, CASES // 10))
def test_bad_input_is_refused_in_a_line(
    subject: Subject,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (tmp_path / "outside").mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("SHARDLAB_CACHE", str(tmp_path_factory.mktemp("cache")))
    whole = request.config.getoption("whole")
    cases = CASES if whole else CASES // 10
    share = cases * subject.weight // sum(s.weight for s in SUBJECTS)
    numbers = range(share)
    if ONLY is not None:
        name, _, number = ONLY.rpartition(":")
        numbers = range(int(number), int(number) + 1) if name == subject.name else range(0)
    wrong: dict[int, str] = {}
    outcomes: Counter[str] = Counter()
    for number in numbers:
        place = tmp_path / "case"
        place.mkdir()
        outcome = run_case(subject, number, place)
        if outcome in ("read", "refused"):
            outcomes[outcome] += 1
            shutil.rmtree(place)
        else:
            wrong[number] = outcome
            place.rename(tmp_path / f"case-{number}")
        assert tree(here) == set()
    said = "\n\n".join(f"{subject.name}:{n}\n{text}" for n, text in list(wrong.items())[:8])
    assert not wrong, f"{len(wrong)} of {share} cases ended badly ({dict(outcomes)}):\n{said}"
    if ONLY is None and whole and not subject.forgives:
        assert outcomes["refused"] > share // 20  # the damage is felt


COMMANDS = {  # of each subject: the command that reads its folder
    "config": ["train", "--config", "in/config.yaml"],
    "token shards": ["data", "show", "in"],
    "archive": ["data", "mnist", "--from", "in/mnist.tar.gz", "--to", "out"],
    "traces": ["trace", "analyze", "in", "--out", "out"],
    "compare.json": ["compare", "--against", "in/compare.json", "--strategies", "zero3"],
    "compare, interrupted": ["compare", "--resume", "in"],
    "checkpoint": ["checkpoint", "show", "in"],
}


@pytest.mark.long
def test_commands_refuse_in_a_line(tmp_path: Path) -> None:
    """A sample of the corpus as a user meets it: those cases that the readers refuse."""
    for name, command in COMMANDS.items():
        (subject,) = (subject for subject in SUBJECTS if subject.name == name)
        place = tmp_path / name / "case"
        place.mkdir(parents=True)
        (place.parent / "outside").mkdir()
        number = len(subject.examples)
        while run_case(subject, number, place) != "refused":
            shutil.rmtree(place)
            place.mkdir()
            number += 1
        shutil.rmtree(place / "out")
        before = tree(tmp_path)
        done = commands.here(*command, cwd=place)
        assert "Traceback" not in done.stderr, f"{name}:{number}\n{done.stderr}"
        assert done.returncode in (1, 2), f"{name}:{number}\n{done.stderr}"
        if done.returncode == 2:
            assert done.stderr.startswith("error: "), done.stderr
            assert done.stderr.count("\n") == 1, done.stderr
        assert tree(tmp_path) == before, f"{name}:{number} left something behind"
