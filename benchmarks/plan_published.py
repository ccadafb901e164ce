"""Fits the planner's constants to published runs, and says how far off it is on the others.

    python benchmarks/plan_published.py --runs runs.csv [--out FILE]

The runs are a CSV file that is not part of the project. Compute and sharded communication are
calibrated on the 8-GPU runs of llm-foundry; its 64-GPU runs and those of torchtitan are only
predicted. Tensor and pipeline parallelism and memory are calibrated on nanotron's runs, and tested
on each group of a model and a number of GPUs with the constants of the other groups.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import plan_transformer as transformer
from plan_transformer import Calibration, Held, Layout, Transformer, tokens_per_s_per_gpu

from shardlab.plan import devices
from shardlab.plan.devices import Machine, Shares

Floats = npt.NDArray[np.float64]
NEAR = 0.4  # nanotron: rows with at least this part of their group's best speed say how fast it is
WITHIN = 0.9


@dataclass(frozen=True)
class Run:
    source: str
    name: str
    gpu: str
    metric: str
    value: float
    model: Transformer
    layout: Layout
    machine: Machine

    @property
    def group(self) -> tuple[str, int]:
        return self.name, self.layout.gpus


def read(path: Path) -> tuple[list[Run], list[str]]:
    """The runs that can be predicted, and why the others cannot."""
    runs, left = [], []
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            made = run(row)
            if isinstance(made, str):
                left.append(f"{row['source']}: {made}")
            else:
                runs.append(made)
    return runs, left


def run(row: dict[str, str]) -> Run | str:
    source, notes = row["source"], row["notes"]
    if source not in ("llm-foundry", "torchtitan", "nanotron-ultrascale"):
        return "not one of the three sources that are used"
    if source == "torchtitan" and re.search(r"CP[1-9]", row["strategy"]):
        return "context parallelism is not modelled"
    if not row["microbatch"]:
        return "the micro-batch is not known"
    number = {key: int(row[key]) for key in ("layers", "hidden", "heads", "seq", "vocab")}
    is_llama = source != "llm-foundry"
    found = re.search(r"intermediate (\d+)", notes)
    ffn = int(found[1]) if found else 0
    kv = 0
    if source == "torchtitan":  # Llama 3.1's
        ffn, kv = {4096: 14336, 8192: 28672, 16384: 53248}[number["hidden"]], 8
    model = Transformer(
        **number, ffn=ffn, kv_heads=kv, gated=is_llama, tied=not is_llama or "tied" in notes
    )
    precision, strategy = row["precision"], row["strategy"]
    state = "accumulated" if source.startswith("nanotron") else "mixed"
    checkpointing = row["act_ckpt"].split()[0]
    layout = Layout(
        dp=int(row["dp"]), tp=int(row["tp"]), pp=int(row["pp"]),
        micro_batch=int(row["microbatch"]), global_batch=int(row["global_batch"]),
        zero=3 if "FSDP" in strategy else 1 if "ZeRO-1" in strategy else 0,
        checkpointing=checkpointing, dtype="fp8" if "8" in precision.split("+")[-1] and
        "f" in precision and ("fp8" in precision or "float8" in precision) else "bf16",
        state="pure" if "PURE" in precision else state,
        compiled="compile" in strategy, overlapped_tp="AsyncTP" in strategy,
    )  # fmt: skip
    return Run(
        source, row["model"], row["gpu"], row["metric"], float(row["value"]),
        model, layout, machine(row),
    )  # fmt: skip


def machine(row: dict[str, str]) -> Machine:
    gpu = row["gpu"]
    if gpu.startswith("h100_96gb"):  # torchtitan's: slower memory, and 500 instead of 700 W
        made = devices.machine("h100", "ndr")
        device = dataclasses.replace(made.device, memory=96e9, bandwidth=2.4e12)
        return dataclasses.replace(made, device=device)
    return devices.machine(gpu, "8x200gbit" if "RoCE 1600" in row["network"] else "ndr")


# ------------------------------------------------------------------ fitting


def least_squares(
    residuals: Callable[[Floats], Floats], start: Sequence[float], width: Sequence[float]
) -> Floats:
    """Levenberg and Marquardt's method. ``width``: how far from the start each number may well be;
    a number that the runs say nothing about stays where it is."""
    begin, wide = np.array(start), np.array(width)

    def whole(x: Floats) -> Floats:
        return np.concatenate([residuals(x), (x - begin) / wide])

    x, damping = begin.copy(), 1e-2
    now = whole(x)
    for _ in range(30):
        slope = np.stack([(whole(x + 1e-4 * unit) - now) / 1e-4 for unit in np.eye(len(x))], axis=1)
        better = False
        for _ in range(8):
            curve = slope.T @ slope + damping * np.eye(len(x))
            moved = x + np.linalg.solve(curve, -slope.T @ now)
            then = whole(moved)
            better = bool(then @ then < now @ now)
            if better:
                break
            damping *= 4
        if not better:
            break
        is_done = now @ now - then @ then < 1e-7 * (now @ now)
        x, now, damping = moved, then, damping / 5
        if is_done:
            break
    return x


def huber(errors: Floats, scale: float) -> Floats:
    """Beyond the scale an error counts in proportion, not by its square: some runs are odd."""
    size = np.abs(errors) / scale
    return np.sign(errors) * np.where(size < 1, size, np.sqrt(np.maximum(2 * size - 1, 1)))


def cauchy(errors: Floats, scale: float) -> Floats:
    """For runs of which many are odd: one that is far off hardly counts."""
    return np.sign(errors) * np.sqrt(np.log1p((errors / scale) ** 2))


def part(x: float) -> float:
    """Any number as one between 0 and 1."""
    return float(1 / (1 + math.exp(-x)))


# ------------------------------------------------------------------ llm-foundry


@dataclass(frozen=True)
class Compute:
    families: dict[str, Shares]
    traffic: float
    beside: float

    def rate(self, run: Run, family: str | None = None) -> float:
        fit = dataclasses.replace(Calibration(), traffic=self.traffic, beside=self.beside)
        by = self.families[family or run.machine.device.family]
        return tokens_per_s_per_gpu(run.model, run.layout, run.machine, fit, by)


def errors(rates: Iterable[float], runs: Iterable[Run]) -> Floats:
    """How much faster than measured, as logarithms."""
    return np.array([math.log(rate / run.value) for rate, run in zip(rates, runs, strict=True)])


def compute(x: Floats) -> Compute:
    ampere, hopper = (Shares(part(x[i]), part(x[i + 2]), part(x[6])) for i in (0, 1))
    return Compute({"ampere": ampere, "hopper": hopper}, float(np.exp(x[4])), part(x[5]))


def fit_compute(runs: Sequence[Run]) -> Compute:
    def residuals(x: Floats) -> Floats:
        made = compute(x)
        return huber(errors((made.rate(run) for run in runs), runs), 0.05)

    start, width = (1.2, 0.6, 0.3, -0.5, 0.0, 0.5, 1.7), (0.7, 0.7, 0.7, 0.7, 0.5, 1.0, 0.7)
    return compute(least_squares(residuals, start, width))


def naive(calibration: Sequence[Run], runs: Sequence[Run], by_model: bool) -> list[float]:
    """Constant MFU: of a GPU and a type of numbers, or of these, checkpointing and model, where
    there is such a run, else without the model."""
    keys: list[Callable[[Run], tuple[str, ...]]] = [
        lambda r: (r.gpu, r.layout.dtype, r.layout.checkpointing, r.name),
        lambda r: (r.gpu, r.layout.dtype, r.layout.checkpointing),
        lambda r: (r.gpu, r.layout.dtype),
    ]
    seen: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for r in calibration:
        for key in keys:
            seen[key(r)].append(r.value * r.model.flops_per_token)
    guesses = []
    for r in runs:
        known = next(key(r) for key in keys[0 if by_model else 2 :] if key(r) in seen)
        guesses.append(float(np.mean(seen[known])) / r.model.flops_per_token)
    return guesses


# ------------------------------------------------------------------ nanotron


@dataclass(frozen=True)
class Parallel:
    fit: Calibration
    # nanotron's network: 400 Gbit/s for each GPU, of which nodes ** -fade is left.
    fade: float
    hop_s: float

    def on(self, run: Run) -> Machine:
        link = devices.link("ndr")
        left = math.ceil(run.layout.gpus / run.machine.per_node) ** -self.fade
        between = dataclasses.replace(
            link, bytes_per_s=link.bytes_per_s * left, latency_s=self.hop_s
        )
        return dataclasses.replace(run.machine, between=between)

    def rate(self, run: Run) -> float:
        return tokens_per_s_per_gpu(run.model, run.layout, self.on(run), self.fit)


def parallel(x: Floats) -> Parallel:
    e = np.exp(x)
    fit = dataclasses.replace(
        transformer.CALIBRATION, summed_beside=part(x[2]), tp_host_s=e[3] * 1e-3,
        hand_s=e[4] * 1e-3, hand_grows=e[5],
    )  # fmt: skip
    return Parallel(fit, e[0], e[1] * 1e-6)


def fit_parallel(runs: Sequence[Run]) -> Parallel:
    def residuals(x: Floats) -> Floats:
        made = parallel(x)
        return cauchy(errors((made.rate(run) for run in runs), runs), 0.1)

    start = (math.log(0.54), math.log(60), 0.0, math.log(4.5), math.log(10), math.log(2))
    return parallel(least_squares(residuals, start, (0.4, 1.0, 1.5, 0.3, 1.0, 0.7)))


def fit_memory(runs: Sequence[Run]) -> Held:
    def made(x: Floats) -> Held:
        return dataclasses.replace(Held(), **dict(zip(MEMORY, np.exp(x).tolist(), strict=True)))

    def residuals(x: Floats) -> Floats:
        held = made(x)
        sizes = (transformer.memory(r.model, r.layout, held) / 1e9 for r in runs)
        return huber(errors(sizes, runs), 0.1)

    start = [math.log(value) for value in (7.0, 12.0, 4.0, 10.0, 0.8e9)]
    return made(least_squares(residuals, start, (0.15, 0.1, 0.7, 0.6, 0.5)))


MEMORY = ("weights", "optimizer", "working", "logits", "base")


def near_best(runs: Sequence[Run]) -> list[Run]:
    best: dict[tuple[str, int], float] = defaultdict(float)
    for r in runs:
        best[r.group] = max(best[r.group], r.value)
    return [r for r in runs if r.value >= NEAR * best[r.group]]


def says_fits(run: Run, held: Held = transformer.HELD) -> bool:
    if run.layout.pp > run.model.layers:
        return False
    usable = held.usable * run.machine.device.memory
    return transformer.memory(run.model, run.layout, held) <= usable


def choose(runs: Sequence[Run], by: Parallel, held: Held) -> tuple[Run, float, float]:
    """Of the layouts of one group: ours, what it reached (0: it did not run), and the best."""
    reached: dict[Layout, float] = defaultdict(float)
    for r in runs:
        reached[r.layout] = max(reached[r.layout], r.value)
    ours = max(
        (r for r in runs if says_fits(r, held)),
        key=lambda r: transformer.rank(r.model, r.layout, by.on(r), by.fit, held),
    )
    return ours, reached[ours.layout], max(reached.values())


# ------------------------------------------------------------------ report


def summary(found: Floats) -> dict[str, float]:
    off = np.abs(np.expm1(found))
    return {"runs": len(off), "mean": float(off.mean()), "median": float(np.median(off)),
            "p90": float(np.percentile(off, 90)), "max": float(off.max())}  # fmt: skip


def covered(found: Floats, margin: str) -> float:
    """The share of errors that the interval of that name, as shipped, contains."""
    low, high = transformer.MARGINS[margin]
    return float(np.mean((found >= low) & (found <= high)))


def held_out_foundry(runs: Sequence[Run]) -> Floats:
    """Each model's errors with the constants of the other models."""
    found = []
    for name in sorted({r.name for r in runs}):
        made = fit_compute([r for r in runs if r.name != name])
        kept = [r for r in runs if r.name == name]
        found.append(errors((made.rate(r) for r in kept), kept))
    return np.concatenate(found)


