"""The user's own workload, by import path: three forms, and mistakes answered with their line.

What ``file.py:name`` may be: a ``Workload``; a function that returns one, given the data config
and its options; or a function without arguments that returns ``(model, data, loss)``, the short
form, or these three by name in a dict, with more of what a ``Workload`` has. Each is tried out on
a few samples before anything is built on it.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardlab import naming
from shardlab.config import DataConfig
from shardlab.errors import UsageError, unknown
from shardlab.workloads import inner_steps, loss_additivity
from shardlab.workloads.base import Batch, Dataset, Workload, cast_model, tensors_of
from shardlab.workloads.blocks import check_blocks, show_blocks
from shardlab.workloads.first_calls import refuse_new_tensors, registered
from shardlab.workloads.loss_additivity import (
    MEAN,
    NEITHER,
    PENALTY,
    SUM,
    Bench,
    Count,
    Finding,
    splits,
    still,
)
from shardlab.workloads.no_rows import with_stand_ins
from shardlab.workloads.samples import IGNORED, RULES, Samples, Stream, call, samples_of
from shardlab.workloads.user_errors import Place, blame, short

LARGE = 200_000_000  # parameters: such a model is not tried, only built
# Parameters times elements of a sample: less is measured if a model needs more. (The clock does not
# decide, as every rank must come to the same finding.)
DEAR = 10_000_000_000

THREE = ("model", "data", "loss")
BESIDE = ("held_out", "optimizer", "schedule")  # as in a Workload; but any data may be held out


@dataclass(frozen=True)
class Checked:
    """What trying a workload out has found."""

    finding: Finding
    blocks: tuple[str, ...]
    notes: tuple[str, ...]
    needs_rows: bool  # the model cannot run a batch of zero rows


_checked: dict[str, Checked] = {}  # once in a process: a comparison builds its workload many times


def build(
    name: str, data: DataConfig, options: Mapping[str, Any], device: torch.device
) -> Workload:
    """The workload behind an import path, looked over before anything is built on it."""
    with blame(name, "importing it"):
        target = naming.resolve(name, {}, "workload")
    where = Place.of_name(name)
    built: Workload | Short
    if isinstance(target, Workload):
        if options:
            raise UsageError(f"the workload {name} is a value and takes no options")
        built = target
    elif inspect.isfunction(target) or isinstance(target, partial):
        naming.check_options(target, options, f"workload {name}")
        where = Place.of(target) or where
        built = _call(name, target, data, options, where)
    elif isinstance(target, type):
        raise where.mistake(f"{name} is a class; name a Workload, or a function that returns one")
    else:
        raise where.mistake(
            f"the workload {name} is neither a Workload nor a function that returns one"
        )
    key = f"{name} {sorted(options.items())} {data}"
    if key not in _checked:
        gpus = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=gpus):
            torch.manual_seed(0)  # the same finding on every rank, and in every run
            _checked[key] = Trial(name, built, where, device).check()
    found = _checked[key]
    workload = built if isinstance(built, Workload) else built.workload(found.finding)
    loss = inner_steps.refused(workload.loss)
    workload = replace(workload, loss=loss, blocks=found.blocks, notes=found.notes)
    return with_stand_ins(workload) if found.needs_rows else workload


def _call(
    name: str, target: Any, data: DataConfig, options: Mapping[str, Any], where: Place
) -> Workload | Short:
    takes_data = any(
        p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
        for p in inspect.signature(target).parameters.values()
    )
    make: Callable[[], Any] = partial(target, *([data] if takes_data else []), **options)
    with blame(name, "calling it"):
        result = make()
    if isinstance(result, Workload):
        return result
    if isinstance(result, Mapping) or (isinstance(result, tuple) and len(result) == 3):
        return _from_parts(name, make, _parts(result), data, where)
    raise where.mistake(
        f"the workload {name} returned a {type(result).__name__}, not a Workload, nor the three of "
        "(model, data, loss), nor a dict of them"
    )


# ------------------------------------------------------------------ the short form


@dataclass(frozen=True)
class Short:
    """``(model, data, loss)``, of which a ``Workload`` is made once the loss has been measured."""

    name: str
    make: Callable[[], Any]  # returns the three, or a dict
    first: weakref.ref[nn.Module]  # the model that it returned first
    samples: Samples
    loss: Any  # a function of (output, targets); None: the model computes it
    held_out: Samples | None
    beside: dict[str, Any]  # the optimizer and the schedule, which are a Workload's
    copies: dict[tuple[torch.device, torch.dtype], nn.Module] = field(default_factory=dict)

    def workload(self, finding: Finding) -> Workload:
        is_mean = finding.kind == MEAN
        samples = self.samples
        samples.rule = finding.counts[0] if is_mean else "targets"  # a sum is divided by these
        samples.identity = f"{finding.kind} over {samples.rule}, {samples.digest}"
        if self.held_out is not None:
            self.held_out.rule = samples.rule
        return Workload(
            name=self.name.rpartition(":")[0].rpartition("/")[2].removesuffix(".py")
            .replace("_", "-"),
            # Called again: each is initialised from the seed.
            make_model=lambda: _parts(self.make())["model"],
            loss=self.times_count if is_mean else self.as_given,
            dataset=samples,
            held_out=self.held_out,
            **self.beside,
        )  # fmt: skip

    def as_given(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._value(model, call(model, batch.inputs), batch)

    def times_count(self, model: nn.Module, batch: Batch) -> Tensor:
        """A mean as the sum that it was before it was divided."""
        output = call(model, batch.inputs)
        if batch.count:
            return self._value(model, output, batch) * batch.count
        # A mean over nothing is NaN. What it depends on gets a gradient of zeros, so that backward
        # runs as on the other ranks.
        for tensor in tensors_of(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(torch.zeros_like)
        return torch.nan_to_num(self._value(model, output, batch)) * 0.0

    def _value(self, model: nn.Module, output: Any, batch: Batch) -> Tensor:
        if self.loss is None:
            return _loss_in(output)
        loss = self.loss
        if isinstance(loss, nn.Module) and [*loss.buffers()]:  # class weights, for example
            parameter = next(model.parameters())
            where = parameter.device, parameter.dtype
            if where not in self.copies:  # the given one would not come back from "meta"
                self.copies[where] = copy.deepcopy(loss).to(*where)
            loss = self.copies[where]
        return cast(Tensor, loss(output, batch.targets))


def _loss_in(output: Any) -> Tensor:
    """The loss that a model has computed itself, as Hugging Face's do."""
    value = output
    if isinstance(output, Mapping):
        value = output.get("loss")
    elif hasattr(output, "loss"):
        value = output.loss
    elif isinstance(output, list | tuple) and output:
        value = output[0]
    if value is None:
        raise TypeError(
            f"the model, which is to compute its loss, returned a {type(output).__name__} without "
            "one: are there labels among the inputs?"
        )
    return cast(Tensor, value)


