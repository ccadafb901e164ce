"""The user's own workload, by import path: three forms, and mistakes answered with their line.

What ``file.py:name`` may be: a ``Workload``; a function that returns one, given the data config
and its options; or a function without arguments that returns ``(model, data, loss)``, the short
form: a module, samples as pairs, and a function of output and target that adds up.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardlab import naming
from shardlab.config import DataConfig
from shardlab.errors import UsageError, unknown
from shardlab.workloads.base import Batch, Workload, cast_model
from shardlab.workloads.blame import Place, blame

LARGE = 200_000_000  # parameters: such a model is not tried, only built
_checked: set[str] = set()  # once in a process: a comparison builds its workload many times


def build(
    name: str, data: DataConfig, options: Mapping[str, Any], device: torch.device
) -> Workload:
    """The workload behind an import path, looked over before anything is built on it."""
    with blame(name, "importing it"):
        target = naming.resolve(name, {}, "workload")
    where = Place.of_name(name)
    if isinstance(target, Workload):
        if options:
            raise UsageError(f"the workload {name} is a value and takes no options")
        workload = target
    elif inspect.isfunction(target) or isinstance(target, partial):
        naming.check_options(target, options, f"workload {name}")
        where = Place.of(target) or where
        workload = _call(name, target, data, options, where)
    elif isinstance(target, type):
        raise where.mistake(f"{name} is a class; name a Workload, or a function that returns one")
    else:
        raise where.mistake(
            f"the workload {name} is neither a Workload nor a function that returns one"
        )
    key = f"{name} {sorted(options.items())} {data}"
    if key not in _checked:
        with torch.random.fork_rng(devices=[]):
            _check(name, workload, where, device)
        _checked.add(key)
    return workload


def _call(
    name: str, target: Any, data: DataConfig, options: Mapping[str, Any], where: Place
) -> Workload:
    takes_data = any(
        p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
        for p in inspect.signature(target).parameters.values()
    )
    make: Callable[[], Any] = partial(target, *([data] if takes_data else []), **options)
    with blame(name, "calling it"):
        result = make()
    if isinstance(result, Workload):
        return result
    if isinstance(result, tuple) and len(result) == 3:
        return _from_three(name, make, result, where)
    raise where.mistake(
        f"the workload {name} returned a {type(result).__name__}, not a Workload, nor the three of "
        "(model, data, loss)"
    )


# ------------------------------------------------------------------ the short form


def _from_three(
    name: str, make: Callable[[], Any], result: tuple[Any, Any, Any], where: Place
) -> Workload:
    model, data, loss = result
    if isinstance(model, type):
        raise where.mistake(f"the model is the class {model.__name__}: call it, {model.__name__}()")
    if not isinstance(model, nn.Module):
        raise where.mistake(f"the model is a {type(model).__name__}, not an nn.Module")
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise where.mistake(
            f"the data, a {type(data).__name__}, has no length or cannot be indexed: give a "
            "sequence of (input, target), such as a list or a TensorDataset"
        )
    if not callable(loss):
        raise where.mistake(
            f"the loss is a {type(loss).__name__}, not a function of (output, target)"
        )
    if getattr(loss, "reduction", "sum") != "sum":
        raise where.mistake(
            f'{type(loss).__name__} makes a {loss.reduction}: give it reduction="sum"'
        )

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        value: Tensor = loss(model(batch.inputs), batch.targets)
        return value

    return Workload(
        name=name.rpartition(":")[0].rpartition("/")[2].removesuffix(".py").replace("_", "-"),
        make_model=lambda: make()[0],  # called again: each model is initialised from the seed
        loss=loss_of,
        dataset=Pairs(data),
    )


class Pairs:
    """Samples that are pairs of input and target, as a torch ``Dataset`` gives them.

    The count is the number of elements of the targets: a label each, or a token each.
    """

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, ids: Sequence[int]) -> Batch:
        from torch.utils.data import default_collate

        rows = [self.data[int(i)] for i in ids] or [self.data[0]]
        if not all(isinstance(row, tuple | list) and len(row) == 2 for row in rows):
            raise TypeError(f"a sample is a pair (input, target), got {_short(rows[0])}")
        inputs, targets = default_collate([tuple(row) for row in rows])
        if not ids:  # a rank with nothing to do
            inputs, targets = _none_of(inputs), _none_of(targets)
        count = targets.numel() if isinstance(targets, Tensor) else len(ids)
        return Batch(inputs=inputs, targets=targets, count=count, samples=len(ids))


def _none_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value[:0]
    if isinstance(value, dict):
        return {k: _none_of(v) for k, v in value.items()}
    return type(value)(_none_of(v) for v in value)


# ------------------------------------------------------------------ looking it over


def _check(name: str, workload: Workload, where: Place, device: torch.device) -> None:
    """Build, fetch, forward, backward, once and on two samples; say what is wrong, and where."""
    model = _check_model(name, workload, where)
    batch = _check_data(name, workload, where).to(device)
    for block in workload.blocks:
        try:
            model.get_submodule(block)
        except AttributeError:
            raise unknown("block", block, [n for n, _ in model.named_modules() if n]) from None
    if sum(p.numel() for p in model.parameters()) > LARGE:
        return
    loss_at = Place.of(workload.loss) or where
    # As training will, but without dropout, and so that BatchNorm takes a single row.
    cast_model(model, device, torch.float32).eval()
    with blame(name, "the loss"):
        loss: Any = workload.loss(model, batch)
    if not isinstance(loss, Tensor):
        hint = " (.item() and float() cut it off from its gradient)" * isinstance(loss, float)
        raise loss_at.mistake(f"the loss is a {type(loss).__name__}, not a tensor{hint}")
    if loss.dim():
        raise loss_at.mistake(
            f'the loss is a tensor of shape {tuple(loss.shape)}, not one number: reduction="sum"'
        )
    if loss.grad_fn is None:
        raise loss_at.mistake(
            "the loss has no gradient: nothing in it depends on the parameters (was it detached, "
            "made anew from numbers, or computed under no_grad?)"
        )
    with blame(name, "backward"):
        loss.backward()
    if all(p.grad is None for p in model.parameters()):
        raise loss_at.mistake(
            "backward reaches none of the model's parameters: is it called in the loss?"
        )
    _refuse_a_mean(workload, model, batch, loss_at)
    _check_evaluation(name, workload, model, where)


def _check_model(name: str, workload: Workload, where: Place) -> nn.Module:
    make: Any = workload.make_model  # or whatever was given for it
    at = Place.of(make) or where
    if isinstance(make, nn.Module):
        raise where.mistake(
            "make_model is a model already; give the class or the function that makes one, as each "
            "strategy begins with a new one"
        )
    if not callable(make):
        raise where.mistake(
            f"make_model is a {type(make).__name__}, not a function that makes a model"
        )
    with blame(name, "make_model"):
        model = make()
    if isinstance(model, type):
        raise at.mistake(
            f"make_model returned the class {model.__name__}: call it, {model.__name__}()"
        )
    if not isinstance(model, nn.Module):
        raise at.mistake(f"make_model returned a {type(model).__name__}, not an nn.Module")
    if not any(True for _ in model.parameters()):
        raise at.mistake(
            f"the model, a {type(model).__name__}, has no parameters (layers in a plain list are "
            "not found: use nn.ModuleList)"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise at.mistake(f"the model of {workload.name} has no parameter that trains")
    return model


def _check_data(name: str, workload: Workload, where: Place) -> Batch:
    for what, dataset in (("dataset", workload.dataset), ("held_out", workload.held_out)):
        if what == "held_out" and dataset is None:
            continue
        at = Place.of(type(dataset)) or where
        for needed in ("__len__", "batch"):
            if not hasattr(dataset, needed):
                raise at.mistake(
                    f"the {what}, a {type(dataset).__name__}, has no {needed}: a data set has "
                    "__len__() and batch(ids)"
                )
        with blame(name, f"the length of the {what}"):
            length = len(dataset)  # type: ignore[arg-type]
        if length < 1:
            raise at.mistake(f"the {what} is empty")
    dataset = workload.dataset
    at = Place.of(dataset.batch) or where
    ids = [0, 1] if len(dataset) > 1 else [0]
    with blame(name, f"batch({ids})"):
        batch = dataset.batch(ids)
    if not isinstance(batch, Batch):
        raise at.mistake(f"batch({ids}) returned a {type(batch).__name__}, not a Batch")
    if batch.samples != len(ids):
        raise at.mistake(f"batch({ids}) has {batch.samples!r} samples, not {len(ids)}")
    if type(batch.count) is not int or batch.count < 0:
        raise at.mistake(
            f"batch({ids}) has the count {batch.count!r}: a whole number of targets belongs"
        )
    return batch


def _refuse_a_mean(workload: Workload, model: nn.Module, batch: Batch, at: Place) -> None:
    """The loss of two samples must be the sum of each one's. A mean gives itself away here."""
    if batch.samples < 2:
        return
    device = next(model.parameters()).device
    with torch.no_grad():
        both = float(workload.loss(model, batch))
        ones = [workload.dataset.batch([i]).to(device) for i in (0, 1)]
        parts = [float(workload.loss(model, one)) for one in ones]
    whole, size = sum(parts), max(abs(both), *map(abs, parts), 1e-12)
    mean = sum(p * o.count for p, o in zip(parts, ones, strict=True)) / max(1, batch.count)
    if abs(both - whole) > 1e-2 * size and abs(both - mean) < 1e-3 * size:
        raise at.mistake(
            "the loss is a mean, and must be a sum: shardlab divides by the count of the global "
            'batch, which ranks share unevenly (use reduction="sum", or .sum() for .mean())'
        )


def _check_evaluation(name: str, workload: Workload, model: nn.Module, where: Place) -> None:
    if workload.held_out is None or workload.evaluate is None:
        return
    with blame(name, "evaluate"), torch.no_grad():
        device = next(model.parameters()).device
        sums = workload.evaluate(model, workload.held_out.batch([0]).to(device))
    is_right = isinstance(sums, dict) and all(
        isinstance(value, Tensor) and value.dim() == 0 for value in sums.values()
    )
    if not is_right or {"samples", "targets"} & set(sums):
        at = Place.of(workload.evaluate) or where
        raise at.mistake(
            f"evaluate returned {_short(sums)}: a dict of sums belongs, each a tensor of one "
            "number, such as loss and correct (samples and targets are counted for you)"
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."
