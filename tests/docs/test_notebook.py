"""The notebook runs from top to bottom in a fresh interpreter, and shows what it says.

Its cells are run in order as a notebook would, without Jupyter: a kernel and a client are a
hundred megabytes, and what they would add is only the frame around the same statements.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import commands

NOTEBOOK = Path(__file__).parents[2] / "examples" / "analyze_traces.ipynb"
MARK = "----- cell"
RUNNER = """
import ast, json, sys
notebook = json.load(open(sys.argv[1]))
names = {"__name__": "__main__"}
for number, cell in enumerate(c for c in notebook["cells"] if c["cell_type"] == "code"):
    print("----- cell", number, flush=True)
    *head, last = ast.parse("".join(cell["source"])).body
    exec(compile(ast.Module(head, []), "cell", "exec"), names)
    exec(compile(ast.Interactive([last]), "cell", "single"), names)  # shows an expression's value
"""


def cells() -> list[dict[str, Any]]:
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    found: list[dict[str, Any]] = notebook["cells"]
    return found


def code_cells() -> list[dict[str, Any]]:
    return [cell for cell in cells() if cell["cell_type"] == "code"]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("notebook")
    (folder / "run.py").write_text(RUNNER)
    done = commands.run(sys.executable, "run.py", str(NOTEBOOK), cwd=folder, TMPDIR=str(folder))
    assert done.returncode == 0, done.stderr
    return re.split(rf"{MARK} \d+\n", done.stdout)[1:]


@pytest.mark.alone
def test_every_cell_runs(outputs: list[str]) -> None:
    assert len(outputs) == len(code_cells())
    assert "rank0.steps2-4.pt.trace.json.gz" in outputs[0]
    assert "steps [2, 3, 4]" in outputs[1]


@pytest.mark.alone
def test_it_shows_what_its_text_says(outputs: list[str]) -> None:
    text = "".join(outputs)
    hidden = {name: int(n) for name, n in re.findall(r"(\w+): (\d+)% of the communication", text)}
    assert hidden["simple_ddp"] < hidden["bucket_ddp_async"]
    assert re.search(r"rank 0 step 2: +[\d.]+ ms \{'compute'", text)
    assert re.search(r"all_reduce: \d+ of them", text)
    assert re.search(r"rank 1, cpu: peak [\d.]+ MiB in step \d", text)
    assert re.search(r"summary.html: \d+ kB", text)
    assert "A step took" in outputs[-1]


def test_what_is_stored_was_run_and_did_not_fail() -> None:
    for number, cell in enumerate(code_cells(), start=1):
        assert cell["execution_count"] == number, "run it again: jupyter execute --inplace"
        assert cell["outputs"]
        assert all(output["output_type"] != "error" for output in cell["outputs"])
        assert "/tmp" not in json.dumps(cell["outputs"])
