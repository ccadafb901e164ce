"""Running the commands as a user does: in processes of their own, or here where that is enough."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
CLUSTERS = ROOT / "examples" / "clusters"
SHARDLAB = [sys.executable, "-m", "shardlab"]


def environment(**changes: str) -> dict[str, str]:
    """This environment, with the interpreter's own folder first on the path. What the tests share
    can be imported: a test may name a strategy in its own file."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shared = [place for place in sys.path if Path(place).is_relative_to(ROOT / "tests")]
    modules = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *shared]))
    return {**os.environ, "PATH": path, "PYTHONPATH": modules, "COLUMNS": "120", **changes}


def run(
    *command: str, cwd: Path, timeout: float = 100, **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=environment(**env), capture_output=True, text=True, timeout=timeout
    )


def shardlab(*args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return run(*SHARDLAB, *args, cwd=cwd, **env)


def here(*args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """The command in this process, with the same answer: it saves the seconds that torch takes to
    import. Its ranks, if it has any, come from the tests' own fork server and have that server's
    environment, so ``env`` does not reach them. A user's file stays loaded: it needs a folder of
    its own.
    """
    from shardlab import cli

    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["shardlab", *args]),
        mock.patch.dict(os.environ, {"COLUMNS": "120", **env}),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())


@dataclass(frozen=True)
class Command:
    """A command of the command line, as the command line itself has it."""

    name: str  # "trace analyze"
    options: dict[str, Any]  # by name, long and short: the option

    @property
    def short(self) -> dict[str, str]:
        """The long name of each flag of one letter."""
        return {n: o.opts[0] for n, o in self.options.items() if re.fullmatch("-[a-z]", n)}


def tree() -> list[Command]:
    """Every command, and every group that is one."""
    from typer.main import get_command

    from shardlab import cli

    def walk(command: Any, name: str) -> Iterator[Command]:
        options = {
            n: o for o in command.params for n in (*o.opts, *o.secondary_opts) if n[0] == "-"
        }
        yield Command(name, options)
        for word, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, f"{name} {word}".strip())

    return list(walk(get_command(cli.app), ""))


def _hears_ctrl_c() -> None:
    """Where the tests themselves run in a shell's background, it is ignored, and that passes on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(*command: str, cwd: Path, **env: str) -> subprocess.Popen[str]:
    """In the background, in a process group of its own."""
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_hears_ctrl_c,
    )


def wait_for(
    is_so: Callable[[], object], seconds: float = 60, said: Callable[[], str] = str
) -> float:
    """How many seconds it took to become so; an error, with what was ``said``, if it takes more."""
    began = time.monotonic()
    while not is_so():
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"not so after {seconds:g} s\n{said()}")
        time.sleep(0.02)
    return time.monotonic() - began


def rows_in(path: Path) -> int:
    """The lines of a file, which may not be there yet."""
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for_steps(root: Path, steps: int, timeout: float = 60) -> dict[str, Any]:
    """The status of the only run under ``root``, once its rank 1 has made some steps."""

    def found() -> list[Path]:
        return [rows.parent for rows in root.glob("*/rank1.jsonl") if rows_in(rows) >= steps]

    wait_for(found, timeout, lambda: f"no {steps} steps under {root}: {list(root.glob('*/*'))}")
    status: dict[str, Any] = json.loads((found()[0] / "status.json").read_text())
    return status


def wait_until_gone(pids: list[int], timeout: float = 5) -> list[int]:
    """Those of the processes that are still there after a while."""
    with contextlib.suppress(TimeoutError):
        wait_for(lambda: not any(is_alive(pid) for pid in pids), timeout)
    return [pid for pid in pids if is_alive(pid)]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # dead, and waiting to be noticed


def descendants(pid: int) -> list[int]:
    """The process's children, theirs, and so on (Linux)."""
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid:
            children.append(int(stat.parent.name))
    return children + [g for c in children for g in descendants(c)]


def bash_lines(name: str | Path) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / name).read_text(), flags=re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    return [code for line in lines if (code := re.sub(r"(^|\s+)# .*", "", line).strip())]