def _parts(result: Any) -> dict[str, Any]:
    """What the short form returned, by name."""
    return dict(result if isinstance(result, Mapping) else zip(THREE, result, strict=True))


def _from_parts(
    name: str,
    make: Callable[[], Any],
    parts: Mapping[str, Any],
    config: DataConfig,
    where: Place,
) -> Short:
    for key in parts:
        if key not in (*THREE, *BESIDE):
            raise where.mistake(str(unknown("part of a workload", key, (*THREE, *BESIDE))))
    if lacks := [key for key in THREE if key not in parts]:
        raise where.mistake(f"the dict has no '{lacks[0]}': model, data and loss belong in it")
    model, data, loss = (parts[key] for key in THREE)
    _refuse_no_model("the model is", model, where)
    if isinstance(loss, type) or not (callable(loss) or loss is None):
        is_class = isinstance(loss, type)
        what = f"the class {loss.__name__}" if is_class else f"a {type(loss).__name__}"
        raise where.mistake(
            f"the loss is {what}, not a function of (output, target), nor None for a model that "
            "computes its loss"
        )
    if isinstance(loss, nn.Module) and [*loss.parameters()]:
        raise where.mistake(
            f"the loss, a {type(loss).__name__}, has parameters, which would not be trained: make "
            "it a part of the model, which may return its loss (and give None for the loss)"
        )
    has_weights = isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and loss.weight is not None
    if has_weights and loss.reduction == "mean":
        raise where.mistake(
            f"{type(loss).__name__} with class weights is divided by the weights of the batch's "
            'targets, not by their number: give it reduction="sum"'
        )
    beside = {key: parts.get(key) for key in BESIDE}
    held_out = beside.pop("held_out")
    try:
        samples = samples_of(name, data, config, keep_targets=loss is None)
        samples.ignored = getattr(loss, "ignore_index", IGNORED)
        if held_out is not None:
            held_out = samples_of(name, held_out, None, keep_targets=loss is None)
            held_out.ignored = samples.ignored
    except TypeError as error:
        raise where.mistake(str(error)) from None
    return Short(name, make, weakref.ref(model), samples, loss, held_out, beside)


