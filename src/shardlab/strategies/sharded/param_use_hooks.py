"""Which part of a model is used when: noticed in any model, however it is written.

A unit of ZeRO-3 is used in three ways: its module is called (hooks around it); backward takes out
what autograd saved of it (hooks on saved tensors); or anything else reads a parameter whose content
is away (``placeholder_params.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.batch import tensors_of
from shardlab.errors import UsageError
from shardlab.strategies.sharded.gathered_unit import GatheredUnit
from shardlab.strategies.steps import in_backward

# Between steps a parameter's view may be taken, by a checkpoint for instance, but not read.
OF_THE_OUTSIDE = (torch.Tensor.detach, torch.Tensor.data.__get__, torch.Tensor.__repr__)  # type: ignore[attr-defined]


class ParamUseHooks:
    """Calls ``need(i)`` before unit i is read, ``entered()`` when the units of a module are there,
    ``left(i)`` when forward has left its module, and ``passed(i)`` when backward has passed through
    a call of it.
    """

    def __init__(
        self,
        units: Sequence[GatheredUnit],
        *,
        need: Callable[[int], None],
        entered: Callable[[], None],
        left: Callable[[int], None],
        passed: Callable[[int], None],
    ) -> None:
        self.units, self.need, self.entered, self.left, self.passed = (
            units, need, entered, left, passed,
        )  # fmt: skip
        self.by_storage = {unit.storage._cdata: i for i, unit in enumerate(units)}
        self.is_running = False  # between the beginning and the end of a micro-batch
        self.thread = 0  # the thread that runs it; autograd may call hooks from threads of its own
        self.refusal: UsageError | None = None  # raised where the caller hears it
        modules: dict[nn.Module, list[int]] = {}
        for i, unit in enumerate(units):
            modules.setdefault(unit.module, []).append(i)
            unit.watch(partial(self._accessed, i))
        for module, its in modules.items():
            # Before the user's hooks, which may read the parameters (weight_norm does).
            before, after = partial(self._before_forward, its), partial(self._after_forward, its)
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            module.register_forward_hook(after, always_call=True, with_kwargs=True)

    def begin(self) -> None:
        """A micro-batch begins."""
        self.is_running, self.thread, self.refusal = True, threading.get_ident(), None

    @contextmanager
    def in_forward(self) -> Iterator[None]:
        """Around the loss function: what was refused inside of it is raised here."""
        try:
            yield
        except BaseException as error:
            if self.refusal is not None:
                raise self.refusal from None
            if "saved tensor hooks" not in str(error):
                raise
            raise UsageError(
                "zero3: the model uses torch.func (grad, vjp, jacrev …), which does not run beside "
                "hooks on what autograd saves; use torch.autograd.grad, or the strategy zero2"
            ) from None
        if self.refusal is not None:  # the model does without what its thread did not compute
            raise self.refusal

    def _use(self, i: int) -> None:
        """The unit's parameters are about to be read."""
        if not in_backward() and threading.get_ident() != self.thread:
            label = self.units[i].label or "the root"
            self.refusal = UsageError(
                f"zero3: the model runs '{label}' in a thread of its own; ranks could not agree in "
                "which order to gather its parameters; use the strategy zero2"
            )
            raise SystemExit  # ends the model's thread without a traceback
        self.need(i)

    def _accessed(self, i: int, operation: Any) -> None:
        """Somebody reads a parameter whose content is away, outside of its module's forward."""
        unit = self.units[i]
        if not self.is_running:
            if operation in OF_THE_OUTSIDE:
                return
            raise RuntimeError(
                f"zero3: a parameter of '{unit.label or 'the root'}' is read between steps, when "
                "this rank has only a part of it; use full_params()"
            )
        if in_backward():
            unit.is_recomputed = True
        else:
            unit.strays = True  # a view of it may be read after its module's forward
        self._use(i)

    # ------------------------------------------------------------ forward

    def _before_forward(self, units: list[int], _module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.is_running:
            raise RuntimeError("zero3: the model is run outside of gradients() and infer()")
        for i in units:
            self.units[i].depth += 1
            self._use(i)
            if in_backward():  # activation checkpointing computes it again
                self.units[i].is_recomputed = True
            elif torch.is_grad_enabled() and not self.units[i].stays:
                self._watch_inputs(i, tensors_of((args, kwargs)))
        if not in_backward():
            self.entered()

    def _after_forward(
        self, units: list[int], _module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        given = {id(t) for t in tensors_of((args, kwargs))}
        outputs = [t for t in tensors_of(output) if id(t) not in given]
        for i in units:
            unit = self.units[i]
            unit.depth -= 1
            if in_backward() or unit.depth or unit.stays:
                continue
            for tensor in outputs:
                if tensor.untyped_storage()._cdata == unit.storage._cdata:
                    unit.strays = True  # it returns a view of its own parameters
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._before_backward, i))
            if not unit.strays:
                self.left(i)

    # ------------------------------------------------------------ backward

    def pack(self, tensor: Tensor) -> Any:
        """Autograd saves a tensor for backward: if it is a parameter, note which unit it is of.

        An operator may save its own output, which holds the operator: with both in a circle that
        Python cannot see, what leads to no loss would never be freed.
        """
        i = self.by_storage.get(tensor.untyped_storage()._cdata)
        return tensor.detach() if i is None else (i, tensor)

    def unpack(self, saved: Any) -> Tensor:
        """Backward takes the tensor out, to read it."""
        if isinstance(saved, Tensor):
            return saved
        i, tensor = saved
        self._use(i)
        result: Tensor = tensor
        return result

    def _before_backward(self, i: int, _gradient: Tensor) -> None:
        self._use(i)

    def _watch_inputs(self, i: int, inputs: Sequence[Tensor]) -> None:
        """When the gradient of a call's input is there, backward has passed through the call.

        That of a leaf says so only where there is no other input: autograd hands it over at once,
        before what is still to be done in the block (relative embeddings that each block is given).
        """
        unit = self.units[i]
        differentiated = [t for t in inputs if t.requires_grad]
        has_other = not all(t.is_leaf for t in differentiated)
        left = len(differentiated)  # the hook must not hold the tensors that hold the hook
        if not left:
            return
        is_untouched = True
        unit.open_calls += 1
        unit.untouched_calls += 1

        def came(_gradient: Tensor, tells: bool) -> None:
            nonlocal left, is_untouched
            if tells and is_untouched:
                is_untouched = False
                unit.untouched_calls -= 1
            left -= 1
            if left == 0:
                unit.open_calls -= 1
            self.passed(i)

        for tensor in differentiated:
            tensor.register_hook(partial(came, tells=not (has_other and tensor.is_leaf)))


def refuse_compiled(model: nn.Module) -> None:
    """Hooks cannot see what compiled code reads."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, torch.jit.ScriptModule) or kind == "OptimizedModule":
            raise UsageError(
                f"zero3: module '{name or kind}' is compiled by the model itself, and zero3 "
                "cannot see what it reads; use training.compile: blocks, or the strategy zero2"
            )
