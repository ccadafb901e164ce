"""The views of a comparison, from a result made by hand: no torch, no ranks."""

from __future__ import annotations

import copy
import csv
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from chrome import FOLDERS
from results import PARTS, cell, drawn_table, explained, proof, result_of, without_numbers
from shardlab import numbers as fmt
from shardlab import trace as traces
from shardlab.measure import choice, readings
from shardlab.report import compare, compare_terminal
from shardlab.report import compare_charts as charts
from shardlab.report.charts import ticks


def without_single(*cells: dict[str, Any]) -> dict[str, Any]:
    return result_of(*(c | {"loss_difference": None} for c in cells))


@pytest.fixture
def result() -> dict[str, Any]:
    return result_of(
        cell("single", 200),
        cell("simple_ddp", 125, mib=70),
        cell("pytorch_ddp", 100, label="pytorch_ddp (bucket_mb=4)", options={"bucket_mb": 4}),
        without_numbers("zero3", "failed", "rank 1: RuntimeError: the shard is [gone]"),
        without_numbers("fsdp2", "skipped", "needs another torch"),
    )


NANS = {"loss": float("nan"), "loss_difference": float("nan"), "losses": [7.0, float("nan")] * 2}
ONE_STEP = {"step_ms_repeats": [[100.0]], "losses": [5.0]}
MANY_STEPS = {"step_ms_repeats": [[100.0] * 999]}
BARE_ENV = {"shardlab": "0", "time": "2026", "git": None, "device": "cpu", "backend": "gloo"}
UNUSUAL = {
    "all failed": result_of(without_numbers("single", "failed", "rank 0: gone")),
    "baseline failed": result_of(
        without_numbers("single", "failed", "rank 0: gone"),
        cell("simple_ddp", 100, speed_to_baseline=None, loss_difference=None),
    ),
    "no single": without_single(cell("simple_ddp", 100), cell("pytorch_ddp", 90)),
    "one step": result_of(cell("single", 100, **ONE_STEP)) | {"warmup_steps": 0, "timed_steps": 1},
    "many steps": result_of(cell("single", 100, **MANY_STEPS)) | {"timed_steps": 999},
    "no tokens": result_of(cell("single", 100, tokens_per_s=None)),
    "no memory": result_of(cell("single", 100, peak_bytes={"total": None})),
    "one loss is nan": result_of(cell("single", 100), cell("simple_ddp", 90, **NANS)),
    "all losses are nan": result_of(cell("single", 100, **NANS), cell("simple_ddp", 90, **NANS)),
    "measured rate": result_of(cell("single", 100, mfu=0.41))
    | {"env": BARE_ENV | {"matmul": {"bf16": {"flops_per_s": 7.88e14}}, "flops_per_sample": 1e9}},
    "no git": result_of(cell("single", 100)) | {"env": BARE_ENV},
}


def drawn(result: dict[str, Any], width: int = 80) -> str:
    return drawn_table(compare_terminal.compare_table(result), width)


def words(text: str) -> str:
    return " ".join(text.split())


# ------------------------------------------------------------------ numbers as text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.2731, "0.273"), (9.996, "10.0"), (27.31, "27.3"), (6294.9, "6,295"), (None, "–"),
     (float("nan"), "nan"), (float("inf"), "inf")],
)  # fmt: skip
def test_number(value: float | None, text: str) -> None:
    assert fmt.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1024, "1.00 KiB"), (89_680_124, "85.5 MiB"),
     (9.1e9, "8.48 GiB"), (5 * 2**50, "5,120 TiB"), (None, "–")],
)  # fmt: skip
def test_size(value: float | None, text: str) -> None:
    assert fmt.size(value) == text


def test_compact_spread_and_names() -> None:
    assert fmt.p10_p90({"p10": 97.02, "p90": 104.1}) == "97–104"
    assert [fmt.compact(v) for v in (1, 999_999, 3_257_856, 1.5e9)] == [
        "1",
        "999,999",
        "3.26M",
        "1.50B",
    ]
    assert fmt.names(["a"]) == "a"
    assert fmt.names(["a", "b"]) == "a and b"
    assert fmt.names(["a", "b", "c", "d"]) == "a, b, c and d"
    assert fmt.names(["a", "b", "c", "d", "e"]) == "a, b, c and 2 others"


# ------------------------------------------------------------------ terminal


