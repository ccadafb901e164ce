"""What a strategy's docstring says that a step sends."""

from __future__ import annotations

import re

OPS = "broadcast|all_reduce|reduce_scatter|all_gather"
KINDS = {  # of what is sent, by a word of the docstring or of the ledger's label; the first counts
    "used": "used", "agreement": "used", "which parameters": "used", "what each rank": "used",
    "activation": "activations", "buffer": "buffer", "target": "target", "loss": "loss",
    "param": "params", "": "gradients",
}  # fmt: skip
Calls = list[tuple[str, str]]


def kind_of(text: str) -> str:
    return next(kind for word, kind in KINDS.items() if word in text)


def told(docstring: str) -> Calls:
    """The collectives of a step in the order in which the docstring names them, each once."""
    found: dict[tuple[str, str], None] = {}
    section = ""
    for line in docstring.partition("Schedule")[2].partition("Cost:")[0].splitlines()[2:]:
        section = line[8:28].strip() or section
        if section in ("at construction", "first step"):
            continue
        for op, text in re.findall(rf"({OPS}) (.*?)(?=;|,|  |\band\b|$)", line):
            found[op, kind_of(text)] = None
    return list(found)
