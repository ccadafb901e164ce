"""What to choose of the rows of a plan, in words, and what would change that.

The fastest that fits is chosen; of those that are close to it and that a prediction cannot tell
from it, the one with the fewest ranks, then the simplest. What would change the choice is found by
predicting again, with a link that is faster or slower and with a larger batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shardlab import text as fmt
from shardlab.axes import CUTS, NAMED
from shardlab.measure.choice import NOTABLE
from shardlab.naming import EVERY_STRATEGY

Row = Mapping[str, Any]
# The step of a row at another rate of its link, in times of that; None if it cannot be predicted.
AtRate = Callable[[int, float], float | None]
# The numbers of a row with twice its global batch; likewise.
Doubled = Callable[[int], Row | None]
RATES = (0.5, 0.25, 0.125, 2.0, 4.0, 8.0)
RIVALS = 2  # how many others are tried


def answered(rows: Sequence[Row]) -> dict[str, Any]:
    """The rows to choose, by their numbers: for each place, and of all. ``why`` has a sentence for
    each; ``otherwise`` is what would change it, as far as the rows tell."""
    by_place: dict[str, int] = {}
    why: list[str] = []
    otherwise: list[str] = []
    for place in dict.fromkeys(row["place"] for row in rows):
        own = [i for i, row in enumerate(rows) if row["place"] == place and row["step_s"]]
        can = [i for i in own if rows[i]["fits"] is not False]
        if not can:
            if own:
                least = min(own, key=lambda i: rows[i]["memory_bytes"])
                why.append(f"On {place} nothing fits: the least is {rows[least]['label']} with "
                           f"{fmt.size(rows[least]['memory_bytes'])} per rank, of "
                           f"{fmt.size(rows[least]['memory_limit'])}.")  # fmt: skip
                if not any(_cuts(rows[i]) for i in own):
                    otherwise.append("Model-parallel ranks hold less each: try "
                                     "zero1:tensor=8 or zero1:pipeline=8.")  # fmt: skip
            continue
        chosen, reason = _choose(rows, can)
        by_place[place] = chosen
        one = rows[chosen]
        what = f"{one['label']} on {fmt.count(one['world'], 'rank')}, {rate_words(one)}"
        why.append(f"On {place}: {what}: {reason}.")
        otherwise += _from_rows(rows, own, chosen)
    overall = next(iter(by_place.values()), None)
    able = [i for i, row in enumerate(rows) if row["cost"] is not None and row["fits"] is not False]
    cheapest = _cheapest(rows, able)
    if len(by_place) > 1 and cheapest is not None:
        overall = cheapest
        least = min(rows[i]["cost"] for i in able)
        what = "Cheapest of all"
        if rows[overall]["cost"] > least:
            what = f"Within {NOTABLE:.0%} of the least cost of all ({least:,.0f})"
        why.append(f"{what}: {_named(rows[overall])}, {_budget(rows[overall])}.")
    elif len(by_place) > 1:
        overall, reason = _choose(rows, list(by_place.values()))
        why.append(f"Of all: {_named(rows[overall])}: {reason}.")
    elif overall is not None and cheapest is not None:
        less = 1 - rows[cheapest]["cost"] / rows[overall]["cost"] if rows[overall]["cost"] else 0
        if less > NOTABLE:
            otherwise.insert(0, f"If money matters more than time: {_named(rows[cheapest])}, "
                                f"{_budget(rows[cheapest])}, {100 * less:.0f}% less.")  # fmt: skip
    if not why:
        why = ["Nothing could be predicted."]
    return {"choice": overall, "by_place": by_place, "why": why, "otherwise": otherwise}


def _cheapest(rows: Sequence[Row], able: Sequence[int]) -> int | None:
    """The cheapest; of those that hardly cost more, the one that would be chosen for its speed."""
    if not able:
        return None
    least = min(rows[i]["cost"] for i in able)
    return _choose(rows, [i for i in able if rows[i]["cost"] <= (1 + NOTABLE) * least])[0]


def _budget(row: Row) -> str:
    return f"{fmt.number(row['days'])} days for {row['cost']:,.0f}"


def _named(row: Row) -> str:
    where = row["place"]
    return f"{row['label']} on {fmt.count(row['world'], 'rank')} of {where}"


def rate(row: Row) -> float:
    value: float = row["samples_per_s"]
    return value


def rate_words(row: Row) -> str:
    if row["tokens_per_s"]:
        return f"{fmt.compact(row['tokens_per_s'])} tokens/s"
    return f"{fmt.compact(row['samples_per_s'])} samples/s"


def _choose(rows: Sequence[Row], can: Sequence[int]) -> tuple[int, str]:
    """Which to choose of those that fit, and why. A tie is said here, and nowhere else.

    All that may be as fast as the fastest, as far as the intervals tell, tie with it. Of those that
    are also close to it, the fewest ranks are chosen, then the simplest. All of them fit, so that
    less memory is no reason by itself.
    """
    fastest = max(can, key=lambda i: rate(rows[i]))
    tied = [i for i in can if i == fastest or _overlap(rows[i], rows[fastest])]
    equal = [i for i in tied if rate(rows[i]) * (1 + NOTABLE) >= rate(rows[fastest])]
    fewest = min(rows[i]["world"] for i in equal)
    few = [i for i in equal if rows[i]["world"] == fewest]
    chosen = min(few, key=lambda i: _rung(rows[i]))
    if len(can) == 1:
        return chosen, "the only one that can be run and fits"
    if len(tied) == 1:
        return chosen, "it is the fastest that fits"
    rivals = fmt.names([_short(rows[i], rows[chosen]) for i in tied if i != chosen])
    of = "of them" if len(equal) == len(tied) else f"of the {len(equal)} with about the best rate"
    reason = f"is the simplest {of}"
    if len(equal) == 1:
        reason = "has the best predicted rate"
    elif len(few) < len(equal):
        also = " and is the simplest with so few" if len(few) > 1 else ""
        reason = f"needs the fewest ranks {of}{also}"
    return chosen, (
        f"it ties with {rivals} for the fastest within the interval, and {reason}; only a "
        "measurement would tell"
    )


def _short(row: Row, beside: Row) -> str:
    if row["place"] != beside["place"]:
        return _named(row)
    if row["world"] == beside["world"]:
        return str(row["label"])
    return f"{row['label']} on {fmt.count(row['world'], 'rank')}"


def _overlap(row: Row, faster: Row) -> bool:
    """Whether one may be as fast as the other, as far as the intervals tell."""
    best = rate(row) * row["step_s"] / row["low_s"]
    worst = rate(faster) * faster["step_s"] / faster["high_s"]
    return bool(best >= worst)


def _cuts(row: Row) -> int:
    """Along how many axes ranks cut the model."""
    axes = [axis for axis in CUTS if row["options"].get(axis, 1) > 1]
    return len(axes) + (row["strategy"] in NAMED)


def _rung(row: Row) -> tuple[int, int, int, float]:
    """How the model is cut and how much is sharded; then the place in the ladder, where the user's
    own come first."""
    ladder, name = list(EVERY_STRATEGY), row["strategy"]
    sharded = 3 if "hsdp" in name else max((n for n in (1, 2, 3) if f"zero{n}" in name), default=0)
    return _cuts(row), sharded, ladder.index(name) if name in ladder else -1, -rate(row)


def _from_rows(rows: Sequence[Row], own: Sequence[int], chosen: int) -> Iterator[str]:
    """What would change the choice at one place, as far as its rows tell."""
    row = rows[chosen]
    large = [
        i for i in own if rows[i]["fits"] is False and rate(rows[i]) > (1 + NOTABLE) * rate(row)
    ]
    if large:
        best = max(large, key=lambda i: rate(rows[i]))
        other = rows[best]
        yield (
            f"With more memory: {_named(other)} would be {rate(other) / rate(row):.2f} times as "
            f"fast, but needs {fmt.size(other['memory_bytes'])} per rank, of "
            f"{fmt.size(other['memory_limit'])}."
        )
    able = [i for i in own if rows[i]["fits"] is not False]
    worlds = sorted({rows[i]["world"] for i in able})
    best_of = {w: _choose(rows, [i for i in able if rows[i]["world"] == w])[0] for w in worlds}
    if len({rows[i]["label"] for i in best_of.values()}) > 1:
        texts = [f"{rows[i]['label']} at {fmt.count(w, 'rank')}" for w, i in best_of.items()]
        yield f"On {row['place']}, by the number of ranks: {fmt.names(texts, at_most=8)}."


def _rivals(rows: Sequence[Row], chosen: int) -> list[int]:
    """The fastest others at the same point."""
    row = rows[chosen]
    same = [
        i for i, other in enumerate(rows)
        if i != chosen and other["step_s"] and other["fits"] is not False
        and (other["place"], other["world"]) == (row["place"], row["world"])
    ]  # fmt: skip
    return sorted(same, key=lambda i: -rate(rows[i]))[:RIVALS]


def _elsewhere(rows: Sequence[Row], chosen: int) -> list[int]:
    """The fastest at each other number of ranks on the same kind of machine."""
    found: dict[int, int] = {}
    for i, row in enumerate(rows):
        is_other = row["place"] == rows[chosen]["place"] and row["world"] != rows[chosen]["world"]
        if is_other and row["step_s"] and row["fits"] is not False:
            found[row["world"]] = max(found.get(row["world"], i), i, key=lambda i: rate(rows[i]))
    return list(found.values())


def flips(rows: Sequence[Row], chosen: int, at_rate: AtRate) -> Iterator[str]:
    """Which rate of the link makes another the fastest."""
    row, rivals = rows[chosen], _rivals(rows, chosen)
    elsewhere = _elsewhere(rows, chosen)
    # On this machine each rate may need ranks to be emulated anew, which takes seconds.
    others = [*rivals, *([] if row["is_measured"] else elsewhere)]
    if not others or row["link"] is None:  # or the ranks share one machine
        return
    for factor in RATES:
        times = {i: seconds for i in (chosen, *others) if (seconds := at_rate(i, factor))}
        rates = {i: rate(rows[i]) * rows[i]["step_s"] / seconds for i, seconds in times.items()}
        best = max(rates, key=lambda i: rates[i], default=chosen)
        if chosen in rates and rates[best] > (1 + NOTABLE) * rates[chosen]:
            yield (
                f"With {factor:g} times the bandwidth on {row['place']}, "
                f"{_short(rows[best], row)} would be "
                f"{100 * (rates[best] / rates[chosen] - 1):.0f}% faster than {row['label']}."
            )
            return
    tried_all = len(others) == len(rivals) + len(elsewhere)
    among = "" if tried_all else f" on {fmt.count(row['world'], 'rank')}"
    yield (
        f"On {row['place']}, no link from {min(RATES):g} to {max(RATES):g} times as fast changes "
        f"the choice{among}."
    )


def if_batch_grows(rows: Sequence[Row], chosen: int, doubled: Doubled) -> Iterator[str]:
    """What twice the global batch would do to the choice, and to the nearest other."""
    row, found = rows[chosen], doubled(chosen)
    if found is None:
        return
    what = f"With twice the global batch on {row['place']}, {row['label']}"
    if found["fits"] is False:
        size = fmt.size(found["memory_bytes"])
        yield f"{what} would no longer fit: it needs {size} per rank."
        return
    line = f"{what} would do {rate(found) / rate(row):.2f} times as many samples a second"
    for i in _rivals(rows, chosen)[:1]:
        other = doubled(i)
        if other and other["fits"] is not False and rate(other) > (1 + NOTABLE) * rate(found):
            line += f", and {rows[i]['label']} would be faster"
    yield f"{line}."


def chosen_by(rows: Sequence[Row], *keys: str) -> list[int]:
    """The row to choose for each value of these keys; none where nothing fits."""
    can: dict[tuple[Any, ...], list[int]] = {}
    for i, row in enumerate(rows):
        if row["step_s"] and row["fits"] is not False:
            can.setdefault(tuple(row[key] for key in keys), []).append(i)
    return [_choose(rows, able)[0] for able in can.values()]