@pytest.mark.parametrize("width", [80, 120])
def test_table_has_a_row_for_each_strategy(result: dict[str, Any], width: int) -> None:
    text = drawn(result, width)
    assert max(len(line) for line in text.splitlines()) <= width
    row = next(line for line in text.splitlines() if line.startswith("simple_ddp"))
    assert words(row) == "simple_ddp 2 125 121–130 1.60× 8,192 70.0 MiB 0"
    assert "tokens/s" in text


def test_table_says_why_a_row_has_no_numbers(result: dict[str, Any]) -> None:
    text = words(drawn(result))
    assert "zero3 2 failed" in text
    assert "zero3 failed: rank 1: RuntimeError: the shard is [gone]" in text  # no markup is read
    assert "fsdp2 skipped: needs another torch" in text


def test_table_reads_no_markup(result: dict[str, Any]) -> None:
    result["workload"] = result["cells"][1]["label"] = "[red]x[/red]"
    assert drawn(result).count("[red]x[/red]") == 2


def test_table_marks_a_loss_that_differs() -> None:
    text = drawn(result_of(cell("single", 200), cell("wrong", 100, loss=5.5)))
    assert "≠ 0.5" in text


@pytest.mark.parametrize("name", UNUSUAL)
def test_table_of_the_unusual(name: str) -> None:
    assert UNUSUAL[name]["cells"][0]["label"] in drawn(UNUSUAL[name])


def test_verdict(result: dict[str, Any]) -> None:
    assert compare_terminal.verdict(result) == (
        "pytorch_ddp (bucket_mb=4) was fastest at 100 ms a step, 2.00× as fast as single. "
        "simple_ddp needed the least memory, 70.0 MiB on the fullest rank; every final loss agrees "
        "with that of single. zero3 failed, fsdp2 was skipped."
    )


def test_verdict_when_the_lead_is_within_the_spread() -> None:
    text = compare_terminal.verdict(result_of(cell("single", 200), cell("a", 100), cell("b", 102)))
    assert "though its spread overlaps that of b." in text


def test_verdict_when_the_baseline_is_fastest() -> None:
    text = compare_terminal.verdict(result_of(cell("single", 200), cell("slow", 300)))
    assert text.startswith("single, the baseline, was fastest at 200 ms a step.")
    assert "Each held 80.0 MiB of memory" in text


@pytest.mark.parametrize(
    ("loss", "agrees"), [(5.0, True), (5.0004, True), (5.0006, False), (float("nan"), False)]
)
def test_losses_agree_within_a_ten_thousandth(loss: float, agrees: bool) -> None:
    text = compare_terminal.verdict(result_of(cell("single", 200), cell("other", 100, loss=loss)))
    assert ("every final loss agrees" in text) is agrees
    assert ("the final loss of other differs from that of single by" in text) is not agrees


def test_verdict_names_all_that_differ() -> None:
    cells = (cell("single", 200), cell("a", 100, loss=5.1), cell("b", 100, loss=5.25))
    text = compare_terminal.verdict(result_of(*cells))
    assert "the final losses of a and b differ from that of single, by up to 0.25." in text


def test_verdict_when_all_failed() -> None:
    cells = [without_numbers(name, "failed", "gone") for name in ("single", "simple_ddp")]
    assert compare_terminal.verdict(result_of(*cells)) == (
        "No strategy finished: single and simple_ddp failed."
    )


@pytest.mark.parametrize("name", ["no single", "baseline failed"])
def test_verdict_without_single_checks_no_loss(name: str) -> None:
    text = compare_terminal.verdict(UNUSUAL[name])
    assert "agrees" not in text
    assert ("the losses were not checked, as single was not measured" in text) or (
        name != "no single"
    )


# ------------------------------------------------------------------ which to choose


def answer(*cells: dict[str, Any]) -> dict[str, Any]:
    return choice.answer(result_of(*cells))


def test_the_fastest_is_chosen() -> None:
    found = answer(cell("single", 200), cell("a", 100, mib=90), cell("b", 150, mib=80))
    assert (found["choice"], found["why"]) == ("a", "a: it is the fastest.")
    assert found["otherwise"] == [
        "If memory is short: b needs 80.0 MiB, 11% less, for 50% more time a step."
    ]


def test_of_those_that_are_equally_fast_the_leaner_is_chosen() -> None:
    found = answer(cell("single", 200), cell("fat", 100, mib=90), cell("lean", 101, mib=60))
    assert found["why"] == (
        "lean: as fast as fat within the noise, and it needs least memory of them, 60.0 MiB."
    )
    assert found["otherwise"][0] == (
        "fat is within the noise; more repeats would tell (--repeats 10)."
    )


