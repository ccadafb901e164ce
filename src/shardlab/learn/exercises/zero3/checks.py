"""ZeRO-3: one process's update, with no more than a block or two of the model alive on any rank."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from shardlab.learn import mistakes, mistakes_sharded, sharded
from shardlab.learn.exercise import Case, Evidence, Finding, Rejected
from shardlab.learn.spy import Spy

CASES = (
    Case("SGD", 2, {"kind": "sgd", "micros": 1}),
    Case("SGD, two micro-batches", 2, {"kind": "sgd", "micros": 2}),
    Case("AdamW, three ranks", 3, {"kind": "adamw", "micros": 1}),
    Case("memory", 2),
)
STEPS = 2
BLOCKS = 16  # of the model that is weighed


def run(case: Case, rank: int, submission: ModuleType, spy: Spy) -> dict[str, Any]:
    if case.name == "memory":
        return weigh(rank, submission, spy)
    kind = case.options["kind"]
    model = sharded.build(sharded.blocks)
    single = sharded.Single(model, kind)
    factory = sharded.Factory(kind)
    zero = submission.Zero3(model, factory)
    subject = sharded.Subject(zero, zero.forward, lambda: whole(zero), model, factory, True)
    return sharded.train(subject, single, spy, rank, case.world, STEPS, case.options["micros"])


def whole(zero: Any) -> dict[str, Tensor]:
    params = zero.full_params()
    if not isinstance(params, dict) or not all(isinstance(v, Tensor) for v in params.values()):
        raise Rejected("wrong-type", "full_params() must give a dict from names to tensors")
    if any(v.numel() and not v.untyped_storage().nbytes() for v in params.values()):
        message = "full_params() gives parameters that are freed already: copy them (clone) before"
        raise Rejected("freed-too-early", message)  # to read them would end the process
    return {name: value.detach().clone() for name, value in params.items()}


def weigh(rank: int, submission: ModuleType, spy: Spy) -> dict[str, Any]:
    """Bytes beyond those at the beginning, in each phase of a micro-batch."""
    weigher = sharded.Weigher()
    with weigher:
        model = sharded.build(lambda: sharded.wide(BLOCKS))
        psi = sum(p.numel() * p.element_size() for p in model.parameters())
        zero = submission.Zero3(model, sharded.Factory("adamw"))
    held = weigher.count()
    steps = []
    for step in range(2):
        start, row = weigher.count(), dict.fromkeys(("forward", "between", "backward", "after"), 0)
        for micro in range(2):
            x, y = sharded.batch(rank, step, micro, rows=1, into=48, out=48)
            spy.mark(f"micro {micro}")
            loss, peak, more = weigher.measure(
                lambda x=x, y=y: sharded.loss(zero.forward(x), (x, y)) / 2  # type: ignore[misc]
            )
            row["forward"] = max(row["forward"], peak)
            row["between"] = max(row["between"], more)
            between = weigher.count() - start
            _, peak, _ = weigher.measure(partial(sharded.backward, loss))
            del loss
            row["backward"] = max(row["backward"], between + peak)
            row["after"] = max(row["after"], weigher.count() - start)
        weigher.measure(zero.step)
        row["idle"] = weigher.count()
        row["params"] = in_storages(model)
        steps.append(row)
    # Gloo's threads let go of a tensor a little after its message is done: the least is the truth.
    least = {key: min(row[key] for row in steps) for key in steps[0]}
    return least | {"psi": psi, "held": held, "block": psi // BLOCKS}


def in_storages(model: nn.Module) -> int:
    """Bytes behind the parameters, each storage once."""
    storages = {s._cdata: s.nbytes() for s in (p.untyped_storage() for p in model.parameters())}
    return sum(storages.values())


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
            or mistakes_sharded.sent(case, ranks, 3 * k, f"3kΨ(n-1)/n with k = {k}")
        )
    return mistakes_sharded.most_telling(findings)


def memory(case: str, ranks: list[dict[str, Any]]) -> list[Finding]:
    """Each limit has a block's room for the activations."""
    n = len(ranks)
    for r, rank in enumerate(ranks):
        psi, block = rank["psi"], rank["block"]
        share = psi / n
        whole = f"a block has {block}, the model {psi}"
        if rank["held"] > share + block:
            message = (
                f"after __init__ rank {r} holds {rank['held']} bytes; one {n}th of the parameters "
                f"is {share:.0f}. Keep a copy of the share (clone) and free the rest"
            )
            return [Finding("not-sharded", message, case)]
        if rank["between"] > 2 * block:
            message = (
                f"after forward rank {r} still holds {rank['between']} bytes more than before it "
                f"({whole}): blocks are not freed. Autograd keeps views of the parameters alive: "
                "shrink their storage, flat.untyped_storage().resize_(0)"
            )
            return [Finding("not-freed", message, case)]
        if rank["forward"] > 4 * block:
            message = (
                f"at the peak of forward rank {r} holds {rank['forward']} bytes more than before "
                f"it ({whole}): gather one block at a time, just before it runs"
            )
            return [Finding("gathered-at-once", message, case)]
        if rank["idle"] > 3 * share + 2 * block and rank["params"] > 2 * block:
            message = (
                f"after a step {rank['params']} bytes of parameters are whole on rank {r} "
                f"({whole}): free a block again when its gradients have left"
            )
            return [Finding("not-freed", message, case)]
        idle = rank["idle"] > 3 * share + 2 * block  # the share, and AdamW's state of it
        if idle or rank["after"] > share + block or rank["backward"] > share + 6 * block:
            message = (
                f"rank {r} holds {rank['backward']} bytes more at the peak of backward than before "
                f"the step, and {rank['after']} after it ({whole}; its share of the gradients is "
                f"{share:.0f}): reduce-scatter a block's gradients, and drop them, as soon as its "
                "last one is there"
            )
            return [Finding("gradients-kept", message, case)]
    return []
