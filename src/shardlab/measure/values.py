"""What is answered where code asks a tensor without content for its value.

In a memory simulation tensors have shapes and no values. PyTorch asks for values now and then (Adam
its step count, ``nn.init.trunc_normal_`` whether all lie within), and so do models (``if
torch.rand(()) < p``, ``mask.any()``, ``lengths.max().item()``). Who asks is found on the stack.
A model's question is noted, because the answer may decide what it holds, and the whole estimate is
made for both answers, 1 and 0.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch
from torch._subclasses import fake_tensor

from shardlab.errors import UsageError
from shardlab.workloads.user_errors import _is_users, _shown

P = ParamSpec("P")
T = TypeVar("T")

NO_VALUES = "in an estimate tensors have none; shardlab compare weighs what it runs"
GUESSES = (1, 0)  # True and False, for a condition
MOST_QUESTIONS = 2_000  # from one line in one forward: more is a loop waiting for another answer
_INIT = torch.nn.init.__file__
_OURS, _MEASURING = (str(folder) for folder in (Path(__file__).parents[1], Path(__file__).parent))
_DEPENDS_ON_VALUES = (
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.DataDependentOutputException,
)


class Values:
    """Answers questions for values, and notes the lines of the user's code that asked."""

    def __init__(self, guess: int = GUESSES[0]) -> None:
        self.guess = guess
        self.questions: dict[str, None] = {}  # the places that asked, file:line
        self.in_this_call: Counter[str] = Counter()

    def answer(self) -> int:
        frame = _who_asks(sys._getframe(1))
        if frame is None:  # the optimizer, a strategy of ours: a step count, a norm
            return 1
        if frame.f_code.co_filename == _INIT:  # is any value out of bounds? No: it would loop
            return 0
        place = f"{_shown(frame.f_code.co_filename)}:{frame.f_lineno}"
        self.questions[place] = None
        self.in_this_call[place] += 1
        if self.in_this_call[place] > MOST_QUESTIONS:
            raise UsageError(f"{place}: a loop waits for the value of a tensor, and {NO_VALUES}")
        return self.guess


def _who_asks(frame: FrameType | None) -> FrameType | None:
    """The nearest frame of PyTorch's initialisation or the user's; None if ours comes first."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file == _INIT or _is_users(file):
            return frame
        if _is_ours(file):
            return None
        frame = frame.f_back
    return None


def _is_ours(file: str) -> bool:
    """A strategy's, a workload's; not what only watches them."""
    return file.startswith(_OURS) and not file.startswith(_MEASURING)


def in_a_line(what: str, function: Callable[P, T], values: Values) -> Callable[P, T]:
    """A function of the user's, whose errors name the line of the user's code they come from.

    An error that comes from our code, which may run inside (hooks), stays as it is. Each call has
    its own count of questions to ``values``.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        values.in_this_call.clear()
        try:
            return function(*args, **kwargs)
        except UsageError:
            raise
        except Exception as error:
            in_users_code = _placed(error, what)
            if in_users_code is None:
                raise
            raise in_users_code from None

    return call


def _placed(error: Exception, what: str) -> UsageError | None:
    """The error with the user's line it comes from; None if it comes from our code."""
    frames = traceback.extract_tb(error.__traceback__)
    known: Any = next(
        (f for f in reversed(frames) if _is_users(f.filename) or _is_ours(f.filename)), None
    )
    if known is None or not _is_users(known.filename):
        return None
    place = f"{_shown(known.filename)}:{known.lineno}"
    if isinstance(error, _DEPENDS_ON_VALUES):
        return UsageError(f"{place}: {error.func} needs the values of its tensors, and {NO_VALUES}")
    message = str(error).strip().partition("\n")[0] or "no message"
    return UsageError(f"{place}: {type(error).__name__}: {message} (in {what}, of the estimate)")
