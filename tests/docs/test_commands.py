"""Every command that a page shows can be parsed; those of the README, the tutorial, the book and
where.md run as they are printed, with less to do."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml

import commands
import test_where
from commands import ROOT, bash_lines
from conftest import deep_unless
from shardlab import cli

sys.path.insert(0, str(ROOT / "benchmarks"))

import book
import book_blocks

DOCS = ROOT / "docs"
FILES = ["Makefile", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"]
FOLDERS = ["src", "examples"]
INSTALL = "pip install -c constraints.txt ."
README = bash_lines("README.md")
# Those of an entry run in one folder, in order: later ones read what earlier ones wrote.
SHOWN: dict[str, list[str]] = {
    "README": README,
    "tutorial": bash_lines("docs/tutorial.md"),
    "book": [line for path in book_blocks.chapters() for line in bash_lines(path)],
    "where": list(test_where.told()),
}
# The first two have tests of their own; the others need a network, or minutes.
NOT_RUN: tuple[str, ...] = ("make test", INSTALL, "python benchmarks/book.py measure ")
NOT_RUN += ("shardlab data fetch ",)


class Shown(NamedTuple):
    page: str
    line: str

    def __str__(self) -> str:
        return f"{self.page}: {self.line}"


def to_run() -> Iterator[Shown]:
    """Each once, on the first page that shows it."""
    seen = set()
    for page, lines in SHOWN.items():
        for line in lines:
            if line not in seen and not line.startswith(NOT_RUN):
                yield Shown(page, line)
            seen.add(line)


RUN = list(to_run())
OURS = [s for s in RUN if s.line.startswith("shardlab ") and "--size xl" not in s.line]
FIRST = {shown.line.split()[1]: shown for shown in reversed(OURS)}


def is_fast(shown: Shown) -> bool:
    """The first of each command."""
    return shown in FIRST.values()


def test_each_page_has_commands() -> None:
    assert INSTALL in README
    assert all(SHOWN.values())


# ------------------------------------------------------------------ parsed


def parse(line: str) -> None:
    """Every command and option of the line exists; nothing is run."""
    for part in re.split(r" (?:\|\||&&|\||;) ", line):
        if part.startswith("shardlab "):
            parse_one(part)


OUR_COMMAND = typer.main.get_command(cli.app)


def parse_one(line: str) -> None:
    words = shlex.split(line.replace("...", "").partition(" > ")[0])[1:]
    context = OUR_COMMAND.make_context("shardlab", words)
    while hasattr(context.command, "commands"):
        rest = [*context._protected_args, *context.args]
        if not rest:  # a group that says something by itself
            return
        name, found, rest = context.command.resolve_command(context, rest)
        context = found.make_context(name, rest, parent=context)


@pytest.mark.parametrize(
    "page", ["README.md", *sorted(p.relative_to(ROOT).as_posix() for p in DOCS.rglob("*.md"))]
)
def test_every_command_can_be_parsed(page: str) -> None:
    """Some need data or hours, but that each command and option exists can be seen at once."""
    told = SHOWN["where"] if page == "docs/where.md" else []
    for line in (*bash_lines(page), *told):
        try:
            parse(line)
        except Exception as error:
            raise AssertionError(line) from error


@pytest.mark.parametrize(
    "line", ["shardlab trian", "shardlab train || shardlab train --stategy zero1"]
)
def test_what_cannot_be_parsed_is_noticed(line: str) -> None:
    with pytest.raises(Exception, match=r"trian|stategy"):
        parse(line)


def test_what_the_book_says_to_measure_was_measured() -> None:
    lines = [line for line in SHOWN["book"] if line.startswith("python benchmarks/book.py measure")]
    assert lines
    for line in lines:
        assert set(line.split()[3:]) <= book.PARTS.keys() & book.read().keys()


# ------------------------------------------------------------------ run

FEW = ["--repeats", "1", "--warmup", "1", "--steps", "2", "--set", "profile.active=1"]
SYNTHETIC = ["--set", "data.source=synthetic"]
SMALL = {
    "gpt2": ["--size", "tiny", "--set", "data.seq_len=32"],
    "yelp": ["--size", "tiny", *SYNTHETIC],
    "causal": ["--size", "tiny", *SYNTHETIC],
    "resnet": ["--size", "tiny", *SYNTHETIC],
    "cnn": SYNTHETIC,
    "--workload": [],
    "--resume": [],
}


def less(line: str) -> list[str]:
    """The command with less to do, all else as it is: it must work. What it measures and proves is
    tested where it costs less (tests/measure, tests/proof)."""
    words = shlex.split(line)[1:]
    if "--to-loss" in words:  # short as they are
        return words
    small = next((flags for name, flags in SMALL.items() if name in line), ["--size", "tiny"])
    if words[0] == "train":
        return [*words, *small, *less_training(line)]
    if words[0] == "compare":
        return [*less_compared(line, words), *small]
    if words[0] == "prove":  # the last strategy
        return [*words, "--strategies", re.split("[, ]", line)[-1]]
    if words[0] == "throughput":
        sizes = ["--max-micro-batch", "2"] if "--sweep" in words else ["--micro-batch", "1"]
        return [*words, "--size", "tiny", *sizes, "--seq-len", "32", "--steps", "1"]
    if words[0] == "memory" and "--size small" in line:
        return [*words, "--size", "tiny", "--seq-len", "32", "--world", "1"]
    if words[0] == "network":
        return [*words, "--max-size", "64KiB", "--rounds", "2"]
    return words


def less_training(line: str) -> list[str]:
    if "--profile" in line:
        return ["--seq-len", "32", "--steps", "4", "--set", "profile.active=1"]
    flags = [] if "--steps" in line else ["--steps", "2"]
    if "examples/experiments" in line:
        flags += ["--global-batch", "8", "--world", "1" if "baseline" in line else "2"]
    if "yelp" in line or "cifar10" in line or "experiments/cnn" in line:
        flags += ["--set", "training.evaluate_every=0", "--set", "training.evaluate_samples=8"]
    return flags


def less_compared(line: str, words: list[str]) -> list[str]:
    flags = [*FEW, "--no-prove"]
    if "examples/experiments" in line:
        at = words.index("--strategies") + 1
        words[at] = words[at].split(",")[-1]
        flags += ["--global-batch", "8", "--set", "training.evaluate_every=null"]
        flags += ["--set", "training.evaluate_samples=null", "--world", "2", "--no-profile"]
    elif "--strategies" not in words:
        flags += ["--strategies", "single,simple_ddp"]
    if "runs/buckets" in line:  # the two sides of a gate, whose limit needs two repeats
        flags += ["--repeats", "2"]
    if "--fail-if" in words:  # other tests run beside it: nothing here is too slow
        flags += ["--fail-if", "slower=900%"]
    return [*words, *flags]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reader")


def folder_of(page: str, root: Path) -> Path:
    """The project as a user has it, but runs/ and the like are the page's own."""
    folder = root / page
    if not folder.exists():
        folder.mkdir()
        for name in (*FILES, *FOLDERS):
            (folder / name).symlink_to(ROOT / name)
    return folder


