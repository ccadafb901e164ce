"""docs/learn.md, done as a new student does it: its commands, its files, its output, in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import commands

PAGE = (commands.ROOT / "docs" / "learn.md").read_text()


@pytest.mark.long
def test_the_page_leads_to_a_green_check(tmp_path: Path) -> None:
    blocks = re.findall(r"```(bash|python|text)\n(.*?)```", PAGE, flags=re.S)
    assert [kind for kind, _ in blocks].count("python") == 2
    output, codes = "", []
    for kind, text in blocks:
        if kind == "python":
            (tmp_path / "learn" / "sampler.py").write_text(text)
        elif kind == "text":
            shown = " ".join(output.split())
            for line in text.splitlines():
                assert " ".join(line.split()) in shown, f"{line}\nis not in\n{output}"
        else:
            for command in text.splitlines():
                done = commands.here(*command.split()[1:], cwd=tmp_path, COLUMNS="100")
                assert "Traceback" not in done.stderr
                assert done.returncode in (0, 1), done.stderr
                output = done.stdout
                codes.append(done.returncode)
    assert codes == [0, 0, 0, 1, 0, 0]
