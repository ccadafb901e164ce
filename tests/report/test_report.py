"""The views of a comparison, from a result made by hand: no torch, no ranks."""

from __future__ import annotations

import copy
import csv
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from results import PARTS, cell, drawn_table, explained, proof, result_of, without_numbers
from shardlab import text as fmt
from shardlab.measure import choice, fields
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


NUMBERS = [(0, "0"), (0.2731, "0.273"), (9.996, "10.0"), (27.31, "27.3"), (6294.9, "6,295"),
           (None, "–"), (float("nan"), "nan"), (float("inf"), "inf")]  # fmt: skip
SIZES = [(0, "0 B"), (1023, "1,023 B"), (1024, "1.00 KiB"), (89_680_124, "85.5 MiB"),
         (9.1e9, "8.48 GiB"), (5 * 2**50, "5,120 TiB"), (None, "–")]  # fmt: skip
COUNTS = [(1, "1"), (999_999, "999,999"), (3_257_856, "3.26M"), (1.5e9, "1.50B")]
NAMES = [("a", "a"), ("ab", "a and b"), ("abcd", "a, b, c and d"),
         ("abcde", "a, b, c and 2 others")]  # fmt: skip


def test_numbers_as_text() -> None:
    for write, cases in ((fmt.number, NUMBERS), (fmt.size, SIZES), (fmt.compact, COUNTS)):
        assert [write(value) for value, _ in cases] == [text for _, text in cases]
    assert [fmt.names(list(letters)) for letters, _ in NAMES] == [text for _, text in NAMES]
    assert fmt.p10_p90({"p10": 97.02, "p90": 104.1}) == "97–104"


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [(0, 300, "0 50 100 150 200 250 300"), (3.6, 5.4, "4.0 4.5 5.0"), (1, 1, "")],
)
def test_ticks_are_round(low: float, high: float, texts: str) -> None:
    assert [tick.text for tick in ticks(low, high)] == texts.split()


# ------------------------------------------------------------------ terminal


def test_table_has_a_row_for_each_strategy_or_says_why_not(result: dict[str, Any]) -> None:
    result["workload"] = "[red]x[/red]"  # no markup is read
    for width in (80, 120):
        text = drawn(result, width)
        assert max(len(line) for line in text.splitlines()) <= width
        row = next(line for line in text.splitlines() if line.startswith("simple_ddp"))
        assert words(row) == "simple_ddp 2 125 121–130 1.60× 8,192 70.0 MiB 0"
        assert "tokens/s" in text
        assert "[red]x[/red]" in text
        text = words(text)
        assert "zero3 2 failed" in text
        assert "zero3 failed: rank 1: RuntimeError: the shard is [gone]" in text
        assert "fsdp2 skipped: needs another torch" in text
    result["cells"][1]["label"] = "[red]y[/red]"
    assert "[red]y[/red]" in drawn(result)
    assert "≠ 0.5" in drawn(result_of(cell("single", 200), cell("wrong", 100, loss=5.5)))


def test_a_tie_is_said_in_one_sentence_and_nothing_is_called_the_fastest_beside_it() -> None:
    """In the terminal, in the page and in JSON alike."""
    proved = {"proof": proof(True)}
    result = result_of(cell("single", 200), cell("b", 100, **proved), cell("a", 102, **proved))
    result["answer"] = choice.answer(result)
    assert result["answer"]["why"] == (
        "b: it is proved, ties with a for the fastest within the noise, and is the simplest of "
        "them; more repeats would tell (--repeats 10)."
    )
    said, *others = compare_terminal.verdict_lines(result)
    assert said.startswith("b took the least time, 100 ms a step, 2.00× as fast as single. ")
    assert [line for line in others if "noise" in line] == [f"Choose {result['answer']['why']}"]
    text = words("".join(Page(compare.html(result)).text))
    for view in (text, "\n".join([said, *others])):
        assert view.count("fastest") == view.count("within the noise") == 1
    clear = result_of(cell("single", 200), cell("b", 100))
    assert "1.96–2.04fastest" in "".join(Page(compare.html(clear)).text)