def test_a_little_less_memory_is_not_worth_a_harder_strategy() -> None:
    """Nor do the bytes of a run decide between two that are equal: the next would say otherwise."""
    found = answer(
        cell("pytorch_ddp", 100, mib=85), cell("zero1", 101, mib=61.7), cell("zero3", 100, mib=60.2)
    )
    assert found["choice"] == "zero1"
    assert "it is the simplest of the 2 that need least memory, 61.7 MiB." in found["why"]


def test_what_is_much_slower_is_not_taken_as_equal_however_noisy_it_was() -> None:
    wild = {"step_ms_repeats": [[50.0, 300.0], [60.0, 250.0]]}
    found = answer(cell("a", 100, mib=90, **wild), cell("b", 140, mib=60, **wild))
    assert found["why"] == "a: it is the fastest."
    assert found["otherwise"][0].startswith("b is within the noise")


def test_of_those_that_are_equal_the_simpler_is_chosen() -> None:
    found = answer(cell("zero1", 100), cell("simple_ddp_hook", 100), cell("pytorch_ddp", 100))
    assert found["choice"] == "simple_ddp_hook"
    assert "it is the simplest of them" in found["why"]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"proof": proof(False, "no")}, "its proof failed"),
        ({"loss_difference": 0.5}, "its loss is not single's"),
    ],
)
def test_what_is_wrong_is_never_chosen(wrong: dict[str, Any], why: str) -> None:
    right = cell("single", 200, proof=proof(True))
    found = answer(right, cell("fast", 50, **wrong))
    assert found["choice"] == "single"
    assert found["otherwise"][-1] == f"Left out, as they are wrong: fast ({why})."


def test_nothing_right_is_no_choice() -> None:
    found = answer(cell("a", 50, loss_difference=None, proof=proof(False)))
    assert found == {
        "choice": None, "why": "None is right: a (its proof failed).", "otherwise": [],
    }  # fmt: skip
    failed = answer(without_numbers("single", "failed", "gone"))
    assert (failed["choice"], failed["why"]) == (None, "Nothing was measured.")


def test_what_would_change_the_answer() -> None:
    sends = {"bytes": 1000, "messages": 1}
    found = answer(
        cell("single", 200),
        cell("a", 100, profile=explained(100), sent=sends),
        cell("b", 150, profile=explained(100), sent=sends | {"bytes": 500}),
        without_numbers("zero3", "failed", "gone"),
    )
    assert found["otherwise"] == [
        "20% of its step is communication that nothing hides: a faster link would help it, a "
        "slower one would cost it most.",
        "On a slow link b sends 50% less.",
        "zero3 failed and could not be judged.",
    ]
    alone = answer(cell("single", 100), cell("a", 200))
    assert alone["otherwise"][0].startswith("One process beat all ranks here")
    worlds = answer(
        cell("a", 100), cell("b", 120), cell("a", 70, world=4, label="a4"), cell("b", 50, world=4)
    )
    assert "By the number of ranks, fastest: a at 2 ranks and b at 4 ranks." in worlds["otherwise"]


def test_the_terminal_explains_and_proves() -> None:
    result = result_of(
        cell("single", 200, profile=explained(200, 0, 0), proof=proof(True)),
        cell("a", 100, profile=explained(100), proof=proof(False, "bytes: sent twice"),
             sent={"bytes": 2**20}),
        cell("b", 100, proof=proof(None, "compress rounds")),
    )  # fmt: skip
    result["answer"] = choice.answer(result)
    text = words(drawn(result, 100))
    assert "a is wrong: bytes: sent twice" in text
    assert "b was not proved: compress rounds" in text
    assert text.count("✓") == text.count("✗") == 1
    table = compare_terminal.explained_table(result)
    assert table is not None
    assert table.row_count == 3
    assert compare_terminal.explained_table(result_of(cell("single", 100))) is None
    unprofiled = compare_terminal.explained_table(result_of(cell("single", 100, mfu=0.25)))
    assert unprofiled is not None
    assert [c.header for c in unprofiled.columns] == ["strategy", "skew\nms", "speed\n95%", "MFU"]
    assert compare_terminal.verdict_lines(result)[1].startswith("Choose b: ")


def test_a_short_wait_does_not_break_the_names() -> None:
    profile = {**explained(1234.5), "wait_ms": 0.05883}
    names = ("simple_ddp_async", "bucket_ddp_async", "pytorch_zero3")
    cells = [cell(name, 1544, profile=profile, sent={"bytes": 43 * 2**20}) for name in names]
    table = compare_terminal.explained_table(result_of(cell("single", 1600), *cells))
    assert table is not None
    lines = drawn_table(table, 80).splitlines()
    assert [name for name in names if not any(line.startswith(name) for line in lines)] == []
    assert "0.06" in lines[-1].split()


