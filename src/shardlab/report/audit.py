"""The audit of a run's data in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EPOCHS_SHOWN = 8


def sentences(result: Mapping[str, Any]) -> list[str]:
    """The audit in words: a line for the run and one for each epoch."""
    what = f"{result['samples']:,} samples"
    if result["tokens"] is not None:
        what += f" ({result['tokens']:,} tokens)"
    by_rank = ", ".join(f"{n:,}" for n in result["samples_of_ranks"])
    lines = [
        f"data: {what} fed in {result['steps']} steps, by rank {by_rank}, of a data set of "
        f"{result['length']:,}; epochs are {result['mode']}"
    ]
    if result["left_over_tokens"]:
        lines.append(
            f"  {result['left_over_tokens']:,} tokens at the end of the stream fill no sample"
        )
    for epoch in result["epochs"][:EPOCHS_SHOWN]:
        lines.append("  " + _sentence(epoch, result["length"]))
    if len(result["epochs"]) > EPOCHS_SHOWN:
        rest = result["epochs"][EPOCHS_SHOWN:]
        good = sum(e["exactly_once"] for e in rest)
        lines.append(f"  and {len(rest)} more epochs, {good} of them each sample exactly once")
    return lines


def _sentence(epoch: Mapping[str, Any], length: int) -> str:
    name = f"epoch {epoch['epoch']}"
    if epoch["exactly_once"]:
        return f"{name}: each of {length:,} samples exactly once"
    parts = []
    if epoch["finished"] and not epoch["missed"]:
        parts.append(f"each of {length:,} samples at least once")
    if epoch["repeated"]:
        shown = ", ".join(f"{i} ({n} times)" for i, n in epoch["repeated_ids"].items())
        parts.append(f"{epoch['repeated']:,} repeated: {shown}{_dots(epoch, 'repeated')}")
    if epoch["missed"] and epoch["finished"]:
        shown = ", ".join(map(str, epoch["missed_ids"]))
        parts.append(f"{epoch['missed']:,} missed: {shown}{_dots(epoch, 'missed')}")
    if not epoch["finished"]:
        name += ", not finished"
        parts.insert(0, f"{epoch['distinct']:,} of {length:,} samples so far")
        if not epoch["repeated"]:
            parts.append("none twice")
    return f"{name}: {'; '.join(parts)}"


def _dots(epoch: Mapping[str, Any], key: str) -> str:
    return ", …" if epoch[key] > len(epoch[f"{key}_ids"]) else ""
