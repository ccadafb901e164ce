"""Reviews with a rating: Yelp Review Full as it is published, or a CSV of your own.

Yelp Review Full: parquet as on the hub, or the original ``train.csv`` (rating 1 to 5 and text, no
header). Your own: a CSV whose header names text and label (from 0).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardlab.data import sources
from shardlab.errors import UsageError, unknown

SPLITS = ("train", "test")
YELP = "yelp"
FORMATS = (".parquet", ".csv")
HOLD_OUT = 10  # every tenth row is the test, in a file without a split of its own

Row = tuple[str, int]  # text, label from 0


@dataclass(frozen=True)
class Reviews:
    texts: list[str]
    labels: list[int]  # 0 to classes - 1
    classes: int


def choose() -> tuple[str, str]:
    """What "auto" stands for on this machine, and why not for Yelp's reviews."""
    if sources.is_downloaded(YELP):
        return YELP, ""
    return sources.SYNTHETIC, sources.absent(YELP)


def load(source: str, split: str = "train", *, limit: int | None = None) -> Reviews:
    """The reviews of a split, all or ``limit`` of them, evenly spread (files come sorted by label).

    ``source`` is a file, a folder with a file per split (``train*``, ``test*``, at any depth) or
    with one file for both, or "yelp", which `shardlab data` has fetched.
    """
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    files, every_tenth = _files(source, split)
    classes = 2 if _is_binary(files[0]) else 5
    rows: list[Row] = []
    for file in files:
        for number, (text, label) in enumerate(_rows(file)):
            if every_tenth and (number % HOLD_OUT == HOLD_OUT - 1) != (split == "test"):
                continue
            if not 0 <= label < classes:
                raise UsageError(f"{file}: the rating in row {number + 1} is not one of {classes}")
            rows.append((text, label))
    if not rows:
        raise UsageError(f"{files[0]} holds no reviews")
    if limit is not None and limit < len(rows):
        rows = [rows[i * len(rows) // limit] for i in range(limit)]
    return Reviews([text for text, _ in rows], [label for _, label in rows], classes)


def _files(source: str, split: str) -> tuple[list[Path], bool]:
    """The files of a split, and whether they are cut in two by row."""
    path = sources.downloaded(YELP) if source == YELP else sources.existing(source)
    if path.is_file() and not path.name.startswith(SPLITS):
        return [path], True
    # A file named train.csv stands for its folder: its test is beside it.
    suffixes = (path.suffix,) if path.is_file() else FORMATS
    folder = path.parent if path.is_file() else path
    for suffix in suffixes:
        found = sorted(f for f in folder.rglob(f"*{suffix}") if f.is_file())
        mine = [f for f in found if f.name.startswith(split)]
        if mine:
            return mine, False
        whole = [f for f in found if not f.name.startswith(SPLITS)]
        if whole and path.is_dir() and len(found) == 1:
            return whole, True
    raise UsageError(
        f"{folder} holds no {split} reviews: no {split}*{{{', '.join(suffixes)}}} in it"
    )


def _rows(path: Path) -> Iterator[Row]:
    if path.suffix not in FORMATS:
        raise UsageError(f"{path}: reviews are read from {', '.join(FORMATS)}")
    return _parquet(path) if path.suffix == ".parquet" else _csv(path)


def _parquet(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise UsageError(
            f"{path} is parquet, which needs pyarrow: pip install 'shardlab[hub]'"
        ) from None
    try:
        file = parquet.ParquetFile(path)
        for part in file.iter_batches(columns=["text", "label"]):
            for row in part.to_pylist():
                yield unescape(row["text"]), int(row["label"])
    except (OSError, ArithmeticError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is not Yelp Review Full in parquet: {error}") from None


def _csv(path: Path) -> Iterator[Row]:
    """A header line names text and label. Yelp's file has no header: rating, then text."""
    number, text_at, label_at, is_yelps = 0, 1, 0, True
    with path.open(encoding="utf-8", newline="") as file:
        try:
            for number, row in enumerate(csv.reader(file)):
                if number == 0 and "text" in row and "label" in row:
                    text_at, label_at, is_yelps = row.index("text"), row.index("label"), False
                elif is_yelps:
                    yield unescape(row[1]), int(row[0]) - 1
                else:
                    yield row[text_at], int(row[label_at])
        except (csv.Error, IndexError, ValueError) as error:
            raise UsageError(f"{path}: row {number + 1} is not a review: {error}") from None


def _is_binary(path: Path) -> bool:
    """Reviews with the header text, label, source are good or bad."""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        first = file.readline(100).strip().replace('"', "")
    return path.suffix == ".csv" and first == "text,label,source"


def unescape(text: str) -> str:
    """Yelp's texts carry their line breaks and quotes escaped, in every format."""
    return text.replace("\\n", "\n").replace('\\""', '"').replace('\\"', '"')
