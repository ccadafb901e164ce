"""A plan: rows, what to choose, what would change it, days and cost; the table and the page."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.cells import cell_len
from rich.text import Text

import browser
import commands
from fake_predictor import FakePredictor
from shardlab import config as configs
from shardlab.errors import UsageError
from shardlab.launch import launcher_env
from shardlab.plan import advice, buckets, check, plan
from shardlab.plan import predict as engine
from shardlab.plan.plan import Question, change_of
from shardlab.report import charts
from shardlab.report import plan as report

THREE = ("pytorch_ddp", "zero1", "zero3")


def question(settings: dict[str, Any] | None = None, **more: Any) -> Question:
    values = {"training.micro_batch": 8, "precision.compute": "bf16", **(settings or {})}
    config = configs.load(None, values)
    return Question(config, **{"specs": THREE, "ranks": (8, 64), "devices": ("h100",), **more})


def planned(fortune: FakePredictor | None = None, **more: Any) -> dict[str, Any]:
    return plan.plan(question(**more), fortune or FakePredictor(rate=8e9), "shardlab plan")


def test_rows_keep_the_samples_of_a_rank_or_the_global_batch() -> None:
    rows = planned()["rows"]
    assert [(row["world"], row["global_batch"]) for row in rows[::3]] == [(8, 64), (64, 512)]
    assert {row["accumulate"] for row in rows} == {1}
    asked = question({"training.global_batch": 1024}, keeps_global_batch=True)
    rows = plan.plan(asked, FakePredictor(), "")["rows"]
    assert [(row["world"], row["accumulate"]) for row in rows[::3]] == [(8, 16), (64, 2)]
    assert {row["global_batch"] for row in rows} == {1024}
    # Without a word, as `shardlab compare` has it: 8 samples on 2 ranks.
    default = Question(configs.load(None, {}), THREE, (4,))
    assert plan.config_at(default, "zero1", 4).training.global_batch == 16


def test_a_world_that_cannot_share_the_batch_is_a_row() -> None:
    settings = {"training.global_batch": 64}
    found = planned(settings=settings, ranks=(8, 80), keeps_global_batch=True)
    reasons = {row["world"]: row["reason"] for row in found["rows"]}
    assert reasons[8] is None
    assert "64 is too small for 80 ranks" in reasons[80]
    with pytest.raises(UsageError, match="use 80 or more"):
        planned(settings=settings, ranks=(80,), keeps_global_batch=True)


def test_a_strategy_that_is_refused_is_a_row() -> None:
    found = planned(specs=("zero1", "zero2"), ranks=(8,))
    assert [row["status"] for row in found["rows"]] == ["ok", "skipped"]
    assert found["rows"][1]["reason"] == "zero2 cannot be predicted"
    with pytest.raises(UsageError, match="zero2 cannot be predicted"):
        planned(specs=("zero2",))


def test_single_is_one_process_once() -> None:
    found = planned(specs=("single", "zero1"), links=("ndr", "hdr"))
    alone = [row for row in found["rows"] if row["strategy"] == "single"]
    assert [row["world"] for row in alone] == [1]
    assert len(found["rows"]) == 1 + 2 * 2


def test_the_numbers_of_a_row() -> None:
    (row,) = planned(specs=("zero1",), ranks=(8,), tokens=1e12, prices={"h100": 2.0})["rows"]
    # 8 samples of 8 TFLOP at 400 TFLOP/s; half of that hides 2 x 0.5 GB x 7/8 at 8 GB/s.
    assert row["work_s"] == pytest.approx(0.16)
    assert row["exposed_s"] == pytest.approx(0.109375 - 0.08)
    assert row["step_s"] == pytest.approx(0.189375)
    assert (row["low_s"], row["high_s"]) == pytest.approx((0.1515, 0.22725))
    assert row["mfu"] == pytest.approx(64e12 / 0.189375 / 1000e12)
    assert row["tokens_per_s"] == pytest.approx(64 * 1024 / 0.189375)
    assert row["days"] == pytest.approx(1e12 / row["tokens_per_s"] / 86400)
    assert row["cost"] == pytest.approx(row["days"] * 24 * 2.0 * 8)
    assert row["naive_days"] == pytest.approx(row["days"] * 0.192 / row["step_s"])
    assert row["fits"] is True
    assert row["is_measured"] is False
    assert sum(row["parts_s"].values()) == pytest.approx(row["step_s"])


# ------------------------------------------------------------------ what to choose


def test_the_fastest_that_fits() -> None:
    answer = planned(ranks=(8,))["answer"]
    assert answer["why"] == [
        "On h100 over ndr: pytorch_ddp on 8 ranks, 409,600 tokens/s: it ties with zero1 and zero3 "
        "for the fastest within the interval, and has the best predicted rate; only a measurement "
        "would tell."
    ]
    full = planned(FakePredictor(rate=8e9, state=90e9), ranks=(8,))
    assert full["rows"][full["answer"]["choice"]]["strategy"] == "zero3"
    assert any(
        line.startswith("With more memory: pytorch_ddp on 8 ranks of h100 over ndr would be 1.")
        for line in full["answer"]["otherwise"]
    )
    none = planned(FakePredictor(state=900e9), ranks=(8,))["answer"]
    assert none["choice"] is None
    assert none["why"] == [
        "On h100 over ndr nothing fits: the least is zero3 with 91.3 GiB per rank, of 74.5 GiB."
    ]


def test_a_tie_goes_to_fewer_ranks_then_to_the_simpler() -> None:
    fast = planned(FakePredictor(rate=1e12), ranks=(8,))["answer"]  # nothing is exposed
    assert fast["why"] == [
        "On h100 over ndr: pytorch_ddp on 8 ranks, 409,600 tokens/s: it ties with zero1 and zero3 "
        "for the fastest within the interval, and is the simplest of them; only a measurement "
        "would tell."
    ]
    assert not any("interval" in line for line in fast["otherwise"])
    slow = planned(  # the more ranks, the more it waits: 16 are no faster than 8
        FakePredictor(rate=1e7), settings={"training.global_batch": 128}, specs=("zero1",),
        ranks=(8, 16), keeps_global_batch=True,
    )  # fmt: skip
    rates = [row["samples_per_s"] for row in slow["rows"]]
    assert rates[0] == pytest.approx(rates[1], rel=0.08)
    same = {**slow["rows"][0], "world": 4, "samples_per_s": 0.97 * rates[0]}
    assert advice.chosen_by([slow["rows"][0], same], "place") == [1]


def test_what_is_within_the_interval_of_the_fastest_ties_with_it_however_far_its_rate() -> None:
    """It was called the fastest, and the next sentence said that others may be as fast."""
    rows = planned(specs=("zero1", "zero3"), ranks=(8,))["rows"]
    rows[1]["step_s"] = 1.2 * rows[0]["step_s"]
    rows[1]["samples_per_s"] = rows[0]["samples_per_s"] / 1.2

    def said(low: float) -> str:
        for row in rows:
            row |= {"low_s": low * row["step_s"], "high_s": row["step_s"] / low}
        why: str = advice.answered(rows)["why"][0]
        return why

    assert said(0.99).endswith("tokens/s: it is the fastest that fits.")
    assert said(0.7).endswith(
        "it ties with zero3 for the fastest within the interval, and has the best predicted rate; "
        "only a measurement would tell."
    )
    assert list(advice.flips(rows, 0, lambda i, _: float(rows[i]["step_s"]))) == [
        "On h100 over ndr, no link from 0.125 to 8 times as fast changes the choice."
    ]


def test_the_table_of_budgets_has_what_is_chosen_of_those_that_tie() -> None:
    result = planned(FakePredictor(rate=1e12), ranks=(8,), tokens=1e11)
    ddp, *_, last = result["rows"]
    last |= {"days": 0.99 * ddp["days"], "samples_per_s": ddp["samples_per_s"] / 0.99}
    assert advice.answered(result["rows"])["choice"] == 0
    assert [*report.budget_table(result).columns[0].cells] == [Text("pytorch_ddp")]


def test_what_would_change_the_choice() -> None:
    # Here all is hidden and zero1 is the simplest; a slower link shows what it does not hide.
    specs = ("zero1", "pytorch_zero1", "zero3")
    answer = planned(FakePredictor(rate=16e9), ranks=(64,), specs=specs)["answer"]
    assert "it ties with pytorch_zero1 and zero3 for the fastest" in answer["why"][0]
    said = " ".join(answer["otherwise"])
    assert "With 0.5 times the bandwidth on h100 over ndr, pytorch_zero1 would be 27%" in said
    assert "With twice the global batch on h100 over ndr, zero1 would do 1.00 times" in said
    firm = planned(FakePredictor(rate=1e15), ranks=(64,))["answer"]["otherwise"]
    assert "no link from 0.125 to 8 times as fast changes the choice" in " ".join(firm)
    large = planned(FakePredictor(rate=8e9, state=70e9), ranks=(8,))["answer"]["otherwise"]
    assert "pytorch_ddp would no longer fit: it needs 80.1 GiB per rank" in " ".join(large)


def test_another_link_may_make_another_number_of_ranks_the_choice() -> None:
    """64 ranks wait for the link so long that 8, which are one node's, are faster."""
    rows = planned(specs=("zero1",), ranks=(8, 64))["rows"]
    rows[1] |= {"step_s": 40 * rows[0]["step_s"], "samples_per_s": 0.2 * rows[0]["samples_per_s"]}

    def at_rate(i: int, factor: float) -> float:
        return float(rows[i]["step_s"] / (factor if i else 1))

    (said,) = advice.flips(rows, 0, at_rate)
    assert said == (
        "With 8 times the bandwidth on h100 over ndr, zero1 on 64 ranks would be 60% faster than "
        "zero1."
    )
    (firm,) = advice.flips(rows, 0, lambda i, _: float(rows[i]["step_s"]))
    assert firm.endswith("changes the choice.")
    # On this machine only rows with as many ranks are tried, and the sentence says so.
    here = [{**rows[0], "is_measured": True}, {**rows[0], "strategy": "zero3"}, rows[1]]
    assert list(advice.flips(here, 0, at_rate))[-1].endswith("changes the choice on 8 ranks.")