SEVERAL = {"couples_samples": True, "global_batch": 32}
VERDICTS = {
    "all is well": (
        result_of(
            cell("single", 200),
            cell("simple_ddp", 125, mib=70),
            cell("pytorch_ddp", 100),
            without_numbers("zero3", "failed", "gone"),
            without_numbers("fsdp2", "skipped", "needs another torch"),
        ),
        "pytorch_ddp took the least time, 100 ms a step, 2.00× as fast as single. simple_ddp "
        "needed the least memory, 70.0 MiB on the fullest rank; every final loss agrees with that "
        "of single. zero3 failed, fsdp2 was skipped.",
    ),
    "the baseline is fastest": (
        result_of(cell("single", 200), cell("slow", 300)),
        "single, the baseline, was fastest at 200 ms a step. Each held 80.0 MiB of memory at its "
        "peak; every final loss agrees with that of single.",
    ),
    "all failed": (
        result_of(*(without_numbers(name, "failed", "gone") for name in ("single", "simple_ddp"))),
        "No strategy finished: single and simple_ddp failed.",
    ),
    # Within a ten-thousandth.
    "a loss nearly agrees": (
        result_of(cell("single", 200), cell("a", 100, loss=5.0004)),
        "every final loss agrees",
    ),
    "a loss does not": (
        result_of(cell("single", 200), cell("a", 100, loss=5.0006)),
        "the final loss of a differs from that of single by 0.0006.",
    ),
    "a loss is nan": (
        result_of(cell("single", 200), cell("a", 100, loss=float("nan"))),
        "the final loss of a differs from that of single by nan.",
    ),
    "two losses do not": (
        result_of(cell("single", 200), cell("a", 100, loss=5.1), cell("b", 100, loss=5.25)),
        "the final losses of a and b differ from that of single, by up to 0.25.",
    ),
    "workers train to another loss": (
        result_of(cell("single", 200), cell("a", 100), cell("diloco", 90, loss=6.0, every=4)),
        "every other final loss agrees with that of single; diloco trains otherwise",
    ),
    "a loss over the batch": (
        result_of(cell("single", 200, accumulate=4), cell("a", 100, accumulate=2)) | SEVERAL,
        "every final loss agrees with that of single on the same micro-batches, in which the loss "
        "sees each sample beside 7 others (negatives); in one process `train` would show it 15, "
        "and the loss would be another.",
    ),
    "no single": (
        UNUSUAL["no single"],
        "the losses were not checked, as single was not measured",
    ),
    "the baseline failed": (UNUSUAL["baseline failed"], "simple_ddp took 100 ms a step"),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_verdict(name: str) -> None:
    result, expected = VERDICTS[name]
    said = compare_terminal.verdict(result)
    assert expected.lower() in said.lower()
    assert expected[0].islower() or said == expected
    assert ("agree" in said) == ("agree" in expected)


# ------------------------------------------------------------------ which to choose


def answer(*cells: dict[str, Any]) -> dict[str, Any]:
    return choice.answer(result_of(*cells))


MORE = "; more repeats would tell (--repeats 10)."
WILD = {"step_ms_repeats": [[50.0, 300.0], [60.0, 250.0]]}
WRONG = "Left out, as they are wrong: "
CHOICES = {
    "the fastest": (
        [cell("single", 200), cell("a", 100, mib=90), cell("b", 150, mib=80)],
        "a: it is the fastest.",
        ["If memory is short: b needs 80.0 MiB, 11% less, for 50% more time a step."],
    ),
    "of those that are equally fast, the leaner": (
        [cell("single", 200), cell("fat", 100, mib=90), cell("lean", 101, mib=60)],
        "lean: it ties with fat for the fastest within the noise, and needs least memory of them, "
        f"60.0 MiB{MORE}",
        [],
    ),
    # A little less memory is not worth a harder strategy; nor do the bytes of a run decide between
    # two that are equal: the next would say otherwise.
    "of those that need about as little, the simplest": (
        [
            cell("pytorch_ddp", 100, mib=85),
            cell("zero1", 101, mib=61.7),
            cell("zero3", 100, mib=60.2),
        ],
        "zero1: it ties with pytorch_ddp and zero3 for the fastest within the noise, and is the "
        f"simplest of the 2 that need least memory, 61.7 MiB{MORE}",
        [],
    ),
    "of those that are equal, the simplest": (
        [cell("zero1", 100), cell("simple_ddp_hook", 100), cell("pytorch_ddp", 100)],
        "simple_ddp_hook: it ties with zero1 and pytorch_ddp for the fastest within the noise, and "
        f"is the simplest of them{MORE}",
        [],
    ),
    # What is much slower is not taken as equal, however noisy it was.
    "of two noisy ones, the faster": (
        [cell("a", 100, mib=90, **WILD), cell("b", 140, mib=60, **WILD)],
        f"a: it ties with b for the fastest within the noise, and took the least time{MORE}",
        ["If memory is short: b needs 60.0 MiB, 33% less, for 40% more time a step."],
    ),
    "of three noisy ones, the simpler of the faster": (
        [cell(name, ms, mib=90, **WILD) for name, ms in (("a", 100), ("c", 105), ("b", 140))],
        "a: it ties with c and b for the fastest within the noise, and is the simplest of the 2 "
        f"with about the least time{MORE}",
        [],
    ),
    "not what its proof refutes": (
        [cell("single", 200, proof=proof(True)), cell("fast", 50, proof=proof(False, "no"))],
        "single: the only one that was measured and proved.",
        [f"{WRONG}fast (its proof failed)."],
    ),
    "not what has another loss": (
        [cell("single", 200, proof=proof(True)), cell("fast", 50, loss_difference=0.5)],
        "single: the only one that was measured and proved.",
        [f"{WRONG}fast (its loss is not single's)."],
    ),
    "nothing right": (
        [cell("a", 50, loss_difference=None, proof=proof(False))],
        "None is right: a (its proof failed).",
        [],
    ),
    "nothing measured": (
        [without_numbers("single", "failed", "gone")],
        "Nothing was measured.",
        [],
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_what_is_chosen_and_why(name: str) -> None:
    cells, why, otherwise = CHOICES[name]
    found = answer(*cells)
    chosen = why.partition(":")[0]
    is_one = chosen in [one["label"] for one in cells]
    assert found == {"choice": chosen if is_one else None, "why": why, "otherwise": otherwise}


def test_what_would_change_the_answer() -> None:
    sends = {"bytes": 1000, "messages": 1}
    found = answer(
        cell("single", 200),
        cell("a", 100, profile=explained(100), sent=sends),
        cell("b", 150, profile=explained(100), sent=sends | {"bytes": 500}),
        without_numbers("zero3", "failed", "gone"),
    )
    assert found["otherwise"] == [
        "20% of its step is exposed communication: a faster link would help it, a "
        "slower one would cost it most.",
        "On a slow link b sends 50% less.",
        "zero3 failed and could not be judged.",
    ]
    alone = answer(cell("single", 100), cell("a", 200))
    assert alone["otherwise"][0].startswith("One process beat all ranks here")
    as_fast = answer(cell("single", 101, world=1, **WILD), cell("zero1", 100, **WILD))
    assert as_fast["choice"] == "single"
    assert as_fast["otherwise"][0].startswith("No strategy on several ranks was faster than one")
    worlds = answer(
        cell("a", 100), cell("b", 120), cell("a", 70, world=4, label="a4"), cell("b", 50, world=4)
    )
    assert "By the number of ranks: a at 2 ranks and b at 4 ranks." in worlds["otherwise"]
    tied = answer(cell("zero1", 100), cell("simple_ddp", 101), cell("zero1", 150, world=4))
    assert tied["choice"] == "simple_ddp"
    assert "simple_ddp at 2 ranks and zero1 at 4 ranks" in tied["otherwise"][-1]


def test_the_terminal_explains_and_proves() -> None:
    result = result_of(
        cell("single", 200, profile=explained(200, 0, 0), proof=proof(True)),
        cell("a", 100, profile=explained(100), proof=proof(False, "bytes: sent twice"),
             sent={"bytes": 2**20}),
        cell("b", 100, proof=proof(None, "comm_dtype rounds")),
    )  # fmt: skip
    result["answer"] = choice.answer(result)
    text = words(drawn(result, 100))
    assert "a is wrong: bytes: sent twice" in text
    assert "b was not proved: comm_dtype rounds" in text
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
    assert files["html"].read_text(encoding="utf-8").endswith("</html>")
    compare.write(tmp_path, result)  # over the old ones
    rows = list(csv.DictReader(files["csv"].read_text(encoding="utf-8").splitlines()))
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


def test_page_escapes_what_it_is_given_and_needs_no_network(result: dict[str, Any]) -> None:
    text = compare.html(result)
    assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttpRequest", text)
    references = [value for name, value in Page(text).attributes if name in ("src", "href")]
    assert references == ["data:,"]
    evil = "<script>alert(1)</script>"
    scripts = Page(text).tags.count("script")
    for cell_ in result["cells"]:
        cell_["strategy"] = cell_["label"] = evil + cell_["label"]
        cell_["reason"] = cell_["reason"] and evil
    result |= {"command": evil, "workload": evil, "baseline": result["cells"][0]["label"]}
    result["env"]["torch"] = evil
    text = compare.html(result)
    assert evil not in text
    assert Page(text).tags.count("script") == scripts


@pytest.mark.parametrize("name", UNUSUAL)
def test_views_of_the_unusual(name: str) -> None:
    assert UNUSUAL[name]["cells"][0]["label"] in drawn(UNUSUAL[name])
    assert "None" not in compare_terminal.verdict(UNUSUAL[name])
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
    many = charts.step_chart(UNUSUAL["many steps"])
    assert many.every == 10
    assert len(many.rows[0].dots) == charts.DOTS_PER_REPEAT


def test_parts_of_a_bar_add_up() -> None:
    causes = dict.fromkeys(fields.CAUSES, 2**20)
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


@pytest.mark.parametrize("bubble", [0.0, 4.0])
def test_terminal_and_page_agree_on_where_a_step_goes(bubble: float) -> None:
    """A step with memory copies, as GPUs have them, of a pipeline and of another strategy."""
    parts = {f"{part}_ms": float(i) for i, part in enumerate(PARTS, start=1)}
    parts["bubble_ms"] = bubble
    profile = {**explained(0.0), **parts, "wall_ms": sum(parts.values())}
    result = result_of(cell("single", 200, profile=profile, traces={"folder": "/nowhere"}))
    table = compare_terminal.explained_table(result)
    assert table is not None
    names = ["compute", "exposed_comm", "wait", *(["bubble"] * (bubble > 0))]
    columns = len(names) + 1
    in_terminal = drawn_table(table).splitlines()[-1].split()[1 : columns + 1]
    found = re.search(r'id="breakdown">.*?<tbody>(.*?)</tbody>', compare.html(result), flags=re.S)
    assert found is not None
    in_page = re.findall(r"<td data-value=\"[^\"]*\">(.*?)</td>", found[1])[:columns]
    # With what is neither computing nor communicating, they are the whole step.
    shown = [profile[f"{part}_ms"] for part in names]
    expected = [fmt.part_of_step(value) for value in (*shown, profile["wall_ms"] - sum(shown))]
    assert in_terminal == in_page == expected


def test_scaling_has_what_ran_in_several_worlds() -> None:
    cells = [cell("a", ms, world=world, label=f"a{world}") for world, ms in ((1, 200), (2, 125))]
    chart = charts.scaling(result_of(cell("single", 200), *cells))
    assert chart is not None
    (curve,) = chart.curves
    assert curve.text == "80% of ideal from 1 to 2 ranks"
    assert [tick.text for tick in chart.worlds] == ["1", "2"]
    assert charts.scaling(result_of(cell("single", 200), cell("a", 100))) is None


def test_reports_need_no_torch() -> None:
    imports = "import sys; from shardlab.report import compare, compare_terminal"
    code = f"{imports}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
