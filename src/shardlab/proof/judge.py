"""The judge: from what was measured on every rank to checks with their reasons. Pure, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardlab import numbers
from shardlab.proof import explain

Evidence = Mapping[str, Any]  # of one rank, as proof.evidence returns it
Check = dict[str, Any]  # {"pass", "claimed", "measured", "message"}

# What padding may add to a claim in bytes. Half or twice as much would be another strategy.
STATE_TOLERANCE = 0.01
SENT_TOLERANCE = 0.02
ONE_SHAPE = "on micro-batches of one shape: it refuses a step whose shapes differ"
UNMEASURED = "not measured: it did not get through"
MIXED = 2.0**-28  # more rounding than this, as a part of a gradient, is not float64's


def reasons(checks: Mapping[str, Check]) -> dict[str, str]:
    """What is wrong, by check. A crash is one reason for every check."""
    wrong = {name: check["message"] for name, check in checks.items() if not check["pass"]}
    if UNMEASURED in wrong.values():
        return {"every check": next(iter(wrong.values()))}
    return wrong


def _check(passed: bool, claimed: Any, measured: Any, message: str) -> Check:
    return {"pass": passed, "claimed": claimed, "measured": measured, "message": message}


# ------------------------------------------------------------------ equal to one process


def equal(ranks: Sequence[Evidence]) -> Check:
    first = explain.first_difference(ranks)
    worst = max(
        (m for e in ranks for m in e["models"]), key=lambda m: m["worst"]["ulp"] / m["tolerance"]
    )
    found, users = worst["worst"], ranks[0]["models"][-1]
    claimed = {"max_ulp": worst["tolerance"]}
    measured = {
        "max_ulp": found["ulp"],
        "where": found["where"] and f"{worst['label']}, {found['where']}",
        "first_difference": first,
        **{key: users[key] for key in ("precision", "why_precision", "noise", "random")},
    }
    unwaited = [u for e in ranks for m in e["models"] for u in m["unwaited"]]
    waits = f"nobody waits for {unwaited[0]}" if unwaited else ""
    if first is not None:
        also = explain.also_in(ranks, first)
        message = "; ".join(part for part in (explain.explain(first), also, waits) if part)
        return _check(False, claimed, measured, message)
    if unwaited:
        return _check(False, claimed, measured, f"equal by luck: {waits}")
    models = numbers.names([m["label"] for m in ranks[0]["models"]])
    steps = numbers.count(ranks[0]["models"][0]["steps"], "step")
    error = "to the last bit" if found["ulp"] == 0 else f"within {numbers.number(found['ulp'])} ulp"
    of = "one process"
    if users["every"] is not None:
        of += f" that plays {len(ranks)} workers, which exchange every {users['every']} steps"
    parts = [f"{error} of {of}, {steps} of {models}", *how(users)]
    if ranks[0].get("one_shape"):
        parts.append(ONE_SHAPE)
    return _check(True, claimed, measured, "; ".join(parts))


def how(model: Mapping[str, Any]) -> list[str]:
    """What had to be done to compare the user's model at all, and is to be known."""
    parts = []
    if model["random"] != "none":
        parts.append(f"random forward: {model['random']} in both")
    if model["why_precision"]:
        parts.append(f"in {model['precision']}: {model['why_precision']}")
    elif model["noise"] > MIXED:
        parts.append(
            f"the model computes in less than float64: one process differs from itself by "
            f"{model['noise']:.0e} of a gradient when it adds up in another order, and so may this"
        )
    return parts


# ------------------------------------------------------------------ holds what it claims


