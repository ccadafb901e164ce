"""The judge: from what was measured on every rank to checks with their reasons. Pure, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from shardlab import text as fmt
from shardlab import wire
from shardlab.proof import explain

Evidence = Mapping[str, Any]  # of one rank, as proof.evidence returns it
# {"pass", "claimed", "measured", "message"}. It passes with True, and fails with False; with None
# it was not checked, and the message begins with the reason.
Check = dict[str, Any]

# What padding may add to a claim in bytes. Half or twice as much would be another strategy.
STATE_TOLERANCE = 0.01
SENT_TOLERANCE = 0.02
ONE_SHAPE = "on micro-batches of one shape: it refuses a step whose shapes differ"
# What is said of the user's model, the same for every strategy.
OF_USERS = ("precision", "why_precision", "noise", "random", "within")
LATE = 0.1  # of the gradients' bytes: small ones may be sent at the end
UNMEASURED = "not measured: it did not get through"
UNCLAIMED = "the strategy names no claim"
MIXED = 2.0**-28  # more rounding than this, as a part of a gradient, is not float64's
# A tolerance that is a larger part than this of what it is for decides nothing: a micro-batch that
# is missing or counts twice may move a gradient no further.
DECIDES = 0.1


def reasons(checks: Mapping[str, Check]) -> dict[str, str]:
    """What is wrong, by check. A crash is one reason for every check."""
    wrong = {name: check["message"] for name, check in checks.items() if check["pass"] is False}
    if UNMEASURED in wrong.values():
        return {"every check": next(iter(wrong.values()))}
    return wrong


def unchecked(checks: Mapping[str, Check]) -> dict[str, str]:
    """Why something could not be checked, by check."""
    return {
        name: check["message"].partition("; ")[0]
        for name, check in checks.items()
        if check["pass"] is None
    }


def _check(passed: bool | None, claimed: Any, measured: Any, message: str) -> Check:
    return {"pass": passed, "claimed": claimed, "measured": measured, "message": message}


# ------------------------------------------------------------------ equal to one process


def equal(ranks: Sequence[Evidence]) -> Check:
    first = explain.first_difference(ranks)
    worst = max(
        (m for e in ranks for m in e["models"]), key=lambda m: m["worst"]["ulp"] / m["tolerance"]
    )
    found, users = worst["worst"], ranks[0]["models"][-1]
    of_users = max((e["models"][-1]["worst"] for e in ranks), key=lambda w: float(w["ulp"]))
    claimed = {"max_ulp": worst["tolerance"]}
    measured = {
        "max_ulp": found["ulp"],
        "where": found["where"] and f"{worst['label']}, {found['where']}",
        "first_difference": first,
        **{key: users[key] for key in OF_USERS},
        "users": {"max_ulp": of_users["ulp"], "where": of_users["where"]},
    }
    unwaited = [u for e in ranks for m in e["models"] for u in m["unwaited"]]
    waits = f"nobody waits for {unwaited[0]}" if unwaited else ""
    if first is not None:
        also = explain.also_in(ranks, first)
        message = "; ".join(part for part in (explain.explain(first), also, waits) if part)
        return _check(False, claimed, measured, message)
    if unwaited:
        return _check(False, claimed, measured, f"equal by luck: {waits}")
    steps = fmt.count(users["steps"], "step")
    of = "one process"
    if users["every"] is not None:
        of += f" that plays {len(ranks)} workers, which exchange every {users['every']} steps"
    near = "within rounding" if of_users["ulp"] and is_wide(users) else _error(ranks, -1)
    parts = [f"{near} of {of}, {steps} of {users['label']}"]
    if len(ranks[0]["models"]) > 1:
        parts[0] += f", and {_error(ranks, 0)} on {ranks[0]['models'][0]['label']}"
    parts += how(users)
    if ranks[0].get("one_shape"):
        parts.append(ONE_SHAPE)
    return _check(True, claimed, measured, "; ".join(parts))


def _error(ranks: Sequence[Evidence], number: int) -> str:
    """How far one of the models was from one process, on the rank where it was furthest."""
    ulp = max(e["models"][number]["worst"]["ulp"] for e in ranks)
    return "to the last bit" if ulp == 0 else f"within {fmt.number(ulp)} ulp"


def is_wide(model: Mapping[str, Any]) -> bool:
    """Whether its tolerance is wider than float64's, so that what it decides is to be said."""
    within = max(model["within"].values())
    return within >= DECIDES or model["noise"] > MIXED or bool(model["why_precision"])