def test_what_costs_hardly_more_is_not_called_the_cheapest() -> None:
    rows = planned(
        specs=("zero1",), devices=("h100", "a100-80"), tokens=1e11, ranks=(8, 64),
        prices={"h100": 1.0, "a100-80": 9.0},
    )["rows"]  # fmt: skip
    costs = {8: 1000.0, 64: 1040.0}
    rows = [{**r, "cost": costs[r["world"]] * (1 if r["device"] == "h100" else 9)} for r in rows]
    said = advice.answered(rows)["why"][-1]
    assert said.startswith("Within 5% of the least cost of all (1,000): zero1 on 64 ranks of h100")


def test_a_size_that_is_to_be_found_is_found_for_each_row() -> None:
    rows = planned(specs=("pytorch_ddp:bucket_mb=auto", "zero3"), ranks=(8,))["rows"]
    assert rows[0]["label"].startswith("pytorch_ddp (bucket_mb=auto: ")
    assert rows[0]["step_s"] is not None
    refused = planned(specs=("zero3:bucket_mb=auto", "zero1"), ranks=(8,))["rows"]
    assert refused[0]["reason"] == "zero3 has no buckets whose size could be chosen"


def test_over_all_devices_by_cost_if_there_are_prices() -> None:
    both: dict[str, Any] = {"devices": ("h100", "a100-80"), "ranks": (8,), "tokens": 1e11}
    assert planned(**both)["answer"]["why"][-1] == (
        "Of all: pytorch_ddp on 8 ranks of h100 over ndr: it is the fastest that fits."
    )
    cheap = planned(**both, prices={"h100": 4.0, "a100-80": 0.5})["answer"]
    assert cheap["why"][-1].startswith(
        "Cheapest of all: pytorch_ddp on 8 ranks of a100-80 over hdr"
    )
    one = planned(FakePredictor(rate=2e9), tokens=1e11, prices={"h100": 2.0}, ranks=(1, 64))[
        "answer"
    ]
    assert one["otherwise"][0].startswith("If money matters more than time: ")


