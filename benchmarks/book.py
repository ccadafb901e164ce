"""Everything in docs/book that is a number, a picture of a trace, an output or code.

    python benchmarks/book.py measure [PART ...]   run what the book tells of; keep the results
    python benchmarks/book.py write                bring the chapters up to date with their sources
    python benchmarks/book.py check                exit 1 if a chapter is not up to date

``measure`` needs some minutes of an idle machine. Traces are of a link of 4 Gbit/s and the bytes
on the wire are counted, both in a network namespace of their own (Linux, root, iproute2). The other
two run nothing: a test calls ``check``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import book_blocks as blocks
import book_timeline as timeline
from book_measure import PARTS, count_wire
from book_parts import BOOK, NUMBERS, ROOT

FIGURES = BOOK / "figures"


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(NUMBERS.read_text(encoding="utf-8"))
    return found


def measure(names: list[str]) -> None:
    import torch

    from shardlab.launch.environment import describe

    for name in names or PARTS:
        if name not in PARTS:
            sys.exit(f"no part '{name}'; there are {', '.join(PARTS)}")
        print(name, flush=True)
        part, command = PARTS[name]
        with tempfile.TemporaryDirectory() as scratch:
            data = part(Path(scratch))
        env = describe(torch.device("cpu"), f"python benchmarks/book.py measure {name}")
        env["load_average"] = os.getloadavg()  # other work on the machine is in the numbers too
        numbers = read() if NUMBERS.exists() else {}
        numbers[name] = {"command": command, "env": env, "data": data}
        text = json.dumps(numbers, indent=1, ensure_ascii=False, sort_keys=True)
        NUMBERS.write_text(compact(text) + "\n", encoding="utf-8")


def compact(text: str) -> str:
    """Lists of numbers on one line: thousands of spans, else each on five."""
    return re.sub(r"\[\s+([-\d.]+),\s+([-\d.]+),\s+(\"\w+\")\s+\]", r"[\1, \2, \3]", text)


def wanted() -> dict[Path, str]:
    """Every chapter and picture as it should be."""
    numbers = read()
    files = {p: blocks.fill(p.read_text(encoding="utf-8"), numbers) for p in blocks.pages()}
    for name, step in numbers["traces"]["data"].items():
        title = f"{name}: one step of {step['wall_ms']:.0f} ms"
        files[FIGURES / f"trace-{name}.svg"] = timeline.draw(step, title)
    return files


def differs() -> list[Path]:
    return [
        path
        for path, text in wanted().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


def write() -> None:
    texts = wanted()
    for path in differs():
        path.parent.mkdir(exist_ok=True)
        path.write_text(texts[path], encoding="utf-8")
        print(path.relative_to(ROOT))


def check() -> None:
    stale = differs()
    for path in stale:
        print(
            f"{path.relative_to(ROOT)} is not what its sources say: python benchmarks/book.py write"
        )
    sys.exit(1 if stale else 0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("measure", "write", "check", "count-wire"))
    parser.add_argument("parts", nargs="*", help=f"of measure: {', '.join(PARTS)}")
    arguments = parser.parse_args()
    if arguments.what == "measure":
        measure(arguments.parts)
    elif arguments.what == "write":
        write()
    elif arguments.what == "check":
        check()
    else:
        print(json.dumps(count_wire()))


if __name__ == "__main__":
    main()
