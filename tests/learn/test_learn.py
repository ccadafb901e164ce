"""Every exercise: its template fails helpfully, correct solutions pass, planted bugs are named."""

from __future__ import annotations

import ast
import json
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from string import Formatter

import pytest
from typer.testing import CliRunner

import commands
import kill_rate
from conftest import deep_unless, long_unless
from kill_rate import Submission
from shardlab import cli
from shardlab.errors import UsageError
from shardlab.learn import ORDER, grade
from shardlab.learn import exercise as exercises
from shardlab.learn.exercise import Exercise
from shardlab.learn.exercises.diloco import checks as diloco
from shardlab.report import learn as report

ALL = list(kill_rate.submissions())
MUTANTS = [s for s in ALL if s.kind == "mutant"]
FIRST_CORRECT = {s.exercise: s for s in reversed(ALL) if s.kind == "correct"}
# A check of these takes a second or more. Of their planted bugs `make test` leaves those to `make
# test-deep` whose cause a cheaper exercise names, too: most of what recognises them is shared. And
# diloco's mistakes in the outer step are rows of one table.
DEAR = ("zero2", "zero3", "fsdp", "checkpoint", "trainer", "diloco")
CHEAPER_CAUSES = {s.cause for s in MUTANTS if s.exercise not in DEAR}
REPEATED = {("diloco", cause) for cause in diloco.IN_THE_OUTER_STEP[3:]}
# Words of the message, as it must be said of a planted bug.
SAID = {
    "simple_ddp-mutant-not-averaged": (
        "exactly 2.0x the mean over the ranks on 2 ranks",
        "exactly 3.0x the mean over the ranks on 3 ranks",
        "divide by the world size",
    ),
    "simple_ddp-mutant-deadlock": (
        "rank 0 entered all_reduce 7 times, rank 1 6 times: the parameter `extra.weight` has no "
        "gradient on rank 1",
    ),
    "one_f_one_b-mutant-nothing-to-send-2": ("torch.float32",),
    "one_f_one_b-mutant-wrong-type": ("('F', '0')",),
    "tensor_split-mutant-not-finite": ("nan",),
    "tensor_split-mutant-part-missing": ("`up.weight`",),
    "memory_estimate-mutant-wrong-type": ("is 3",),
}
GetVerdict = Callable[[Submission], grade.Verdict]


@pytest.fixture(scope="module")
def verdict(request: pytest.FixtureRequest) -> Iterator[GetVerdict]:
    """Those of the chosen tests, three at a time: a check waits more than it computes."""
    with ThreadPoolExecutor(3) as pool:
        futures: dict[Submission, Future[grade.Verdict]] = {
            s: pool.submit(kill_rate.graded, s) for s in kill_rate.chosen(request, "submission")
        }
        yield lambda submission: futures[submission].result()
        for future in futures.values():
            future.cancel()


def is_quick(submission: Submission) -> bool:
    return submission.kind == "solution" and submission.exercise not in DEAR


def is_fast(submission: Submission) -> bool:
    """Our solution, another, the template, and each cause once."""
    if submission.kind == "correct":
        return submission == FIRST_CORRECT[submission.exercise]
    if submission.kind != "mutant":
        return True
    is_first = submission.name == submission.cause
    is_shared = submission.exercise in DEAR and submission.cause in CHEAPER_CAUSES
    is_repeated = is_shared or (submission.exercise, submission.cause) in REPEATED
    return is_first and not is_repeated


@pytest.mark.parametrize("submission", deep_unless(is_fast, long_unless(is_quick, ALL)), ids=str)
def test_verdict(submission: Submission, verdict: GetVerdict) -> None:
    found = verdict(submission)
    if submission.kind in ("solution", "correct"):
        assert found.passed, found.findings
        return
    assert not found.passed
    first = found.findings[0]
    assert len(first.message) > 20
    said = " ".join(finding.message for finding in found.findings)
    assert all(words in said for words in SAID.get(str(submission), ()))
    if submission.kind == "mutant":
        assert first.cause == submission.cause, found.findings
    else:
        assert first.cause == "not-done", found.findings
        assert "TODO" in first.message or "line" in first.message


