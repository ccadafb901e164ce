"""Proofs and estimates that are kept: which, how long, and that none is taken for another."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import commands
import shardlab
from shardlab import config as configs
from shardlab.measure import compare as comparison
from shardlab.measure import fields
from shardlab.measure.cells import Cell, Plan
from shardlab.proof import cache as proof_cache
from shardlab.proof import judge
from shardlab.report import compare as report
from shardlab.report import compare_terminal

ENV = {
    "python": "3.11.7", "torch": "2.13.0", "platform": "Linux", "cpu": "x", "device": "cpu",
    "gpus": [], "cuda": None, "backend": "gloo", "threads_per_rank": 1,
    "nodes": [{"host": "a", "ranks": [0]}], "time": "now", "workload": "w", "parameters": 1,
}  # fmt: skip
PROOF = {
    "pass": True,
    "message": "it is",
    "checks": {name: {"pass": True, "message": "it is"} for name in judge.CHECKS},
}
SIZES = {"total": 12, "parameters": 8, "other": 4}
STDLIB = "stdlib"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "proofs"


def made(**env: Any) -> proof_cache.ProofCache:
    return proof_cache.ProofCache({**ENV, **env}, proof_cache.source_digest())


def config_of(**settings: Any) -> configs.Config:
    flat = {key.replace("__", "."): value for key, value in settings.items()}
    loaded = configs.load(None, {"strategy.name": "zero2", "launch.world": 2, **flat})
    return comparison.proof_config(loaded)


def test_a_proof_that_passed_is_found_again(cache: Path) -> None:
    assert made().find(config_of(), STDLIB) is None
    made().keep(config_of(), STDLIB, PROOF)
    found = made(time="later", parameters=2).find(config_of(), STDLIB)
    assert found is not None
    assert found == {**PROOF, "kept": found["kept"]}
    assert found["kept"].endswith("+00:00")
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("proof", [
    {**PROOF, "pass": False}, {**PROOF, "pass": None, "checks": {}},
])  # fmt: skip
def test_nothing_else_is_kept(proof: dict[str, Any], cache: Path) -> None:
    made().keep(config_of(), STDLIB, proof)
    assert not cache.exists()


def test_a_proof_that_fails_is_not_outlived_by_one_that_passed(cache: Path) -> None:
    """As when somebody has patched PyTorch, which no digest sees."""
    made().keep(config_of(), STDLIB, PROOF)
    made().keep(config_of(training__seed=7), STDLIB, PROOF)
    made().keep(config_of(), STDLIB, {**PROOF, "pass": False})
    assert made().find(config_of(), STDLIB) is None
    assert made().find(config_of(training__seed=7), STDLIB) is not None
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("other", [
    {"torch": "2.11.0"}, {"python": "3.12.1"}, {"device": "cuda", "gpus": ["H"]},
    {"backend": "nccl"}, {"cpu": "y"}, {"threads_per_rank": 2},
])  # fmt: skip
def test_what_is_kept_is_of_its_versions_and_its_machine(other: dict[str, Any]) -> None:
    made().keep(config_of(), STDLIB, PROOF)
    made().keep_estimate(config_of(), STDLIB, SIZES)
    assert made(**other).find(config_of(), STDLIB) is None
    assert made(**other).find_estimate(config_of(), STDLIB) is None


def test_a_proof_is_of_its_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    made().keep(config_of(), STDLIB, PROOF)
    monkeypatch.setattr(proof_cache.importlib.metadata, "version", lambda _name: "0.1")
    assert made().find(config_of(), STDLIB) is None


@pytest.mark.parametrize("settings", [
    {"strategy__name": "zero3"}, {"launch__world": 4}, {"strategy__options": {"bucket_mb": 1}},
    {"training__optimizer": "sgd"}, {"training__seed": 1}, {"training__clip_norm": 1.0},
    {"model__workload": "resnet_cifar10"},
])  # fmt: skip
def test_what_is_kept_is_of_its_options(settings: dict[str, Any]) -> None:
    made().keep(config_of(), STDLIB, PROOF)
    made().keep_estimate(config_of(), STDLIB, SIZES)
    assert made().find(config_of(**settings), STDLIB) is None
    assert made().find(config_of(), "synthetic") is None
    assert made().find_estimate(config_of(**settings), STDLIB) is None


OWN = "strategies/mine.py:Mine"


@pytest.mark.parametrize(("settings", "data"), [
    ({"strategy__name": OWN}, STDLIB),
    ({"strategy__name": "package.module:Mine"}, STDLIB),
    ({"model__workload": "mine.py:model"}, STDLIB),
    ({"model__workload": "causal_lm"}, "synthetic"),  # transformers' code
    ({"training__optimizer": "mine:make"}, STDLIB),
    ({"training__schedule": "mine:factor"}, STDLIB),
    ({}, "fineweb"),
    ({}, "some/shard.bin"),
])  # fmt: skip
def test_what_runs_a_users_code_or_reads_a_users_files_is_never_kept(
    settings: dict[str, Any], data: str, cache: Path
) -> None:
    config = config_of(**settings)
    made().keep(config, data, PROOF)
    assert not cache.exists()
    assert made().find(config, data) is None


def test_ranks_of_several_nodes_are_proved_anew(cache: Path) -> None:
    made(nodes=[{"host": "a"}, {"host": "b"}]).keep(config_of(), STDLIB, PROOF)
    assert not cache.exists()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of ours, whose source counts."""
    copy = tmp_path / "package" / "shardlab"
    ours = Path(shardlab.__file__).parent
    shutil.copytree(ours, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(shardlab, "__file__", str(copy / "__init__.py"))
    return copy


FILES = ("strategies/sharded/zero2.py", "config.py", "training/_preload.py")


@pytest.mark.parametrize("name", FILES)
def test_one_byte_of_the_source_is_another_source(package: Path, name: str, cache: Path) -> None:
    before = made()
    before.keep(config_of(), STDLIB, PROOF)
    file = package / name
    file.write_bytes(file.read_bytes() + b"#")
    assert made().find(config_of(), STDLIB) is None
    # The ranks may have run either: nobody knows, and it is not kept.
    before.keep(config_of(strategy__name="zero1"), STDLIB, PROOF)
    assert len(list(cache.iterdir())) == 1
    # What another source had proved goes when this one keeps something.
    made().keep(config_of(strategy__name="zero3"), STDLIB, PROOF)
    (left,) = cache.iterdir()
    assert left.name.startswith(proof_cache.source_digest())


def test_the_cache_does_not_grow_for_ever(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof_cache, "MOST", 3)
    for seed in range(5):
        made().keep(config_of(training__seed=seed), STDLIB, PROOF)
        for file in cache.iterdir():
            os.utime(file, ns=(0, file.stat().st_mtime_ns - 10**9))
    assert len(list(cache.iterdir())) == 3
    there = [made().find(config_of(training__seed=seed), STDLIB) is not None for seed in range(5)]
    assert there == [False, False, True, True, True]


def damaged(change: dict[str, Any]) -> Any:
    return lambda text: json.dumps({**json.loads(text), **change})


@pytest.mark.parametrize("damage", [
    lambda _text: "",
    lambda text: text[: len(text) // 2],
    lambda _text: "[]",
    lambda _text: "null",
    lambda _text: "[" * 100_000,
    damaged({"found": {**PROOF, "pass": "yes"}}),
    damaged({"found": {**PROOF, "checks": {}}}),
    damaged({"found": {**PROOF, "checks": {**PROOF["checks"], "equal": {"pass": False}}}}),
    damaged({"found": {**PROOF, "message": None}}),
    damaged({"time": "yesterday"}),
    damaged({"time": 7}),
    damaged({"about": {}}),
])  # fmt: skip
def test_a_damaged_file_is_not_there(damage: Any, cache: Path) -> None:
    made().keep(config_of(), STDLIB, PROOF)
    (file,) = cache.iterdir()
    file.write_text(damage(file.read_text()))
    assert made().find(config_of(), STDLIB) is None
    made().keep(config_of(), STDLIB, PROOF)
    assert made().find(config_of(), STDLIB) is not None


def test_an_estimate_is_found_again_and_is_no_proof(cache: Path) -> None:
    made().keep_estimate(config_of(), STDLIB, SIZES)
    assert made().find_estimate(config_of(), STDLIB) == SIZES
    assert made().find(config_of(), STDLIB) is None
    made().keep_estimate(config_of(strategy__name=OWN), STDLIB, SIZES)
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("sizes", [None, [], {}, {"total": None}, {"total": 1, "other": "much"}])
def test_a_damaged_estimate_is_not_there(sizes: Any, cache: Path) -> None:
    made().keep_estimate(config_of(), STDLIB, SIZES)
    (file,) = cache.iterdir()
    file.write_text(damaged({"found": sizes})(file.read_text()))
    assert made().find_estimate(config_of(), STDLIB) is None


def test_another_users_file_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    made().keep(config_of(), STDLIB, PROOF)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert made().find(config_of(), STDLIB) is None


def test_a_cache_that_cannot_be_written_is_no_error(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder should be")
    made().keep(config_of(), STDLIB, PROOF)
    assert made().find(config_of(), STDLIB) is None


# ------------------------------------------------------------------ in a comparison


class Answering:
    """Ranks that prove whatever they are asked to, and count how often."""

    def __init__(self) -> None:
        self.proved = 0

    def run(self, target: str, *_args: Any) -> list[Any]:
        self.proved += target.endswith(":examine")
        return [STDLIB if target.endswith(":check") else {}]


def test_fresh_proves_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "judge", lambda _evidence: PROOF["checks"])
    config, ranks = configs.load(None, {"strategy.name": "zero2", "launch.world": 2}), Answering()
    proofs: list[Any] = []
    for keeps, fresh in ((False, False), (True, False), (True, False), (True, True)):
        cell = Cell(config, "zero2")
        store = made() if keeps else None
        comparison._prove(ranks, [cell], cell, store, fresh)  # type: ignore[arg-type]
        proofs.append((ranks.proved, "kept" in (cell.proof or {})))
    assert proofs == [(1, False), (2, False), (2, True), (3, False)]


def test_fresh_estimates_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept estimate needs no simulator; ``--fresh`` and a first comparison do."""
    config = configs.load(None, {"strategy.name": "zero2", "launch.world": 2})
    env, asked = {**ENV, "chosen": {"data.source": STDLIB}}, []

    class Simulating(contextlib.ExitStack):
        def run(self, config: Any, *_args: Any, **_more: Any) -> dict[str, Any]:
            asked.append(config.strategy.name)
            return {"weights": dict.fromkeys(("building", "step"), SIZES)}

    monkeypatch.setattr(comparison, "Simulator", Simulating)
    for cache, fresh in ((None, False), (made(), False), (made(), False), (made(), True)):
        cell = Cell(config, "zero2")
        with comparison._Estimates(env, Plan(fresh=fresh), [cell], cache) as estimates:
            estimates.take(cell)
        assert cell.estimated_bytes == SIZES
    assert len(asked) == 3


def result_of(*times: str | None) -> dict[str, Any]:
    cells = []
    for i, when in enumerate(times):
        cell = Cell(configs.load(None, {"strategy.name": "zero2"}), f"zero2 ({i})")
        cell.times_ms, cell.skews_ms, cell.losses = [[1.0], [1.0]], [0.0], [5.0]
        cell.proof = {**PROOF, **({"kept": when} if when else {})}
        cells.append(cell)
    env = {**ENV, "shardlab": "0"}
    return comparison.summarize(cells, comparison.Plan(), "shardlab compare", env)


def test_the_report_says_which_proofs_are_kept_and_of_when_they_are() -> None:
    assert fields.kept_proofs(result_of(None)) is None
    one = "2026-11-16T09:30:01+00:00"
    for result, said in (
        (result_of(one, None), "1 proof is kept from an earlier comparison (2026-11-16 09:30 UTC)"),
        (
            result_of(one, "2026-11-17T10:00:00+00:00"),
            "2 proofs are kept from an earlier comparison (2026-11-16 09:30 to 2026-11-17 10:00 "
            "UTC)",
        ),
    ):
        assert any(line.startswith(said) for line in compare_terminal.verdict_lines(result))
        assert said in report.html(result)
        assert said in report.markdown(result)
        assert "--fresh" in report.html(result)


SHORT = ["--size", "tiny", "--repeats", "1", "--steps", "1", "--warmup", "0", "--no-profile"]


@pytest.mark.deep
def test_a_bug_that_is_planted_later_is_found(tmp_path: Path, package: Path, cache: Path) -> None:
    """The second comparison takes the first one's proofs; one of another source takes none."""
    environment = {"SHARDLAB_CACHE": str(cache.parent), "PYTHONPATH": str(package.parent)}

    def compare(out: str) -> tuple[int, dict[str, Any]]:
        args = ("compare", "--strategies", "single,zero2", *SHORT, "--out", out)
        done = commands.run(*commands.SHARDLAB, *args, cwd=tmp_path, timeout=300, **environment)
        found = json.loads((tmp_path / out / "compare.json").read_text())["cells"]
        is_told = "--fresh proves anew" in " ".join(done.stdout.split())
        assert is_told == any("kept" in cell["proof"] for cell in found)
        return done.returncode, {cell["label"]: cell["proof"] for cell in found}

    code, first = compare("first")
    assert (code, [p["pass"] for p in first.values()]) == (0, [True, True])
    assert not any("kept" in proof for proof in first.values())
    assert len(list(cache.iterdir())) == 4  # and two estimates of memory
    code, second = compare("second")
    assert code == 0
    for label, proof in second.items():
        assert proof.pop("kept")
        assert proof == first[label]
    file, right = package / "strategies" / "steps.py", "(loss / divisor).backward()"
    text = file.read_text()
    assert text.count(right) == 1
    file.write_text(text.replace(right, "(2 * loss / divisor).backward()"))
    code, third = compare("third")
    assert (code, third["zero2"]["pass"]) == (1, False)
    assert not any("kept" in proof for proof in third.values())