def state(ranks: Sequence[Evidence]) -> Check:
    claimed = ranks[0]["claimed"]
    kinds = ("params", "gradients", "optimizer", "kept")
    own = [_without_outside(e) for e in ranks]
    fullest = {kind: max(held[kind] for held in own) for kind in kinds}
    outside = max(e["outside"]["params"] + e["outside"]["rest"] for e in ranks)
    measured = {
        **fullest,
        "stack": _fullest_stack(ranks),
        "replicated": ranks[0]["replica"] is not None,
        "outside": outside,
        "ranks": own,
        "live": [e["live"] and e["live"]["kept"] for e in ranks],
    }
    wanted = claimed and {
        **{kind: claimed[kind] for kind in kinds},
        "stack": "stack" in ranks[0]
        and {"resident": _resident(ranks[0]), "peak": ranks[0]["claimed_of_stack"]["peak"]},
    }
    problem = _ranks_disagree(ranks)
    problem = problem or next(_too_many_live(ranks), None)
    if problem is None and claimed is not None and ranks[0]["mesh"]:  # each has a part of its own
        found = zip(ranks, own, strict=True)
        problem = next((p for e, held in found for p in _misheld([e], held)), None)
    elif problem is None and claimed is not None:
        problem = next(_misheld(ranks, fullest), None)
    if problem is not None:
        return _check(False, wanted, measured, problem)
    parts = [f"{numbers.size(fullest[k])} of {k}" for k in ("params", "gradients", "optimizer")]
    message = f"each rank holds {', '.join(parts)}"
    if room := max(e["room"] for e in ranks):
        message += f"; PyTorch keeps {numbers.size(room)} to receive activations in"
    if ranks[0]["live"] is not None:
        kept = max(e["live"]["kept"] for e in ranks)
        message += f"; activations of {kept} micro-batches at most, as the schedule says"
    if outside > _slack(ranks[0]["full"]):
        message += f"; the model keeps {numbers.size(outside)} outside of parameters and buffers"
    return _check(True, wanted, measured, message)


def _too_many_live(ranks: Sequence[Evidence]) -> Iterator[str]:
    for rank, evidence in enumerate(ranks):
        live = evidence["live"]
        if live is not None and live["kept"] != live["claimed"]:
            yield (
                f"rank {rank} keeps the activations of {live['kept']} micro-batches at a time; "
                f"{live['schedule']} says {live['claimed']}"
            )


def _fullest_stack(ranks: Sequence[Evidence]) -> dict[str, int] | None:
    """The most that a rank held on the stack; None where there is none."""
    if "stack" not in ranks[0]:
        return None
    return {kind: max(e["stack"][kind] for e in ranks) for kind in ("resident", "peak")}


def _without_outside(evidence: Evidence) -> dict[str, int]:
    """What is held, less what a plain process's model keeps beside its parameters and buffers."""
    outside = evidence["outside"]
    less = {"params": outside["params"], "gradients": outside["rest"], "kept": outside["rest"]}
    return {kind: max(0, size - less.get(kind, 0)) for kind, size in evidence["held"].items()}


def _resident(evidence: Evidence) -> float:
    """Bytes that the stack may hold between steps."""
    claim, buffers = evidence["claimed_of_stack"], evidence["stack"]["buffers"]
    total: float = claim["params"] + claim["optimizer"] + claim["kept"] + buffers
    return total


def _ranks_disagree(ranks: Sequence[Evidence]) -> str | None:
    for models in zip(*(e["models"] for e in ranks), strict=True):
        for place, digest in models[0]["digests"].items():
            for rank, model in enumerate(models):
                if model["digests"].get(place) != digest:
                    where = f"{model['label']}, {place}"
                    return f"ranks 0 and {rank} do not have the same: {where}"
    if len({e["replica"] for e in ranks}) > 1:
        return "the replicas that the ranks compute with are not bitwise equal"
    return None


def _misheld(ranks: Sequence[Evidence], fullest: Mapping[str, int]) -> Iterator[str]:
    claimed, full = ranks[0]["claimed"], ranks[0]["full"]
    slack = _slack(full) + ranks[0]["room"]
    if not _at_most(fullest["kept"], claimed["kept"], slack):
        yield (
            f"between steps {numbers.size(fullest['kept'])} are held beside parameters and "
            f"optimizer state, not {numbers.size(claimed['kept'])}: gradients that are not freed?"
        )
    # Gradients may be gone already, and what got no gradient has no optimizer state yet.
    for kind, name, least in (
        ("params", "the parameters", claimed["params"]),
        ("optimizer", "the optimizer state", ranks[0]["claimed_of_used"]["least_optimizer"]),
        ("gradients", "the gradients", 0.0),
    ):
        held, wanted = fullest[kind], claimed[kind]
        enough = held >= (1 - STATE_TOLERANCE) * least - slack
        if enough and _at_most(held, wanted, slack):
            continue
        if wanted < full[kind] and _near(held, full[kind], STATE_TOLERANCE, slack):
            verb = "are" if name.endswith("s") else "is"
            yield f"{name} on each rank {verb} full size, {numbers.size(held)}: nothing is sharded"
        yield f"{name} on the fullest rank: {numbers.size(held)}, not {numbers.size(wanted)}"
    stack = _fullest_stack(ranks)
    if stack is None:
        return
    resident = _resident(ranks[0])
    if not _at_most(stack["resident"], resident, _slack(ranks[0]["stack"])):
        yield (
            f"on the stack {numbers.size(stack['resident'])} are held between steps, not "
            f"{numbers.size(resident)}"
        )
    allowed = ranks[0]["claimed_of_stack"]["peak"]
    if allowed is not None and stack["peak"] > allowed:
        yield _too_high(ranks, stack["peak"], allowed)


