"""The Python interface: what a notebook calls, and a strategy in a script of the user's own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import commands
import shardlab
from commands import ROOT
from shardlab.errors import UsageError
from shardlab.strategies import steps

PUBLIC = [
    "Batch", "Strategy", "Workload", "__version__", "compare", "load_checkpoint", "load_traces",
    "memory", "predict", "prove", "save_checkpoint", "strategy", "train",
]  # fmt: skip
MODEL = f"{ROOT / 'examples' / 'your_model.py'}:workload"
SMALL = {"training.global_batch": 4}


def test_the_export_list_is_exact() -> None:
    assert shardlab.__all__ == dir(shardlab) == PUBLIC
    assert all(getattr(shardlab, name) is not None for name in PUBLIC)
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        _ = shardlab.tarin  # type: ignore[attr-defined]
    page = (ROOT / "docs" / "python.md").read_text().partition("## In a notebook")[0]
    assert set(re.findall(r"`([A-Za-z_]+)`", page)) == set(PUBLIC)


def test_importing_costs_and_does_nothing() -> None:
    """Our name alone loads nothing of ours; what starts ranks and reads configs needs no torch."""
    script = "import sys, shardlab; print(sorted(m for m in sys.modules if 'shardlab' in m))\n"
    script += "import shardlab.config, shardlab.launch.launch; shardlab.compare\n"
    script += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["['shardlab']", "False"]


@pytest.mark.long
def test_compare_is_an_object_with_a_table(tmp_path: Path) -> None:
    found = shardlab.compare(
        MODEL, ["single", "simple_ddp"], repeats=1, prove=False, out=tmp_path, settings=SMALL
    )
    assert found.passed
    assert [row["label"] for row in found.rows] == ["single", "simple_ddp"]
    assert "simple_ddp" in str(found)
    assert "fastest" in str(found)
    assert found._repr_html_().startswith("<pre")
    assert json.loads((tmp_path / "compare.json").read_text())["cells"] == found.data["cells"]
    assert (tmp_path / "report.html").is_file()


def test_a_data_frame_if_pandas_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardlab.api import Result

    rows = [{"label": "zero2", "step_ms": {"median": 2.0}}]
    result = Result({}, Path(), rows, ())
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="needs pandas"):
        result.to_dataframe()
    # Pandas is no dependency of the tests: this has the one function of it that is called.
    monkeypatch.setitem(sys.modules, "pandas", types.SimpleNamespace(json_normalize=list))
    assert result.to_dataframe() == rows


@pytest.mark.long
def test_train_prove_and_memory(tmp_path: Path) -> None:
    run = shardlab.train(MODEL, "zero2", steps=3, out=tmp_path / "run", settings=SMALL)
    assert [row["step"] for row in run.rows] == [0, 1, 2]
    assert "3 steps: loss" in str(run)
    assert run.data["tokens_per_s"] is None  # its samples are no texts
    wrong = f"{ROOT / 'tests' / 'bugs' / 'saboteurs.py'}:NoAveraging"
    proof = shardlab.prove(MODEL, ["zero2", wrong], out=tmp_path / "proof")
    assert [row["pass"] for row in proof.rows] == [True, False]
    assert not proof.passed
    held = shardlab.memory(MODEL, ["zero1", "zero3"], world=8, out=tmp_path / "memory")
    assert [row["strategy"] for row in held.rows] == ["zero1", "zero3"]


def workload(_config: Any) -> Any: ...


def test_a_function_is_found_by_the_ranks_or_refused() -> None:
    from shardlab.api import _path_of

    assert _path_of(workload) == f"{__file__}:workload"
    with pytest.raises(UsageError, match="each rank must import the workload"):
        _path_of(lambda: None)


def test_what_is_wrong_with_a_call_is_one_line() -> None:
    model = nn.Linear(4, 4)
    wrong: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="make_optimizer: the optimizer is a SGD, not a function"):
        shardlab.strategy("single", model, wrong, lambda m, b: m(b.inputs).sum())
    with pytest.raises(UsageError, match="world must be at least 1, got 0"):
        shardlab.memory(MODEL, "zero2", world=0)
    with pytest.raises(UsageError, match="unknown strategy 'zero9'"):
        shardlab.compare(MODEL, "zero2, zero9")
    batches: Any
    for batches, message in (
        ([], "at least one"),
        (shardlab.Batch(torch.ones(2, 4), None, 2, 2), "takes a list of micro-batches"),
        ([(torch.ones(2, 4), None)], "is a shardlab.Batch, with its count; this is a tuple"),
    ):
        with pytest.raises(UsageError, match=message):
            steps.local_count(batches, torch.device("cpu"))


@pytest.mark.long
def test_a_script_without_a_guard_is_told(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(f"import shardlab\nshardlab.train({MODEL!r}, 'simple_ddp', steps=1)\n")
    done = commands.run(sys.executable, str(script), cwd=tmp_path)
    assert done.returncode != 0
    assert 'if __name__ == "__main__":' in done.stderr


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_the_page_runs_as_printed(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    notebook, own_loop = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "notebook.py").write_text(notebook)
    (tmp_path / "own_loop.py").write_text(own_loop)
    done = commands.run(sys.executable, "notebook.py", cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "zero2" in done.stdout
    assert "True runs/" in done.stdout
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = commands.run(
        sys.executable, *torchrun, "own_loop.py", cwd=tmp_path,
        OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


@pytest.mark.parametrize(
    ("name", "options"),
    [("zero1", {"tensor": 2}), ("tensor_parallel", {}), ("zero2", {"pipeline": 2})],
)
def test_a_loop_of_ones_own_has_no_axes(name: str, options: dict[str, Any]) -> None:
    model, make = nn.Linear(2, 2), torch.optim.SGD
    with pytest.raises(UsageError, match="tensor, context and pipeline are not for a loop"):
        shardlab.strategy(name, model, make, lambda model, batch: model(batch.inputs), **options)
