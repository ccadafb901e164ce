"""The answer of a comparison in words: which to choose, why, and what would change that.

Pure: from the rows of ``compare.json``. A strategy that was found wrong (its proof failed, or its
loss is not that of ``single``) is never chosen; nor is one that takes other steps than one process
would, as its time says nothing about how many it needs. Strategies whose difference is within the
noise are taken as equally fast if they are close, and then one that needs notably less memory is
better; then the simpler one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardlab import stats
from shardlab import text as fmt
from shardlab.measure import fields
from shardlab.naming import EVERY_STRATEGY

Row = Mapping[str, Any]

NOTABLE = 0.05  # a smaller share of memory or of a step is not worth a sentence
CLOSE = 0.10  # a step that is slower by more is not taken as equal, however noisy it was


def answer(result: Mapping[str, Any]) -> dict[str, Any]:
    """``choice`` (a label or None), ``why`` in a sentence, and ``otherwise``: what changes it."""
    cells = fields.measured(result)
    others = [cell for cell in cells if cell.get("changes") and fields.proved(cell) is not False]
    judged = [cell for cell in cells if cell not in others]
    right = [cell for cell in judged if not _wrong(cell, result)]
    excluded = [f"{cell['label']} ({_wrong(cell, result)})" for cell in judged if cell not in right]
    if not right and others and not excluded:
        return {"choice": None, "why": _not_ranked(others), "otherwise": []}
    if not right:
        why = f"none is right: {fmt.names(excluded)}" if excluded else "nothing was measured"
        return {"choice": None, "why": f"{why[0].upper()}{why[1:]}.", "otherwise": []}
    if len(right) > 1 and not stats.can_tell(*(cell["step_ms_repeats"] for cell in right)):
        why = (
            "Nothing is chosen: one visit to each says nothing about how much the next would "
            "differ (--repeats 2 or more)."
        )
        return {"choice": None, "why": why, "otherwise": _left_out(excluded, others)}
    choice, why = _choose(right)
    otherwise = [*_otherwise(choice, right, result), *_left_out(excluded, others)]
    return {"choice": choice["label"], "why": why, "otherwise": otherwise}


def _ms(cell: Row) -> float:
    """Its median step."""
    median: float = cell["step_ms"]["median"]
    return median


def _left_out(wrong: Sequence[str], others: Sequence[Row]) -> list[str]:
    found = [f"Left out, as they are wrong: {fmt.names(wrong)}."] if wrong else []
    return found + ([_not_ranked(others)] if others else [])


def _not_ranked(others: Sequence[Row]) -> str:
    """Of strategies that change the mathematics."""
    labels = fmt.names([cell["label"] for cell in others])
    what = "it takes" if len(others) == 1 else "they take"
    return (
        f"Ms per step does not rank {labels}, as {what} other steps than one process would: "
        "compare the time to a held-out loss (--to-loss)."
    )


def _wrong(cell: Row, result: Mapping[str, Any]) -> str:
    """Why it must not be chosen, if so."""
    if fields.proved(cell) is False:
        return "its proof failed"
    return "its loss is not single's" if fields.agrees(cell, result) is False else ""


def _lean(cells: Sequence[Row]) -> Sequence[Row]:
    """Those that need the least memory, or hardly more; all, if it is not known."""
    peaks = [(peak, cell) for cell in cells if (peak := fields.peak(cell)) is not None]
    limit = min((peak for peak, _ in peaks), default=0) / (1 - NOTABLE)
    return [cell for peak, cell in peaks if peak <= limit] or cells


def _difficulty(cell: Row) -> tuple[int, float]:
    """The rung of the ladder, then the time. The user's own comes first."""
    ladder = list(EVERY_STRATEGY)
    place = ladder.index(cell["strategy"]) if cell["strategy"] in ladder else -1
    return place, _ms(cell)


