"""The comparison: what it measures, what it writes, and that one failure is one row."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import commands
from shardlab import config as configs
from shardlab.errors import UsageError
from shardlab.measure import compare as comparison
from shardlab.measure import stats
from shardlab.measure.memory import peak_bytes

TINY = ["--size", "tiny", "--repeats", "2", "--warmup", "1", "--steps", "2"]


def compare(tmp_path: Path, *args: str) -> dict[str, Any]:
    done = commands.shardlab("compare", *TINY, "--out", "out", *args, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("out/") == 3  # where its files are
    result: dict[str, Any] = json.loads((tmp_path / "out" / "compare.json").read_text())
    return result


def test_losses_agree_with_single(tmp_path: Path) -> None:
    result = compare(tmp_path, "--strategies", "single,simple_ddp,pytorch_ddp", "--world", "2")
    assert result["schema"] == 1
    assert result["baseline"] == "single"
    assert result["command"].startswith("shardlab compare")
    assert (result["workload"], result["parameters"]) == ("gpt2-tiny", 120_576)
    cells = result["cells"]
    assert [(c["strategy"], c["world"]) for c in cells] == [
        ("single", 1), ("simple_ddp", 2), ("pytorch_ddp", 2),
    ]  # fmt: skip
    for cell in cells:
        assert (cell["status"], cell["reason"]) == ("ok", None)
        assert cell["step_ms"]["n"] == 4
        assert cell["step_ms"]["p10"] <= cell["step_ms"]["median"] <= cell["step_ms"]["p90"]
        assert cell["tokens_per_s"] == pytest.approx(cell["samples_per_s"] * 64)
        assert cell["loss_difference"] < 1e-5
        assert len(cell["losses"]) == 3
        # fp32 parameters, gradients and Adam's two moments, at the least, and little of them.
        assert 16 * 120_576 < cell["peak_bytes"]["total"] < 160 * 120_576
    with (tmp_path / "out" / "compare.csv").open() as file:
        assert [row["strategy"] for row in csv.DictReader(file)] == [c["strategy"] for c in cells]
    assert "<html" in (tmp_path / "out" / "report.html").read_text()


FAILING = """
from shardlab.strategies.simple_ddp_ga import SimpleDDPGradientAccumulation

class Fails(SimpleDDPGradientAccumulation):
    def step(self):
        if self.group.rank() == 1:
            raise ArithmeticError("planted")
        super().step()
"""


def test_a_failure_is_a_row_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILING)
    result = compare(tmp_path, "--strategies", "fails.py:Fails,simple_ddp,single")
    failed, good, single = result["cells"]
    assert failed["status"] == "failed"
    assert failed["reason"] == "rank 1: ArithmeticError: planted"
    assert failed["step_ms"] is None
    assert (good["status"], single["status"]) == ("ok", "ok")
    assert result["baseline"] == "single"


def test_only_failures_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILING)
    done = commands.shardlab(
        "compare", *TINY, "--strategies", "fails.py:Fails", "--quiet", cwd=tmp_path
    )
    assert done.returncode == 1
    assert (tmp_path / done.stdout.strip() / "compare.json").exists()


def test_json_alone_on_stdout(tmp_path: Path) -> None:
    done = commands.shardlab(
        "compare", *TINY, "--strategies", "pytorch_ddp:bucket_mb=1", "--json", cwd=tmp_path
    )
    result = json.loads(done.stdout)
    (cell,) = result["cells"]
    assert (cell["options"], cell["label"]) == ({"bucket_mb": 1}, "pytorch_ddp (bucket_mb=1)")
    assert result["baseline"] == cell["label"]
    assert cell["loss_difference"] is None  # there is no single to differ from
    assert cell["speed_to_baseline"] == 1.0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--strategies", "single,zero9"], "unknown strategy 'zero9'"),
        (["--strategies", "single,single"], "strategy single is named twice"),
        (["--strategies", "pytorch_ddp:bucket=4"], "unknown option of strategy pytorch_ddp"),
        (["--strategies", "pytorch_ddp:bucket_mb=x"], "pytorch_ddp's bucket_mb must be a number"),
        (["--world", "3"], "a global batch of 8 cannot be divided evenly over 3 ranks"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--size", "huge"], "unknown gpt2 size 'huge'"),
    ],
)
def test_wrong_input(args: list[str], message: str, tmp_path: Path) -> None:
    done = commands.shardlab("compare", *args, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) <= 2
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ pure


def test_single_has_every_ranks_microbatches() -> None:
    """So that BatchNorm sees batches of the same size, and the arithmetic is the same."""
    config = configs.load(None, {"training.accumulate": 2, "training.global_batch": 24})
    single, ddp = comparison.cells_of(
        config, ["single", "simple_ddp"], 3, comparison.Plan(steps=5, warmup=2)
    )
    assert (single.config.launch.world, single.config.training.accumulate) == (1, 6)
    assert (ddp.config.launch.world, ddp.config.training.accumulate) == (3, 2)
    assert single.config.training.steps == 7


def test_the_schedule_interleaves() -> None:
    visits = list(comparison._schedule(3, 2))
    assert visits == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (1, 0)]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("single", ("single", {})),
        ("a:b=1:c=x", ("a", {"b": 1, "c": "x"})),
        ("pkg.mod:Class", ("pkg.mod:Class", {})),
        ("file.py:Class:rate=1e-4:on=true", ("file.py:Class", {"rate": 1e-4, "on": True})),
    ],
)
def test_parse_spec(spec: str, expected: tuple[str, dict[str, Any]]) -> None:
    assert comparison.parse_spec(spec) == expected


def test_parse_spec_refuses() -> None:
    with pytest.raises(UsageError, match="is not option=value"):
        comparison.parse_spec("a:b=1:c")


def test_spread_and_throughput() -> None:
    assert stats.spread([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]) == {
        "median": 6, "p10": 2, "p90": 10, "n": 11,
    }  # fmt: skip
    assert stats.throughput([100, 200, 900], 8, 64) == {
        "samples_per_s": 40, "tokens_per_s": 2560,
    }  # fmt: skip
    assert stats.throughput([100], 8, None)["tokens_per_s"] is None


def test_peak_is_the_peak() -> None:
    """Not what is left, not a sum, not what an earlier measurement held."""
    mib = 1 << 20
    kept: list[torch.Tensor] = []

    def work() -> str:
        a = torch.empty(3 * mib, dtype=torch.uint8)
        b = torch.empty(4 * mib, dtype=torch.uint8)
        del a
        kept.append(torch.empty(2 * mib, dtype=torch.uint8))
        del b
        return "done"

    for _ in range(2):
        result, peak = peak_bytes(torch.device("cpu"), work)
        assert result == "done"
        assert peak == pytest.approx(7 * mib, rel=0.001)
    kept.clear()
    _, peak = peak_bytes(torch.device("cpu"), work)
    assert peak == pytest.approx(7 * mib, rel=0.001)
