"""A plan: what a step would take with each strategy, on each number of ranks, device and link.

From what is asked to the content of ``plan.json``: a row for each, what to choose, and what would
change that. The numbers are the ``Predictor``'s; nothing is simulated and nothing is drawn here.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shardlab import text as fmt
from shardlab.axes import axes_of
from shardlab.config import Config, StrategyConfig
from shardlab.errors import RankFailure, UsageError, unknown
from shardlab.launch.launch import DEFAULT_WORLD
from shardlab.measure.cells import has_buckets
from shardlab.plan import advice, buckets, cut, devices
from shardlab.plan.predict import Prediction, WhatIf
from shardlab.specs import BASELINE, parse_spec

SCHEMA = 1
HERE = "this"
# Without --strategies: those that hide what they send, or share what they hold. The rungs before
# them are slower by construction.
DEFAULT = (
    "bucket_ddp_async", "zero1", "zero2", "zero3", "pytorch_ddp", "pytorch_zero2", "pytorch_zero3",
)  # fmt: skip
STEADY = {"training.steps": 3, "training.warmup_steps": 0, "output.dir": None}
MOST_SPANS = 20_000  # of an explained step: the longest
# The part of a step that a stretch of work belongs to, by the first word of its name.
PHASES = {
    "forward": "forward", "backward": "backward", "input": "backward", "weight": "backward",
    "update": "update",
}  # fmt: skip
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}

OnProgress = Callable[[str, int, int], None]
Row = Mapping[str, Any]


class Predicts(Protocol):
    """What a plan needs of a ``Predictor``."""

    def predict(
        self, config: Config, device: str = ..., link: str | None = ..., change: WhatIf = ...
    ) -> Prediction: ...


# ------------------------------------------------------------------ what is asked


@dataclass(frozen=True)
class Change:
    """One ``--what-if``: of the machine, or of the run."""

    text: str
    machine: WhatIf = field(default_factory=WhatIf)
    bucket_mb: float | None = None  # inf: the best
    checkpointing: bool | None = None

    @property
    def wants_best(self) -> bool:
        return self.bucket_mb == math.inf

    def of(self, config: Config, has_link: bool) -> Config | None:
        """The config with the change; None if no part of it concerns the row: a bucket size where
        there are no buckets, a bandwidth where there is no link."""
        overrides: dict[str, Any] = {}
        buckets_change = self.bucket_mb is not None and has_buckets(config.strategy.name)
        machine = self.machine if has_link else dataclasses.replace(self.machine, bandwidth=1.0)
        others = self.checkpointing is not None or machine != WhatIf()
        if self.text and not (buckets_change or others):
            return None
        if buckets_change and not self.wants_best:
            options = {**config.strategy.options, "bucket_mb": self.bucket_mb}
            overrides["strategy.options"] = options
        if self.checkpointing is not None:
            overrides["training.activation_checkpointing"] = self.checkpointing
        return config.with_overrides(overrides) if overrides else config


@dataclass(frozen=True)
class Question:
    config: Config
    specs: tuple[str, ...]
    ranks: tuple[int, ...]
    devices: tuple[str, ...] = (HERE,)
    links: tuple[str | None, ...] = (None,)  # None: what such nodes usually have
    # Whether the global batch stays as it is when there are more ranks; else a rank's samples do.
    keeps_global_batch: bool = False
    tokens: float | None = None  # to be trained on
    prices: Mapping[str, float] = field(default_factory=dict)  # of a device's hour, by device
    changes: tuple[Change, ...] = ()
    fits_only: bool = False

    def __post_init__(self) -> None:
        if self.prices and self.tokens is None:
            raise UsageError("--price-per-hour is the price of a budget; add --tokens, as in 300B")


def devices_of(text: str | None) -> tuple[str, ...]:
    """``h100,a100,this`` by the names that the datasheets have."""
    names = [part.strip() for part in (HERE if text is None else text).split(",")]
    if not any(names):
        raise UsageError("--machine names no device; write h100, or h100,a100,this")
    found = (name.lower() if name.lower() == HERE else devices.device(name).name for name in names)
    return tuple(dict.fromkeys(found))


def links_of(texts: Sequence[str]) -> tuple[str | None, ...]:
    for text in texts:
        devices.link(text)
    return tuple(dict.fromkeys(texts)) or (None,)


def tokens_of(text: str | None) -> float | None:
    """``1T``, ``300B``, ``2.5e9``."""
    if text is None:
        return None
    found = re.fullmatch(r"\s*([0-9.]+(?:e\+?[0-9]+)?)\s*([kmbgt]?)\s*", text.lower())
    try:
        amount = float(found[1]) * UNITS[found[2]] if found else 0.0
    except ValueError:
        amount = 0.0
    if not 0 < amount < float("inf"):
        raise UsageError(f"--tokens {text}: not a number of tokens above 0, as in 300B or 1T")
    return amount


def prices_of(text: str | None, names: Sequence[str]) -> dict[str, float]:
    """``2.5`` for every device, or ``h100=2.5,a100=1.3``."""
    if text is None:
        return {}
    prices: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.strip().rpartition("=")
        if equals:
            (own,) = devices_of(name)
            if own not in names:
                raise UsageError(f"--price-per-hour {own}: --machine has only {', '.join(names)}")
            if own in prices:
                raise UsageError(f"--price-per-hour {text}: {own} is named twice")
        elif "," in text:
            raise UsageError(f"--price-per-hour {text}: whose? write h100=2.5,a100=1.3")
        try:
            price = float(value)
        except ValueError:
            price = -1.0
        if not 0 <= price < float("inf"):
            raise UsageError(f"--price-per-hour {part.strip()}: not a price of 0 or more")
        prices |= {own: price} if equals else dict.fromkeys(names, price)
    return prices


def change_of(text: str) -> Change:
    """``bandwidth=2``, ``slow-rank=1.3``, ``overlap=off``, ``bucket-mb=4``, ``checkpointing=on``;
    several at once with commas."""
    machine: dict[str, Any] = {}
    run: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        key = key.replace("_", "-")
        if key.replace("-", "_") in {**machine, **run}:
            raise UsageError(f"--what-if {text}: {key} is named twice")
        if key in ("overlap", "checkpointing"):
            if value not in ("on", "off"):
                raise UsageError(f"--what-if {part.strip()}: write {key}=on or {key}=off")
            where = machine if key == "overlap" else run
            where[key] = value == "on"
        elif key in ("bandwidth", "slow-rank", "bucket-mb"):
            least = 1.0 if key == "slow-rank" else 0.0
            try:
                number = float(value)
            except ValueError:
                number = -1.0
            if (key, value) == ("bucket-mb", "best"):
                number = math.inf
            elif not least <= number < math.inf or number == 0:
                words = "of at least 1" if least else "above 0"
                raise UsageError(f"--what-if {part.strip()}: write {key}= and a number {words}")
            where = run if key == "bucket-mb" else machine
            where[key.replace("-", "_")] = number
        else:
            known = ("bandwidth", "slow-rank", "overlap", "bucket-mb", "checkpointing")
            raise unknown("change of --what-if", key, known)
    words = ", ".join(part.strip() for part in text.split(","))
    return Change(words, WhatIf(**machine), **run)


def config_at(question: Question, spec: str, world: int) -> Config:
    """The run that a row is about. Refused if so many ranks cannot share the batch."""
    name, options = parse_spec(spec)
    overrides: dict[str, Any] = {
        "strategy.name": name, "strategy.options": options, "launch.world": world, **STEADY,
    }  # fmt: skip
    if question.keeps_global_batch:
        return question.config.with_overrides(overrides)
    times = question.config.accumulate
    overrides["training.global_batch"] = per_rank(question.config) * world * times
    overrides["training.micro_batch"] = None
    return question.config.with_overrides(overrides).in_parts(times)


def keeps_global_batch(config: Config, is_asked: bool) -> bool:
    """Whether it is the global batch that stays when there are more ranks: if it is asked for, or
    if the config says both it and what a rank takes at a time."""
    training = config.training
    both = training.micro_batch is not None and training.global_batch
    return is_asked or bool(both)


def per_rank(config: Config) -> int:
    """Samples that a rank takes at a time, as the config has it."""
    training = config.training
    if training.micro_batch is not None:
        return training.micro_batch
    parts = (config.launch.world or DEFAULT_WORLD) * config.accumulate
    return max(1, -(-training.global_batch // parts))


# ------------------------------------------------------------------ the rows


@dataclass
class Cell:
    """A row as it is made: what is asked of the predictor, and what it said."""

    spec: str
    world: int
    device: str
    link: str | None
    config: Config | None = None
    found: Prediction | None = None
    error: UsageError | RankFailure | None = None  # why nothing is found
    changed: list[Prediction | None] = field(default_factory=list)  # one for each what-if
    buckets: dict[str, float] = field(default_factory=dict)  # the best size in MB, by what-if

    @property
    def has_link(self) -> bool:
        """On this machine ranks share its memory, unless a link is named."""
        return self.device != HERE or self.link is not None

    @property
    def status(self) -> str:
        if self.error is None:
            return "ok"
        return "failed" if isinstance(self.error, RankFailure) else "skipped"


def cells_of(question: Question) -> list[Cell]:
    """``single`` is one process on any number of ranks, and uses no link."""
    for spec in question.specs:
        StrategyConfig(*parse_spec(spec))  # a name that is none is no row
    cells: dict[tuple[Any, ...], Cell] = {}
    for device in question.devices:
        for link in question.links:
            for world in question.ranks:
                for spec in question.specs:
                    alone = parse_spec(spec)[0] == BASELINE
                    here = (spec, 1, device, question.links[0]) if alone else None
                    key = here or (spec, world, device, link)
                    cells.setdefault(key, Cell(*key))
    for cell in cells.values():
        try:
            cell.config = config_at(question, cell.spec, cell.world)
        except UsageError as error:
            cell.error = error
    _refuse_if_all([*cells.values()])
    return list(cells.values())


def _refuse_if_all(cells: Sequence[Cell]) -> None:
    """What is said of every row is not about one of them."""
    if len({str(cell.error) for cell in cells}) == 1 and cells[0].error is not None:
        raise cells[0].error


def plan(
    question: Question,
    predictor: Predicts,
    command: str,
    on_progress: OnProgress = lambda _what, _done, _total: None,
) -> dict[str, Any]:
    """The content of ``plan.json``. What cannot be is a row that says why."""
    cells = cells_of(question)
    asks = [Change(""), *question.changes]
    if any(c.machine.bandwidth != 1 for c in asks) and not any(c.has_link for c in cells):
        raise UsageError(
            "--what-if bandwidth: the ranks of this machine share its memory, and there is no "
            "link; name one with --link"
        )
    total, done = len(cells) * len(asks), 0
    for number, change in enumerate(asks):
        for cell in cells:
            on_progress(f"{cell.spec} · {fmt.count(cell.world, 'rank')}", done, total)
            done += 1
            found = _predicted(predictor, cell, change, is_first=number == 0)
            if found is not None and question.tokens is not None and not found.tokens:
                name = question.config.model.workload
                raise UsageError(f"--tokens is for text; a sample of {name} has no tokens")
            if number == 0:
                cell.found = found
            else:
                cell.changed.append(found)
    on_progress("done", total, total)
    _refuse_if_all(cells)
    known = [cell.found for cell in cells if cell.found is not None]
    if question.fits_only:
        cells = [cell for cell in cells if cell.found is None or fits(cell.found) is not False]
        if not any(cell.found for cell in cells):
            least = min(known, key=lambda found: found.memory_bytes)
            raise UsageError(
                f"--only-fitting: nothing fits; the least is {fmt.size(least.memory_bytes)} per "
                f"rank, of {fmt.size(least.memory_limit)}: more ranks with zero3, or a smaller "
                "batch"
            )
    rows = [_row(cell, question) for cell in cells]
    for i, row in enumerate(rows):
        row["against"] = cut.against(rows, i)
    answer = advice.answered(rows)

    def at_rate(i: int, factor: float) -> float | None:
        change = Change("", WhatIf(bandwidth=factor))
        found = _predicted(predictor, cells[i], change, is_first=False)
        return None if found is None else found.step_s

    def doubled(i: int) -> Row | None:
        config = cells[i].config
        assert config is not None
        batch = 2 * config.training.global_batch
        larger = config.with_overrides({"training.global_batch": batch})
        cell = dataclasses.replace(cells[i], config=larger)
        cell.found = _predicted(predictor, cell, Change(""), is_first=True)
        return None if cell.found is None else _row(cell, question)

    for i in answer["by_place"].values():
        answer["otherwise"] += advice.flips(rows, i, at_rate)
    if answer["choice"] is not None:
        answer["otherwise"] += advice.if_batch_grows(rows, answer["choice"], doubled)
    return {
        "schema": SCHEMA,
        "command": command,
        "config": question.config.to_dict(),
        "batch": _batch_words(question),
        "tokens": question.tokens,
        "prices": dict(question.prices),
        "rows": rows,
        "answer": answer,
        "what_if": [_what_if(change, i, cells, rows, question)
                    for i, change in enumerate(question.changes)],
        "explained": [explained(i, cells[i].found) for i in _to_explain(rows, answer["by_place"])],
        "notes": list(dict.fromkeys(note for found in known for note in found.notes)),
    }  # fmt: skip


def _predicted(
    predictor: Predicts, cell: Cell, change: Change, is_first: bool
) -> Prediction | None:
    if cell.config is None or (not is_first and cell.found is None):
        return None
    try:
        config = change.of(cell.config, cell.has_link)
        if config is None:
            return None
        where = cell.device, cell.link, change.machine
        if (change.wants_best and has_buckets(config.strategy.name)) or buckets.is_auto(config):
            size, found = buckets.best(predictor, config, *where)
            if is_first or change.wants_best:
                cell.buckets[change.text] = size
            return found
        return predictor.predict(config, *where)
    except (UsageError, RankFailure) as error:
        if is_first:
            cell.error = error
        return None


def fits(found: Prediction) -> bool | None:
    """Whether it fits the device's memory; None if nobody knows how much there is."""
    return None if found.memory_limit is None else found.memory_bytes <= found.memory_limit