def makers(shown: Shown) -> Iterator[tuple[str, str]]:
    """The commands before it on its page whose files it reads, and these files."""
    lines = SHOWN[shown.page]
    read = re.sub(r"--out \S+", "", shown.line)
    for earlier in lines[: lines.index(shown.line)]:
        start = re.fullmatch(r"shardlab learn start (\w+) --dir (\S+)", earlier)
        out = re.search(r"--out (\S+)", earlier)
        made = f"{start[2]}/{start[1]}.py" if start else out[1] if out else ""
        if made and re.search(rf"(?<=[ =]){re.escape(made)}(?![\w-])", read):
            yield earlier, made


def run(shown: Shown, root: Path) -> subprocess.CompletedProcess[str]:
    """In its page's folder, after what it needs, if that has not run: a test may run alone."""
    folder = folder_of(shown.page, root)
    for earlier, made in makers(shown):
        if not (folder / made).exists():
            run(Shown(shown.page, earlier), root)
    line = shown.line
    if line.startswith("make "):  # what make would run, once it has made the environment
        # The tests themselves may run below make, which tells its children so.
        told = commands.run("make", "-n", *line.split()[1:], cwd=folder, MAKEFLAGS="", MAKELEVEL="")
        *_, last = (row for row in told.stdout.splitlines() if row.startswith(".venv/bin/"))
        line = last.removeprefix(".venv/bin/")
    if line.startswith("shardlab "):
        return commands.here(*less(line), cwd=folder, OMP_NUM_THREADS="1")
    return commands.run("bash", "-ec", line, cwd=folder, OMP_NUM_THREADS="1")


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("shown", deep_unless(is_fast, RUN), ids=str)
def test_it_runs_as_printed(shown: Shown, root: Path) -> None:
    done = run(shown, root)
    said = f"{shown}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr, said
    if shown.line.startswith("shardlab learn check"):  # a template: the TODOs are the reader's
        assert done.returncode == 1, said
    elif "--snapshot" in shown.line and done.returncode:
        assert "CUDA allocator" in done.stderr, said
    else:
        assert done.returncode == 0, said
        assert done.stdout, said
    for written in re.findall(r"--out (\S+)", shown.line):
        assert any((folder_of(shown.page, root) / written).iterdir()), said
    if "compare" in shown.line and shown.page != "where" and "--to-loss" not in shown.line:
        assert "fastest" in done.stdout, said
        assert "report.html" in done.stdout, said