def decided(model: Mapping[str, Any]) -> tuple[list[tuple[str, float]], list[str]]:
    """What could be judged of the user's model, and to which part of it; and what could not."""
    words = {"loss": "losses", "gradient": "gradients", "parameter": "parameters"}
    known = [(words[kind], part) for kind, part in model["within"].items() if part < DECIDES]
    return known, [words[kind] for kind, part in model["within"].items() if part >= DECIDES]


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
    if is_wide(model):
        known, unknown = decided(model)
        text = ", ".join(f"{kind} to {part:.0e}" for kind, part in known)
        text = text.replace(" to", " are judged to", 1)
        if unknown:
            text += f"; {fmt.names(unknown)} could not be judged: rounding moves them as far"
            text += " as a mistake"
        parts.append(text)
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
    parts = [f"{fmt.size(fullest[k])} of {k}" for k in ("params", "gradients", "optimizer")]
    message = f"each rank holds {', '.join(parts)}"
    if room := max(e["room"] for e in ranks):
        message += f"; PyTorch keeps {fmt.size(room)} to receive activations in"
    if ranks[0]["live"] is not None:
        kept = max(e["live"]["kept"] for e in ranks)
        message += f"; activations of {kept} micro-batches at most, as the schedule says"
    if outside > _slack(ranks[0]["full"]):
        message += f"; the model keeps {fmt.size(outside)} outside of parameters and buffers"
    if claimed is None:
        return _check(None, wanted, measured, f"{UNCLAIMED}; {message}")
    if "stack" not in ranks[0] or ranks[0]["claimed_of_stack"]["peak"] is None:
        message += "; what gradients() holds besides in the meantime is not claimed"
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


def _resident(evidence: Evidence, claim: Mapping[str, float] | None = None) -> float:
    """Bytes that the stack may hold between steps."""
    claim = claim or evidence["claimed_of_stack"]
    buffers: int = evidence["stack"]["buffers"]
    return claim["params"] + claim["optimizer"] + claim["kept"] + buffers


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
            f"between steps {fmt.size(fullest['kept'])} are held beside parameters and "
            f"optimizer state, not {fmt.size(claimed['kept'])}: gradients that are not freed?"
        )
    # What got no gradient has no optimizer state yet. What the model itself keeps may be less than
    # in one process, and its gradients those of another step.
    is_open = ranks[0]["irregular"]
    least, outside = ranks[0]["claimed_of_used"]["least"], ranks[0]["outside"]["rest"]
    for kind, name, own in (
        ("params", "the parameters", 0),
        ("optimizer", "the optimizer state", 0),
        ("gradients", "the gradients", math.inf if is_open else outside),
        ("kept", "what is kept between steps", math.inf if is_open else outside),
    ):
        held, wanted = fullest[kind], claimed[kind]
        enough = held + own >= (1 - STATE_TOLERANCE) * least[kind] - slack
        if enough and _at_most(held, wanted, slack):
            continue
        if wanted < full.get(kind, 0) and _near(held, full[kind], STATE_TOLERANCE, slack):
            verb = "are" if name.endswith("s") else "is"
            yield f"{name} on each rank {verb} full size, {fmt.size(held)}: nothing is sharded"
        yield f"{name} on the fullest rank: {fmt.size(held)}, not {fmt.size(wanted)}"
    stack = _fullest_stack(ranks)
    if stack is None:
        return
    resident, floor = _resident(ranks[0]), _slack(ranks[0]["stack"])
    least_resident = _resident(ranks[0], ranks[0]["claimed_of_stack"]["least"])
    enough = stack["resident"] >= (1 - STATE_TOLERANCE) * least_resident - floor
    if not enough or not _at_most(stack["resident"], resident, floor):
        yield (
            f"on the stack {fmt.size(stack['resident'])} are held between steps, not "
            f"{fmt.size(resident)}"
        )
    allowed = ranks[0]["claimed_of_stack"]["peak"]
    if allowed is not None and stack["peak"] > allowed:
        yield _too_high(ranks, stack["peak"], allowed)


