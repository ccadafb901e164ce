"""Records each call of torch.distributed: when, with which tensor, and whether it was waited for.

The functions of ``torch.distributed`` are replaced before the learner's file is imported, so that
``from torch.distributed import all_reduce`` is seen too, and it is seen if they are replaced again.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn

Row = dict[str, Any]

# Which argument says how large the message is: the larger side of a gather or a scatter.
_SIZE_ARGUMENT = {
    "all_reduce": "tensor",
    "all_reduce_coalesced": "tensors",
    "broadcast": "tensor",
    "reduce": "tensor",
    "all_gather": "tensor_list",
    "all_gather_into_tensor": "output_tensor",
    "all_gather_single": "output_tensor",
    "reduce_scatter": "input_list",
    "reduce_scatter_tensor": "input",
    "reduce_scatter_single": "input",
    "all_to_all": "input_tensor_list",
    "all_to_all_single": "input",
    "gather": "gather_list",
    "scatter": "scatter_list",
    "barrier": "",
    "send": "tensor",
    "recv": "tensor",
    "isend": "tensor",
    "irecv": "tensor",
}
# One thing under two names; torch 2.13 has new ones.
_SAME = {
    "all_reduce_coalesced": "all_reduce",
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}
_MODULES = (dist, dist.distributed_c10d)
_ALWAYS_ASYNC = ("isend", "irecv")
CHAINED = "chained"


class Spy:
    """What this rank called. ``calls`` has a row per call, in order:

    op           "all_reduce", "all_gather_into_tensor", "isend" …
    bytes        of the tensor; of gathers and scatters the larger side
    dtype, shape of the tensor (of a list: of its first)
    what         "grad:head.bias", "param:head.bias", "buffer:…" if it is one of the watched
                 model's; else ""
    reduce       "sum", "avg", "max" …; "" if nothing is reduced
    peer         the root or the other rank; None if there is none
    is_async     whether it returned a handle
    waited       the mark under which it was first waited for (for a blocking call, its own);
                 "chained" if its future was taken instead; None if it was never waited for
    touched      whether its tensor was written to, in place, between launch and wait
    in_backward  whether it was launched by a hook, inside backward
    ready, come  how many gradients of the watched model had come since the last ``mark``, and
                 their bytes
    mark         the last ``mark``'s name
    line         of the learner's file; 0 if it was not called from there
    """

    def __init__(self, tell: Callable[[str, Any], None], path: str) -> None:
        self._tell = tell
        self._path = path
        self._depth = 0
        self._wrappers: dict[str, Any] = {}
        self.clear()

    # -------------------------------------------------------------- for the checks

    def watch(self, model: nn.Module) -> None:
        """Name this model's tensors in the rows, and count its gradients as they come.

        Call it before the learner's code sees the model, so that our hooks run before theirs.
        """
        self._models.append(model)
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._arrived)

    def mark(self, name: str) -> None:
        """Name what comes now, and begin to count gradients anew."""
        self._mark, self._ready, self._come = name, 0, 0

    def clear(self) -> None:
        """Forget the calls so far."""
        self.calls: list[Row] = []
        self.before: Callable[[Row], None] = lambda _row: None  # done before each call
        self._models: list[nn.Module] = []
        self.mark("")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not record the check's own calls."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def tampered(self) -> list[str]:
        """The functions that somebody else has replaced."""
        return [
            name
            for name, wrapper in sorted(self._wrappers.items())
            if any(getattr(module, name) is not wrapper for module in _MODULES)
        ]

    # -------------------------------------------------------------- how it is done

    def install(self) -> None:
        for name in _SIZE_ARGUMENT:
            if original := getattr(dist, name, None):  # not every version has all of them
                self._wrappers[name] = self._wrapped(name, original)
                for module in _MODULES:
                    setattr(module, name, self._wrappers[name])
        functional.wait_tensor = self._waiting(functional.wait_tensor)

    def _waiting(self, original: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """What a DTensor sends does not pass through ``torch.distributed``, but is waited for
        here. No row is kept; the guard hears of it, to tell a rank that waits from a busy one."""

        def wait(tensor: Tensor) -> Tensor:
            row = {"op": "a collective of a DTensor", "what": "", "line": self._line()}
            self._tell("wait", row)
            result = original(tensor)
            self._tell("leave", None)
            return result

        return wait

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(original).parameters)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._depth:  # torch's own: send calls isend
                return original(*args, **kwargs)
            row, tensor = self._row(name, dict(zip(names, args, strict=False)) | kwargs)
            self.calls.append(row)
            self._tell("enter", row)
            with self.paused():
                self.before(row)
                handle = original(*args, **kwargs)
            if row["is_async"] and handle is not None:
                handle = _Handle(handle, self, row, tensor)
            else:
                row["waited"] = self._mark
            self._tell("leave", None)
            return handle

        return wrapper

    def _row(self, name: str, given: dict[str, Any]) -> tuple[Row, Tensor | None]:
        value = given.get(_SIZE_ARGUMENT[name])
        tensors = [value] if isinstance(value, Tensor) else list(value or [])
        tensors = [t for t in tensors if isinstance(t, Tensor)]
        small = given.get("tensor", given.get("input_tensor", given.get("input")))
        small = small if isinstance(small, Tensor) else None
        first = tensors[0] if tensors else small
        named = first if small is None else small
        peer = next(
            (given[k] for k in ("src", "dst", "group_src", "group_dst") if k in given), None
        )
        row: Row = {
            "op": _SAME.get(name, name),
            "bytes": sum(t.numel() * t.element_size() for t in tensors),
            "dtype": "" if first is None else str(first.dtype).removeprefix("torch."),
            "shape": [] if first is None else list(first.shape),
            "what": "" if named is None else self._name_of(named),
            "reduce": _op_name(given.get("op", dist.ReduceOp.SUM)) if "reduce" in name else "",
            "peer": peer if isinstance(peer, int) else None,
            "is_async": bool(given.get("async_op")) or name in _ALWAYS_ASYNC,
            "waited": None,
            "touched": False,
            "in_backward": torch._C._current_graph_task_id() != -1,
            "ready": self._ready,
            "come": self._come,
            "mark": self._mark,
            "line": self._line(),
        }
        return row, first

    def _name_of(self, tensor: Tensor) -> str:
        for model in self._models:
            for name, p in model.named_parameters():
                if _same_memory(tensor, p):
                    return f"param:{name}"
                if p.grad is not None and _same_memory(tensor, p.grad):
                    return f"grad:{name}"
            for name, b in model.named_buffers():
                if _same_memory(tensor, b):
                    return f"buffer:{name}"
        return ""

    def _arrived(self, p: Tensor) -> None:
        self._ready += 1
        self._come += p.numel() * p.element_size()

    def _line(self) -> int:
        """The innermost line of the learner's file that led here."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename == self._path:
                return frame.f_lineno
            frame = frame.f_back
        return 0


