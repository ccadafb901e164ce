"""Mistakes in the user's source, reported with their line: file:line, what is wrong, the source."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import textwrap
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardlab
from shardlab.errors import Mistake, UsageError


@dataclass(frozen=True)
class Place:
    """A line of the user's source."""

    file: str
    line: int

    def mistake(self, message: str) -> Mistake:
        source = linecache.getline(self.file, self.line).strip()
        shown = f"\n    {source}" if source else ""
        return Mistake(f"{_shown(self.file)}:{self.line}: {message}{shown}")

    @classmethod
    def of_name(cls, name: str) -> Place:
        """Where a module gives the name its value."""
        file, _, attribute = name.rpartition(":")
        if not file.endswith(".py"):
            file = getattr(sys.modules[file], "__file__", None) or file
        nodes: Iterable[ast.AST] = ()
        with suppress(OSError, SyntaxError, UnicodeDecodeError):
            nodes = ast.walk(ast.parse(Path(file).read_text(encoding="utf-8")))
        names = (n for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        return cls(file, max((n.lineno for n in names if n.id == attribute), default=1))

    @classmethod
    def now(cls) -> Place | None:
        """The line of the user's that is being run."""
        frames = [f for f in traceback.extract_stack() if _is_users(f.filename)]
        return cls(frames[-1].filename, frames[-1].lineno or 1) if frames else None

    @classmethod
    def of(cls, thing: Any) -> Place | None:
        """A function's last return, or the beginning of a class; None if it is not the user's."""
        while isinstance(thing, partial):
            thing = thing.func
        thing = inspect.unwrap(getattr(thing, "__func__", thing))
        try:
            file = inspect.getsourcefile(thing)
            lines, first = inspect.getsourcelines(thing)
        except (TypeError, OSError):
            return None
        if file is None or not _is_users(file):
            return None
        nodes: Iterable[ast.AST] = ()
        if inspect.isfunction(thing):
            with suppress(SyntaxError):  # a lambda is only a part of a statement
                nodes = ast.walk(ast.parse(textwrap.dedent("".join(lines))))
        returns = [first + node.lineno - 1 for node in nodes if isinstance(node, ast.Return)]
        return cls(file, max(returns, default=max(1, first)))


@contextmanager
def blame(name: str, what: str, model: nn.Module | None = None) -> Iterator[None]:
    """Report an exception of the user's code with its own lines alone. ``what`` calls ``model``,
    which may be where it was raised."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
        text = "".join(traceback.format_list(frames))
        place = f"{_shown(frames[-1].filename)}:{frames[-1].lineno}: " if frames else ""
        if isinstance(error, SyntaxError) and error.filename:
            place = f"{_shown(error.filename)}:{error.lineno}: "
            text = f"    {(error.text or '').strip()}"
        message = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
        if model is not None and _is_inside(model, error):
            what = f"the model's forward, for {what}"
        whole = f"{place}{message} (in {what} of {name})\n{text}"
        raise Mistake(whole.rstrip()) from None


def _is_inside(model: nn.Module, error: Exception) -> bool:
    """Whether the model, or a module in it, was at work when it was raised."""
    callers = (f.f_locals.get("self") for f, _ in traceback.walk_tb(error.__traceback__))
    return any(caller is module for caller in callers for module in model.modules())


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
    """The path, relative to the current folder if the file is inside it."""
    try:
        return str(Path(file).resolve().relative_to(Path.cwd()))
    except ValueError:
        return file


def short(value: Any) -> str:
    """A value in a message."""
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."
