"""A memory estimate: the learner's numbers, compared with ours and with those of usual mistakes."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from shardlab.learn.exercise import Case, Evidence, Finding, Rejected, Row, Stage, say

BYTES = {"fp32": 4, "bf16": 2}
MOMENTS = {"sgd": 0, "momentum": 1, "adamw": 2}
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
PARTS = ("parameters", "gradients", "optimizer")
WORLDS = (1, 2, 8, 64)
TOLERANCE = 1e-3


class Block(NamedTuple):
    parameters: int  # elements
    activations: int  # bytes


MODELS = {
    # An embedding, blocks, a head with a large vocabulary: the peak is at backward's beginning.
    "a large batch": [
        Block(38_600_000, 25_000_000),
        *[Block(7_090_000, 210_000_000)] * 12,
        Block(3_000, 830_000_000),
    ],
    "hardly any activations": [Block(20_000_000, 100_000), *[Block(12_000_000, 300_000)] * 8],
    # As in a network for pictures: the first layers have the activations, the last the parameters.
    "the peak in the middle": [
        Block(100_000, 90_000_000),
        Block(1_000_000, 160_000_000),
        Block(9_000_000, 50_000_000),
        Block(40_000_000, 6_000_000),
        Block(2_000_000, 100_000),
    ],
    "one huge block": [
        Block(5_000_000, 8_000_000), Block(150_000_000, 2_000_000), Block(5_000_000, 8_000_000),
    ],
}  # fmt: skip
ESTIMATES = (
    Case("held, fp32", 1, {"model": "a large batch", "precision": "fp32"}),
    Case("held, bf16", 1, {"model": "a large batch", "precision": "bf16"}),
    *(
        Case(f"peak, {model}, {precision}", 1, {"model": model, "precision": precision})
        for model in MODELS
        for precision in BYTES
    ),
)
CHOICE = Case("the first that fits", 1)
CASES = (*ESTIMATES, CHOICE)


class Question(NamedTuple):
    model: str
    world: int
    strategy: str
    precision: str
    optimizer: str
    part: str = ""  # of what is held; empty: the peak

    def __str__(self) -> str:
        function, part = ("held", f'["{self.part}"]') if self.part else ("peak", "")
        words = f'world={self.world}, "{self.strategy}", "{self.precision}", "{self.optimizer}"'
        return f"{function}(blocks, {words}){part}"


def questions(case: Case) -> Iterator[Question]:
    model, precision = case.options["model"], case.options["precision"]
    is_held = case.name.startswith("held")
    for strategy, world, optimizer in itertools.product(STRATEGIES, WORLDS, MOMENTS):
        if is_held or optimizer == "adamw":
            for part in PARTS if is_held else ("",):
                yield Question(model, world, strategy, precision, optimizer, part)


class Budget(NamedTuple):
    """A question to choose()."""

    model: str
    world: int
    precision: str
    memory: float

    def __str__(self) -> str:
        return f'choose(blocks, world={self.world}, "{self.precision}", "adamw", {self.memory:.4g})'

    def peaks(self, strategy: str) -> list[float]:
        return _accepted(Question(self.model, self.world, strategy, self.precision, "adamw"))


def budgets() -> Iterator[Budget]:
    """A little more than each strategy needs, and less than any of them."""
    for model, precision, world in itertools.product(MODELS, BYTES, WORLDS):
        nothing = Budget(model, world, precision, 0.0)
        peaks = [max(nothing.peaks(strategy)) for strategy in STRATEGIES]
        for memory in (*(1.01 * peak for peak in peaks), min(peaks) / 2):
            yield nothing._replace(memory=memory)


# ------------------------------------------------------------------ on a rank


def run(at: Stage) -> dict[str, Any]:
    if at.case == CHOICE:
        return {"answers": [_chosen(at, budget) for budget in budgets()]}
    return {"answers": [_answer(at, question) for question in questions(at.case)]}


def _chosen(at: Stage, asked: Budget) -> str | None:
    model, world, precision, memory = asked
    value: str | None = at.submission.choose(list(MODELS[model]), world, precision, "adamw", memory)
    if value is not None and value not in STRATEGIES:
        raise Rejected(say("wrong-type/choice", call=f"{asked}", type=_shown(value)))
    return value


def _answer(at: Stage, asked: Question) -> float:
    model, world, strategy, precision, optimizer, part = asked
    function = at.submission.held if part else at.submission.peak
    value = function(list(MODELS[model]), world, strategy, precision, optimizer)
    if part:
        if not isinstance(value, Mapping) or part not in value:
            raise Rejected(say("wrong-type/held", call=f"{asked}", type=_shown(value)))
        value = value[part]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Rejected(say("wrong-type/estimate", call=f"{asked}", type=_shown(value)))
    return float(value)


def _shown(value: Any) -> str:
    return repr(value)[:80]


# ------------------------------------------------------------------ what is right, and what is not


@dataclass(frozen=True)
class Rules:
    """How an estimate is made. The defaults are right; each mistake changes one of them."""

    master: int = 4
    always_master: bool = False  # in fp32, too
    moment: int | None = 4  # bytes; None: those of a parameter
    moments: int = 2  # of AdamW
    item: int | None = None  # bytes of a parameter and of a gradient; None: the precision's
    gradient: int | None = None  # the same, of a gradient alone
    more: int = 0  # rungs of the ladder that are shared out too much, or too little
    activations: float = 1.0
    divided: bool = False  # the activations, by the number of ranks
    freed: bool = True  # activations go as backward goes
    early: bool = False  # a block's activations are gone when its gradients come
    gathered: str = "block"  # "block", "all", "largest" or "": what zero3 has whole
    gathered_item: int | None = None
    whole: bool = True  # a block's whole gradients are counted
    dropped: bool = True  # they go, where gradients are shared out
    forwards: bool = False  # backward is taken to go from the first block to the last
    first_only: bool = False  # only the beginning of backward


RIGHT = Rules()
HELD = {
    "master-forgotten": Rules(master=0),
    "master-in-fp32": Rules(always_master=True),
    "moments-in-16-bits": Rules(moment=None),
    "one-moment": Rules(moments=1),
    "precision-ignored": Rules(item=4),
    "gradients-in-32-bits": Rules(gradient=4),
    "not-sharded/estimate": Rules(more=-1),
    "sharded-too-much": Rules(more=1),
}
PEAK = {
    "activations-forgotten": Rules(activations=0.0),
    "activations-shared-out": Rules(divided=True),
    "all-at-once": Rules(freed=False),
    "all-at-once/largest": Rules(freed=False, gathered="largest"),
    "activations-gone-early": Rules(early=True),
    "gathered-forgotten": Rules(gathered=""),
    "all-gathered": Rules(gathered="all"),
    "gathered-in-32-bits": Rules(gathered_item=4),
    "gradients-not-dropped": Rules(dropped=False),
    "whole-gradients-forgotten": Rules(whole=False),
    "beginning-only": Rules(first_only=True),
    "forward-order/peak": Rules(forwards=True),
}


def estimate(asked: Question, rules: Rules = RIGHT) -> float:
    """The answer to a question by these rules."""
    blocks = MODELS[asked.model]
    item = rules.item or BYTES[asked.precision]
    gradient = rules.gradient or item
    rung = STRATEGIES.index(asked.strategy)
    rung = min(3, max(0, rung + rules.more)) if rung or rules.more > 0 else 0
    ranks = {p: asked.world if rung >= r else 1 for p, r in zip(PARTS, (3, 2, 1), strict=True)}
    moments = rules.moments if asked.optimizer == "adamw" else MOMENTS[asked.optimizer]
    has_master = asked.precision == "bf16" or rules.always_master
    master = rules.master if has_master else 0
    size = {
        "parameters": item,
        "gradients": gradient,
        "optimizer": master + moments * (item if rules.moment is None else rules.moment),
    }
    elements = sum(block.parameters for block in blocks)
    held = {part: elements * size[part] / ranks[part] for part in PARTS}
    if asked.part:
        return held[asked.part]

    def gathered(block: Block) -> float:
        what = {"block": block.parameters, "all": elements, "": 0,
                "largest": max(b.parameters for b in blocks)}  # fmt: skip
        return (rules.gathered_item or item) * what[rules.gathered] if rung == 3 else 0

    activations = rules.activations * sum(block.activations for block in blocks)
    activations /= asked.world if rules.divided else 1
    share = activations / (sum(block.activations for block in blocks) or 1)
    kept = 0.0
    found = []
    for block in blocks if rules.forwards else reversed(blocks):
        whole = gradient * block.parameters
        now = held["parameters"] + held["optimizer"] + activations + kept + gathered(block)
        kept += whole / ranks["gradients"] if rules.dropped else whole
        counted = whole if rules.whole else whole / ranks["gradients"]
        found.append(now + counted - (share * block.activations if rules.early else 0))
        if rules.freed:
            activations -= share * block.activations
    return found[0] if rules.first_only else max(found)


def _accepted(asked: Question) -> list[float]:
    """Right answers: at a block's end its share of the gradients may be there, or not yet."""
    right = estimate(asked)
    if asked.part or asked.strategy in STRATEGIES[:2]:
        return [right]
    blocks = MODELS[asked.model]
    # The moment that is fullest may be another one with the share than without it.
    item, kept, most = BYTES[asked.precision], 0.0, 0.0
    left = sum(block.activations for block in blocks)
    base = sum(estimate(asked._replace(part=part)) for part in ("parameters", "optimizer"))
    for block in reversed(blocks):
        whole = item * block.parameters
        kept += whole / asked.world
        most = max(most, base + left + kept + whole * (1 + (asked.strategy == "zero3")))
        left -= block.activations
    return [right, most]


