"""The tables that belong to one chapter of the book, and the numbers inside its sentences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from book_parts import Missing, Numbers, gpt2_small, part, record, table

from shardlab import text as fmt
from shardlab.plan import claims
from shardlab.strategies.pipeline import schedule_analysis, schedules
from shardlab.wire import wire_bytes

LADDERS = {"loopback": "ladder-2ranks", "4 Gbit/s": "ladder-2ranks-4gbit"}  # link and record
TOKENS_PER_S = 33_000  # GPT-2 small on one GPU, as in the assignment's log


def collective_costs(_numbers: Numbers) -> str:
    """The formulas of ``wire_bytes``, in numbers: of 1 GiB."""
    ops = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
    rows = [
        [f"`{op}`", *(fmt.size(wire_bytes(op, 1 << 30, n)) for n in (2, 4, 8, 64))] for op in ops
    ]
    return table(["a rank sends, of 1 GiB", *(f"{n} ranks" for n in (2, 4, 8, 64))], rows)


def message_sizes(numbers: Numbers) -> str:
    rows = [
        [fmt.size(row["bytes"]), *(fmt.number(row[f"ms_{n}"]) for n in (2, 4))]
        for row in part(numbers, "all_reduce")["sizes"]
    ]
    return table(["all-reduce of", "2 ranks, ms", "4 ranks, ms"], rows)


def one_or_many(numbers: Numbers) -> str:
    found = part(numbers, "all_reduce")["split"]
    total = fmt.size(found[0]["bytes"])
    rows = [[fmt.count(r["messages"], "message"), fmt.number(r["ms"])] for r in found]
    return table([f"{total} in", "2 ranks, ms"], rows)


def on_the_wire(numbers: Numbers) -> str:
    rows = [
        [f"`{r['op']}`", *(f"{r[f'times_{n}']:.2f} ({r[f'best_{n}']:.2f})" for n in (2, 4))]
        for r in part(numbers, "wire")
    ]
    return table(["sent by all ranks together, in units of the tensor (the least possible)",
                  "2 ranks", "4 ranks"], rows)  # fmt: skip


def ten_samples(_numbers: Numbers) -> str:
    """The sampler's own answer, for 10 samples on 4 ranks."""
    from shardlab.data import sampler

    rows = []
    for mode in ("padded", "exact"):
        shares = [
            sampler.rank_ids(10, 4, rank, 0, 0, mode=mode, shuffle=False).tolist()
            for rank in range(4)
        ]
        read = [i for share in shares for i in share]
        twice = sorted({i for i in read if read.count(i) > 1})
        note = f"{twice} twice" if twice else "each once"
        rows.append([f"`{mode}`", *map(str, shares), note])
    return table(["", *(f"rank {r}" for r in range(4)), ""], rows)


def memory_by_cause(numbers: Numbers) -> str:
    found = part(numbers, "memory")
    causes = ("parameters", "gradients", "optimizer", "buckets", "activations", "other")
    rows = [
        [f"`{r['label']}`", *(fmt.size(r["step_bytes"][c]) for c in causes),
         fmt.size(r["step_bytes"]["total"])]
        for r in found["rows"] if r["status"] == "ok"
    ]  # fmt: skip
    return table(["at the peak of a step", *causes, "total"], rows)


def what_fits(numbers: Numbers) -> str:
    rows = []
    for row in part(numbers, "fits")["rows"]:
        need = row["step_bytes"]["total"]
        answers = ["yes" if need <= limit * 2**30 else "no" for limit in (3, 4, 8)]
        rows.append([f"`{row['label']}`", fmt.size(need), *answers])
    return table(["", "needs at its peak", "3 GiB", "4 GiB", "8 GiB"], rows)


