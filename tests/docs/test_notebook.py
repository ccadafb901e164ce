"""The notebooks run from top to bottom in a fresh interpreter, and show what they say.

Their cells are run in order as a notebook would, without Jupyter: a kernel and a client are a
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

EXAMPLES = Path(__file__).parents[2] / "examples"
TRACES, FOUR_RUNS = EXAMPLES / "analyze_traces.ipynb", EXAMPLES / "four_runs.ipynb"
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


def code_cells(path: Path) -> list[dict[str, Any]]:
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(path: Path, folder: Path) -> list[str]:
    """What each cell of code prints. Jupyter's current folder is the notebook's own."""
    env = {"TMPDIR": str(folder), "SHARDLAB_CACHE": str(folder), "MPLBACKEND": "agg"}
    # Not as a file, which ranks would import, and with it run the cells again.
    command = sys.executable, "-c", RUNNER, str(path)
    done = commands.run(*command, cwd=path.parent, timeout=200, **env)
    assert done.returncode == 0, done.stderr
    return re.split(rf"{MARK} \d+\n", done.stdout)[1:]


@pytest.mark.long
def test_every_cell_runs(tmp_path: Path) -> None:
    outputs = run(TRACES, tmp_path)
    assert len(outputs) == len(code_cells(TRACES))
    assert "rank0.steps2-4.pt.trace.json.gz" in outputs[0]
    assert "steps [2, 3, 4]" in outputs[1]


@pytest.mark.long
def test_the_four_runs(tmp_path: Path) -> None:
    """In a table, with the same losses; FSDP sends what its text says."""
    pytest.importorskip("matplotlib")
    said = run(FOUR_RUNS, tmp_path)
    assert len(said) == len(code_cells(FOUR_RUNS))
    names = ("baseline", "DDP", "FSDP full shard", "FSDP grad-op")
    losses = [re.search(rf"^{name} .* ([\d.]+ → [\d.]+) ", said[1], re.M) for name in names]
    assert all(losses), said[1]
    assert len({match[1] for match in losses if match}) == 1
    assert float(said[2].split("baseline's: ")[1].split()[0]) < 1e-3
    sent = {line[:16].strip(): line for line in said[4].splitlines()}
    assert sent["baseline"].endswith(" nothing")
    assert "all_reduce" in sent["DDP"]
    gathers = [int(re.findall(r"(\d+) all_gather", sent[name])[0]) for name in names[2:]]
    assert gathers[0] > gathers[1]


@pytest.mark.parametrize("path", [TRACES, FOUR_RUNS], ids=lambda p: p.stem)
def test_what_is_stored_was_run_and_did_not_fail(path: Path) -> None:
    for number, cell in enumerate(code_cells(path), start=1):
        assert cell["execution_count"] == number, "run it again: jupyter execute --inplace"
        assert cell["outputs"]
        assert all(output["output_type"] != "error" for output in cell["outputs"])
        assert "/tmp" not in json.dumps(cell["outputs"])
