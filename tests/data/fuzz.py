"""Valid files made wrong, in every way we could think of: what readers must survive.

A case is a folder of files as ``{path: bytes}``. ``mutate`` returns another one in which one or
two things are wrong. All chance comes from the generator that is passed in.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import json
import os
import random
import zlib
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import yaml

from data_files import Files

SCRIPT = "</script><script>alert(1)</script>"
DEEP = 3000  # beyond Python's limit of recursion
NASTY: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63) - 1, 10**30, 10**400, 0.5, -0.0, 1e308,
    float("nan"), float("inf"), float("-inf"), "", " ", "0", "-1", "1e400", "nan", "null",
    "x" * 9999, "\0", "a\nb", "\N{RIGHT-TO-LEFT OVERRIDE}abc", "\N{PILE OF POO}" * 5, "\ud800",
    SCRIPT, "[red]rich[/nothing]", "{{ 7 * 7 }}", "%s%n", "../../escaped", "/escaped", "~",
    "~nobody/x", "payload.py:run", "..", ".", "con:\\", "a:b", ":", "*", "[", "${HOME}", [], {},
    [[]], [None], {"": None}, {"a": {}}, [1, "a", None, {}], list(range(300)),
)  # fmt: skip
TEXTS = (
    b"", b"\0", b"\0" * 4096, b"\xff\xfe", b"\xef\xbb\xbf", b"null", b"[]", b"{}", b"[", b"{", b'"',
    b"nan", b"-", b"1" * 5000, b"\x80" * 64, b"\x1f\x8b", b"<html>", b"%PDF-1.4", b"!!python/none",
    b"[" * DEEP, b'{"a":' * DEEP, b"&a [*a, *a]", b"\n" * 999,
)  # fmt: skip


def mutate(files: Files, rng: random.Random) -> Files:
    """One or two things made wrong."""
    files = dict(files)
    for _ in range(rng.choice((1, 1, 1, 2))):
        name = rng.choice(sorted(files))
        content = files[name]
        changed: bytes | None = None
        if rng.random() < 0.6:
            changed = _structure(name, content, rng)
        files[name] = _bytes(content, rng) if changed is None else changed
    return files


# ------------------------------------------------------------------ bytes


def _bytes(content: bytes, rng: random.Random) -> bytes:
    size = len(content)
    at = rng.randrange(size + 1)
    # Headers are small and decide most: half of all changes are near the beginning.
    if size and rng.random() < 0.5:
        at = rng.randrange(min(size, 64))
    length = min(size - at, rng.choice((1, 2, 4, 8, 64, 1024)))
    match rng.randrange(8):
        case 0:
            flipped = bytearray(content)
            for _ in range(rng.choice((1, 1, 1, 8)) if size else 0):
                flipped[rng.randrange(at, size) if at < size else 0] ^= 1 << rng.randrange(8)
            return bytes(flipped)
        case 1:
            return content[:at]
        case 2:
            return content[:at] + content[at + length :]
        case 3:
            return content[:at] + content[at : at + length] * 2 + content[at + length :]
        case 4:
            return content[:at] + rng.randbytes(length) + content[at + length :]
        case 5:
            return content[:at] + rng.choice((b"\0", b"\xff")) * length + content[at + length :]
        case 6:
            return content[:at] + rng.choice(TEXTS) + content[at:]
        case _:
            return rng.choice(TEXTS)


# ------------------------------------------------------------------ JSON and YAML, by their values


def _structure(name: str, content: bytes, rng: random.Random) -> bytes | None:
    """The file with one of its values changed; None: it is no JSON or YAML."""
    packed = content[:2] == b"\x1f\x8b"
    with contextlib.suppress(
        ValueError, yaml.YAMLError, OSError, EOFError, zlib.error, RecursionError
    ):
        text = gzip.decompress(content) if packed else content
        if name.endswith((".yaml", ".yml")):
            value = change(yaml.safe_load(text), rng)
            return yaml.safe_dump(value, sort_keys=False, allow_unicode=True).encode(
                "utf-8", "surrogatepass"
            )
        if name.endswith(".jsonl"):
            lines = text.splitlines()
            at = rng.randrange(len(lines))
            lines[at] = dump(change(json.loads(lines[at]), rng))
            changed = b"\n".join(lines)
        else:
            changed = dump(change(json.loads(text), rng))
        return gzip.compress(changed, 1) if packed else changed
    return None


def dump(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def change(value: Any, rng: random.Random) -> Any:
    """A deep copy of the value with something wrong somewhere in it."""
    box = [copy.deepcopy(value)]
    places: list[tuple[Any, Any]] = [(box, 0)]
    _walk(box[0], places)
    # Large lists (events) would draw all the changes; the small things around them matter more.
    early = places[: 1 + len(places) // 20] if rng.random() < 0.3 else places
    parent, key = rng.choice(early)
    rng.choice((_replace, _replace, _replace, _delete, _rename, _repeat, _bury))(parent, key, rng)
    return box[0]


def _walk(value: Any, places: list[tuple[Any, Any]]) -> None:
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value))
    else:
        return
    for key, child in children:
        places.append((value, key))
        _walk(child, places)


def _replace(parent: Any, key: Any, rng: random.Random) -> None:
    old = parent[key]
    if type(old) in (int, float) and rng.random() < 0.4:
        with contextlib.suppress(OverflowError):
            parent[key] = rng.choice((-old, old * 1000, old / 7, str(old), old + 1, [old]))
            return
    if isinstance(old, str) and rng.random() < 0.4:
        parent[key] = rng.choice((old + SCRIPT, old[::-1], old.upper(), old * 50, [old], {old: 1}))
        return
    parent[key] = copy.deepcopy(rng.choice(NASTY))


def _delete(parent: Any, key: Any, rng: random.Random) -> None:
    if parent is not None and len(parent) > 1:
        del parent[key]
    else:
        _replace(parent, key, rng)


def _rename(parent: Any, key: Any, rng: random.Random) -> None:
    if not isinstance(parent, MutableMapping):
        return _replace(parent, key, rng)
    text = key if isinstance(key, str) else str(key)
    name = rng.choice((text + "x", text[:-1], SCRIPT, "", "../../escaped", "__class__", "1"))
    parent[name] = parent.pop(key)
    return None


def _repeat(parent: Any, key: Any, rng: random.Random) -> None:
    if isinstance(parent, list):
        parent[key:key] = [copy.deepcopy(parent[key])] * rng.choice((1, 2, 50))
    else:
        _replace(parent, key, rng)


def _bury(parent: Any, key: Any, rng: random.Random) -> None:
    """Under more brackets than anybody wants to follow."""
    for _ in range(rng.choice((1, 10, 80))):
        parent[key] = [parent[key]] if rng.random() < 0.5 else {"a": parent[key]}


# ------------------------------------------------------------------ in a folder


def disturb(folder: Path, outside: Path, rng: random.Random, pipes: bool) -> None:
    """One of the folder's files gone, elsewhere, or something that is no file."""
    path = rng.choice(sorted(p for p in folder.rglob("*") if p.is_file()))
    acts: tuple[Callable[[], Any], ...] = (
        path.unlink,
        lambda: (path.unlink(), path.mkdir()),
        lambda: (path.unlink(), path.symlink_to(path.name)),  # to itself
        lambda: (path.unlink(), path.symlink_to("nowhere")),
        lambda: (path.unlink(), path.symlink_to(outside)),
        lambda: (path.unlink(), path.symlink_to(folder)),
        lambda: path.rename(path.with_name("renamed" + path.suffix)),
        lambda: path.rename(path.with_name(SCRIPT.replace("/", "") + path.name)),
        lambda: path.with_name("copy-" + path.name).write_bytes(path.read_bytes()),
        lambda: path.with_name("\N{PILE OF POO}" + path.name).write_bytes(b""),
        lambda: (path.unlink(), os.mkfifo(path)),
    )
    rng.choice(acts if pipes else acts[:-1])()