def report(runs: Sequence[Run], left: Sequence[str]) -> dict[str, Any]:
    foundry = [r for r in runs if r.source == "llm-foundry"]
    known = [r for r in foundry if r.layout.gpus == 8]
    more = [r for r in foundry if r.layout.gpus > 8]
    fitted = fit_compute(known)
    out: dict[str, Any] = {"constants": {
        **{name: dataclasses.asdict(shares) for name, shares in fitted.families.items()},
        "traffic": fitted.traffic, "beside": fitted.beside,
    }}  # fmt: skip
    of = out["llm-foundry"] = {}
    of["8 GPUs, calibrated on them"] = summary(errors(map(fitted.rate, known), known))
    apart = held_out_foundry(known)
    of["8 GPUs, each model held out"] = summary(apart)
    tested = errors(map(fitted.rate, more), more)
    of["64 GPUs, only predicted"] = summary(tested)
    for title, by_model in (("GPU", False), ("GPU, checkpointing and model", True)):
        guessed = errors(naive(known, more, by_model), more)
        of[f"64 GPUs, constant MFU by {title}"] = summary(guessed)
    of["5% and 95% of each model held out"] = [float(v) for v in np.percentile(apart, [5, 95])]
    of["in the interval, each model held out"] = covered(apart, "sharded")
    of["in the interval, 64 GPUs"] = covered(tested, "sharded")
    other = {"ampere": "hopper", "hopper": "ampere"}
    swapped = errors((fitted.rate(r, other[r.machine.device.family]) for r in known), known)
    of["each GPU with the other's constants"] = summary(swapped)
    of["5% and 95% of that"] = [float(v) for v in np.percentile(swapped, [5, 95])]

    titan = [r for r in runs if r.source == "torchtitan"]
    speeds = [r for r in titan if r.metric == "tokens_per_s_per_gpu"]
    part_of = out["torchtitan, only predicted"] = {}
    for title, chosen in {
        "all": speeds,
        "bf16": [r for r in speeds if r.layout.dtype == "bf16"],
        "fp8": [r for r in speeds if r.layout.dtype == "fp8"],
        "without tensor parallelism": [r for r in speeds if r.layout.tp == 1],
        "with tensor parallelism": [r for r in speeds if r.layout.tp > 1],
    }.items():
        part_of[title] = summary(errors(map(fitted.rate, chosen), chosen))
    rate = float(np.mean([r.value * r.model.flops_per_token for r in known
                          if r.gpu == "h100_80gb" and r.layout.dtype == "bf16"]))  # fmt: skip
    guessed = errors((rate / r.model.flops_per_token for r in speeds), speeds)
    part_of["all, constant MFU of llm-foundry's H100"] = summary(guessed)
    for title, margin, is_tp in (("without", "sharded", False), ("with", "parallel", True)):
        chosen = [r for r in speeds if (r.layout.tp > 1) == is_tp]
        share = covered(errors(map(fitted.rate, chosen), chosen), margin)
        part_of[f"in the interval, {title} tensor parallelism"] = share
    peaks = [r for r in titan if r.metric == "peak_memory"]
    sizes = [transformer.memory(r.model, r.layout) / 2**30 for r in peaks]
    part_of["memory"] = summary(errors(sizes, peaks))
    out["left out"] = {why: left.count(why) for why in sorted(set(left))}
    out["nanotron"] = report_nanotron([r for r in runs if r.source.startswith("nanotron")])
    return out


