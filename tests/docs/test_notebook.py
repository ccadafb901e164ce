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


def cells(path: Path) -> list[dict[str, Any]]:
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    found: list[dict[str, Any]] = notebook["cells"]
    return found


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in cells(path) if cell["cell_type"] == "code"]


def run(path: Path, folder: Path) -> list[str]:
    """What each cell of code prints. Jupyter's current folder is the notebook's own."""
    env = {"TMPDIR": str(folder), "SHARDLAB_CACHE": str(folder), "MPLBACKEND": "agg"}
    # Not as a file, which ranks would import, and with it run the cells again.
    command = sys.executable, "-c", RUNNER, str(path)
    done = commands.run(*command, cwd=path.parent, timeout=200, **env)
    assert done.returncode == 0, done.stderr
    return re.split(rf"{MARK} \d+\n", done.stdout)[1:]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return run(TRACES, tmp_path_factory.mktemp("notebook"))


@pytest.mark.alone
def test_every_cell_runs(outputs: list[str]) -> None:
    assert len(outputs) == len(code_cells(TRACES))
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


@pytest.mark.long
def test_the_four_runs(tmp_path: Path) -> None:
    """In a table, with the same losses; FSDP sends and holds what its text says."""
    pytest.importorskip("matplotlib")
    said = run(FOUR_RUNS, tmp_path)
    assert len(said) == len(code_cells(FOUR_RUNS))
    assert "stdlib: the text of Python's library" in said[0]
    names = ("baseline", "DDP", "FSDP full shard", "FSDP grad-op")
    number = r"[\d.,]+"
    row = (
        rf"(?P<ms>{number}) +{number} +{number}x +(?P<loss>{number} → {number}) +(?P<mib>{number})"
    )
    found = {name: re.search(rf"^{name} +{row}$", said[1], re.M) for name in names}
    assert all(found.values()), said[1]
    rows = {name: match.groupdict() for name, match in found.items() if match}
    assert len({r["loss"] for r in rows.values()}) == 1
    mib = {name: float(r["mib"]) for name, r in rows.items()}
    assert mib["FSDP full shard"] < mib["FSDP grad-op"] < mib["DDP"]
    assert float(said[2].split("baseline's: ")[1].split()[0]) < 1e-3
    sent = {line[:16].strip(): line for line in said[4].splitlines()}
    assert sent["baseline"].endswith(" nothing")
    assert "all_reduce" in sent["DDP"]
    gathers = {n: int(re.search(r"(\d+) all_gather", sent[n])[1]) for n in names[2:]}  # type: ignore[index]
    assert gathers["FSDP full shard"] > gathers["FSDP grad-op"]


@pytest.mark.parametrize("path", [TRACES, FOUR_RUNS], ids=lambda p: p.stem)
def test_what_is_stored_was_run_and_did_not_fail(path: Path) -> None:
    for number, cell in enumerate(code_cells(path), start=1):
        assert cell["execution_count"] == number, "run it again: jupyter execute --inplace"
        assert cell["outputs"]
        assert all(output["output_type"] != "error" for output in cell["outputs"])
        assert "/tmp" not in json.dumps(cell["outputs"])
