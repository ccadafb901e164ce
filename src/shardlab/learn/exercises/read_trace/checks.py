"""Reading a trace: each answer against the trace itself, and a wrong one against known mistakes."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shardlab.learn.exercise import Case, Finding

if TYPE_CHECKING:
    from shardlab.learn.spy import Spy

CASES = (Case("questions", 1),)
QUESTIONS = (
    "STEP_MS", "LATE_RANK", "LATE_BECAUSE", "WAIT_MS", "COMM_MS", "OVERLAP_PERCENT",
    "BYTES_PER_STEP", "TOP_OPERATOR", "EXPOSED_BUCKET",
)  # fmt: skip

# What each mistake is, in the teacher's words. No answer is in them.
SAYS = {
    "counted-warm-up": "that is with step 0 counted in. The first step is warm-up: it creates the "
    "optimizer's state and learns the order of the gradients. Leave it out",
    "microseconds": "that is in microseconds, as the trace has it; asked for are milliseconds",
    "seconds": "that is in seconds; asked for are milliseconds",
    "whole-trace": "that is over several steps; asked for is one",
    "blamed-the-victim": "the rank with the long collectives is the one that waits in them. Late "
    "is the one that comes last, and whose collectives are short",
    "not-the-cause": "compare the two ranks: of this both have about as much. What does the late "
    "rank have that the other has not?",
    "wait-is-communication": "that is all the time that rank 0 spends in collectives. Most of it "
    "nothing is sent: the other rank is not there yet. Asked for is only the time until it is",
    "wrong-rank": "that is the wait of the other rank",
    "summed-intervals": "that is the sum of the durations, and collectives run at the same time on "
    "several threads: a moment with two of them counts twice. Take the union of the intervals",
    "counted-the-wait": "that is rank 0's, most of which is waiting for rank 1. Rank 1 comes last "
    "and does not wait: its collectives are transfers",
    "exposed-only": "that is only the part that nothing hides; asked for is all of it",
    "fraction-not-percent": "that is a fraction; asked for is a percentage",
    "exposed-not-hidden": "that is the part that is exposed; asked for is the part that computing "
    "hides",
    "of-the-step": "that is a part of the step; asked for is a part of the communication",
    "ranks-added": "that is both ranks together. An all-reduce is one collective, of one size, "
    "though it is in both traces",
    "elements-not-bytes": "that is the number of elements; each is a float32 of 4 bytes",
    "megabytes": "that is in megabytes; asked for are bytes",
    "not-own-time": "that operator is long because of the operators inside it. Count for each only "
    "the time in which nothing inside it runs",
    "blamed-the-wait": "on rank 0 that one is the longest: it is the first that rank 0 meets, and "
    "there it waits for rank 1. On rank 1, which waits for nobody, it is short",
    "no-bucket": "that one carries no gradients, and hardly any bytes: it waits behind the buckets",
    "another-bucket": "that one is mostly hidden behind backward. Which is sent when there is "
    "hardly anything left to compute?",
}


def run(_case: Case, _rank: int, submission: ModuleType, _spy: Spy) -> dict[str, Any]:
    answers = {}
    for name in QUESTIONS:
        value = getattr(submission, name, None)
        answers[name] = value() if callable(value) else value
    return {"answers": answers}


def judge(evidence: Mapping[str, list[dict[str, Any]]]) -> list[Finding]:
    from shardlab.learn.exercises.read_trace.answers import answers

    case = CASES[0].name
    if case not in evidence:
        return []
    given = evidence[case][0]["answers"]
    open_ = [name for name in QUESTIONS if given[name] is None]
    if len(open_) == len(QUESTIONS):
        return [
            Finding("not-done", "no question is answered yet: fill in the constants (TODO)", case)
        ]
    findings = []
    for name, answer in answers().items():
        value = given[name]
        if value is None:
            findings.append(Finding("not-done", f"{name} has no answer yet", case))
        elif not answer.matches(value, answer.right):
            cause = answer.mistake(value) or "wrong-answer"
            text = SAYS.get(cause) or "that is not what the trace says, nor a mistake that is known"
            shown = f"{value:.6g}" if isinstance(value, float) else repr(value)
            findings.append(Finding(cause, f"{name} = {shown}: {text}", case))
    return findings