# ------------------------------------------------------------------ files


def test_files_are_written_whole(result: dict[str, Any], tmp_path: Path) -> None:
    files = compare.write(tmp_path, result)
    assert files == {
        "json": tmp_path / "compare.json",
        "csv": tmp_path / "compare.csv",
        "md": tmp_path / "compare.md",
        "html": tmp_path / "report.html",
    }
    assert set(tmp_path.iterdir()) == set(files.values())  # no part is left behind
    assert json.loads(files["json"].read_text(encoding="utf-8")) == result
    assert files["csv"].read_text(encoding="utf-8") == compare.csv_text(result)
    assert files["html"].read_text(encoding="utf-8").endswith("</html>")
    compare.write(tmp_path, result)  # over the old ones


def test_csv_reads_back(result: dict[str, Any]) -> None:
    rows = list(csv.DictReader(compare.csv_text(result).splitlines()))
    assert [row["label"] for row in rows] == [c["label"] for c in result["cells"]]
    tuned, failed = rows[2], rows[3]
    assert json.loads(tuned["options"]) == {"bucket_mb": 4}
    assert float(tuned["step_ms_median"]) == 100
    assert float(tuned["step_ms_p90"]) == 104
    assert int(tuned["peak_bytes_total"]) == 80 * 2**20
    assert tuned["workload"] == "gpt2-mini"
    assert failed["status"] == "failed"
    assert failed["reason"] == "rank 1: RuntimeError: the shard is [gone]"
    assert failed["step_ms_median"] == failed["loss"] == ""


def test_markdown_is_a_table(result: dict[str, Any]) -> None:
    result["cells"][3]["reason"] = "a | pipe\nand a line"
    result["answer"] = choice.answer(result)
    lines = compare.markdown(result).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + len(result["cells"])
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1
    assert table[3].startswith("| simple_ddp | 2 | 125 (121–130) | 1.60× (1.57–1.63) |")
    assert "failed: a \\| pipe and a line" in table[5]
    assert any(line.startswith("Choose pytorch_ddp (bucket_mb=4): ") for line in lines)


