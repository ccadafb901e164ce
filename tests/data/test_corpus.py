"""Thousands of damaged inputs: no traceback, no hang, no file elsewhere, no HTML from a file.

``SHARDLAB_CORPUS=50000 pytest tests/data/test_corpus.py`` is the long form. A failure names its
case, which is the same in each run.
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

import fuzz
from data_files import lay_out
from fuzz_corpus import SUBJECTS, Subject
from shardlab.errors import UsageError

CASES = int(os.environ.get("SHARDLAB_CORPUS", "2400"))  # over all subjects
DEADLINE_S = 5.0  # of one case: a thousand times what most take
LONGEST = 2100  # characters of a refusal


# Inputs name it as their code. It may be imported only where the user names the input a config.
PAYLOAD = "import pathlib\n\npathlib.Path(__file__).with_name('payload-has-run').touch()\n"


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
        lay_out(subject.examples[number], inside)  # as they are: they must be read
    elif rng.random() < 0.1:
        lay_out(files, inside)
        fuzz.disturb(inside, place.parent / "outside", rng, pipes=not subject.is_named)
    else:
        lay_out(fuzz.mutate(files, rng), inside)
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
    if not subject.names_code:
        (here / "payload.py").write_text(PAYLOAD)
    at_first = tree(here)
    monkeypatch.chdir(here)
    monkeypatch.setenv("SHARDLAB_CACHE", str(tmp_path_factory.mktemp("cache")))
    whole = request.config.getoption("whole")
    cases = CASES if whole else CASES // 10
    share = cases * subject.weight // sum(s.weight for s in SUBJECTS)
    wrong: dict[int, str] = {}
    outcomes: Counter[str] = Counter()
    for number in range(share):
        place = tmp_path / "case"
        place.mkdir()
        outcome = run_case(subject, number, place)
        if outcome in ("read", "refused"):
            outcomes[outcome] += 1
            shutil.rmtree(place)
        else:
            wrong[number] = outcome
            place.rename(tmp_path / f"case-{number}")
        assert tree(here) == at_first, f"{subject.name}:{number}"
    said = "\n\n".join(f"{subject.name}:{n}\n{text}" for n, text in list(wrong.items())[:8])
    assert not wrong, f"{len(wrong)} of {share} cases ended badly ({dict(outcomes)}):\n{said}"
    if whole and not subject.forgives:
        assert outcomes["refused"] > share // 20  # the damage is felt
