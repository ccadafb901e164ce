"""Exact resume: what was not put back, and which checkpoint survives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shardlab.learn.exercise import Case, Finding

if TYPE_CHECKING:
    from shardlab.learn.spy import Spy

Row = Mapping[str, Any]
RESUME, FEWER, MORE, FULL = "resume", "on fewer ranks", "on more ranks", "full disk"
SAVED_BY = 2  # ranks
TWICE = 1.6  # of the state's bytes, over all ranks: somebody has written what another has

CASES = (Case(RESUME, SAVED_BY), Case(FEWER, 1), Case(MORE, 3), Case(FULL, 1))


def run(case: Case, _rank: int, submission: ModuleType, spy: Spy) -> dict[str, Any]:
    from shardlab.learn.exercises.checkpoint import toy

    scenario = {RESUME: toy.resume, FULL: toy.full_disk}.get(case.name, toy.other_world)
    return scenario(submission, spy)


def judge(evidence: Mapping[str, list[dict[str, Any]]]) -> list[Finding]:
    findings: list[Finding] = []
    if ranks := evidence.get(RESUME):
        findings += [*_resumed(ranks), *_early(ranks), *_disturbs(ranks), *_written(ranks)]
        for name in (FEWER, MORE):
            if name in evidence and not findings:
                findings += _other_world(name, evidence[name], ranks[0]["wanted"])
    if FULL in evidence:
        findings += _full(
            evidence[FULL][0], forgot_model=any(f.cause == "forgot-model" for f in findings)
        )
    return findings


# ------------------------------------------------------------------ what was put back


def _resumed(ranks: Sequence[Row]) -> list[Finding]:
    """Everything that the next step depends on, against the run that was not stopped."""
    findings = [
        *_step(ranks), *_model(ranks), *_optimizer(ranks), *_loader(ranks), *_random(ranks)
    ]  # fmt: skip
    if not findings and any(row["final"] != row["wanted_final"] for row in ranks):
        message = (
            "everything is back after load, but some steps later the resumed run differs from the "
            "one that was not stopped: does what you loaded share memory with what is trained?"
        )
        findings.append(Finding("not-exact", message, RESUME))
    return findings


def _wrong(ranks: Sequence[Row], what: str) -> list[int]:
    return [r for r, row in enumerate(ranks) if row["loaded"][what] != row["wanted"][what]]


def _step(ranks: Sequence[Row]) -> list[Finding]:
    for rank, row in enumerate(ranks):
        if row["returned"] != row["wanted_step"]:
            message = (
                f"the last save was of step {row['wanted_step']}, and load returned "
                f"{row['returned']} on rank {rank}"
            )
            return [Finding("wrong-step", message, RESUME)]
    return []


def _model(ranks: Sequence[Row]) -> list[Finding]:
    if bad := _wrong(ranks, "parameters"):
        message = f"after load the parameters of rank {_list(bad)} are not those that were saved"
        return [Finding("forgot-model", message, RESUME)]
    if bad := _wrong(ranks, "buffers"):
        message = (
            f"on rank {_list(bad)} the parameters are back, the model's buffers are not: save "
            "model.state_dict(), which has both"
        )
        return [Finding("forgot-buffers", message, RESUME)]
    return []


def _optimizer(ranks: Sequence[Row]) -> list[Finding]:
    bad = _wrong(ranks, "optimizer")
    if not bad:
        return []
    if ranks[bad[0]]["loaded"]["optimizer"]:
        message = f"the optimizer's state on rank {_list(bad)} is not the one that was saved"
    else:
        message = (
            f"after load the optimizer of rank {_list(bad)} has no state: its moments and its step "
            "count begin anew. Save optimizer.state_dict()"
        )
    return [Finding("forgot-optimizer", message, RESUME)]


def _loader(ranks: Sequence[Row]) -> list[Finding]:
    bad = _wrong(ranks, "loader")
    if not bad:
        return []
    row = ranks[bad[0]]
    message = (
        f"the loader of rank {_list(bad)} goes on at {_place(row['loaded'])}, the run that was not "
        f"stopped at {_place(row['wanted'])}: samples are seen twice, or never. Save "
        "loader.state_dict()"
    )
    return [Finding("forgot-data", message, RESUME)]


def _random(ranks: Sequence[Row]) -> list[Finding]:
    bad = _wrong(ranks, "rng")
    if not bad:
        return []
    if owners := ranks[bad[0]]["rng_of"]:
        message = (
            f"rank {bad[0]} goes on with the random state of rank {owners[0]}: both now draw the "
            "same dropout masks. Save the state of every rank"
        )
        return [Finding("rng-of-another-rank", message, RESUME)]
    message = (
        f"the random state of rank {_list(bad)} is not put back: other dropout masks from here on. "
        "torch.get_rng_state(), of every rank"
    )
    return [Finding("forgot-rng", message, RESUME)]


# ------------------------------------------------------------------ what saving did


def _early(ranks: Sequence[Row]) -> list[Finding]:
    for saves in zip(*(row["saves"] for row in ranks), strict=True):
        rank, ms = max(enumerate(s["early_ms"] for s in saves), key=lambda item: item[1])
        if ms > 0:
            message = (
                f"rank {rank} returned from save {ms:.0f} ms before the checkpoint of step "
                f"{saves[0]['step']} was complete: if it loads now, it finds the one before, or "
                "none. A barrier at the end"
            )
            return [Finding("returned-early", message, RESUME)]
    return []


def _disturbs(ranks: Sequence[Row]) -> list[Finding]:
    names = sorted({name for row in ranks for save in row["saves"] for name in save["disturbs"]})
    if not names:
        return []
    message = f"saving has changed what it saves: {', '.join(names)}"
    return [Finding("save-disturbs", message, RESUME)]


def _written(ranks: Sequence[Row]) -> list[Finding]:
    written = [row["saves"][-1]["written"] for row in ranks]
    whole = ranks[0]["bytes"]
    if min(written) < 0 or sum(written) <= TWICE * whole:
        return []
    each = ", ".join(f"{size / 1000:.0f} kB (rank {rank})" for rank, size in enumerate(written))
    message = (
        f"the ranks wrote {each}, and the model with its optimizer is {whole / 1000:.0f} kB: it is "
        "the same on all ranks, and is to be written once"
    )
    return [Finding("written-by-all", message, RESUME)]


# ------------------------------------------------------------------ other ranks, no room


def _other_world(name: str, ranks: Sequence[Row], wanted: Row) -> list[Finding]:
    """A rank that has a saved random state takes it; the others keep theirs."""
    where = f"saved by {SAVED_BY} ranks and loaded by {len(ranks)}"
    for rank, row in enumerate(ranks):
        if row["error"]:
            message = (
                f"{where}: load fails on rank {rank} with {row['error']}. The model is the same on "
                "all ranks, so their number may change"
            )
            return [Finding("world-fixed", message, name)]
        for what in ("parameters", "buffers", "optimizer", "loader"):
            if row["loaded"][what] != wanted[what]:
                message = f"{where}: on rank {rank} the {what} is not what was saved"
                return [Finding("world-fixed", message, name)]
    return []


def _full(row: Row, forgot_model: bool) -> list[Finding]:
    how = "the disk was full in the middle of the second save"
    if row["load_error"]:
        message = (
            f"{how}, and now load fails with {row['load_error']}: the good checkpoint is gone. "
            "Write to a temporary file, and rename it when it is complete"
        )
        return [Finding("not-atomic", message, FULL)]
    if row["is_second"] or forgot_model:
        return []  # written in pieces that did fit; or what was loaded cannot be told
    if not row["is_first"]:
        message = (
            f"{how}, and load returned something that is neither the first checkpoint nor the "
            f"second (it says step {row['returned']})"
        )
        return [Finding("not-atomic", message, FULL)]
    if row["raised"] is None:
        message = (
            f"{how}, and save returned as if all were well: let the exception out, or nobody hears "
            "of it"
        )
        return [Finding("error-hidden", message, FULL)]
    return []


def _place(state: Row) -> str:
    return f"sample {state['loader']['position']} of epoch {state['loader']['epoch']}"


def _list(ranks: Sequence[int]) -> str:
    return " and ".join(map(str, ranks))
