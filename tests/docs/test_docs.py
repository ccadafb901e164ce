"""Every command of the README and the tutorial runs, and every link leads somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import commands
from commands import ROOT, bash_lines

NEEDED = ["Makefile", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"]
FOLDERS = ["src", "examples"]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
INSTALL = "pip install -c constraints.txt ."


README = bash_lines("README.md")
TUTORIAL = bash_lines("docs/tutorial.md")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project as a user has it, but runs/ and the like go elsewhere."""
    folder = tmp_path_factory.mktemp("clone")
    for name in (*NEEDED, *FOLDERS):
        (folder / name).symlink_to(ROOT / name)
    return folder


def test_the_readme_has_commands() -> None:
    assert README[:2] == ["make compare", "make test"]
    assert INSTALL in README
    assert any(line.startswith("torchrun") for line in README)
    assert len(TUTORIAL) >= 3


# `make test` is what runs this; pip has a test of its own below.
RUNNABLE = [line for line in README if line not in ("make test", INSTALL)]
FEW = ["--repeats", "1", "--warmup", "1", "--steps", "2", "--set", "profile.active=1"]


def fewer(line: str) -> list[str]:
    """Flags that shorten a command, all else as it is: it must work, and what it measures and
    proves is tested where it costs less (tests/measure, tests/proof/test_prove.py)."""
    if "--to-loss" in line:  # short as they are
        return []
    if line.startswith("shardlab compare"):
        flags = [*FEW, "--no-prove"]
        if "--size" not in line and "--workload" not in line:
            flags += ["--size", "tiny"]
        elif "--strategies" not in line:  # all of them: `make compare` does that
            flags += ["--strategies", "single,simple_ddp"]
        if "runs/buckets" in line:  # the two sides of a gate, whose limit needs two repeats
            flags += ["--repeats", "2"]
        if "--fail-if" in line:  # other tests run beside it: nothing here is too slow
            flags += ["--fail-if", "slower=900%"]
        return flags
    if line.startswith("shardlab prove"):
        last = line.rpartition(",")[2] if "," in line else line.split()[-1]
        return ["--strategies", last]
    chosen = ("--size", "--workload", "--config", "--resume", "--data")
    if line.startswith("shardlab train") and not any(flag in line for flag in chosen):
        return ["--size", "tiny"]
    if line.startswith("shardlab network"):
        return ["--max-size", "64KiB", "--rounds", "2"]
    return []


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("line", [*RUNNABLE, *(c for c in TUTORIAL if c.startswith("shardlab"))])
def test_runs_as_printed(line: str, clone: Path) -> None:
    command = line
    if line.startswith("make "):  # what make would run, once it has made the environment
        # The tests themselves may run below make, which tells its children so.
        told = commands.run("make", "-n", *line.split()[1:], cwd=clone, MAKEFLAGS="", MAKELEVEL="")
        *_, last = (row for row in told.stdout.splitlines() if row.startswith(".venv/bin/"))
        command = last.removeprefix(".venv/bin/")
    if command.startswith("shardlab "):
        words = [*shlex.split(command)[1:], *fewer(command)]
        done = commands.here(*words, cwd=clone, OMP_NUM_THREADS="1")
    else:
        done = commands.run("bash", "-ec", command, cwd=clone, OMP_NUM_THREADS="1")
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    if "compare" in line:
        assert "fastest" in done.stdout
        assert "report.html" in done.stdout


@pytest.mark.long
def test_what_looks_at_a_run_has_something_to_see(clone: Path) -> None:
    (line,) = (c for c in TUTORIAL if not c.startswith("shardlab"))
    done = commands.run("bash", "-ec", line, cwd=clone)
    assert done.stdout.count('"seq"') == 3


def test_ci_runs_the_readmes_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    assert script[-2:] == ["make test", "make test-cluster"]


@pytest.mark.long
@pytest.mark.timeout(200)
def test_pip_install(clone: Path, tmp_path: Path) -> None:
    """The package as installed, not as checked out: it has all it needs to work."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    bin_folder = tmp_path / "venv" / "bin"
    # The dependencies are taken from here, where they are installed already.
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [str(bin_folder / "python"), "-m", *INSTALL.split()[:2], "-q", *INSTALL.split()[2:]]
    done = commands.run(*install, cwd=clone, timeout=180)
    assert done.returncode == 0, done.stderr
    where = [str(bin_folder / "python"), "-c", "import shardlab; print(shardlab.__file__)"]
    assert commands.run(*where, cwd=tmp_path).stdout.startswith(str(site))
    compare = "compare --strategies single,simple_ddp --size tiny --repeats 1 --steps 2 --out out"
    done = commands.run(str(bin_folder / "shardlab"), *compare.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page: str | Path) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), f"{page} links to {target}"


def test_the_tree_in_the_readme_is_the_tree() -> None:
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"^  ([a-z_]+(?:\.py|/)) ", text, flags=re.M))
    shown = {p.name + ("/" if p.is_dir() else "") for p in (ROOT / "src" / "shardlab").iterdir()}
    assert named
    assert named <= shown, named - shown


def test_no_path_of_this_machine_is_in_the_project() -> None:
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in files:
        content = (ROOT / name).read_bytes()
        assert str(ROOT).encode() + b"/" not in content, name
