"""Why a strategy does not equal one process, as far as the numbers tell. Pure, no torch.

The most telling is the *mixture*: how often each micro-batch of each rank is in the gradients.
Right is once each. Every classic mistake has a pattern of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from shardlab import text as fmt

Mixture = Sequence[Sequence[float | None]]  # [rank][micro-batch]; None: it had no gradient


def first_difference(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The earliest difference on any rank, with the ranks that have one."""
    found = (_difference(ranks, number) for number in range(len(ranks[0]["models"])))
    return next((first for first in found if first is not None), None)


def _difference(ranks: Sequence[Mapping[str, Any]], number: int) -> dict[str, Any] | None:
    """The earliest in one of the models."""
    models = [e["models"][number] for e in ranks]
    found = [(m["first"], rank) for rank, m in enumerate(models) if m["first"] is not None]
    if not found:
        return None
    # A step of None is before the first.
    first, rank = min(found, key=lambda f: (-1 if f[0]["step"] is None else f[0]["step"], f[1]))
    step = first["step"]
    located = [{**at, "rank": r} for other, r in found if (at := other.get("located")) is not None]
    earliest = min(
        located,
        key=lambda at: (at["step"], at["micro"], at["direction"] != "forward", at["rank"]),
        default=None,
    )
    # A loss belongs to no module.
    owner = first["tensor"].rpartition(".")[0] if first["tensor"] else None
    return {
        **first,
        "located": earliest,
        "module": owner if earliest is None else earliest["module"],
        "model": models[0]["label"],
        "rank": rank,
        "ranks": [r for other, r in found if other["step"] == step],
        "world": len(ranks),
        "counts": None if step is None else models[0]["counts"][step],
    }


def also_in(ranks: Sequence[Mapping[str, Any]], first: Mapping[str, Any]) -> str:
    """Where the user's own model differs, if the first difference is in the other."""
    other = _difference(ranks, -1)
    if other is None or other["model"] == first["model"] or other["step"] is None:
        return ""
    return f"in {other['model']} first {other['kind']} '{other['tensor']}'{_located(other)}"


def explain(first: Mapping[str, Any]) -> str:
    """One line: what differs first, where, and the cause if the numbers show it."""
    name, kind, step = first["tensor"], first["kind"], first["step"]
    if step is None:
        if 0 not in first["ranks"]:
            return (
                f"{_on(first)} starts from other weights ('{name}'): equal on rank 0 only, so "
                "nothing was broadcast"
            )
        return f"before the first step '{name}' is not what rank 0 was given, {_cause(first)}"
    where = f"step {step} of {first['model']}, {kind}" + (f" '{name}'" if name else "")
    unseen = "if nobody looks in between, " if first.get("unwatched") else ""
    return f"{unseen}{where}: {_cause(first)}{_located(first)}"


def _located(first: Mapping[str, Any]) -> str:
    """The module where it begins, if it is not the one that the tensor belongs to."""
    at = first.get("located")
    if at is None:
        return ""
    names = at.get("modules", [at["module"]])
    modules = f"'{fmt.names(names, at_most=3)}'" if names != [""] else "the model itself"
    what = "output" if at["direction"] == "forward" else f"gradient of the {at['of']}"
    text = f"{at['direction']} differs first in the {what} of {modules}"
    text += f", on rank {at['rank']} in micro-batch {at['micro']}"
    if at["step"] != first["step"]:
        text += f" of step {at['step']}"
    if at["ratio"] is not None and not _is(at["ratio"], 1):
        text += f", exactly {_times(at['ratio'])}"
    return f"; {text}"


def _on(first: Mapping[str, Any]) -> str:
    ranks = first["ranks"]
    if len(ranks) == first["world"]:
        return "every rank"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {fmt.names([str(r) for r in ranks])}"


def _cause(first: Mapping[str, Any]) -> str:
    if "missing" in first:
        return "it is missing" if first["missing"] else "one process has no such tensor"
    if "none" in first:
        if first["none"] == "one process":
            return "it is there, in one process it is None and the optimizer skips it"
        return "it is None, in one process it is there"
    if "shapes" in first:
        return f"its shape is {first['shapes'][0]}, not {first['shapes'][1]}"
    if not first["finite"]:
        return "it is not finite"
    if first["kind"] == "gradient" and first.get("mixture"):
        counts, flat = first["counts"], iter(first["mixture"])
        mixture = [list(islice(flat, len(row))) for row in counts]
        return mixed(mixture, counts, first["rank"])
    return _by_elements(first)


