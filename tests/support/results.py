"""Results of a comparison, made by hand: what the views of it are tested with."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from shardlab.proof.judge import CHECKS


def cell(
    strategy: str, ms: float, mib: float = 80, loss: float = 5.0, **more: Any
) -> dict[str, Any]:
    return {
        "strategy": strategy,
        "label": strategy,
        "world": 1 if strategy == "single" else 2,
        "options": {},
        "accumulate": 1,
        "status": "ok",
        "reason": None,
        "step_ms": {"median": ms, "p10": 0.97 * ms, "p90": 1.04 * ms, "n": 4},
        "step_ms_repeats": [[ms, 0.97 * ms], [1.04 * ms, ms]],
        "precision": "fp32",
        "mfu": None,
        "speed_to_baseline": 200 / ms,
        "speed_interval": [0.98 * 200 / ms, 1.02 * 200 / ms],
        "skew_ms": 0.5,
        "samples_per_s": 8e3 / ms,
        "tokens_per_s": 8e3 * 128 / ms,
        "peak_bytes": {"total": int(mib * 2**20)},
        "estimated_bytes": None,
        "proof": None,
        "profile": None,
        "sent": None,
        "traces": None,
        "loss": loss,
        "loss_difference": abs(loss - 5.0),
        "losses": [7.0, 6.0, loss],
    } | more


def explained(ms: float, comm: float = 0.2, hidden: float = 0.1) -> dict[str, Any]:
    """A profiled step: so much of it exposed communication, so much hidden behind compute."""
    parts = dict.fromkeys((f"{part}_ms" for part in PARTS), 0.0)
    parts |= {"compute_ms": (1 - comm) * ms, "exposed_comm_ms": comm * ms}
    parts |= {"wall_ms": ms, "hidden_comm_ms": hidden * ms, "comm_ms": (comm + hidden) * ms}
    overlap = 100 * hidden / (comm + hidden) if comm + hidden else None
    return {"steps": 3, "overlap_pct": overlap, **parts}


def proof(passed: bool | None, message: str = "to the last bit of one process") -> dict[str, Any]:
    check = {"pass": passed, "message": message}
    return {**check, "checks": {} if passed is None else dict.fromkeys(CHECKS, check)}


def without_numbers(strategy: str, status: str, reason: str) -> dict[str, Any]:
    """As a cell is that failed in its second visit: what the first one left is still there."""
    return cell(strategy, 100) | dict.fromkeys(MISSING) | {"status": status, "reason": reason}


def result_of(*cells: dict[str, Any]) -> dict[str, Any]:
    names = [c["label"] for c in cells]
    return {
        "schema": 1,
        "command": "shardlab compare --world 2",
        "env": {
            "time": "2026-11-15T03:32:37+00:00",
            "command": "shardlab compare --world 2",
            "shardlab": "0.1.0",
            "git": {"commit": "d277b3a1020482f2cdb24385b28e9a82497e37f2", "dirty": True},
            "torch": "2.13.0",
            "memory_bytes": 2**34,
            "device": "cpu",
            "gpus": [],
            "cuda": None,
            "backend": "gloo",
            "workload": "gpt2-mini",
            "parameters": 3_257_856,
            "something new": "shown too",
        },
        "baseline": "single" if "single" in names else names[0],
        "workload": "gpt2-mini",
        "parameters": 3_257_856,
        "global_batch": 8,
        "repeats": 2,
        "warmup_steps": 1,
        "timed_steps": 2,
        "config": {"precision": {"compute": "fp32"}},
        "cells": list(cells),
    }


def drawn_table(table: Table, width: int = 80) -> str:
    console = Console(width=width, file=None, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


MISSING = (
    "step_ms", "speed_to_baseline", "speed_interval", "skew_ms", "samples_per_s", "tokens_per_s",
    "peak_bytes", "loss", "loss_difference",
)  # fmt: skip


PARTS = ("compute", "exposed_comm", "wait", "bubble", "memory", "idle_host", "idle")
