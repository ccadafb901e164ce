"""Writes docs/zoo.md from what the animals say: ``python tests/models/zoo_page.py``."""

from __future__ import annotations

from pathlib import Path

from shardlab.naming import STRATEGIES
from zoo import STEPS, ZOO

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"

HEAD = """\
# The zoo

{count} small models, written the way people write them. Under each strategy the result equals one
plain process (✓), or the strategy refuses the model in one line, on every rank (–). Nothing else
may happen: no difference that nobody notices, no hang, no crash. `make test-deep` runs each of them
on two real ranks; `zero3`, and a part of the other strategies, also run on three. `make test` runs
each under `zero3` and one other strategy. It compares losses, gradients, parameters and buffers of
{steps} steps of AdamW with a plain loop. The parameters are not read before the end of the second
step, since reading them might hide a bug.

`local_sgd`, `diloco` and `streaming_diloco` exchange after every step of plain SGD here, with an
outer rate of 1: so they too must equal one process. `pytorch_ddp` and `pytorch_zero1` run with
`find_unused_parameters: true`. Frozen parameters and buffers that forward changes must equal those
of rank 0, as buffers do in DDP.

"""

FOOT = """
## To add a model

Write it as a class in `tests/models/zoo.py`, under `@animal("why it is here")`. `Net` is a start:
three blocks and a head; a net that is only changed once it is built is a function under `@changed`.
`blocks` names the modules to shard by, `refused` the strategies that
refuse it (or a group of them, as in `GROUPS`) and words of the refusal; a `loss` or an
`evaluate` of the class replaces the default. Then run

```text
python tests/models/zoo_page.py
python -m pytest tests/strategies/test_zoo.py
```

`tests/models/zoo_generator.py` finds new ones: it puts such traits together at random, and prints
those models under which a strategy neither equals one process nor refuses, with the number that
builds them again.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD.format(count=len(ZOO), steps=STEPS)]
    parts.append(_row("model", "why it is here", *(f"`{s}`" for s in STRATEGIES)))
    parts.append(_row("---", "---", *(":-:" for _ in STRATEGIES)))
    for a in ZOO.values():
        cells = ("–" if s in a.refused else "✓" for s in STRATEGIES)
        parts.append(_row(f"`{a.name}`", a.why, *cells))
    parts.append("\n## What is refused, and in which words\n\n")
    parts.append(_row("model", "words of the refusal", "strategies"))
    parts.append(_row("---", "---", "---"))
    for a in ZOO.values():
        words: dict[str, list[str]] = {}
        for strategy in STRATEGIES:
            if strategy in a.refused:
                words.setdefault(a.refused[strategy], []).append(f"`{strategy}`")
        for text, strategies in words.items():
            parts.append(_row(f"`{a.name}`", f"“{text}”", ", ".join(strategies)))
    return "".join(parts) + FOOT


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