def _batch_words(question: Question) -> str:
    """What stays the same when there are more ranks."""
    training = question.config.training
    if question.keeps_global_batch:
        return f"global batch {training.global_batch:,} on any number of ranks"
    times = question.config.accumulate
    own = fmt.count(per_rank(question.config), "sample") + " per rank"
    return own if times == 1 else f"{times} x {own}"


def _row(cell: Cell, question: Question) -> dict[str, Any]:
    name, options = parse_spec(cell.spec)
    found, config = cell.found, cell.config
    found_mb = {"bucket_mb": f"auto: {cell.buckets['']:g}"} if "" in cell.buckets else {}
    label = ", ".join(f"{key}={value}" for key, value in {**options, **found_mb}.items())
    row: dict[str, Any] = {
        "strategy": name,
        "label": f"{name} ({label})" if label else name,
        "options": options,
        "device": cell.device,
        "link": cell.link or (None if cell.device == HERE else devices.device(cell.device).between),
        "place": place_of(cell),
        "world": cell.world,
        "global_batch": None if config is None else config.training.global_batch,
        "accumulate": None if config is None else config.accumulate,
        "precision": question.config.precision.compute,
        "status": cell.status,
        "reason": None if cell.error is None else str(cell.error),
        **dict.fromkeys(NUMBERS),
    }
    if found is None:
        return row
    rate = found.tokens / found.step_s or None
    axes, _ = axes_of(name, options, cell.world)
    row |= {
        "step_s": found.step_s,
        "low_s": found.low_s,
        "high_s": found.high_s,
        "naive_s": found.naive_s,
        "is_measured": found.is_measured,
        "samples_per_s": found.samples / found.step_s,
        "tokens_per_s": rate,
        "mfu": mfu(found),
        "work_s": found.work_s,
        "exposed_s": found.wait_s,
        "bubble_s": found.bubble_s,
        "comm_s": found.comm_s,
        "parts_s": parts(found),
        "model_ranks": 1 if axes is None else axes.model_ranks,
        "ranks": cut.ranks_of(found, axes),
        "even_bubble": cut.even_bubble(axes, row["accumulate"]),
        "flops": found.flops,
        "pointwise_bytes": found.pointwise_bytes,
        "memory_bytes": found.memory_bytes,
        "memory_limit": found.memory_limit,
        "fits": fits(found),
        "notes": list(found.notes),
    }
    if question.tokens is not None and rate:
        row["days"] = question.tokens / rate / 86400
        row["naive_days"] = (
            None
            if found.naive_s is None
            else (question.tokens * found.naive_s / found.tokens / 86400)
        )
        price = question.prices.get(cell.device)
        if price is not None:
            row["cost"] = row["days"] * 24 * price * cell.world
    return row