def test_only_what_fits() -> None:
    fortune = FakePredictor(state=90e9)
    assert {row["strategy"] for row in planned(fortune, fits_only=True)["rows"]} == {
        "zero1", "zero3",
    }  # fmt: skip
    with pytest.raises(UsageError, match="nothing fits; the least is"):
        planned(FakePredictor(state=900e9), fits_only=True)
    # On a machine whose memory is not known nothing is left out.
    assert len(planned(fortune, fits_only=True, devices=("this",))["rows"]) == 6


# ------------------------------------------------------------------ what if


def test_changes_of_the_machine_and_of_the_run() -> None:
    fortune = FakePredictor(rate=8e9)
    texts = ("bandwidth=0.25", "slow-rank=1.5", "overlap=off", "checkpointing=on")
    found = planned(fortune, changes=tuple(map(change_of, texts)), specs=("zero1",), ranks=(8,))
    before = found["rows"][0]["step_s"]
    half, slow, off, again = (change["step_s"][0] for change in found["what_if"])
    comm = 0.109375
    assert half == pytest.approx(before + 3 * comm)
    assert slow == pytest.approx(0.24)  # longer work hides all of it
    assert off == pytest.approx(0.16 + comm)
    assert again == before
    assert found["what_if"][0]["by_place"] == {"h100 over ndr": 0}


