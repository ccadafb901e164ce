"""Every animal of the zoo, under every strategy: equal to one process, or refused as stated."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import zoo_generator
import zoo_page
import zookeeper
from conftest import GetRanks, deep_unless
from shardlab.naming import STRATEGIES
from shardlab.strategies.data_parallel.simple_ddp import SimpleDDP
from zoo import GROUPS, ZOO, Animal
from zookeeper import Verdict

# One of each other mechanism: a model in so many, in turn. `zero3` meets every model, since most of
# them are there for its sake. They stand by their trouble, so each mechanism meets each trouble.
IN_TURN = ("bucket_ddp_async", "zero2", "simple_ddp_hook", "local_sgd", "zero1")
WORLDS = [
    (strategy, world)
    for strategy in STRATEGIES
    for world in (1, 2, 3)
    if (world == 1) == (strategy == "single")
]


def complaint(animal: Animal, strategy: str, verdict: Verdict) -> str | None:
    """What is not as the animal says; none if it is."""
    words = animal.refused.get(strategy)
    if words is None:
        as_stated = verdict.kind == "equal"
    else:
        is_refused = verdict.kind == "refused" and words in verdict.text
        # What depends on the data may show in any step.
        is_in_time = verdict.step <= animal.shows_at or "in every step" in verdict.text
        as_stated = is_refused and "\n" not in verdict.text and is_in_time
    if as_stated:
        return None
    stated = "equal" if words is None else f"refused in step {animal.shows_at} ({words})"
    return f"{animal.name}, {strategy}: stated {stated}, got {verdict} (step {verdict.step})"


def complaints(ranks: GetRanks, strategy: str, world: int, chosen: Iterable[Animal]) -> list[str]:
    # Those that are refused come last: after each, connections are new and PyTorch learns anew.
    animals = sorted(chosen, key=lambda a: strategy in a.refused)
    verdicts = zookeeper.run(
        ranks, world, zookeeper.of_the_zoo, [(a.name, strategy) for a in animals]
    )
    found = [complaint(a, strategy, v) for a, v in zip(animals, verdicts, strict=True)]
    return [text for text in found if text]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["zero3", *IN_TURN])
def test_two_strategies_as_stated(strategy: str, ranks: GetRanks) -> None:
    part = (
        slice(IN_TURN.index(strategy), None, len(IN_TURN)) if strategy in IN_TURN else slice(None)
    )
    assert complaints(ranks, strategy, 2, list(ZOO.values())[part]) == []


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["bucket_ddp_async", "zero1", "zero2"])
def test_what_joins_later_is_updated(strategy: str, ranks: GetRanks) -> None:
    """What nobody used in one step says nothing about the next."""
    later = [ZOO["part_unused_at_first"], ZOO["part_on_one_rank_after_none"]]
    assert complaints(ranks, strategy, 2, later) == []


@pytest.mark.deep
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("strategy", "world"), WORLDS)
def test_as_stated(strategy: str, world: int, ranks: GetRanks) -> None:
    """Three ranks on two cores take twice as long: there, all of them under `zero3` alone."""
    animals = list(ZOO.values())
    if world == 3 and strategy != "zero3":
        animals = animals[list(STRATEGIES).index(strategy) % 10 :: 10]
    assert complaints(ranks, strategy, world, animals) == []


def test_each_says_why() -> None:
    assert all(animal.why for animal in ZOO.values())
    assert len({animal.why for animal in ZOO.values()}) == len(ZOO)


def test_the_page_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "zoo.md"
    assert page.read_text() == zoo_page.page(), "run: python tests/models/zoo_page.py"


SEEDS = [0, 2553, secrets.randbelow(10_000)]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "seed",
    deep_unless(lambda seed: seed == SEEDS[2], SEEDS),
    ids=["fixed", "evaluation moves buffers", "fresh"],
)
def test_random_models(seed: int, ranks: GetRanks) -> None:
    """A failure names its model: ``tests/models/zoo_generator.py --only NUMBER`` runs it again."""
    numbers = [seed * zoo_generator.SPAN + i for i in range(6)]
    strategies = [s for s in GROUPS["ours"] if s != "single"]
    found = zoo_generator.hunt(ranks, numbers, strategies)
    assert found.failures == []
    # A re-entrant checkpoint may give a gradient in two parts; in another model nothing trains
    # before some step.
    right = ("came twice in one backward", "has no parameter that trains")
    assert [t for t in found.refusals if not any(words in t for words in right)] == []
    assert found.tried - found.unsound >= len(numbers) // 2


def test_a_number_is_a_model() -> None:
    first, again, other = (str(zoo_generator.plan_of(n).calls) for n in (7, 7, 8))
    assert first == again != other


@pytest.mark.long
def test_every_trait_can_be_trained_somewhere() -> None:
    """No trait is one that one process always refuses: it would find nothing."""
    seen: set[str] = set()
    for number in range(400):
        traits = set(zoo_generator.plan_of(number).traits)
        if traits - seen and zoo_generator.is_sound(str(number), 1):
            seen |= traits
    assert seen == set(zoo_generator.TRAITS)


# ------------------------------------------------------------------ the keeper notices


class Drifts(SimpleDDP):
    """One rank makes less of its gradients."""

    def step(self) -> None:
        if self.group.rank() == 1:
            for p in self.params.values():
                p.grad = None if p.grad is None else p.grad * 0.9
        super().step()


class Stale(SimpleDDP):
    """Whoever looks at the parameters mends them: only a run without looking is wrong."""

    def step(self) -> None:
        super().step()
        for p in self.params.values():
            p.data.add_(1.0)

    def full_tensors(self) -> dict[str, Any]:
        for p in self.params.values():
            p.data.sub_(1.0)
        return super().full_tensors()


class Dies(SimpleDDP):
    def step(self) -> None:
        if self.group.rank() == 1:
            os.abort()
        super().step()


class Fails(SimpleDDP):
    """On one rank, while its peers wait for it."""

    def gradients(self, microbatches: Any) -> Any:
        if self.group.rank() == 1:
            raise ValueError("something broke")
        return super().gradients(microbatches)


class Sleeps(SimpleDDP):
    def step(self) -> None:
        time.sleep(60)


PLANTED = {
    "Drifts": "WRONG",
    "Stale": "WRONG",
    "Dies": "CRASH",
    "Fails": "CRASH",
    "Sleeps": "HANG",
}


@pytest.mark.deep
def test_the_keeper_notices_and_goes_on(ranks: GetRanks) -> None:
    cells = []
    for name in PLANTED:
        cells += [("plain", f"test_zoo:{name}"), ("skips", "simple_ddp")]
    verdicts = zookeeper.run(ranks, 2, zookeeper.of_the_zoo, cells, limit_s=5.0)
    assert [v.kind for v in verdicts[0::2]] == list(PLANTED.values())
    assert {v.kind for v in verdicts[1::2]} == {"equal"}
    assert "something broke" in verdicts[6].text