def _too_high(ranks: Sequence[Evidence], peak: int, allowed: float) -> str:
    """A peak during gradients(), and whether it came with the parameters or the gradients."""
    text = (
        f"gradients() holds {fmt.size(peak)} beyond what is there between steps, "
        f"more than {fmt.size(allowed)}"
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
        measured["axes"] = [e["axes"] for e in ranks]
    found = [missed for e in ranks for missed in _missent(e)] if claimed is not None else []
    if claimed is not None and first["sends_claimed"]:
        found += [
            (is_wrong, f"{_of_stack(step['step'])}, {text}")
            for e in ranks
            for step in e.get("sent_of_stack", ())
            for is_wrong, text in _missent(step)
        ]
    problem = next((text for is_wrong, text in found if is_wrong), None)
    if problem is not None and first["sends_claimed"]:
        return _check(False, claimed, measured, problem)
    parts = [
        f"{op} {fmt.size(s['bytes'] + s['small_bytes'])} in {fmt.count(s['messages'], 'message')}"
        for op, s in first["sent"].items()
        if s["messages"]
    ]
    by_whom = "rank 0" if first["mesh"] else "each rank"
    per_step = f"{', '.join(parts) or 'nothing'} sent by {by_whom} in a step"
    if (why := _why_unjudged(ranks, found)) is not None:
        return _check(None, claimed, measured, f"{why}; {per_step}")
    return _check(True, claimed, measured, per_step)


def _why_unjudged(ranks: Sequence[Evidence], missed: Sequence[tuple[bool, str]]) -> str | None:
    """Why something of what is sent was compared with nothing; None: all of it was compared."""
    if ranks[0]["claimed"] is None:
        return UNCLAIMED
    if not ranks[0]["sends_claimed"]:
        return "PyTorch's own code sends, and nobody can tell to which ranks"
    if any(e["axes"] for e in ranks):
        return "prove does not judge what the axes send"
    return next((text for _, text in missed), None)


def _of_stack(step: int | None) -> str:
    return "on the stack" if step is None else f"on the stack, from step {step} on"


def _missent(evidence: Evidence) -> Iterator[tuple[bool, str]]:
    """What is not as claimed, and whether that is wrong: of a model that uses some of its parts
    now and then, or several times, it may be right."""
    claimed, full, used = evidence["claimed"], evidence["full"], evidence["claimed_of_used"]
    nothing = {"bytes": 0.0, "messages": 0, "small_bytes": 0.0}
    for op in dict.fromkeys((*claimed["moved"], *evidence["sent_of_data"])):
        found, wanted = evidence["sent_of_data"].get(op, nothing), claimed["moved"].get(op, 0.0)
        # A small message may be a gradient or a count: the claim may lie anywhere between.
        low, high = found["bytes"], found["bytes"] + found["small_bytes"]
        slack = 8 * evidence["ranks"] * max(1, found["messages"])  # padding
        if op == "broadcast":  # buffers, in each step
            slack += wire.wire_bytes(op, full["buffers"], evidence["ranks"])
        margin = SENT_TOLERANCE * wanted + slack
        # Counts, losses, and a flag of each parameter and of each that is planned for it.
        told = evidence["micro"] * (128 + 32 * full["tensors"])
        if evidence["irregular"]:  # then ranks may tell each other of every single use
            told = math.inf
        least = used["moved"].get(op, wanted)
        is_enough = high >= least - margin
        if is_enough and high <= wanted + margin + told and low <= wanted + margin:
            continue
        most = claimed["most"].get(op, wanted)
        is_open = evidence["irregular"] or most > wanted
        most *= claimed["if_irregular"] if evidence["irregular"] else 1.0
        if is_open and is_enough and low <= most + margin:
            yield (
                False,
                f"{_how_missent(op, high, wanted, evidence)}; that may be right, as it is not "
                "known how often a forward uses each layer",
            )
        else:
            yield True, _how_missent(op, high, wanted, evidence)


def _how_missent(op: str, found: float, wanted: float, evidence: Evidence) -> str:
    micro = evidence["micro"]
    if not found:
        others = [o for o, s in evidence["sent_of_data"].items() if s["messages"] and o != op]
        instead = fmt.names(others or ["nothing"])
        return f"no {op} was sent, {fmt.size(wanted)} are claimed; sent: {instead}"
    if not wanted:
        return f"{fmt.size(found)} of {op} were sent, of which nothing is claimed"
    text = f"{op} sent {fmt.size(found)} per rank and step, {found / wanted:.2f}x the claim"
    if micro > 1 and _near(found / wanted, micro, SENT_TOLERANCE):
        return f"{text}: it communicates in each of the {micro} micro-batches, not once"
    if micro > 1 and _near(found / wanted, 1 / micro, SENT_TOLERANCE):
        return f"{text}: it communicates once, not in each of the {micro} micro-batches"
    return text


# ------------------------------------------------------------------ overlaps as it claims


def overlap(ranks: Sequence[Evidence]) -> Check:
    if "overlap" not in ranks[0]:
        return _check(None, None, None, "not watched: the stack cannot be cut like this")
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
            text += f", {fmt.number(measured['exposed_ms'])} ms of sending came after"
    if claimed == "none" and share:
        return _check(False, claimed, measured, f"no overlap is claimed, but {text}")
    if claimed == "some" and not share and len(ranks) > 1:
        return _check(False, claimed, measured, f"overlap is claimed, but {text}")
    if claimed == "some" and (late := _late(e["overlap"] for e in ranks)) > LATE:
        text = f"overlap is claimed, but {late:.0%} of the gradients' bytes wait for the last one"
        return _check(False, claimed, measured, text)
    if (why := _why_unseen(ranks, claimed)) is not None:
        return _check(None, claimed, measured, f"{why}; {text}")
    return _check(True, claimed, measured, text)


def _late(found: Iterable[Mapping[str, Any]]) -> float:
    """The part of the gradients that some rank launched when backward had made its last one, less
    one message: a bucket that waits for that gradient is right."""
    seen = [f for f in found if f.get("ahead") is not None]
    return max((1 - f["ahead"] - f.get("largest", 0.0) for f in seen), default=0.0)


def _why_unseen(ranks: Sequence[Evidence], claimed: str | None) -> str | None:
    """Why nothing can be said of when gradients were sent; None: something can."""
    if ranks[0]["mesh"]:
        return "prove does not judge when ranks that cut a model send"
    if claimed is None:
        return UNCLAIMED
    if any(e["overlap"]["share"] is None and e["overlap"]["messages"] for e in ranks):
        return "it does not call torch's backward"
    if claimed == "some" and len(ranks) == 1:
        return "a single rank has nobody to send to"
    if claimed == "some" and any(e["overlap"].get("largest", 0.0) > 0.5 for e in ranks):
        return "most gradients are in one message, as its size was asked for"
    return None


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
    if not count:
        return _check(None, True, measured, "there was nothing to compare")
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
    """Nothing that was checked is wrong."""
    return all(check["pass"] is not False for check in checks.values())
