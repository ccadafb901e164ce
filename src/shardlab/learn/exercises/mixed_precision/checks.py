"""Loss scaling: which step was the first to go wrong, and by which mistake."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shardlab.learn.exercise import Case, Finding

if TYPE_CHECKING:
    from shardlab.learn.spy import Spy

TOLERANCE = 1e-5  # of a step's update: in fp32, and the scale is a power of two
OVERFLOW = 0.0  # in place of a gradient's size: see toy.batch

CASES = (
    Case("large gradients", 2, {"scale": 1024.0, "growth_interval": 100, "clip_norm": 0.1,
                                "lr": 1.0, "steps": [[8.0, 0.5], [1.0, 6.0]]}),
    # Gradients of 1e-8 are 0 in fp16. The learning rate makes their update visible in fp32.
    Case("tiny gradients", 2, {"scale": 65536.0, "growth_interval": 100, "clip_norm": 1.0,
                               "lr": 1e6, "steps": [[2e-7, 1e-7]]}),
    Case("overflow on one rank", 2, {"scale": 65536.0, "growth_interval": 100, "clip_norm": 10.0,
                                     "lr": 0.1, "steps": [[0.5, 0.3], [0.4, OVERFLOW], [0.3, 0.4],
                                                          [OVERFLOW, 0.4], [0.2, 0.1]]}),
    Case("the scale's course", 2, {"scale": 1024.0, "growth_interval": 3, "clip_norm": 10.0,
                                   "lr": 0.1, "steps": [[0.5, 0.3], [0.3, 0.4], [0.4, OVERFLOW],
                                                        [0.3, 0.4], [0.2, 0.1], [0.3, 0.1],
                                                        [0.1, 0.3], [0.2, 0.3], [0.3, 0.2],
                                                        [0.1, 0.2]]}),
)  # fmt: skip

SAYS = {
    "not-averaged": "the gradients are {n}.0x the mean on {n} ranks: all_reduce sums; divide by "
    "the world size",
    "not-communicated": "each rank has updated with its own gradient: the gradients must be "
    "averaged over the ranks first",
    "not-unscaled": "the gradients reach the optimizer {scale:g} times too large (or are clipped "
    "as if they were): divide them by the scale after backward",
    "clipped-before-unscaling": "the update is {scale:g} times too small: you clip the scaled "
    "gradient, whose norm is {scale:g} times too large, and divide by the scale afterwards. "
    "Unscale first, then clip",
    "clipped-locally": "each rank clips its own gradient before the average: the norm that counts "
    "is that of the averaged gradient, and it is smaller",
    "not-clipped": "the gradient is larger than clip_norm and is not clipped",
    "unscaled-twice": "the gradients are divided by the scale twice",
    "not-scaled": "the gradients are those of the unscaled loss: in fp16 the small ones are 0 "
    "now. Multiply the loss by self.scale before backward",
    "not-scaled-but-unscaled": "the gradients are divided by the scale, but the loss was not "
    "multiplied by it before backward",
    "gradients-kept": "the gradient of the step before is still in .grad, and backward adds to it: "
    "optimizer.zero_grad() before backward",
}


def run(case: Case, rank: int, submission: ModuleType, _spy: Spy) -> dict[str, Any]:
    from shardlab.learn.exercises.mixed_precision import toy

    return toy.run(case, rank, submission)


def judge(evidence: Mapping[str, list[dict[str, Any]]]) -> list[Finding]:
    """Each case up to its first wrong step: what comes after follows from it."""
    findings: list[Finding] = []
    for case in CASES:
        if case.name not in evidence:
            continue
        ranks = [e["steps"] for e in evidence[case.name]]
        scale = case.options["scale"]
        for i, rows in enumerate(zip(*ranks, strict=True)):
            found = _judge_step(rows, scale, [r[i - 1]["expected"] for r in ranks] if i else None)
            if found is not None:
                cause, text = found
                findings.append(Finding(cause, f"step {i + 1}: {text}", case.name))
                break
            scale = rows[0]["expected"]["scale"]
    return list({f.cause: f for f in reversed(findings)}.values())[::-1]


def _judge_step(
    rows: Sequence[Mapping[str, Any]], scale: float, previous: Sequence[Mapping[str, Any]] | None
) -> tuple[str, str] | None:
    """(cause, message) of the first thing that is wrong. ``scale``: before the step."""
    expected = rows[0]["expected"]
    for rank, row in enumerate(rows):
        if row["dtypes"] != ["float32"]:
            return "weights-not-fp32", (
                f"the model's parameters are {', '.join(row['dtypes'])}: autocast computes in fp16 "
                "by itself, and the weights must stay float32, or small updates are lost"
            )
        if row["others_moved"]:
            return "changed-others", (
                f"on rank {rank} a frozen or unused parameter has changed: it has no gradient"
            )
    over = expected["overflows"]
    if over:
        return _judge_skip(rows, scale, over)
    return _judge_update(rows, scale, bool(previous and previous[0]["overflows"]))


def _judge_skip(
    rows: Sequence[Mapping[str, Any]], scale: float, over: Sequence[int]
) -> tuple[str, str] | None:
    where = f"the gradients overflow on rank {over[0]}"
    broken = [r for r, row in enumerate(rows) if not _finite(row["params"])]
    if broken:
        return "not-skipped", (
            f"{where}, and the parameters of rank {_ranks(broken)} are now inf or nan: the step "
            "must be skipped on every rank. Look at the gradients after the all-reduce: then all "
            "ranks see the same"
        )
    moved = [r for r, row in enumerate(rows) if row["params"] != row["start"]]
    if moved and all(
        _near(
            rows[r]["params"], rows[r]["expected"]["moved_by_zeros"], rows[r]["expected"]["before"]
        )
        for r in moved
    ):
        return "moved-on-skip", (
            f"{where}; you skip, but the parameters have moved: optimizer.step() with zero "
            "gradients still applies momentum. Do not call it"
        )
    if moved and len(moved) < len(rows):
        stayed = [r for r in range(len(rows)) if r not in moved]
        return "ranks-disagree", (
            f"{where}: rank {_ranks(stayed)} skipped the step and rank {_ranks(moved)} took it, so "
            "the ranks no longer hold the same model. Decide from something that all ranks share: "
            "the averaged gradient, or a flag that was all-reduced"
        )
    if moved:
        return (
            "not-skipped",
            f"{where}, and no rank skipped the step: its gradient is not to be used",
        )
    scales = [row["scale"] for row in rows]
    if len(set(scales)) > 1:
        return "ranks-disagree", f"{where}: the ranks now have different scales, {_list(scales)}"
    for row in rows:
        if row["returned"] is not False:
            return (
                "wrong-return",
                f"{where} and the step is skipped: return False, not {row['returned']}",
            )
    if scales[0] != scale / 2:
        if scales[0] == scale:
            return "scale-not-reduced", (
                f"{where} and the step is skipped, but the scale is still {scale:g}: without "
                f"halving it to {scale / 2:g} the next step overflows again"
            )
        return (
            "scale-wrong",
            f"{where}: the scale should be halved to {scale / 2:g}, it is {scales[0]}",
        )
    return None


def _judge_update(
    rows: Sequence[Mapping[str, Any]], scale: float, after_skip: bool
) -> tuple[str, str] | None:
    n = len(rows)
    if any(not _finite(row["params"]) for row in rows):
        return "not-finite", "the parameters are inf or nan, though no gradient overflows"
    wrong = [r for r, row in enumerate(rows) if not _is_right(row)]
    if wrong:
        row = rows[wrong[0]]
        if row["params"] == row["start"] and row["returned"] is False:
            if after_skip:
                return "gradients-kept", (
                    "no gradient overflows, but the step was skipped: the inf of the step before "
                    "is still in .grad, and backward adds to it. optimizer.zero_grad() before "
                    "backward"
                )
            return "skipped-needlessly", "no gradient overflows, but the parameters did not change"
        for cause, text in SAYS.items():
            if all(_is_mistake(rows[r], cause) for r in wrong):
                return cause, text.format(n=n, scale=scale)
        if len({tuple(row["params"]) for row in rows}) > 1:
            return "ranks-disagree", "the ranks hold different parameters after this step"
        return "wrong-update", (
            f"the parameters are off by {_distance(row):.2g} of the update that one process makes "
            "of both ranks' samples"
        )
    scales = [row["scale"] for row in rows]
    right = rows[0]["expected"]["scale"]
    for row in rows:
        if row["returned"] is not True:
            return "wrong-return", f"the step was taken: return True, not {row['returned']}"
    if set(scales) != {right}:
        return _judge_scale(scales, scale, right)
    return None


def _judge_scale(scales: Sequence[Any], before: float, right: float) -> tuple[str, str]:
    if right > before and scales[0] == before:
        return "scale-not-grown", (
            f"growth_interval good steps in a row are done, and the scale is still {before:g}: "
            f"double it to {right:g}"
        )
    if right == before and scales[0] == 2 * before:
        return "skip-not-counted", (
            f"the scale has grown to {scales[0]:g} too early: a skipped step starts the count of "
            "good steps anew"
        )
    return "scale-wrong", f"the scale should be {right:g} after this step, it is {_list(scales)}"


# ------------------------------------------------------------------ numbers


def _finite(values: Sequence[float]) -> bool:
    return all(math.isfinite(v) for v in values)


def _near(values: Sequence[float], wanted: Sequence[float], before: Sequence[float]) -> bool:
    """Within the tolerance of the step's length, and of what float32 can tell."""
    length = math.dist(wanted, before)
    rounding = 1e-7 * math.hypot(*wanted)
    return _finite(wanted) and math.dist(values, wanted) <= TOLERANCE * length + rounding


def _is_right(row: Mapping[str, Any]) -> bool:
    return _near(row["params"], row["expected"]["params"], row["expected"]["before"])


def _is_mistake(row: Mapping[str, Any], cause: str) -> bool:
    wanted = row["expected"]["mistakes"].get(cause)
    return wanted is not None and _near(row["params"], wanted, row["expected"]["before"])


def _distance(row: Mapping[str, Any]) -> float:
    expected = row["expected"]
    return math.dist(row["params"], expected["params"]) / math.dist(
        expected["params"], expected["before"]
    )


def _ranks(numbers: Sequence[int]) -> str:
    return " and ".join(map(str, numbers))


def _list(values: Sequence[Any]) -> str:
    return ", ".join(f"{v:g} on rank {r}" if isinstance(v, float) else f"{v} on rank {r}"
                     for r, v in enumerate(values))  # fmt: skip
