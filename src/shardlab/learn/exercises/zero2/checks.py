"""ZeRO-2: one process's update, with no more full gradients alive than a parameter or two."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from shardlab.learn import mistakes, mistakes_sharded, sharded
from shardlab.learn.exercise import Case, Evidence, Finding
from shardlab.learn.spy import Spy

CASES = (
    Case("SGD", 2, {"kind": "sgd", "micros": 1}),
    Case("SGD, three micro-batches", 2, {"kind": "sgd", "micros": 3}),
    Case("AdamW, three ranks", 3, {"kind": "adamw", "micros": 2}),
    Case("memory", 2),
)
STEPS = 2
DEPTH = 14  # layers of the model that is weighed


def run(case: Case, rank: int, submission: ModuleType, spy: Spy) -> dict[str, Any]:
    if case.name == "memory":
        return weigh(rank, submission, spy)
    kind = case.options["kind"]
    model = sharded.build(sharded.Frozen)
    single = sharded.Single(model, kind)
    factory = sharded.Factory(kind)
    spy.watch(model)
    zero = submission.Zero2(model, factory)
    subject = sharded.Subject(
        zero, model.forward, lambda: sharded.trained(model), model, factory, True
    )
    return sharded.train(subject, single, spy, rank, case.world, STEPS, case.options["micros"])


def weigh(rank: int, submission: ModuleType, spy: Spy) -> dict[str, Any]:
    """Bytes beyond those at the beginning of a step: the most in a backward, and after it."""
    weigher = sharded.Weigher()
    with weigher:
        model = sharded.build(lambda: sharded.wide(DEPTH))
        zero = submission.Zero2(model, sharded.Factory("adamw"))
    peaks, kept, idle = [], [], []
    for step in range(2):
        start = weigher.count()
        most = after = 0
        for micro in range(2):
            x, y = sharded.batch(rank, step, micro, rows=1, into=48, out=48)
            before = weigher.count() - start

            def backward(x: Any = x, y: Any = y, micro: int = micro) -> None:
                loss = sharded.loss(model(x), (x, y)) / 2
                spy.mark(f"micro {micro}")
                loss.backward()

            _, peak, more = weigher.measure(backward)
            most, after = max(most, before + peak), max(after, before + more)
        peaks.append(most)
        kept.append(after)
        spy.mark("step")
        weigher.measure(zero.step)
        idle.append(weigher.count())
    psi = sum(p.numel() * p.element_size() for p in model.parameters())
    # Gloo's threads let go of a tensor a little after its message is done: the least is the truth.
    least = {"peak": min(peaks), "kept": min(kept), "idle": min(idle)}
    return least | {"psi": psi, "largest": psi // DEPTH}


def judge(evidence: Evidence) -> list[Finding]:
    findings: list[Finding] = []
    for case, ranks in evidence.items():
        if case == "memory":
            findings += memory(case, ranks)
            continue
        calls = [[c for row in rank["steps"] for c in row["calls"]] for rank in ranks]
        k = ranks[0]["micros"]
        findings += (
            mistakes.not_waited(case, calls)
            or mistakes_sharded.after_backward(case, ranks)
            or mistakes_sharded.judge(case, ranks)
            or mistakes_sharded.sent(case, ranks, k + 1, f"(k+1)Ψ(n-1)/n with k = {k}")
        )
    return mistakes_sharded.most_telling(findings)


def memory(case: str, ranks: list[dict[str, Any]]) -> list[Finding]:
    """This rank's share, four of the largest parameter, and one more for the activations."""
    for r, rank in enumerate(ranks):
        psi, largest, n = rank["psi"], rank["largest"], len(ranks)
        if rank["kept"] > psi / n + 4 * largest:
            message = (
                f"after backward rank {r} holds {rank['kept']} bytes more than before it; its "
                f"share of the gradients is {psi / n:.0f} of {psi}. Something keeps the full "
                "gradients alive: p.grad, a handle not yet waited for, or a view of a part"
            )
            return [Finding("gradients-kept", message, case)]
        between = psi + 3 * psi / n  # parameters; this rank's share, and AdamW's state of it
        if rank["idle"] > between + 4 * largest:
            message = (
                f"between steps rank {r} holds {rank['idle']} bytes; parameters, its share and its "
                f"state are {between:.0f}. Something of the gradients' size stays"
            )
            return [Finding("gradients-kept", message, case)]
        if rank["peak"] > psi / n + 5 * largest:
            message = (
                f"at the peak of backward rank {r} holds {rank['peak']} bytes more than before it; "
                f"its share and four of the largest gradient are {psi / n + 4 * largest:.0f}, all "
                f"gradients {psi}. Free each as soon as it is reduce-scattered, not at the end"
            )
            return [Finding("gradients-kept", message, case)]
    return []