class Page(HTMLParser):
    """What a browser would see: the tags, their attributes, and whether each is closed."""

    VOID = frozenset({"meta", "link", "wbr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self._open):
            self.text.append(data)


def test_page_has_the_answer_the_rows_and_the_reasons(result: dict[str, Any]) -> None:
    page = Page(compare.html(result))
    text = words("".join(page.text))
    for expected in (
        compare_terminal.verdict(result),
        "rank 1: RuntimeError: the shard is [gone]",
        "shardlab compare --world 2",
        "d277b3a10204, with uncommitted changes",
        "shown too",  # of the environment, though this version does not know its name
        "all 3 are within 0.01% of the loss of single: exactly the same",
    ):
        assert expected in text
    labels = [value for name, value in page.attributes if name == "aria-label"]
    assert "simple_ddp: median 125 ms, p10 to p90 121–130 ms, 4 steps" in labels
    assert page.tags.count("h1") == page.tags.count("caption") == 1


def test_page_escapes_what_it_is_given(result: dict[str, Any]) -> None:
    evil = "<script>alert(1)</script>"
    scripts = Page(compare.html(result)).tags.count("script")
    for cell_ in result["cells"]:
        cell_["strategy"] = cell_["label"] = evil + cell_["label"]
        cell_["reason"] = cell_["reason"] and evil
    result |= {"command": evil, "workload": evil, "baseline": result["cells"][0]["label"]}
    result["env"]["torch"] = evil
    text = compare.html(result)
    assert evil not in text
    assert Page(text).tags.count("script") == scripts


def test_page_needs_no_network(result: dict[str, Any]) -> None:
    text = compare.html(result)
    assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttpRequest", text)
    references = [value for name, value in Page(text).attributes if name in ("src", "href")]
    assert references == ["data:,"]


@pytest.mark.parametrize("name", UNUSUAL)
def test_page_of_the_unusual(name: str) -> None:
    text = "".join(Page(compare.html(UNUSUAL[name])).text)
    assert "How it was measured" in text
    assert ("Step time" in text) is (name != "all failed")
    assert "None" not in text


def test_step_chart_keeps_the_others_apart_when_one_is_far_behind() -> None:
    result = result_of(cell("single", 800), cell("a", 100), cell("b", 110))
    stalled = copy.deepcopy(result)
    stalled["cells"][1]["step_ms_repeats"][0][0] = 5000.0
    chart = charts.step_chart(stalled)
    single, a, b = chart.rows
    assert single.beyond
    assert chart.baseline is None
    assert chart.stalls == 1
    assert 0 < a.median < b.median - 20
    for row in (a, b):
        assert all(0 <= dot.x <= 100 for dot in row.dots)


def test_step_chart_draws_a_limited_number_of_dots() -> None:
    chart = charts.step_chart(UNUSUAL["many steps"])
    assert chart.every == 10
    assert len(chart.rows[0].dots) == charts.DOTS_PER_REPEAT


def test_parts_of_a_bar_add_up() -> None:
    causes = dict.fromkeys(readings.CAUSES, 2**20)
    many = [
        cell("single", 200, peak_bytes={"total": 6 * 2**20, **causes}, profile=explained(200)),
        cell("a", 100, peak_bytes={"total": 3 * 2**20, **dict.fromkeys(causes, 2**19)},
             profile=explained(100)),
    ]  # fmt: skip
    result = result_of(*many)
    for chart in (charts.memory_chart(result), charts.stack_chart(result)):
        assert chart is not None
        for row, width in zip(chart.rows, (100, 50), strict=True):
            assert sum(s.width for s in row.segments) == pytest.approx(width)
            assert row.segments[0].x == 0
    assert charts.memory_chart(result_of(cell("single", 1))) is None
    result["cells"][0]["estimated_bytes"] = {"total": 6.3 * 2**20}
    result["cells"][1]["estimated_bytes"] = {"total": None, "reason": "no"}
    chart = charts.memory_chart(result)
    assert chart is not None
    assert [row.note for row in chart.rows] == ["estimate +5.0%", ""]


def profiles() -> Iterator[Any]:
    """A pipeline's profiled step with memory copies, as GPUs have them; those of real traces."""
    parts = {f"{part}_ms": float(i) for i, part in enumerate(PARTS, start=1)}
    yield pytest.param({**explained(0.0), **parts, "wall_ms": 28.0}, id="by hand")
    for folder in FOLDERS:
        yield pytest.param(folder, id=folder.name)


@pytest.mark.parametrize("profile", list(profiles()))
def test_terminal_and_page_agree_on_where_a_step_goes(profile: Any) -> None:
    if isinstance(profile, Path):
        profile = traces.load(profile).mean_step()
    result = result_of(cell("single", 200, profile=profile, traces={"folder": "/nowhere"}))
    table = compare_terminal.explained_table(result)
    assert table is not None
    names = ["compute", "exposed_comm", "wait", *(["bubble"] * readings.has_bubble(result))]
    columns = len(names) + 1
    in_terminal = drawn_table(table).splitlines()[-1].split()[1 : columns + 1]
    page = compare.html(result)
    found = re.search(r'id="breakdown">.*?<tbody>(.*?)</tbody>', page, flags=re.S)
    assert found is not None
    in_page = re.findall(r"<td data-value=\"[^\"]*\">(.*?)</td>", found[1])[:columns]
    assert in_terminal == in_page
    # With what is neither computing nor communicating, they are the whole step.
    idle = readings.idle_ms(profile)
    assert in_page[-1] == fmt.part_of_step(idle)
    shown = [profile[f"{part}_ms"] for part in names]
    assert sum(shown) + idle == pytest.approx(profile["wall_ms"])


def test_scaling_has_what_ran_in_several_worlds() -> None:
    cells = [cell("a", ms, world=world, label=f"a{world}") for world, ms in ((1, 200), (2, 125))]
    chart = charts.scaling(result_of(cell("single", 200), *cells))
    assert chart is not None
    (curve,) = chart.curves
    assert curve.text == "80% of ideal from 1 to 2 ranks"
    assert [tick.text for tick in chart.worlds] == ["1", "2"]
    assert charts.scaling(result_of(cell("single", 200), cell("a", 100))) is None


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [(0, 300, "0 50 100 150 200 250 300"), (3.6, 5.4, "4.0 4.5 5.0"), (1, 1, "")],
)
def test_ticks_are_round(low: float, high: float, texts: str) -> None:
    assert [tick.text for tick in ticks(low, high)] == texts.split()


def test_reports_need_no_torch() -> None:
    imports = "import sys; from shardlab.report import compare, compare_terminal"
    code = f"{imports}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