def _near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=1.0)


def judge(evidence: Evidence) -> list[Finding]:
    for case in CASES:
        look = _look_at_choices if case == CHOICE else _look
        if case.name in evidence and (found := look(case, evidence[case.name][0])):
            return [found]
    return []


def _look_at_choices(case: Case, row: Row) -> Finding | None:
    answers = list(zip(budgets(), row["answers"], strict=True))
    wrong = [(asked, got) for asked, got in answers if got not in _fitting(asked)]
    if not wrong:
        return None
    asked, got = wrong[0]
    peak = min(asked.peaks(got)) if got else 0.0
    key = "over-memory" if peak > asked.memory else "sends-more"
    if all(got == _first(_resident(a), a.memory) for a, got in answers):
        key = "resident-not-peak/choice"
    finding = say(key, call=asked, got=got, right=_fitting(asked)[0], peak=_mb(peak))
    return replace(finding, case=case.name)


def _fitting(asked: Budget) -> list[str | None]:
    """Right choices, by either of the peaks that are accepted."""
    peaks = {strategy: sorted(asked.peaks(strategy)) for strategy in STRATEGIES}
    return [_first({s: both[i] for s, both in peaks.items()}, asked.memory) for i in (-1, 0)]


def _first(sizes: Mapping[str, float], memory: float) -> str | None:
    return next((strategy for strategy, size in sizes.items() if size <= memory), None)