def _by_elements(first: Mapping[str, Any]) -> str:
    off = f"off by {first['error']:.1e} ({first['ulp']:.1e} ulp)"
    only = "" if len(first["ranks"]) == first["world"] else f" on {_on(first)} only"
    if first["kind"] == "buffer":
        return f"{off}{only}: buffers do not follow rank 0's"
    if first["shift"]:
        return f"{off}{only}: shifted by one element, as by a shard's offset that is off by one"
    elements, of = first["elements"], first["of"]
    if first["stale"]:
        part = "it was" if elements == of else f"{elements:,} of {of:,} elements were"
        return f"{off}{only}: {part} not updated in this step; were the shards gathered?"
    if elements <= max(8, 0.01 * of) and of > 16:
        place = f"{elements} of {of:,} elements, {first['first']} to {first['last']}"
        edge = ", at the edge of a shard" if _at_edge(first) else ""
        return f"{off}{only}, in only {place}{edge}"
    if first["ratio"] is not None and not _is(first["ratio"], 1):
        return f"{off}{only}: exactly {_times(first['ratio'])}"
    if first["kind"] == "parameter" and first.get("gradients_equal"):
        return f"{off}{only}, though the gradients are equal: look at the update"
    if first["kind"] == "parameter":
        return f"{off}{only}: a wrong gradient, or one that the update did not wait for"
    return f"{off}{only}"


def _at_edge(first: Mapping[str, Any]) -> bool:
    """Whether what differs lies where a tensor is cut into as many parts as there are ranks."""
    cuts = [first["of"] * i / first["world"] for i in range(1, first["world"])]
    return any(first["first"] - 2 <= cut <= first["last"] + 2 for cut in cuts)


# ------------------------------------------------------------------ patterns of the mixture


def mixed(mixture: Mixture, counts: Sequence[Sequence[int]], rank: int) -> str:
    """What is wrong with a gradient, from how often each micro-batch is in it."""
    ranks, micro = len(mixture), len(mixture[0])
    known = [(r, m, c) for r, row in enumerate(mixture) for m, c in enumerate(row) if c is not None]
    total = sum(map(sum, counts))

    def fits(rule: Any) -> bool:
        return all(_is(c, rule(r, m)) for r, m, c in known)

    factor = known[0][2]
    if fits(lambda _r, _m: factor):
        return f"gradients are exactly {_times(factor)}: {_factor(factor, ranks, micro)}"
    if fits(lambda r, _m: float(r == rank)):
        return "each rank has the gradients of its own data only: they are not reduced"
    last = micro - 1
    if fits(lambda r, m: float(r == rank or m == last)):
        return (
            f"only the last of {micro} micro-batches is reduced over the ranks; of the others "
            "each rank has its own"
        )
    if fits(lambda r, m: float(r == rank or m < last)):
        return "the last micro-batch of the other ranks is not in it: it was sent too early"
    for only, word in ((last, "last"), (0, "first")):
        if fits(lambda _r, m, only=only: float(m == only)):
            return f"only the {word} of {micro} micro-batches is in it"
    final = known[-1][2]
    if ranks > 1 and fits(lambda _r, m: final * float(ranks) ** (last - m)):
        return (
            "each micro-batch's gradient is reduced again with every later one: the sum so far is "
            "all-reduced after each"
        )
    if fits(lambda r, _m: total / (ranks * sum(counts[r]))):
        return "each rank divides by its own count: a mean of means, wrong when counts differ"
    if fits(lambda r, _m: total / sum(counts[r])):
        return "each rank divides by its own count, and the sum over ranks is not averaged"
    if fits(lambda r, m: total / (ranks * micro * counts[r][m])):
        return "each micro-batch divides by its own count: a mean of means, wrong when they differ"
    lost = sorted({r for r, _, _ in known if all(_is(c, 0) for s, _, c in known if s == r)})
    if lost and rank not in lost:
        others = [c for r, _, c in known if r not in lost]
        if all(_is(c, others[0]) for c in others) and others[0] > 1.5:
            return (
                f"the data of rank {fmt.names([str(r) for r in lost])} is not in it, the rest "
                f"{_times(others[0])}: ranks read the same samples"
            )
    wrong = [(r, m, c) for r, m, c in known if not _is(c, 1)] or known[:1]
    shown = [f"micro-batch {m} of rank {r} counts {_times(c)}" for r, m, c in wrong]
    return fmt.names(shown, at_most=2)


def _factor(factor: float, ranks: int, micro: int) -> str:
    reasons = (
        (ranks, "summed over the ranks, not averaged"),
        (1 / ranks, "divided by the number of ranks once too often"),
        (micro, "summed over the micro-batches, not averaged"),
        (1 / micro, "divided by the number of micro-batches once too often"),
        (ranks * micro, "summed over ranks and micro-batches, not averaged"),
        (1 / (ranks * micro), "divided by ranks and micro-batches once too often"),
    )
    found = [why for value, why in reasons if value != 1 and _is(factor, value)]
    return found[0] if found else "a wrong factor"


def _is(value: float, wanted: float) -> bool:
    return abs(value - wanted) <= 1e-5 * max(1.0, abs(wanted))


def _times(factor: float) -> str:
    return f"{factor:.4g}x" if not _is(factor, round(factor)) else f"{round(factor)}.0x"