def test_bandwidth_needs_a_link() -> None:
    changes = (change_of("bandwidth=2"),)
    with pytest.raises(UsageError, match="there is no link; name one with --link"):
        planned(changes=changes, devices=("this",), links=(None,), ranks=(2,))
    both = planned(changes=changes, devices=("this", "h100"), links=(None,), ranks=(8,))
    steps = both["what_if"][0]["step_s"]
    assert [step is None for step in steps] == [row["device"] == "this" for row in both["rows"]]


def test_a_part_of_a_change_that_does_not_concern_a_row_leaves_the_rest() -> None:
    """zero3 has no buckets, and is slowed all the same."""
    changes = (change_of("slow-rank=3, bucket-mb=4"),)
    found = planned(changes=changes, specs=("pytorch_ddp", "zero3"), ranks=(8,))
    before = [row["step_s"] for row in found["rows"]]
    assert all(a > 1.5 * b for a, b in zip(found["what_if"][0]["step_s"], before, strict=True))


def test_a_bucket_size_concerns_those_that_have_buckets() -> None:
    fortune = FakePredictor()
    found = planned(fortune, changes=(change_of("bucket-mb=4"),), ranks=(8,))
    steps = found["what_if"][0]["step_s"]
    assert [step is None for step in steps] == [False, False, True]  # zero3 has none
    assert any("bucket_mb=4" in asked[0] for asked in fortune.asked)