# What a row has only if it could be predicted.
NUMBERS = (
    "step_s", "low_s", "high_s", "naive_s", "is_measured", "samples_per_s", "tokens_per_s", "mfu",
    "work_s", "exposed_s", "bubble_s", "comm_s", "parts_s", "memory_bytes", "memory_limit", "fits",
    "days", "naive_days", "cost", "notes", "model_ranks", "ranks", "even_bubble", "flops",
    "pointwise_bytes", "against",
)  # fmt: skip


def place_of(cell: Cell) -> str:
    """``h100 over ndr``; ``this machine``."""
    if cell.device == HERE:
        return "this machine" + (f" over {cell.link}" if cell.link else "")
    return f"{cell.device} over {cell.link or devices.device(cell.device).between}"


def mfu(found: Prediction) -> float | None:
    if not found.peak_flops_per_s or found.flops <= 0:
        return None
    return found.flops / found.step_s / found.peak_flops_per_s


def parts(found: Prediction) -> dict[str, float]:
    """Where the step goes: the rank's work by phase, exposed communication, and the
    bubble. In a pipeline it is the mean over the stages."""
    result = {"forward": 0.0, "backward": 0.0, "update": 0.0, "other": 0.0}
    stages = _stages(found)
    for span in found.spans:
        if span.lane == "work":
            part = PHASES.get(span.name.partition(" ")[0], "other")
            result[part] += (span.end - span.begin) / stages
    # Without spans all that is known is how long it worked.
    result["other"] += max(0.0, found.work_s - sum(result.values()))
    return {**result, "exposed": found.wait_s, "bubble": found.bubble_s}