def _resident(asked: Budget) -> dict[str, float]:
    """What held() adds up to."""
    model, world, precision, _ = asked
    wholes = {s: Question(model, world, s, precision, "adamw") for s in STRATEGIES}
    return {
        s: sum(estimate(whole._replace(part=part)) for part in PARTS) for s, whole in wholes.items()
    }


def _look(case: Case, row: Row) -> Finding | None:
    """The mistake that explains the answers best, with the first answer that it explains."""
    answers = list(zip(questions(case), row["answers"], strict=True))
    wrong = [(a, got) for a, got in answers if not any(_near(got, r) for r in _accepted(a))]
    if not wrong:
        return None
    score = Counter[str]()
    first: dict[str, tuple[Question, float]] = {}
    for asked, got in answers:
        for key, value in _mistakes(asked):
            score[key] += 1 if _near(got, value) else -1
            if _near(got, value):
                first.setdefault(key, (asked, got))
    key = max(first, key=lambda key: score[key], default="wrong-estimate")
    asked, got = first.get(key, wrong[0])
    facts = {"n": asked.world, "strategy": asked.strategy}
    finding = say(key, call=asked, got=_mb(got), right=_mb(estimate(asked)), **facts)
    return replace(finding, case=case.name)


def _mistakes(asked: Question) -> Iterator[tuple[str, float]]:
    """What each mistake gives, where that is not right anyway."""
    right, blocks = estimate(asked), MODELS[asked.model]
    simple = {
        "megabytes/estimate": right / 1e6,
        "megabytes/mebi": right / 2**20,
        "megabytes/giga": right / 1e9,
        "megabytes/gibi": right / 2**30,
        "all-ranks": right * asked.world,
    }
    if not asked.part:
        table = sum(estimate(asked._replace(part=part)) for part in PARTS)
        simple["resident-not-peak"] = table
        simple["all-at-once/parts"] = table + sum(block.activations for block in blocks)
    rules = HELD if asked.part else PEAK | HELD
    values = {key: estimate(asked, each) for key, each in rules.items()}
    for key, value in (simple | values).items():
        if not any(_near(value, one) for one in _accepted(asked)):
            yield key, value


def _mb(value: float) -> str:
    return f"{value / 1e6:,.1f} MB" if abs(value) >= 1e5 else f"{value:,.6g} bytes"