def test_the_best_bucket_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """sqrt(1 ms x 500 MB x 2 GB/s) = 32 MB; 25 is nearer than 50."""
    slow = FakePredictor(rate=2e9)
    found = planned(slow, changes=(change_of("bucket-mb=best"),), ranks=(8,))
    assert found["what_if"][0]["bucket_mb"] == [25.0, 25.0, None]
    said = "The best bucket size of pytorch_ddp on 8 ranks of h100 over ndr is 25 MB."
    assert said in report.what_if_sentences(found)
    # As an option of a run it is settled before the ranks are started.
    monkeypatch.setattr(engine, "Predictor", lambda: slow)
    options = {"strategy.options": {"bucket_mb": "auto"}, "launch.world": 2}
    auto = configs.load(None, {"strategy.name": "pytorch_ddp", **options})
    plain = configs.load(None, {"strategy.name": "zero3"})
    chosen, other = buckets.settled([auto, plain])
    assert chosen.strategy.options == {"bucket_mb": 1.0}  # of eight that hide all, the smallest
    assert other is plain
    with pytest.raises(UsageError, match="zero3 has no buckets whose size could be chosen"):
        buckets.settled([configs.load(None, {"strategy.name": "zero3", **options})])
    monkeypatch.setattr(launcher_env, "joined", lambda: SimpleNamespace(launcher="torchrun"))
    with pytest.raises(UsageError, match="is settled before ranks are started, and torchrun has"):
        buckets.settled([auto])


# ------------------------------------------------------------------ words and numbers


