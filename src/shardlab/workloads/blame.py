"""Mistakes in the user's source, reported with their line: file:line, what is wrong, the source."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import shardlab
from shardlab.errors import UsageError


@dataclass(frozen=True)
class Place:
    """A line of the user's source."""

    file: str
    line: int

    def mistake(self, message: str) -> UsageError:
        source = linecache.getline(self.file, self.line).strip()
        shown = f"\n    {source}" if source else ""
        return UsageError(f"{_shown(self.file)}:{self.line}: {message}{shown}", lines=True)

    @classmethod
    def of_name(cls, name: str) -> Place:
        """Where a module gives the name its value."""
        module_name, _, attribute = name.rpartition(":")
        file = module_name
        if not file.endswith(".py"):
            file = getattr(sys.modules[module_name], "__file__", None) or module_name
        line = 1
        for node in _syntax(file):
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.AnnAssign):
                targets = [node.target]
            if any(isinstance(t, ast.Name) and t.id == attribute for t in targets):
                line = node.lineno
        return cls(file, line)

    @classmethod
    def of(cls, thing: Any) -> Place | None:
        """A function's last return, or the beginning of a class; None if it is not the user's."""
        while isinstance(thing, partial):
            thing = thing.func
        thing = getattr(thing, "__func__", thing)
        try:
            file = inspect.getsourcefile(thing)
            _, first = inspect.getsourcelines(thing)
        except (TypeError, OSError):
            return None
        if file is None or not _is_users(file):
            return None
        returns = [
            inner.lineno
            for node in _syntax(file)
            if isinstance(node, ast.FunctionDef) and inspect.isfunction(thing)
            and node.lineno <= thing.__code__.co_firstlineno + len(node.decorator_list)
            and thing.__code__.co_firstlineno <= node.lineno
            for inner in ast.walk(node)
            if isinstance(inner, ast.Return)
        ]  # fmt: skip
        return cls(file, max(returns, default=max(1, first)))


def _syntax(file: str) -> list[Any]:
    """Every statement of a file, also inside of classes and functions."""
    try:
        return list(ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return []


@contextmanager
def blame(name: str, what: str) -> Iterator[None]:
    """Report an exception of the user's code with its own lines alone."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
        text = "".join(traceback.format_list(frames))
        if isinstance(error, SyntaxError) and error.filename:
            place = f"{_shown(error.filename)}:{error.lineno}: "
            text = f"    {(error.text or '').strip()}\n"
        else:
            place = f"{_shown(frames[-1].filename)}:{frames[-1].lineno}: " if frames else ""
        message = str(error).strip() or "no message"
        raise UsageError(
            f"{place}{type(error).__name__}: {message} (in {what} of {name})\n{text}".rstrip(),
            lines=True,
        ) from None


_OURS = tuple(
    str(Path(str(module.__file__)).parent) for module in (shardlab, torch, ast) if module.__file__
)


def _is_users(file: str) -> bool:
    """Not ours, PyTorch's or Python's own."""
    installed = "site-packages" in file or "dist-packages" in file
    return not file.startswith("<") and (
        not file.startswith(_OURS) or (installed and not file.startswith(_OURS[:2]))
    )


def _shown(file: str) -> str:
    """As short as it is clear."""
    try:
        return str(Path(file).resolve().relative_to(Path.cwd()))
    except ValueError:
        return file


def short(value: Any) -> str:
    """A value in a message."""
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."