def test_there_are_enough_planted_bugs_and_correct_solutions() -> None:
    for name in ORDER:
        kinds = [s.kind for s in ALL if s.exercise == name]
        assert kinds.count("mutant") >= 4, name
        assert kinds.count("correct") >= 2, name
    assert SAID.keys() <= {str(mutant) for mutant in MUTANTS}


def test_every_folder_is_on_the_ladder() -> None:
    folders = {path.parent.name for path in exercises.FOLDER.glob("*/checks.py")}
    assert folders == set(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_an_exercise_is_whole(name: str) -> None:
    exercise = Exercise(name)
    for heading in ("## The task", "## How it is checked", "## Pitfalls", "## What it costs"):
        assert heading in exercise.readme, heading
    assert "Why it matters" in exercise.readme
    assert "(picture.svg)" in exercise.readme
    assert len(exercise.hints) == 3
    assert all(len(hint) > 40 for hint in exercise.hints)
    picture = (exercise.folder / "picture.svg").read_text()
    assert ET.fromstring(picture).tag == "{http://www.w3.org/2000/svg}svg"
    assert "prefers-color-scheme: dark" in picture
    assert "<title" in picture
    named = exercise.corresponds_to
    assert (Path(exercises.__file__).parent.parent / named).is_file(), named
    assert "TODO" in exercise.template
    assert f"shardlab learn check {name}" in exercise.template


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "cause", "words"),
    [
        ("def average_gradients(model:\n", "raised", "is not Python"),
        ("x = '\0'\n", "raised", "null bytes"),
        ("import no_such_module\n", "raised", "ModuleNotFoundError in line 1"),
        ("x = 1\n", "missing", "your file has no `average_gradients`"),
        ("average_gradients = 3\n", "unusable", "'int' object is not callable"),
    ],
)
def test_a_file_that_is_none(source: str, cause: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "simple_ddp.py"
    path.write_text(source)
    found = grade.grade(Exercise("simple_ddp"), path)
    assert [finding.cause for finding in found.findings] == [cause]
    assert words in found.findings[0].message


# ------------------------------------------------------------------ messages


def test_every_message_is_said_with_what_it_names() -> None:
    """A name that is missing would show only when a learner makes that very mistake."""
    texts, said = exercises.messages(), set()
    for path in Path(exercises.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                said.add(node.value)
            if not isinstance(node, ast.Call) or not ast.unparse(node.func).startswith("say"):
                continue
            given = {keyword.arg for keyword in node.keywords}
            constants = (c.value for c in ast.walk(node.args[0]) if isinstance(c, ast.Constant))
            for key in (c for c in constants if isinstance(c, str)):
                assert key in texts, (path.name, key)
                names = {name for _, name, _, _ in Formatter().parse(texts[key]) if name}
                needed = {name.partition("[")[0] for name in names}
                # With ** a row of evidence is given; the sampler's say knows its samples.
                assert None in given or needed - {"samples"} <= given, (path.name, key, needed)
    assert set(texts) <= said


def test_no_message_takes_the_place_of_another() -> None:
    """YAML takes the last of two entries with one key, without a word."""
    lines = (exercises.FOLDER.parent / "messages.yaml").read_text().splitlines()
    keys = [line.partition(":")[0] for line in lines if line[:1].isalpha()]
    assert len(keys) == len(set(keys)) == len(exercises.messages())


# ------------------------------------------------------------------ the commands


@pytest.mark.long
def test_the_path_of_a_learner(tmp_path: Path) -> None:
    listed = commands.here("learn", cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    assert "0 of" in listed.stdout
    assert "next: shardlab learn start sampler" in listed.stdout
    assert not (tmp_path / "learn").exists()

    started = commands.here("learn", "start", "broadcast", cwd=tmp_path)
    assert started.returncode == 0, started.stderr
    assert "shardlab learn check broadcast" in started.stdout
    again = commands.here("learn", "start", "broadcast", cwd=tmp_path)
    assert again.returncode == 2
    assert "learn/broadcast.py exists" in again.stderr

    failed = commands.here("learn", "check", "broadcast", "--json", cwd=tmp_path)
    assert failed.returncode == 1, failed.stderr
    result = json.loads(failed.stdout)
    assert result["schema"] == 1
    assert result["pass"] is False
    assert result["verdicts"][0]["findings"][0]["cause"] == "not-done"

    hints = [commands.here("learn", "hint", "broadcast", cwd=tmp_path) for _ in range(4)]
    assert [hint.stdout.partition("\n")[0] for hint in hints] == [
        "hint 1 of 3",
        "hint 2 of 3",
        "hint 3 of 3",
        "hint 3 of 3",
    ]

    (tmp_path / "learn" / "broadcast.py").write_text(Exercise("broadcast").solution)
    passed = commands.here("learn", "check", cwd=tmp_path)
    assert passed.returncode == 0, passed.stdout + passed.stderr
    assert "passed" in passed.stdout
    rows = json.loads(commands.here("learn", "--json", cwd=tmp_path).stdout)["exercises"]
    row = next(row for row in rows if row["name"] == "broadcast")
    assert row["passed"] is not None
    assert (row["hints"], row["checks"]) == (3, 2)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("learn start sampel", "did you mean 'sampler'?"),
        ("learn check simple_dpp", "did you mean 'simple_ddp'?"),
        ("learn check nothing.py", "no file nothing.py"),
        ("learn check sampler", "begin with `shardlab learn start sampler`"),
        ("learn check", "begin with `shardlab learn start sampler`"),
        ("learn check sampler --time-limit 0", "a check needs time"),
        ("learn --dir elsewhere check sampler", "put the options after the command"),
        ("learn show xyzxyz", "known: sampler, token_shards"),
    ],
)
def test_wrong_input_is_answered_in_a_line(
    words: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli.app, words.split())
    assert isinstance(done.exception, UsageError)
    assert says in str(done.exception)
    assert "\n" not in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_a_terminal_that_is_not_utf8(tmp_path: Path) -> None:
    listed = commands.shardlab("learn", cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert listed.returncode == 0, listed.stderr
    assert "memory_estimate" in listed.stdout


def test_a_progress_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "learn").mkdir()
    (tmp_path / "learn" / "progress.json").write_text("[1]")
    done = commands.here("learn", "start", "sampler", cwd=tmp_path)
    assert done.returncode == 2
    assert "is not a progress file" in done.stderr
    assert not (tmp_path / "learn" / "sampler.py").exists()


@pytest.mark.parametrize("name", long_unless(lambda name: name == ORDER[0], ORDER))
def test_shown_on_a_terminal(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    exercise = Exercise(name)
    words = ["learn", "show", name]
    shown = CliRunner().invoke(cli.app, words, catch_exceptions=False).stdout
    assert str(exercise.picture) in shown.splitlines()  # in one piece
    pitfalls = shown.partition("Pitfalls")[2].partition("What it costs")[0]
    assert "After your first" in pitfalls
    assert " •" not in pitfalls
    exercises.keep(tmp_path / "learn", name, checks=1)
    for more in (words, [*words, "--dir", "elsewhere", "--pitfalls"]):
        shown = CliRunner().invoke(cli.app, more, catch_exceptions=False).stdout
        assert " •" in shown.partition("Pitfalls")[2].partition("What it costs")[0]
    ours = CliRunner().invoke(cli.app, ["learn", "solution", name], catch_exceptions=False)
    assert f"in the package: src/shardlab/{exercise.corresponds_to}" in ours.stdout


def test_a_template_run_as_a_script_says_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    for name in ORDER:
        source = exercises.start(Exercise(name), folder).read_text()
        assert source.endswith(exercises.RUN_AS_A_SCRIPT)
        compile(source, name, "exec")
    path = folder / "memory_estimate.py"  # it does not import torch: quick
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    proposed = shlex.split(done.stdout.splitlines()[-1])
    assert proposed == ["shardlab", "learn", "check", str(path)]


def test_what_was_passed_is_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    """The names of cases have commas in them."""
    cases = ("in order", "in order, with padding")
    report.print_verdict(grade.Verdict("sampler", "sampler.py", (), cases), "")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["passed  sampler", "  - in order", "  - in order, with padding"]