def _choose(cells: Sequence[Row]) -> tuple[Row, str]:
    """Which to choose, and why. A tie is said here, and nowhere else."""
    first = min(cells, key=_ms)
    tied = [first, *fields.ties(cells, first)]
    equal = [cell for cell in tied if _ms(cell) <= (1 + CLOSE) * _ms(first)]
    lean = _lean(equal)
    choice = min(lean, key=_difficulty)
    label, proved = choice["label"], fields.proved(choice)
    if len(cells) == 1:
        return choice, f"{label}: the only one that was measured{' and proved' if proved else ''}."
    if len(tied) == 1:
        return choice, f"{label}: it is the fastest{' and proved' if proved else ''}."
    rivals = fmt.names([cell["label"] for cell in tied if cell is not choice])
    memory = fmt.size(fields.peak(choice))
    of = "of them" if len(equal) == len(tied) else f"of the {len(equal)} with about the least time"
    reason = f"is the simplest {of}"
    if len(equal) == 1:
        reason = "took the least time"
    elif len(lean) == 1:
        reason = f"needs least memory {of}, {memory}"
    elif len(lean) < len(equal):
        reason = f"is the simplest of the {len(lean)} that need least memory, {memory}"
    return choice, (
        f"{label}: it {'is proved, ' if proved else ''}ties with {rivals} for the fastest within "
        f"the noise, and {reason}; more repeats would tell (--repeats 10)."
    )


def _otherwise(choice: Row, right: Sequence[Row], result: Mapping[str, Any]) -> Iterator[str]:
    """What would change the answer, each in a sentence."""
    yield from _if_memory_is_short(choice, right)
    yield from _if_the_link_is_slower(choice, right)
    shared = [cell for cell in right if cell["world"] > 1]
    if choice["strategy"] == "single" and shared:
        tied = fields.ties(right, choice)
        yield (
            "No strategy on several ranks was faster than one process beyond the noise."
            if any(cell in tied for cell in shared)
            else "One process beat all ranks here: what ranks send each other took longer than "
            "what they shared."
        ) + " More work per rank (--global-batch), a faster link or more cores would change that."
    worlds = sorted({cell["world"] for cell in right if cell["strategy"] != "single"})
    if len(worlds) > 1:
        best = [_choose([c for c in right if c["world"] == world])[0] for world in worlds]
        parts = [f"{c['strategy']} at {fmt.count(c['world'], 'rank')}" for c in best]
        yield f"By the number of ranks: {fmt.names(parts, at_most=8)}."
    failed = [cell["label"] for cell in result["cells"] if cell["status"] == "failed"]
    if failed:
        yield f"{fmt.names(failed)} failed and could not be judged."


def _if_memory_is_short(choice: Row, right: Sequence[Row]) -> Iterator[str]:
    peaks = [(peak, cell) for cell in right if (peak := fields.peak(cell)) is not None]
    own = fields.peak(choice)
    if not peaks or own is None:
        return
    least, lean = min(peaks, key=lambda item: (item[0], _ms(item[1])))
    if lean is choice or least > (1 - NOTABLE) * own:
        return
    ratio = _ms(lean) / _ms(choice)
    cost = f"for {100 * (ratio - 1):.0f}% more time a step"
    if ratio >= 2:
        cost = f"for {ratio:.1f} times the time of a step"
    elif ratio <= 1:
        cost = "at no cost in time"
    yield (
        f"If memory is short: {lean['label']} needs {fmt.size(least)}, "
        f"{100 * (1 - least / own):.0f}% less, {cost}."
    )


def _if_the_link_is_slower(choice: Row, right: Sequence[Row]) -> Iterator[str]:
    profile = choice.get("profile")
    if choice["world"] == 1 or not profile or not profile["wall_ms"]:
        return
    share = profile["exposed_comm_ms"] / profile["wall_ms"]
    if share >= NOTABLE:
        yield (
            f"{100 * share:.0f}% of its step is exposed communication: a faster link "
            "would help it, a slower one would cost it most."
        )
    else:
        yield "Hardly any of its communication is left to hide; a slower link would show."
    crosses = fields.between_nodes(choice)
    if crosses is not None:
        yield f"A node sends the others {fmt.size(crosses)} in a step of it."
    read = fields.sent if crosses is None else fields.between_nodes
    sent = [
        (size, cell)
        for cell in right
        if cell["world"] == choice["world"] and (size := read(cell)) is not None
    ]
    own = read(choice)
    if not sent or not own:
        return
    least, cell = min(sent, key=lambda item: item[0])
    if cell is not choice and least < (1 - NOTABLE) * own:
        where = "On a slow link" if crosses is None else "Between nodes"
        yield f"{where} {cell['label']} sends {100 * (1 - least / own):.0f}% less."