def _too_high(ranks: Sequence[Evidence], peak: int, allowed: float) -> str:
    """A peak during gradients(), and whether it came with the parameters or the gradients."""
    text = (
        f"gradients() holds {numbers.size(peak)} beyond what is there between steps, "
        f"more than {numbers.size(allowed)}"
    )
    in_forward = max(e["stack"]["forward_peak"] or 0 for e in ranks)
    if in_forward > 0.9 * ranks[0]["stack"]["params"]:
        return f"{text}: it gathers the whole model for forward"
    return f"{text}: full gradients are kept until backward ends"


def _slack(full: Mapping[str, float]) -> float:
    """Small things beside the tensors themselves: Adam's step of each, a loss, a count."""
    return 512 + 64 * full["tensors"]


def _at_most(value: float, wanted: float, slack: float) -> bool:
    return value <= (1 + STATE_TOLERANCE) * wanted + slack


def _near(value: float, wanted: float, share: float, slack: float = 0.0) -> bool:
    return abs(value - wanted) <= share * wanted + slack


# ------------------------------------------------------------------ sends what it claims


def sent(ranks: Sequence[Evidence]) -> Check:
    first = ranks[0]
    claimed = None if first["claimed"] is None else first["claimed"]["moved"]
    measured = {"source": first["source"], **first["sent"]}
    for rank, evidence in enumerate(ranks):
        if evidence["sent"] != first["sent"] and not first["mesh"]:
            message = f"ranks 0 and {rank} do not send the same collectives"
            return _check(False, claimed, measured, message)
    if first["axes"] is not None:
        measured["axes"] = [e["axes"]["sent"] for e in ranks]
        claimed = {**(claimed or {}), "axes": [e["axes"]["claimed"] for e in ranks]}
    is_claimed = first["claimed"] is not None and first["sends_claimed"]
    problem = next(_missent_on_axes(ranks), None)
    if problem is None and is_claimed:
        problem = next((p for e in ranks for p in _missent(e)), None)
    if problem is not None:
        return _check(False, claimed, measured, problem)
    parts = [
        f"{op} {numbers.size(s['bytes'] + s['small_bytes'])} in "
        f"{numbers.count(s['messages'], 'message')}"
        for op, s in first["sent"].items()
        if s["messages"]
    ]
    by_whom = "rank 0" if first["mesh"] else "each rank"
    per_step = f"{', '.join(parts) or 'nothing'} sent by {by_whom} in a step"
    if first["axes"] is not None and first["axes"]["claimed"] is None:
        per_step += f"; of the axes' there is no claim: {first['axes']['why']}"
    elif first["axes"] is not None:
        sums = [f"{key} {_messages(*found)}" for key, found in first["axes"]["sent"].items()]
        per_step += f"; of it, exactly as claimed, {', '.join(sums) or 'nothing'}"
    return _check(True, claimed, measured, per_step)


def _missent_on_axes(ranks: Sequence[Evidence]) -> Iterator[str]:
    """Ranks that cut a model send what one process's shapes say, to the byte."""
    for rank, evidence in enumerate(ranks):
        axes = evidence["axes"]
        if axes is None or axes["claimed"] is None:
            continue
        for key in dict.fromkeys((*axes["claimed"], *axes["sent"])):
            found, wanted = axes["sent"].get(key, (0, 0)), axes["claimed"].get(key, (0, 0))
            if tuple(found) != tuple(wanted):
                yield (
                    f"rank {rank} sent {_messages(*found)} by {key.replace(' ', ' axis, ')} in a "
                    f"step; by one process's shapes there are {_messages(*wanted)}"
                )


def _messages(messages: int, size: int) -> str:
    exact = f"{size:,} bytes" if size < 2**20 else f"{numbers.size(size)} ({size:,} bytes)"
    return f"{exact} in {numbers.count(messages, 'message')}"