def ladder(names: str, _numbers: Numbers) -> str:
    """Beside PyTorch's own, from the records of the ladder."""
    rows = []
    for link, file in LADDERS.items():
        for row in record(file)["pairs"]:
            if row["ours"] in names.split(", "):
                rows.append(
                    [
                        f"`{row['ours']}` / `{row['theirs']}`, {link}",
                        " / ".join(
                            fmt.number(row[f"{who}_ms"]["median"])
                            for who in ("ours", "theirs", "alone")
                        ),
                        _speed(row),
                        " / ".join(
                            fmt.size(row[f"{who}_peak_bytes"]) for who in ("ours", "theirs")
                        ),
                    ]
                )
    heading = "ms per step, ours / PyTorch's / no messages"
    return table(["ours / PyTorch's, link", heading, "speed, 95%", "peak memory"], rows)


def ladder_all(_numbers: Numbers) -> str:
    return ladder("bucket_ddp_async, zero1, zero2, zero3", {})


def ladder_short(_numbers: Numbers) -> str:
    """The README's table: the speeds and the memory of the same records."""
    peaks: dict[tuple[str, str], str] = {}
    speeds: dict[tuple[str, str], dict[str, str]] = {}
    for file in LADDERS.values():
        for row in record(file)["pairs"]:
            pair = row["ours"], row["theirs"]
            speeds.setdefault(pair, {})[file] = _speed(row)
            ours, theirs = (row[f"{who}_peak_bytes"] / 2**20 for who in ("ours", "theirs"))
            peaks[pair] = f"{ours:.0f} / {theirs:.0f}"
    rows = [
        [f"`{ours}` / `{theirs}`", *(found.get(file, "") for file in LADDERS.values()),
         peaks[ours, theirs]]
        for (ours, theirs), found in sorted(speeds.items())
    ]  # fmt: skip
    return table(["ours / PyTorch's", *LADDERS, "peak MiB, ours / PyTorch's"], rows)


def _speed(row: Mapping[str, Any]) -> str:
    low, high = row["speed_ratio_95"]
    return f"{row['speed_ratio']:.2f} [{low:.2f}, {high:.2f}]"


def amortised(_numbers: Numbers) -> str:
    """What sending takes of a step if nothing hides it: GPT-2 small on 8 ranks."""
    sent = sum(claims.CLAIMS["simple_ddp_ga"].of(gpt2_small(8, 1))["moved"].values())
    rows = []
    for sequences in (1, 4, 16, 64):
        computes = sequences * 1024 / TOKENS_PER_S
        shares = [sent / rate / (computes + sent / rate) for rate in (10e9, 1e9)]
        rows.append(
            [str(sequences), f"{1000 * computes:.0f} ms", *(f"{share:.0%}" for share in shares)]
        )
    header = ["sequences per rank and step", "computing"]
    return table([*header, "sending, at 10 GB/s", "at 1 GB/s"], rows)