class _Handle:
    """The handle of an asynchronous call: torch's, and it notes that it was waited for."""

    def __init__(self, handle: Any, spy: Spy, row: Row, tensor: Tensor | None) -> None:
        self._handle, self._spy, self._row = handle, spy, row
        self._tensor = tensor  # held no longer than torch's own handle holds it
        self._version = 0 if tensor is None else tensor._version  # torch's count of writes in place

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        # Gloo itself divides in place for an average.
        if self._tensor is not None and self._row["reduce"] != "avg":
            self._row["touched"] |= self._tensor._version != self._version
        self._tensor = None
        self._spy._tell("wait", {**self._row, "line": self._spy._line()})
        result = self._handle.wait(*args, **kwargs)
        self._done(self._spy._mark)
        self._spy._tell("leave", None)
        return result

    def is_completed(self) -> bool:
        completed = bool(self._handle.is_completed())
        if completed:
            self._done(self._spy._mark)
        return completed

    def get_future(self) -> Any:
        """A learner who chains on the future may wait for that instead: it counts as waiting."""
        self._done(CHAINED)
        self._tensor = None
        return self._handle.get_future()

    def _done(self, how: str) -> None:
        if self._row["waited"] is None:
            self._row["waited"] = how

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.numel() > 0 and a.data_ptr() == b.data_ptr() and a.numel() == b.numel())


def _op_name(op: Any) -> str:
    """ReduceOp.SUM and its like print differently from one version of torch to the next."""
    text = str(getattr(op, "op", op))
    return text.rpartition(".")[2].strip("<>").partition(":")[0].lower()