def test_budgets_and_prices_as_people_write_them() -> None:
    assert plan.tokens_of("1T") == 1e12
    assert plan.tokens_of(" 300b ") == 3e11
    assert plan.tokens_of("2.5e9") == 2.5e9
    for text in ("0", "-1", "many", "", "1e999", "1.2.3T"):
        with pytest.raises(UsageError, match="not a number of tokens above 0"):
            plan.tokens_of(text)
    names = ("h100", "a100-80")
    assert plan.prices_of("2.5", names) == {"h100": 2.5, "a100-80": 2.5}
    assert plan.prices_of("h100=2.5, a100=1.3", names) == {"h100": 2.5, "a100-80": 1.3}
    for text, message in (
        ("-1", "not a price of 0 or more"), ("nan", "not a price"), ("x", "not a price"),
        ("2,3", "write h100=2.5,a100=1.3"), ("t4=1", "--machine has only h100, a100-80"),
        ("h100=2,h100=3", "h100 is named twice"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            plan.prices_of(text, names)


def test_devices_and_links() -> None:
    assert plan.devices_of("H100, a100,this,h100-sxm") == ("h100", "a100-80", "this")
    assert plan.devices_of(None) == ("this",)
    with pytest.raises(UsageError, match="names no device"):
        plan.devices_of(" ")
    with pytest.raises(UsageError, match="unknown device 'h1000'"):
        plan.devices_of("h1000")
    assert plan.links_of(["ndr", "ndr", "4gbit"]) == ("ndr", "4gbit")
    with pytest.raises(UsageError, match="no link"):
        plan.links_of(["tin can"])


# ------------------------------------------------------------------ the terminal and the page

# A row of each table.
SHOWN = (
    "gpt2 · 8 samples per rank · bf16",
    "h100 over ndr, never measured: from datasheets",
    "strategy ranks ms 90% naive per s MFU comm. rank",
    "pytorch_ddp 64 160 ±20% 192 3.28M 40% 0% 63.3 ✓",
    "zero2 64 skipped",
    "to train on 1.00T tokens",
    "pytorch_ddp 8 h100 over ndr 28.3 ±20% 33.9 13,563",
    "bandwidth=0.5 h100 over ndr pytorch_ddp 64 160 278 1.74×",
    "backward 90.7 57%",
    "bucket 1 1 123 77% 0",
)


def test_the_tables_at_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = planned(
        specs=("pytorch_ddp", "zero2"), tokens=1e12, prices={"h100": 2.5},
        changes=(change_of("bandwidth=0.5"),),
    )  # fmt: skip
    report.show(found, report.write(tmp_path, found), explain=True)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert not [line for line in lines if cell_len(line) > 80 and not line.startswith("  /")]
    assert set(SHOWN) <= {" ".join(line.split()) for line in lines}
    assert "zero2 on 8 ranks and zero2 on 64 ranks: zero2 cannot be predicted" in lines
    assert json.loads((tmp_path / "plan.json").read_text())["schema"] == 1


def test_samples_where_there_are_no_tokens() -> None:
    found = planned(FakePredictor(tokens=0), ranks=(8,))
    assert found["rows"][0]["tokens_per_s"] is None
    assert "400 samples/s" in found["answer"]["why"][0]
    assert report.table(found, "h100 over ndr").columns[5].header == "samples\nper s"
    assert "Samples/s" in report.html(found)
    with pytest.raises(UsageError, match="--tokens is for text; a sample of gpt2 has no tokens"):
        planned(FakePredictor(tokens=0), tokens=1e9)


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = planned(
        devices=("h100", "this"), ranks=(8, 64, 512), tokens=1e12, specs=(*THREE, "zero2"),
        changes=(change_of("overlap=off"),),
    )  # fmt: skip
    found["notes"] = ["<img src=x onerror=alert(1)>"]
    return report.write(tmp_path_factory.mktemp("plan"), found)["html"]


@pytest.mark.parametrize("width", [1200, 420])
def test_the_page_in_a_browser(chromium: browser.Browser, page_file: Path, width: int) -> None:
    with chromium.page(page_file, dark=width == 420, width=width) as page:
        assert page.problems == []
        assert page.run("document.images.length") == 0
        assert page.run("document.documentElement.scrollWidth") <= width
        sections = page.run("[...document.querySelectorAll('h2')].map(h => h.id)")
        assert sections == ["scaling", "layouts", "went", "when", "what-if", "reading"]
        bands = page.run(
            "[...document.querySelectorAll('.band')].map(b => b.getBoundingClientRect().height)"
        )
        assert len(bands) == 2 * 2 * 3  # machines, plots, strategies
        assert min(bands) > 2
        drawn = (
            "(() => { const c = document.getElementById('timeline'); const d = c.getContext('2d')"
            ".getImageData(0, 0, c.width, c.height).data; return new Set(d).size > 10; })()"
        )
        assert page.run(drawn)
        options = page.run("[...document.querySelectorAll('#which option')].map(o => o.text)")
        assert len(options) == 2
        assert "this machine" in options[1]


def test_an_axis_has_round_numbers() -> None:
    for low, high in ((60, 70), (0.1, 0.9), (1, 9), (3, 3e7), (0.148, 0.246), (5, 5)):
        made = charts.Log(low, high).round_ticks(lambda value: f"{value:.4g}")
        assert len(made) <= 9
        assert len(made) >= 2 or low == high
        assert all(-0.01 <= tick.at <= 100.01 for tick in made)
        assert all(len(tick.text.strip("0.")) <= 4 or "e" in tick.text for tick in made), made


def test_one_number_of_ranks_has_no_curves() -> None:
    assert report.scaling(planned(ranks=(8,))) == []
    assert 'id="scaling"' not in report.html(planned(ranks=(8,)))
    full = planned(FakePredictor(state=900e9))
    assert "nothing fits" in report.html(full)


# ------------------------------------------------------------------ the command


@pytest.fixture
def fortune(monkeypatch: pytest.MonkeyPatch) -> FakePredictor:
    made = FakePredictor(rate=8e9)
    monkeypatch.setattr(engine, "Predictor", lambda: made)
    return made


def test_the_command(fortune: FakePredictor, tmp_path: Path) -> None:
    done = commands.here(
        "plan", "--size", "small", "--world", "8,64,8", "--machine", "h100,a100", "--link", "ndr",
        "--link", "25gbit,50us", "--strategies", "pytorch_ddp,zero1", "--tokens", "300B",
        "--price-per-hour", "h100=2.5", "--what-if", "bandwidth=2", "--explain", "--out", "out",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert len(found["rows"]) == 2 * 2 * 2 * 2  # ranks, devices, links, strategies
    assert {row["link"] for row in found["rows"]} == {"ndr", "25gbit,50us"}
    assert "a100-80 over 25gbit,50us" in done.stdout
    assert found["batch"] == "4 samples per rank"
    assert {device for _, _, device, _, _ in fortune.asked} == {"h100", "a100-80"}
    assert (tmp_path / "out" / "plan.html").is_file()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--world 0", "--world must be at least 1, got 0"),
        ("--world 1.5", "not whole numbers"),
        ("--world ,", "--world"),
        ("--link nonsense", "nonsense"),
        ("--price-per-hour 2", "--price-per-hour is the price of a budget; add --tokens"),
        ("--strategies zero9", "unknown strategy 'zero9'"),
        ("--strategies ,", "unknown strategy ''"),
        ("--global-batch 10 --world 30 --strategies zero1", "10 is too small for 30 ranks"),
        (
            "--what-if bandwith=2",
            "unknown change of --what-if 'bandwith'; did you mean 'bandwidth'",
        ),
        ("--what-if bandwidth=0", "--what-if bandwidth=0: write bandwidth= and a number above 0"),
        ("--what-if bandwidth=nan", "a number above 0"),
        ("--what-if slow-rank=0.5", "slow-rank=0.5: write slow-rank= and a number of at least 1"),
        ("--what-if overlap=maybe", "--what-if overlap=maybe: write overlap=on or overlap=off"),
        ("--what-if overlap", "write overlap=on or overlap=off"),
        ("--what-if=", "unknown change of --what-if ''"),
        ("--what-if bandwidth=2,bandwidth=3", "bandwidth is named twice"),
        (
            "--check --machine h100",
            "what runs here, as it is; leave out --machine",
        ),
        ("--check --link ndr", "leave out --link"),
        ("--check --world 4096", "4096 are too many"),
    ],
)
@pytest.mark.usefixtures("fortune")
def test_wrong_input_is_answered_in_a_line(flags: str, message: str, tmp_path: Path) -> None:
    done = commands.here("plan", *flags.split(), cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not any(tmp_path.iterdir())


# ------------------------------------------------------------------ the check


def test_a_check_says_how_far_it_was_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    # 8 samples of 8 TFLOP at 1 TFLOP/s take 64 s; as if they had taken 63 s, 80 s and been killed.
    took: list[list[float] | str] = [[63.0, 63.0, 90.0], [80.0], "rank 1: killed"]
    monkeypatch.setattr(check, "measure", lambda configs, *_: took[: len(configs)])
    asked = question(devices=("this",), ranks=(2,), specs=(*THREE, "zero2"))
    found = check.check(asked, FakePredictor(rate=1e15), "", lambda *_: None)
    first, second, third, fourth = found["rows"]
    assert first["error"] == pytest.approx(64 / 63 - 1)
    assert (first["inside"], second["inside"]) == (True, False)
    assert (third["error"], third["reason"]) == (None, "rank 1: killed")
    assert (fourth["predicted_s"], fourth["reason"]) == (None, "zero2 cannot be predicted")
    assert found["coverage"] == 0.5
    assert found["mean_error"] == pytest.approx((64 / 63 - 1 + 0.2) / 2)
    assert found["naive_mean_error"] == pytest.approx((76.8 / 63 - 1 + 1 - 76.8 / 80) / 2)
    report.show(found, report.write(tmp_path, found))
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if cell_len(line) > 80 and not line.startswith("  /")]
    assert "+1.6%" in lines[4]
    assert "Mean error 10.8%, at most 20.0%, on 2 points; 50% of them lie inside" in "".join(lines)


@pytest.mark.long
def test_a_check_measures_real_ranks(fortune: FakePredictor, tmp_path: Path) -> None:
    del fortune
    done = commands.here(
        "plan", "--check", "--size", "tiny", "--seq-len", "16", "--strategies",
        "single,zero1", "--json", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["points"] == 2
    assert all(0 < row["measured_s"] < 10 for row in found["rows"])