def number_formats(_numbers: Numbers) -> str:
    """What PyTorch says of each."""
    import torch

    rows = []
    for name in ("float32", "bfloat16", "float16"):
        info = torch.finfo(getattr(torch, name))
        least = info.smallest_normal * info.eps  # with the last bit of its fraction alone
        rows.append([f"`{name}`", str(info.bits // 8), f"{info.max:.3g}", f"{least:.2g}",
                     f"{info.eps:.2g}"])  # fmt: skip
    return table(["", "bytes", "largest", "smallest above 0", "step at 1"], rows)


def precisions(numbers: Numbers) -> str:
    rows = [
        [f"`{name}`", fmt.loss(row["loss"]), f"{row['loss'] - found['fp32']['loss']:+.4f}"]
        for found in [part(numbers, "precision")]
        for name, row in found.items()
    ]
    return table(["", "loss, mean of the last ten steps", "less that of fp32"], rows)


def slow_link(_numbers: Numbers) -> str:
    """Time to a held-out loss, from the record of ``slow_link.py``."""
    found = record("slow-link-100mbit")["to_loss"]
    rows = []
    for cell in found["cells"]:
        if not cell["ranked"]:
            there = f"{cell['reached']} of {fmt.count(len(found['seeds']), 'seed')} got there"
            rows.append([f"`{cell['label']}`", "", "", there, "not ranked", ""])
            continue
        ratio, time = cell["seconds_ratio"], cell["seconds"]
        low, high = ratio["interval"]
        is_baseline = cell["label"] == found["baseline"]
        rows.append(
            [
                f"`{cell['label']}`",
                f"{cell['steps']['median']:g} ({cell['steps']['low']}–{cell['steps']['high']})",
                fmt.number(cell["step_ms"]["median"]),
                f"{fmt.number(time['median'])} ({fmt.number(time['low'], like=time['high'])}–"
                f"{fmt.number(time['high'])})",
                "1" if is_baseline else f"{ratio['mean']:.2f} [{low:.2f}, {high:.2f}]",
                fmt.size(cell["bytes"]["median"]),
            ]
        )
    goal = f"to a loss of {found['goal']['loss']:g}, {fmt.count(len(found['seeds']), 'seed')}"
    header = [goal, "steps", "ms per step", "seconds", "time to the first", "sent by a rank"]
    return table(header, rows)


def muon(_numbers: Numbers) -> str:
    rows = [
        [
            f"`{cell['label']}`",
            f"{fmt.number(cell['step_ms']['median'])} ({fmt.p10_p90(cell['step_ms'])})",
            f"{cell['speed_to_baseline']:.2f} "
            f"[{cell['speed_interval'][0]:.2f}, {cell['speed_interval'][1]:.2f}]",
            fmt.size(cell["peak_bytes"]["optimizer"]),
            fmt.size(cell["peak_bytes"]["total"]),
        ]
        for cell in record("muon-2ranks")["cells"]
    ]
    header = ["with Muon", "ms per step (p10–p90)", "speed, 95%", "optimizer state", "peak memory"]
    return table(header, rows)


def muon_proved(_numbers: Numbers) -> str:
    wanted = ("zero1", "zero2", "pytorch_ddp")
    found = [v for v in record("h200-muon-w2")["verdicts"] if v["strategy"] in wanted]
    rows = [
        [f"`{v['strategy']}`", v["checks"]["equal"]["message"], v["checks"]["state"]["message"]]
        for v in found
    ]
    return table(["", "equal", "what a rank holds"], rows)


class Transformer(NamedTuple):
    """A GPT in float32, by its sizes; A is the residual stream of one sequence."""

    name: str
    layers: int
    dim: int
    tokens: int  # in a sequence

    @property
    def psi(self) -> int:
        block = 12 * self.dim**2 + 13 * self.dim
        return 4 * (self.layers * block + (50257 + self.tokens + 2) * self.dim)

    @property
    def stream(self) -> int:
        return 4 * self.tokens * self.dim

    @property
    def tensor_sums(self) -> int:
        """All-reduces of A for each sequence: two each way in a block, embedding and head."""
        return 4 * self.layers + 2


SMALL = Transformer("GPT-2 small", 12, 768, 1024)
LARGE = Transformer("6.7 B parameters", 32, 4096, 2048)
SEQUENCES, ON_RANKS = 64, 8


def axes(_numbers: Numbers) -> str:
    """What a rank sends in a step of as many sequences, on as many ranks, under each axis alone."""
    n = ON_RANKS

    def sent(model: Transformer) -> list[float]:
        a, psi = model.stream, model.psi
        gradients = wire_bytes("all_reduce", psi, n)
        ring = model.layers * (3 * n - 2) * 2 * a / n
        tensor = model.tensor_sums * wire_bytes("all_reduce", a, n)
        return [gradients, 3 * wire_bytes("all_gather", psi, n) * SEQUENCES / n,
                SEQUENCES * tensor, SEQUENCES * 2 * a, SEQUENCES * ring + gradients]  # fmt: skip

    names = [
        "data: gradients, once",
        "`zero3`: parameters twice and gradients, for each micro-batch",
        "tensor: activations, in every half block",
        "pipeline: activations, at two borders",
        "context: keys and values, in every layer; gradients, once",
    ]
    rows = [
        [name, *map(fmt.size, sizes)]
        for name, *sizes in zip(names, sent(SMALL), sent(LARGE), strict=True)
    ]
    header = f"{SEQUENCES} sequences on {n} ranks: a rank sends in a step"
    return table([header, SMALL.name, LARGE.name], rows)


def pipeline_schedules(_numbers: Numbers) -> str:
    """Every schedule in a simulation: four ranks, equal times, sends that take none."""
    rows = []
    for name in schedules.SCHEDULES:
        bubbles, kept, messages = [], 0.0, 0
        for micro in (8, 32):
            lists = schedules.schedule(name, 4, micro)
            bubbles.append(f"{schedule_analysis.bubble(lists, schedule_analysis.Times()):.3f}")
            kept = max(schedule_analysis.live(lists)) / schedules.chunks_of(name)
            messages = max(schedule_analysis.messages(lists))
        rows.append([f"`{name}`", *bubbles, f"{kept:g}", str(messages)])
    header = ["4 ranks", "bubble, 8 micro-batches", "bubble, 32", "most that a rank keeps of 32",
              "most that a rank sends"]  # fmt: skip
    return table(header, rows)


TABLES: dict[str, Callable[[Numbers], str]] = {
    "collective_costs": collective_costs,
    "message_sizes": message_sizes,
    "one_or_many": one_or_many,
    "on_the_wire": on_the_wire,
    "ten_samples": ten_samples,
    "memory_by_cause": memory_by_cause,
    "what_fits": what_fits,
    "ladder": ladder_all,
    "ladder_short": ladder_short,
    "amortised": amortised,
    "number_formats": number_formats,
    "precisions": precisions,
    "slow_link": slow_link,
    "muon": muon,
    "muon_proved": muon_proved,
    "axes": axes,
    "pipeline_schedules": pipeline_schedules,
}


def named_table(name: str, numbers: Numbers) -> str:
    if name not in TABLES:
        raise Missing(f"no table '{name}'; there are {', '.join(TABLES)}")
    return TABLES[name](numbers)


def fitted_ms(numbers: Numbers, size: int) -> float:
    """An all-reduce of ``size`` bytes on two ranks, by the line through the measurements."""
    line = part(numbers, "all_reduce")
    return float(line["alpha_ms"] + size / line["gb_per_s"] / 1e6)


def moved_by_zero3() -> float:
    """By the lab's own, in a step of ``SEQUENCES`` micro-batches of one sequence."""
    claim = claims.CLAIMS["zero3"].of(gpt2_small(ON_RANKS, SEQUENCES // ON_RANKS))
    return float(sum(claim["moved"].values()))


def value_of(name: str, numbers: Numbers) -> str:
    values: Mapping[str, Callable[[], str]] = {
        "alpha_us": lambda: fmt.number(1000 * part(numbers, "all_reduce")["alpha_ms"]),
        "beta": lambda: fmt.number(part(numbers, "all_reduce")["gb_per_s"]),
        "fit_middle": lambda: fmt.number(fitted_ms(numbers, 1 << 22)),
        "fit_many": lambda: fmt.number(256 * fitted_ms(numbers, 1 << 14)),
        "many": lambda: fmt.number(part(numbers, "all_reduce")["split"][-1]["ms"]),
        "zero3_small": lambda: fmt.size(moved_by_zero3()),
        "half_size": lambda: fmt.size(part(numbers, "all_reduce")["half_bytes"]),
        "tensors": lambda: str(len(gpt2_small(1, 1).params)),
        "state": lambda: fmt.size(4 * gpt2_small(1, 1).psi),
        "psi": lambda: fmt.size(gpt2_small(1, 1).psi),
        "parameters": lambda: fmt.compact(gpt2_small(1, 1).psi / 4),
        "tensor_even": lambda: fmt.number(SMALL.psi / SMALL.tensor_sums / SMALL.stream),
        "tensor_even_large": lambda: fmt.number(LARGE.psi / LARGE.tensor_sums / LARGE.stream),
        "stream": lambda: fmt.size(SMALL.stream),
        "tied": lambda: fmt.size(4 * 50257 * SMALL.dim),
    }
    if name not in values:
        raise Missing(f"no value '{name}'; there are {', '.join(values)}")
    return values[name]()