def _missent(evidence: Evidence) -> Iterator[str]:
    claimed, full = evidence["claimed"]["moved"], evidence["full"]
    of_used = evidence["claimed_of_used"]["moved"]
    nothing = {"bytes": 0.0, "messages": 0, "small_bytes": 0.0}
    for op in dict.fromkeys((*claimed, *evidence["sent_of_data"])):
        found, wanted = evidence["sent_of_data"].get(op, nothing), claimed.get(op, 0.0)
        # A small message may be a gradient or a count: the claim may lie anywhere between.
        low, high = found["bytes"], found["bytes"] + found["small_bytes"]
        slack = 8 * evidence["ranks"] * max(1, found["messages"])  # padding
        if op == "broadcast":  # buffers, in each forward at most
            slack += evidence["micro"] * full["buffers"]
        margin = SENT_TOLERANCE * wanted + slack
        # What is not used in every micro-batch may be sent, or not.
        most = evidence["claimed"]["most"].get(op, wanted) * (
            evidence["claimed"]["if_irregular"] if evidence["irregular"] else 1.0
        )
        if low <= most + margin and high >= of_used.get(op, wanted) - margin:
            continue
        yield _how_missent(op, high, wanted, evidence)


def _how_missent(op: str, found: float, wanted: float, evidence: Evidence) -> str:
    micro = evidence["micro"]
    if not found:
        others = [o for o, s in evidence["sent_of_data"].items() if s["messages"] and o != op]
        instead = numbers.names(others or ["nothing"])
        return f"no {op} was sent, {numbers.size(wanted)} are claimed; sent: {instead}"
    if not wanted:
        return f"{numbers.size(found)} of {op} were sent, of which nothing is claimed"
    text = f"{op} sent {numbers.size(found)} per rank and step, {found / wanted:.2f}x the claim"
    if micro > 1 and _near(found / wanted, micro, SENT_TOLERANCE):
        return f"{text}: it communicates in each of the {micro} micro-batches, not once"
    if micro > 1 and _near(found / wanted, 1 / micro, SENT_TOLERANCE):
        return f"{text}: it communicates once, not in each of the {micro} micro-batches"
    return text


# ------------------------------------------------------------------ overlaps as it claims


def overlap(ranks: Sequence[Evidence]) -> Check:
    if "overlap" not in ranks[0]:
        return _check(True, None, None, "not watched: the stack cannot be cut like this")
    is_claimed = ranks[0]["claimed"] is not None and not ranks[0]["mesh"]
    claimed = ranks[0]["claimed"]["overlap"] if is_claimed else None
    worst = max if claimed == "none" else min
    measured = worst((e["overlap"] for e in ranks), key=lambda found: found["share"] or 0.0)
    share = measured["share"]
    if share is None:
        text = "backward was not seen" if measured["messages"] else "no gradients were sent"
    elif measured.get("of_workers"):
        text = f"{share:.0%} of what workers exchange was still on its way when its step had ended"
    else:
        text = f"{share:.0%} of the gradients' bytes launched before backward ended"
        if measured["exposed_ms"] is not None:
            text += f", {numbers.number(measured['exposed_ms'])} ms of sending came after"
    if claimed == "none" and share:
        return _check(False, claimed, measured, f"no overlap is claimed, but {text}")
    if claimed == "some" and not share and len(ranks) > 1:
        return _check(False, claimed, measured, f"overlap is claimed, but {text}")
    return _check(True, claimed, measured, text)


# ------------------------------------------------------------------ twice the same


def reproducible(ranks: Sequence[Evidence]) -> Check:
    changed = [
        (m["label"], m["changed"], rank)
        for rank, e in enumerate(ranks)
        for m in e["models"]
        if m["changed"] is not None
    ]
    count = sum(m["compared"] for m in ranks[0]["models"])
    measured = {"bitwise_equal": not changed, "tensors": count}
    if changed:
        label, place, rank = changed[0]
        message = (
            f"two runs differ, first in {label}, {place} on rank {rank}: "
            "something random, or read before it is there"
        )
        return _check(False, True, {**measured, "first": f"{label}, {place}"}, message)
    return _check(True, True, measured, f"two runs agree in every bit of {count} tensors")


# ------------------------------------------------------------------ all five

CHECKS = {
    "equal": equal,
    "state": state,
    "bytes": sent,
    "overlap": overlap,
    "reproducible": reproducible,
}


def judge(ranks: Sequence[Evidence]) -> dict[str, Check]:
    """The five checks of one strategy in one world."""
    return {name: check(ranks) for name, check in CHECKS.items()}


def failed(reason: str) -> dict[str, Check]:
    """The checks of a strategy that did not get through: the reason stands in the first."""
    messages = [reason] + [UNMEASURED] * (len(CHECKS) - 1)
    return {
        name: _check(False, None, None, message)
        for name, message in zip(CHECKS, messages, strict=True)
    }


def passes(checks: Mapping[str, Check]) -> bool:
    return all(check["pass"] for check in checks.values())