def _stages(found: Prediction) -> int:
    """How many ranks were played back."""
    return len({span.rank for span in found.spans}) or 1


def _to_explain(rows: Sequence[Row], by_place: Mapping[str, int]) -> list[int]:
    """What is chosen, and the fastest pipeline at each place."""
    lines: dict[str, int] = {}
    for i, row in enumerate(rows):
        best = lines.get(row["place"])
        if row["bubble_s"] and (best is None or advice.rate(row) > advice.rate(rows[best])):
            lines[row["place"]] = i
    return list(dict.fromkeys([*by_place.values(), *lines.values()]))


def explained(row: int, found: Prediction | None) -> dict[str, Any]:
    """The simulated step of one row: its timeline, and its collectives, the longest first; those of
    a pipeline as means over the stages."""
    assert found is not None
    sums: dict[str, dict[str, Any]] = {}
    stages = _stages(found)
    for span in found.spans:
        if span.lane in ("comm", "wait"):
            name = span.name.partition(" of micro-batch")[0]
            empty = {"name": name, "count": 0, "comm_s": 0.0, "exposed_s": 0.0}
            one = sums.setdefault(name, empty)
            one["count"] += span.lane == "comm"
            part = "comm_s" if span.lane == "comm" else "exposed_s"
            one[part] += (span.end - span.begin) / stages
    for one in sums.values():
        one["count"] = -(-one["count"] // stages)
    spans = sorted(found.spans, key=lambda span: span.begin - span.end)[:MOST_SPANS]
    spans.sort(key=lambda span: (span.rank, span.begin))
    longest = sorted(sums.values(), key=lambda one: -(one["comm_s"] + one["exposed_s"]))
    return {
        "row": row,
        "collectives": longest,
        "spans": [[span.lane, span.name, span.begin, span.end, span.rank] for span in spans],
    }


def _what_if(
    change: Change, number: int, cells: Sequence[Cell], rows: Sequence[Row], question: Question
) -> dict[str, Any]:
    """The steps after a change, and what is chosen then; a row that the change does not concern
    stays as it is."""
    after = [
        row
        if cell.changed[number] is None
        else _row(dataclasses.replace(cell, found=cell.changed[number]), question)
        for cell, row in zip(cells, rows, strict=True)
    ]
    steps = [None if cell.changed[number] is None else row["step_s"]
             for cell, row in zip(cells, after, strict=True)]  # fmt: skip
    by_place = {after[i]["place"]: i for i in advice.chosen_by(after, "place")}
    sizes = [cell.buckets.get(change.text) for cell in cells]
    return {"change": change.text, "step_s": steps, "bucket_mb": sizes, "by_place": by_place}