def report_nanotron(runs: Sequence[Run]) -> dict[str, Any]:
    by_metric = {m: [r for r in runs if r.metric == m] for m in {r.metric for r in runs}}
    ran, ended = by_metric["tokens_per_s_per_gpu"], by_metric["fits"]
    good = near_best(ran)
    fitted = fit_parallel(good)
    held = fit_memory(by_metric["peak_memory"])
    out: dict[str, Any] = {
        "constants": {
            **{name: getattr(fitted.fit, name)
               for name in ("summed_beside", "tp_host_s", "hand_s", "hand_grows")},
            "fade": fitted.fade, "hop_s": fitted.hop_s,
            "memory": {name: getattr(held, name) for name in MEMORY},
        },
        "near the best of their group, calibrated on them":
            summary(errors(map(fitted.rate, good), good)),
        "all that ran": summary(errors(map(fitted.rate, ran), ran)),
        "memory": summary(errors(
            (transformer.memory(r.model, r.layout, held) / 1e9 for r in by_metric["peak_memory"]),
            by_metric["peak_memory"])),
    }  # fmt: skip
    right = [says_fits(r) for r in ran], [not says_fits(r) for r in ended]
    out["fits"] = {
        "all": float(np.mean(right[0] + right[1])),
        "that ran": float(np.mean(right[0])), "that ended": float(np.mean(right[1])),
    }  # fmt: skip
    table: list[dict[str, Any]] = []
    apart = []
    for group in sorted({r.group for r in runs}):
        inside = [r for r in ran + ended if r.group == group]
        others = fit_parallel([r for r in good if r.group != group])
        held_there = fit_memory([r for r in by_metric["peak_memory"] if r.group != group])
        kept = [r for r in good if r.group == group]
        apart.append(errors(map(others.rate, kept), kept))
        rows = []
        for by, memory in ((fitted, held), (others, held_there)):
            _, reached, best = choose(inside, by, memory)
            rows.append(reached / best)
        speeds = sorted({r.value for r in inside}, reverse=True)
        table.append({"group": f"{group[0]}, {group[1]} GPUs", "reached": rows[0],
                      "reached, group held out": rows[1], "best": best,
                      "second best": speeds[1] / speeds[0]})  # fmt: skip
    out["groups"] = table
    for key in ("reached", "reached, group held out"):
        out[f"groups within 10%, {key}"] = float(np.mean([row[key] >= WITHIN for row in table]))
    held_out = np.concatenate(apart)
    out["near the best, group held out"] = summary(held_out)
    out["5% and 95% of that"] = [float(value) for value in np.percentile(held_out, [5, 95])]
    out["in the interval, near the best, group held out"] = covered(held_out, "parallel")
    out["in the interval, all that ran"] = covered(errors(map(fitted.rate, ran), ran), "parallel")
    return out


def show(name: str, value: Any, depth: int = 0) -> None:
    pad = "  " * depth
    if isinstance(value, dict) and set(value) == {"runs", "mean", "median", "p90", "max"}:
        shares = ", ".join(f"{key} {value[key]:.1%}" for key in ("mean", "median", "p90", "max"))
        print(f"{pad}{name}: {value['runs']} runs, {shares}")
    elif isinstance(value, dict):
        print(f"{pad}{name}")
        for key, inner in value.items():
            show(key, inner, depth + 1)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for row in value:
            texts = (f"{k} {v:.3g}" if isinstance(v, float) else str(v) for k, v in row.items())
            print(f"{pad}{'; '.join(texts)}")
    else:
        text = f"{value:.4g}" if isinstance(value, float) else value
        print(f"{pad}{name}: {text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    runs, left = read(given.runs)
    found = report(runs, left)
    for key, value in found.items():
        show(key, value)
    if given.out:
        found["command"] = "python benchmarks/plan_published.py --runs runs.csv"
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