@pytest.mark.long
def test_python_snippets_run(root: Path) -> None:
    """They read what commands of the book have written."""
    folder = folder_of("book", root)
    if not (folder / "runs" / "bucket-trace").exists():  # this test alone was asked for
        (needed,) = (line for line in SHOWN["book"] if line.endswith("--out runs/bucket-trace"))
        run(Shown("book", needed), root)
    text = "".join(path.read_text() for path in book_blocks.chapters())
    text = book_blocks.BLOCK.sub("", text)  # what is the source's is not run
    snippets = re.findall(r"^```python\n(.*?)^```$", text, flags=re.S | re.M)
    assert snippets
    for code in snippets:
        said = io.StringIO()
        with contextlib.chdir(folder), contextlib.redirect_stdout(said):
            exec(compile(code, "snippet", "exec"), {})
        assert said.getvalue()


@pytest.mark.deep
@pytest.mark.timeout(200)
def test_pip_install(root: Path, tmp_path: Path) -> None:
    """The package as installed, not as checked out: it has all it needs to work."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    bin_folder = tmp_path / "venv" / "bin"
    # The dependencies are taken from here, where they are installed already.
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [str(bin_folder / "python"), "-m", *INSTALL.split()[:2], "-q", *INSTALL.split()[2:]]
    done = commands.run(*install, cwd=folder_of("README", root), timeout=180)
    assert done.returncode == 0, done.stderr
    where = [str(bin_folder / "python"), "-c", "import shardlab; print(shardlab.__file__)"]
    assert commands.run(*where, cwd=tmp_path).stdout.startswith(str(site))
    compare = "compare --strategies single,simple_ddp --size tiny --repeats 1 --steps 2 --out out"
    done = commands.run(str(bin_folder / "shardlab"), *compare.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "report.html").exists()


# ------------------------------------------------------------------ the files of examples/clusters

# tests/cluster runs them. That the pages show them to the letter is a test of test_site.py.
CLUSTERS = {
    "torchrun": "torchrun.sh",
    "slurm": "slurm.sbatch",
    "mpi": "mpirun.sh",
    "ray": "ray_job.py",
    "kubernetes": "kubernetes.yaml",
}


def test_each_file_for_a_cluster_has_a_page_that_shows_it() -> None:
    assert {path.name for path in commands.CLUSTERS.iterdir()} == set(CLUSTERS.values())
    for page, file in CLUSTERS.items():
        text = (DOCS / "clusters" / f"{page}.md").read_text()
        assert f"<!-- file: examples/clusters/{file} -->" in text


def command_of(path: Path) -> str:
    """What the file's ranks run, as it would be typed."""
    text = path.read_text()
    if path.suffix == ".py":
        (found,) = re.findall(r"^COMMAND = (\[.*?^\])", text, flags=re.S | re.M)
        return " ".join(["shardlab", *ast.literal_eval(found)])
    if path.suffix == ".yaml":
        trainer: dict[str, Any] = yaml.safe_load(text)["spec"]["trainer"]
        return " ".join([*trainer["command"], *trainer["args"]]).partition(" -m ")[2]
    (line,) = re.findall(r"shardlab train .*", text.replace("\\\n", " "))
    return str(line)


@pytest.mark.parametrize("file", CLUSTERS.values())
def test_its_command_can_be_parsed(file: str) -> None:
    command = command_of(commands.CLUSTERS / file)
    parse(command)
    words = command.split()
    assert words[:2] == ["shardlab", "train"]
    # Without these a job that starts again would not continue.
    assert words[words.index("--resume") + 1] == "auto"
    assert {"--checkpoint-every", "--out"} <= set(words)
