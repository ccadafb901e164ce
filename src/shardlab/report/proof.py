"""A proof in the terminal: a row of checks for each strategy, and below it what failed and why."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from shardlab import config as configs
from shardlab import text as fmt
from shardlab.proof.judge import ONE_SHAPE, decided, how, is_wide
from shardlab.proof.judge import reasons as reasons_of
from shardlab.proof.judge import unchecked as unchecked_of
from shardlab.report import terminal

Result = Mapping[str, Any]  # the content of prove.json


def show(result: Result, path: Path) -> None:
    out = terminal.out()
    out.print(table(result))
    out.print()
    for line in reasons(result):
        out.print(line)
    terminal.say(out, *notes(result), summary(result), *terminal.about(result["env"]), wraps=True)
    if len(result["env"]["nodes"]) > 1:
        terminal.say(out, f"Proved on {fmt.nodes(result['env']['nodes'])}.", wraps=True)
    terminal.say_paths(out, [path])


def table(result: Result) -> Table:
    """One row per strategy and world, for 80 columns."""
    env, config = result["env"], configs.from_dict(result["config"])
    proof = terminal.table(
        "<strategy", "world", "|equal to\none process", "|state\nper rank",
        "|bytes sent\nper step", "|overlap", "|repro-\nducible",
        title=f"{env['workload']} · {fmt.compact(env['parameters'])} parameters in "
        f"{_equal(result).get('precision', 'float64')} · "
        f"{fmt.count(config.training.steps, 'step')} of {config.accumulate} micro-batches",
        least=16,
    )  # fmt: skip
    for verdict in result["verdicts"]:
        label = Text(verdict["label"])  # not str: rich would read brackets in it as markup
        cells = itertools.starmap(_cell, verdict["checks"].items())
        style = "" if verdict["pass"] else "bold"
        proof.add_row(label, str(verdict["world"]), *cells, style=style)
    return proof


def _cell(name: str, check: Mapping[str, Any]) -> Text:
    text = _number(name, check["measured"])
    style = {True: "green", False: "red", None: ""}[check["pass"]]
    return Text.assemble((fmt.mark(check["pass"]), style), " ", (text, style.replace("green", "")))


def _number(name: str, measured: Any) -> str:
    """The one number that says most about a check."""
    if measured is None:
        return ""
    if name == "equal":
        if measured["first_difference"] is not None:
            return "differs"
        ulp = measured["users"]["max_ulp"]
        if ulp == 0 or not is_wide(measured):
            return "exact" if ulp == 0 else f"{fmt.compact(ulp)} ulp"
        known, unknown = decided(measured)
        kind, part = known[-1]
        return f"{kind}\n  to {part:.0e}" if unknown else f"to {max(p for _, p in known):.0e}"
    if name == "state":
        return fmt.size(measured["params"] + measured["gradients"] + measured["optimizer"])
    if name == "bytes":
        sent = (op for op in measured.values() if isinstance(op, Mapping))
        return fmt.size(sum(op["bytes"] + op["small_bytes"] for op in sent))
    if name == "overlap":
        return fmt.NOTHING if measured["share"] is None else f"{measured['share']:.0%}"
    return ""


def reasons(result: Result) -> list[Text]:
    """What failed or was skipped, and why, in a line each."""
    failed = [
        Text.assemble((f"{v['label']}, world {v['world']}, {name}: ", "bold"), reason)
        for v in result["verdicts"]
        for name, reason in reasons_of(v["checks"]).items()
    ]
    skipped = [
        Text.assemble((f"{s['label']}, world {s['world']}, skipped: ", "bold"), s["reason"])
        for s in result["skipped"]
    ]
    return failed + skipped


def _equal(result: Result) -> Mapping[str, Any]:
    """What was measured of the model, the same for every strategy that got through."""
    found = (v["checks"]["equal"]["measured"] for v in result["verdicts"])
    return next((measured for measured in found if measured is not None), {})


def notes(result: Result) -> list[str]:
    """What had to be done to compare the model with itself."""
    measured = _equal(result)
    found = [f"{text[0].upper()}{text[1:]}." for text in (how(measured) if measured else [])]
    if result["env"].get("couples_samples"):
        found.append(
            "The loss looks at the samples of a micro-batch together: one process was given the "
            "ranks' micro-batches. On the whole batch its loss is another."
        )
    even = [v["label"] for v in result["verdicts"] if ONE_SHAPE in v["checks"]["equal"]["message"]]
    found += [f"{label} is proved {ONE_SHAPE}." for label in dict.fromkeys(even)]
    unchecked: dict[str, list[str]] = {}  # what of which strategies, by the reason
    for verdict in result["verdicts"]:
        for name, why in unchecked_of(verdict["checks"]).items():
            unchecked.setdefault(f"{name}: {why}", []).append(verdict["label"])
    for why, labels in unchecked.items():
        found.append(
            f"{fmt.NOTHING} Not checked of {fmt.names(list(dict.fromkeys(labels)))}, {why}."
        )
    return found


def summary(result: Result) -> str:
    """The answer in a sentence."""
    failed = [f"{v['label']} (world {v['world']})" for v in result["verdicts"] if not v["pass"]]
    total = len(result["verdicts"])
    if not total:
        return "Nothing was proved."
    if failed:
        verb = "does" if len(failed) == 1 else "do"
        rest = f"{total - len(failed)} of {total} proved"
        return f"{fmt.names(failed)} {verb} not do what is claimed; {rest}."
    what = "It does" if total == 1 else f"All {total} do"
    is_whole = not any(unchecked_of(v["checks"]) for v in result["verdicts"])
    return f"{what} what is claimed{'' if is_whole else ', as far as it was checked'}."