def _refuse_no_model(what: str, model: Any, at: Place) -> None:
    if isinstance(model, type):
        raise at.mistake(f"{what} the class {model.__name__}: call it, {model.__name__}()")
    if not isinstance(model, nn.Module):
        raise at.mistake(f"{what} a {type(model).__name__}, not an nn.Module")


# ------------------------------------------------------------------ looking it over


class Trial:
    """A workload tried out: build, fetch, forward, backward, once and on a few samples.

    ``check`` raises what is wrong with it, and where.
    """

    def __init__(
        self, name: str, built: Workload | Short, where: Place, device: torch.device
    ) -> None:
        self.name, self.where, self.device = name, where, device
        self.short = built if isinstance(built, Short) else None
        workload = built.workload(Finding(SUM)) if isinstance(built, Short) else built
        self.workload = replace(workload, loss=inner_steps.refused(workload.loss))
        self.loss_at = Place.of(built.loss) or where  # as the user wrote it
        self.model = self._made_model()
        kinds = {name: p.dtype for name, p in self.model.named_parameters()}
        self.narrow = [n for n, kind in kinds.items() if kind in (torch.float16, torch.bfloat16)]
        self.wide = [n for n, kind in kinds.items() if kind is torch.float64]
        self.batch = self._first_batch().to(device)

    def check(self) -> Checked:
        workload, model = self.workload, self.model
        if self.short is not None and self.short.first() is model:
            raise self.where.mistake(
                "the function returns the same model each time: make it inside the function, as "
                "each strategy begins with a new one"
            )
        if workload.blocks is not None:
            check_blocks(model, workload.blocks)
        blocks = workload.blocks_of(model)
        if sum(p.numel() for p in model.parameters()) > LARGE:
            finding, needs_rows = self._presumed(), True  # which is right for any model
        else:
            begun = inner_steps.trained(cast_model(model, self.device, torch.float32))
            used = self._forward_and_backward()
            self._refuse_changes(begun)
            if workload.blocks is None:  # a block that is not called would never be gathered
                blocks = tuple(block for block in blocks if block in used)
            finding = Finding(SUM)
            if not workload.couples_samples:
                finding = self._measured()
                self._refuse(finding)
            cast_model(model, self.device, torch.float32)
            self._check_evaluation()
            needs_rows = self._needs_rows(finding)
        notes = [self.short.samples.note] if self.short and self.short.samples.note else []
        if self.narrow:
            notes.append(
                f"the model is made with '{self.narrow[0]}' in half precision; parameters are kept "
                "and updated in float32, and --precision bf16 or fp16 computes in half precision"
            )
        if self.wide:
            notes.append(
                f"the model is made with '{self.wide[0]}' in float64; parameters are kept and "
                "updated in float32"
            )
        if workload.blocks is None and blocks:
            notes.append(f"the blocks are guessed from the model: {show_blocks(blocks)}")
        return Checked(finding, blocks, (*notes, *_notes_on(finding)), needs_rows)

    # ------------------------------------------------------------ its parts

    def _made_model(self) -> nn.Module:
        make: Any = self.workload.make_model  # or something else that was given for it
        at = Place.of(make) or self.where
        if isinstance(make, nn.Module) or not callable(make):
            is_model = isinstance(make, nn.Module)
            what = "model already" if is_model else f"{type(make).__name__}, not a function"
            raise self.where.mistake(
                f"make_model is a {what}; give the class or the function that makes a model, as "
                "each strategy begins with a new one"
            )
        with blame(self.name, "make_model"):
            model = make()
        _refuse_no_model("make_model returned", model, at)
        trains = [p.requires_grad for p in model.parameters()]
        if not trains:
            raise at.mistake(
                f"the model, a {type(model).__name__}, has no parameters (layers in a plain list "
                "are not found: use nn.ModuleList)"
            )
        if not any(trains):
            raise at.mistake(f"the model of {self.workload.name} has no parameter that trains")
        return cast(nn.Module, model)

    def _first_batch(self) -> Batch:
        dataset, held_out = self.workload.dataset, self.workload.held_out
        self._check_dataset("dataset", dataset)
        if held_out is not None:
            self._check_dataset("held_out", held_out)
        at = Place.of(dataset.batch) or self.where
        ids = [0, 1] if len(dataset) > 1 else [0]
        with blame(self.name, f"batch({ids})"):
            batch = dataset.batch(ids)
        if not isinstance(batch, Batch):
            raise at.mistake(f"batch({ids}) returned a {type(batch).__name__}, not a Batch")
        if batch.samples != len(ids):
            raise at.mistake(f"batch({ids}) has {batch.samples!r} samples, not {len(ids)}")
        if type(batch.count) is not int or batch.count < 0:
            raise at.mistake(
                f"batch({ids}) has the count {batch.count!r}: the number of targets must be an int "
                "of at least 0"
            )
        return batch

    def _check_dataset(self, what: str, dataset: Dataset) -> None:
        at = Place.of(type(dataset)) or self.where
        for needed in ("__len__", "batch"):
            if not hasattr(dataset, needed):
                raise at.mistake(
                    f"the {what}, a {type(dataset).__name__}, has no {needed}: a data set has "
                    "__len__() and batch(ids)"
                )
        with blame(self.name, f"the length of the {what}"):
            length = len(dataset)
        if length < 1:
            raise at.mistake(f"the {what} is empty")

    def _forward_and_backward(self) -> set[str]:
        """The names of the modules that were called."""
        model = self.model
        at = Place.of(self.workload.loss) or self.where
        called: set[str] = set()
        hooks = [
            module.register_forward_pre_hook(lambda _m, _a, name=module_name: called.add(name))
            for module_name, module in model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)  # which takes no such hooks
        ]
        before = registered(model)
        with blame(self.name, "the loss", model):
            loss: Any = self._loss_in_eval()
        refuse_new_tensors(before, registered(model))  # here it is seen before FSDP hides it
        for hook in hooks:
            hook.remove()
        if not isinstance(loss, Tensor):
            hint = " (.item() and float() cut it off from its gradient)" * isinstance(loss, float)
            raise at.mistake(f"the loss is a {type(loss).__name__}, not a tensor{hint}")
        if loss.dim():
            what = f"a tensor of shape {tuple(loss.shape)}"
            raise at.mistake(f'the loss is {what}, not one number: reduction="sum"')
        if loss.grad_fn is None:
            raise at.mistake(
                "the loss has no gradient: nothing in it depends on the parameters (was it "
                "detached, made anew from numbers, or computed under no_grad?)"
            )
        with blame(self.name, "backward"):
            loss.backward()
        for recurrent in _recurrent(model):
            recurrent.train(model.training)
        if all(p.grad is None for p in model.parameters()):
            raise at.mistake(
                "backward reaches none of the model's parameters: is it called in the loss?"
            )
        model.zero_grad()
        return called

    def _refuse_changes(self, begun: Mapping[str, Tensor]) -> None:
        """Refuse a forward or a loss that trains a parameter by itself: each rank would with its
        own samples. What other samples and more calls leave the same, as clipping does, may be."""
        loss, batch = self.workload.loss, self.batch
        found = inner_steps.after_calls(self.model, loss, [batch])
        if found is None or not inner_steps.differing(begun, found):
            return
        model = cast_model(self._made_model(), self.device, torch.float32)
        inner_steps.fill(model, begun)
        with blame(self.name, "batch([0])"):
            batch = self.workload.dataset.batch([0]).to(self.device)
        again = inner_steps.after_calls(model, loss, [batch, batch, batch])
        if again is not None and (
            names := inner_steps.differing({n: found[n] for n in begun}, again)
        ):
            raise self.loss_at.mistake(inner_steps.by_hand(names[0]))

    def _loss_in_eval(self) -> Tensor:
        """In eval mode there is no dropout, and BatchNorm takes a single row; but cuDNN has no
        backward for recurrent layers then. If the loss fails, because the model returns something
        else, it is computed in train mode."""
        self.model.eval()
        for recurrent in _recurrent(self.model):
            recurrent.train()
        try:
            return self.workload.loss(self.model, self.batch)
        except Exception:
            try:
                return self.workload.loss(still(self.model), self.batch)
            except Exception:
                self.model.eval()
            raise

    def _check_evaluation(self) -> None:
        held_out, evaluate = self.workload.held_out, self.workload.evaluate
        if held_out is not None and self.short is not None:
            with blame(self.name, "the loss of held-out sample 0"), torch.no_grad():
                self.workload.loss(self.model, held_out.batch([0]).to(self.device))
        if held_out is None or evaluate is None:
            return
        with blame(self.name, "evaluate", self.model), torch.no_grad():
            sums = evaluate(self.model, held_out.batch([0]).to(self.device))
        is_right = isinstance(sums, dict) and all(
            isinstance(value, Tensor) and value.dim() == 0 for value in sums.values()
        )
        if not is_right or {"samples", "targets"} & set(sums):
            at = Place.of(evaluate) or self.where
            raise at.mistake(
                f"evaluate returned {short(sums)}: a dict of sums belongs, each a tensor of one "
                "number, such as loss and correct (samples and targets are counted for you)"
            )

    def _needs_rows(self, finding: Finding) -> bool:
        """Whether the model, the loss or the data cannot do without rows, which a rank may have to:
        they fail, or what they give is not finite."""
        workload = self.workload if self.short is None else self.short.workload(finding)
        loss, model = workload.loss, self.model
        try:
            value = loss(model.train(), workload.dataset.batch([]).to(self.device))
            value.backward()
            found = [value, *(p.grad for p in model.parameters() if p.grad is not None)]
            if workload.held_out is not None:
                batch = workload.held_out.batch([]).to(self.device)
                model.eval()
                with torch.no_grad():
                    evaluate = workload.evaluate
                    sums = (
                        {"loss": loss(model, batch)} if evaluate is None else evaluate(model, batch)
                    )
                found += sums.values()
            return not all(bool(value.isfinite().all()) for value in found)
        except Exception:
            return True
        finally:
            model.zero_grad()

    # ------------------------------------------------------------ whether the loss adds up

    def _measured(self) -> Finding:
        """Measured in float64, or in float32 if the model cannot compute in float64."""
        dataset, model = self.workload.dataset, self.model
        length = len(dataset)
        elements = sum(t.numel() for t in tensors_of(self.batch.inputs)) // self.batch.samples
        is_dear = elements * sum(p.numel() for p in model.parameters()) > DEAR
        most = 2 if is_dear else max(2, min(loss_additivity.SAMPLES, length))
        last = min(most if isinstance(dataset, Stream) or is_dear else length, length) - 1
        ids = [i * last // (most - 1) for i in range(most)]
        rules: dict[str, Count] = {"count": lambda batch: batch.count}
        if self.short is not None:
            rules = {rule: partial(self.short.samples.count, rule) for rule in RULES}
        loss_additivity.shake(model)
        ways = [(torch.device("cpu"), torch.float64), (self.device, torch.float32)][is_dear:]
        for place, dtype in ways:
            bench = Bench(model.to(place, dtype), self.workload.loss, dataset.batch, place, dtype,
                          most_draws=4 if is_dear else loss_additivity.DRAWS)  # fmt: skip
            try:
                finding = loss_additivity.measure(bench, ids, rules)
                break
            except UsageError:
                raise
            except Exception:  # an operator without float64, or a model that is made for its device
                if (place, dtype) == ways[-1]:
                    with blame(self.name, f"the loss of samples {ids}", model):
                        raise
        if self.short is None:
            _check_counts(dataset, ids)
        declares = self.short and (self.short.loss is None or hasattr(self.short.loss, "reduction"))
        if finding.note and declares:  # the loss says itself what it is
            return replace(self._presumed(), note=finding.note)
        if finding.kind == MEAN and len(finding.counts) > 1 and place.type == "cpu":
            return replace(finding, counts=(self._planted(bench, ids, rules, finding),))
        return finding

    def _planted(
        self, bench: Bench, ids: Sequence[int], rules: Mapping[str, Count], finding: Finding
    ) -> str:
        """The rule, among several that count alike here, that still holds when some of the targets
        are to be ignored. (Tried on a CPU alone: a label out of range ends a GPU's process.)"""
        counts = finding.counts
        ignored = IGNORED if self.short is None else self.short.samples.ignored
        if loss_additivity.plant(bench.make(ids), ids, ids[0], ignored) is None:
            return counts[0]

        def make(numbers: Sequence[int], plain: Any = bench.make) -> Batch:
            batch = loss_additivity.plant(plain(numbers), numbers, ids[0], ignored)
            assert batch is not None
            return batch

        try:
            again = loss_additivity.measure(
                replace(bench, make=make), ids, {n: rules[n] for n in counts}
            )
        except Exception:  # the loss knows of no ignored targets
            counts = tuple(n for n in counts if n not in ("targets", "next tokens")) or counts
            return counts[0]
        return again.counts[0] if again.kind == MEAN else counts[0]

    def _presumed(self) -> Finding:
        """What the loss says about itself, for a model that is too large to be tried."""
        note = "the model is too large to be tried, so whether its loss adds up was not measured"
        if self.short is None:
            return Finding(SUM, note=note)
        if self.short.loss is None:
            is_causal = any(word in type(self.model).__name__ for word in ("CausalLM", "LMHead"))
            return Finding(MEAN, ("next tokens" if is_causal else "targets",), note)
        counts = {"mean": ("targets",), "batchmean": ("samples",)}
        over = counts.get(getattr(self.short.loss, "reduction", SUM))
        return Finding(SUM, note=note) if over is None else Finding(MEAN, over, note)

    def _refuse(self, finding: Finding) -> None:
        """Refuse a loss that ranks cannot share."""
        if finding.kind == NEITHER:
            raise self.loss_at.mistake(
                f"the loss is neither a sum nor a mean over targets ({finding.evidence}): it looks "
                "at the samples of a batch together, as dice, contrastive losses and weighted "
                "means do, so ranks that share a batch get another loss; make it a sum over "
                "samples, or say Workload(couples_samples=True) to have it of each micro-batch by "
                "itself; a mean over something else, as over labels under CTC, is a sum in a "
                "Workload whose batches count that; of two means over different numbers, as of "
                "graphs and of nodes, return the sums"
            )
        if finding.kind == MEAN and self.short is None and not finding.note:
            raise self.loss_at.mistake(
                "the loss is a mean, and must be a sum: shardlab divides by the count of the "
                'global batch, which ranks share unevenly (use reduction="sum", or .sum() for '
                ".mean())"
            )


def _recurrent(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.RNNBase)]


def _check_counts(dataset: Dataset, ids: Sequence[int]) -> None:
    whole, parts = dataset.batch(ids).count, [dataset.batch(p).count for p in splits(ids)[0]]
    if whole != sum(parts):
        at = Place.of(dataset.batch) or Place.of(type(dataset))
        message = (
            f"the counts do not add up: that of samples {list(ids)} is {whole}, of their parts "
            f"{' and '.join(map(str, parts))} (is padding counted?); a rank's share of the loss "
            "would depend on which samples it has"
        )
        raise UsageError(message) if at is None else at.mistake(message)


def _notes_on(finding: Finding) -> tuple[str, ...]:
    if finding.kind == PENALTY:
        return (
            "the loss has a term that is the same whatever the samples are (a penalty on the "
            "parameters?): every micro-batch of every rank adds it; multiply it by batch.count, "
            "and its weight no longer depends on the number of ranks",
        )
    notes = [finding.note] if finding.note else []
    if finding.kind == MEAN and finding.counts != ("count",):
        notes.append(
            f"the loss is a mean over {finding.counts[0]}, and is taken times their number"
        )
    return tuple(notes)
