"""How a model is split over the ranks of the tensor axis, as its workload says it.

A workload's ``splits`` map names of modules, with ``*`` for any part of a name between dots, to
what becomes of them:

    vocabulary     an embedding or a head: some of the tokens
    heads 8 2 2    a layer whose outputs are 8 heads, then 2, then 2 (queries, keys, values): some
                   of each; "heads 8" where they are layers of their own
    columns        a layer: some of its outputs
    rows           a layer: some of its inputs, which are heads or columns; outputs are summed
    branch         a module that holds such layers, and gives all of them its input
    inside         a module between columns and rows that every rank has: a norm of each head
    block          a module that the residual stream goes through, from its first argument to its
                   output; all of them, one after another
    norm           a module of a block that treats each position by itself
    whole          a module, with all in it, that every rank computes as one process would
    number         an attribute of a module, such as its number of heads: divided by the ranks

Every parameter must be spoken for, by its module or by itself, so that none is forgotten.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from shardlab import comm
from shardlab.batch import map_tensors, tensors_of
from shardlab.errors import UsageError, unknown
from shardlab.numbers import cut_range
from shardlab.strategies.layout import Cut, Held, rows, whole, whole_layout
from shardlab.strategies.rehearsal import Rehearsal
from shardlab.strategies.sequence_parallel import Positions
from shardlab.strategies.stages import WHEN_SKIPPED, intercepted, probing
from shardlab.strategies.tensor_parallel import ColumnLinear, RowLinear, Stream, Whole, enter
from shardlab.strategies.vocabulary import Vocabulary, VocabularyEmbedding, VocabularyHead
from shardlab.workloads.base import Batch, LossFn

LAYERS = ("vocabulary", "heads", "columns", "rows")
KINDS = (*LAYERS, "branch", "inside", "block", "norm", "whole", "number")


@dataclass(frozen=True)
class Layer:
    """A layer, and which of its outputs or inputs this rank keeps."""

    name: str
    module: nn.Module
    kind: str
    weight: nn.Parameter
    is_transposed: bool  # its weight is (in, out), as in transformers' Conv1D
    kept: list[range]

    @property
    def axis(self) -> int:
        """The dimension of the weight that is split."""
        return int((self.kind == "rows") != self.is_transposed)

    def cuts(self) -> Iterator[tuple[nn.Parameter, list[range], int]]:
        """The parameters that are split, with what is kept of which dimension."""
        yield self.weight, self.kept, self.axis
        bias = getattr(self.module, "bias", None)
        if bias is not None and self.kind != "rows":
            yield bias, self.kept, 0


def cut(
    model: nn.Module,
    splits: Mapping[str, str] | None,
    group: comm.Group,
    loss: LossFn,
    sequence: bool = False,
    sample: Batch | None = None,
) -> Cut:
    """Keep this rank's part of a model that is whole, and the same, on every rank. The ``sample``
    shows whether the model and its loss can bear that."""
    named = read(model, splits)
    stream: Stream = Whole(group)
    if sequence:
        _refuse_for_sequence(named)
        stream = Positions(group, has_dropout=bool(_dropouts(model)))
    layers = layers_of(model, named, group)
    if not layers:
        raise UsageError("tensor parallelism: the workload's splits cut no layer; see splits.py")
    divided = divided_by(model, named, group.size())
    held, partial = agreed(model, named, layers, sequence)
    rehearsal = None
    if sample is not None:
        parts = {p for p, part in held.items() if part != whole(p)}
        _refuse_read_outside(model, loss, sample, parts | set(partial))
        rehearsal = Rehearsal.of(model, loss, sample)
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = Cut(whole_layout(model), loss)
    found.layout |= {names[p]: part for p, part in held.items()}
    found.partial |= dict.fromkeys((names[p] for p in partial), group)
    made: dict[nn.Parameter, nn.Parameter] = {}  # a tied parameter is made once
    for layer in layers:
        for p, kept, axis in layer.cuts():
            if p not in made:
                part = torch.cat([p.detach().narrow(axis, r.start, len(r)) for r in kept], axis)
                made[p] = nn.Parameter(part, requires_grad=p.requires_grad)
    branches = [name for name, kind in named.items() if kind == "branch"]
    replaced = {layer.module: _made(layer, made, branches, stream) for layer in layers}
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child in replaced:
                parent._modules[key] = replaced[child].train(child.training)
    for module, attribute, number in divided:
        setattr(module, attribute, number)
    for name in branches:
        _share_input(model.get_submodule(name), stream, name)
    blocks = [name for name, kind in named.items() if kind == "block"]
    if isinstance(stream, Positions):
        _begin_at(model.get_submodule(blocks[0]), stream, blocks[0])
        _end_at(model.get_submodule(blocks[-1]), stream, blocks[-1])
    if rehearsal is not None and sample is not None:
        rehearsal.hold(
            functools.partial(rehearsal.again, model, loss, sample),
            "sequence parallelism" if sequence else "tensor parallelism",
            "do the workload's splits fit its model, do they name each number of heads and "
            "channels as a 'number', and does no code in a block look at several positions?",
        )
    return found


# ------------------------------------------------------------------ what the workload says


def read(model: nn.Module, splits: Mapping[str, str] | None) -> dict[str, str]:
    """What becomes of which module, parameter or attribute, by its name, in the model's order."""
    if not splits:
        raise UsageError(
            f"tensor parallelism: the workload does not say how its model, a "
            f"{type(model).__name__}, is split; give it splits (docs/workloads.md)"
        )
    if not isinstance(splits, Mapping):
        raise UsageError(
            f"a workload's splits map names of modules to what becomes of them; these are a "
            f"{type(splits).__name__}"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    named: dict[str, tuple[str, str]] = {}
    for pattern, text in splits.items():
        kind = text.partition(" ")[0] if isinstance(text, str) else text
        if kind not in KINDS:
            raise unknown(f"split of '{pattern}'", str(kind), KINDS)
        if kind == "heads" and not re.fullmatch(r"heads( [1-9]\d*)+", text):
            raise UsageError(
                f"the split of '{pattern}' is '{text}': say how many heads its outputs are, as in "
                "'heads 8', or 'heads 8 2 2' for queries, keys and values"
            )
        if kind != "heads" and text != kind:
            raise UsageError(f"the split of '{pattern}' is '{text}', where '{kind}' belongs")
        regex = re.compile(re.escape(pattern).replace(r"\*", r"[^.]*"))
        choice: Sequence[str] = [*modules, *parameters]
        if kind == "number":
            choice = [
                f"{name}.{key}" if name else key
                for name, module in modules.items()
                for key, value in vars(module).items()
                if type(value) is int
            ]
        matches = [name for name in choice if name and regex.fullmatch(name)]
        if not matches:
            raise unknown("split of a module", pattern, [name for name in choice if name])
        for name in matches:
            before, of = named.setdefault(name, (text, pattern))
            if before != text:
                raise UsageError(
                    f"'{name}' is split twice: '{of}' says {before}, and '{pattern}' {text}"
                )
    _refuse_forgotten(model, {name: text for name, (text, _) in named.items()})
    order = {name: place for place, name in enumerate((*modules, *parameters))}
    return {n: named[n][0] for n in sorted(named, key=lambda n: order.get(n, len(order)))}


def _around(name: str) -> Iterator[str]:
    """The name, and those of the modules around it, inmost first."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _refuse_forgotten(model: nn.Module, named: Mapping[str, str]) -> None:
    for name, _ in model.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        kind = named.get(name, named.get(owner, "")).partition(" ")[0]
        is_known = kind in (*LAYERS, "inside", "norm", "whole")
        if not is_known and not any(named.get(outer) == "whole" for outer in _around(owner)):
            what = f"module '{owner}' ({type(model.get_submodule(owner)).__name__})"
            raise UsageError(
                f"tensor parallelism: {what if owner else repr(name)} has no place in the "
                "workload's splits; say 'columns', 'rows' or another of strategies/splits.py, or "
                "'whole' if every rank is to compute all of it"
            )


# ------------------------------------------------------------------ what each rank keeps


def layers_of(model: nn.Module, named: Mapping[str, str], group: comm.Group) -> list[Layer]:
    return [
        _layer(model, name, kind, group)
        for name, kind in named.items()
        if kind.partition(" ")[0] in LAYERS
    ]


def _layer(model: nn.Module, name: str, text: str, group: comm.Group) -> Layer:
    """The layer and its split; refused by name where it cannot be."""
    owner, _, last = name.rpartition(".")
    module = getattr(model.get_submodule(owner), last)
    kind, *heads = text.split()
    what = f"'{name}' ({type(module).__name__})"
    is_embedding = isinstance(module, nn.Embedding)
    is_conv = type(module).__name__ == "Conv1D" and hasattr(module, "nf")
    plain = (nn.Linear.forward, nn.Embedding.forward)
    is_known = (
        is_conv
        or getattr(module, "SUMS_LOSS", False)
        or (isinstance(module, nn.Linear | nn.Embedding) and type(module).forward in plain)
    )
    if not is_known or (is_embedding and kind != "vocabulary"):
        wanted = "an nn.Embedding or an nn.Linear" if kind == "vocabulary" else "an nn.Linear"
        raise UsageError(f"{what} cannot be split as {kind}: {wanted} with its own forward belongs")
    weight = module._parameters.get("weight")
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    if weight is None or weight._backward_hooks or any(hooks):
        raise UsageError(
            f"{what} cannot be split: it has hooks, or its weight is computed from others "
            "(parametrizations, weight_norm), and would see a part where it expects the whole"
        )
    if is_embedding and module.scale_grad_by_freq:
        raise UsageError(f"{what} cannot be split: scale_grad_by_freq needs all tokens' counts")
    size, ranks = weight.shape[(kind == "rows") != is_conv], group.size()
    if size < ranks:
        raise UsageError(f"{what} has {size} to split over {ranks} ranks: there are too few")
    kept = [cut_range(size, ranks)[group.rank()]]
    if heads:
        kept = _by_heads(what, size, [int(number) for number in heads], group)
    dropouts = _dropouts(model)
    if kind in ("columns", "rows") and size % ranks and dropouts:
        raise UsageError(
            f"{what} has {size}, which {ranks} ranks cannot share evenly, and '{dropouts[0]}' "
            "would draw different numbers on them; use a size that divides, or no dropout"
        )
    return Layer(name, module, kind, weight, is_conv, kept)


def _by_heads(what: str, size: int, heads: list[int], group: comm.Group) -> list[range]:
    """This rank's heads of the queries, of the keys and of the values."""
    ranks, each, kept, start = group.size(), size // sum(heads), [], 0
    if size % sum(heads):
        raise UsageError(f"{what} has {size} outputs: they are not {sum(heads)} heads of one size")
    for number in heads:
        if number % ranks:
            raise UsageError(
                f"{what} has {number} heads, which {ranks} ranks cannot share evenly; use a number "
                "of ranks that divides them (tensor=…)"
            )
        own = cut_range(number, ranks)[group.rank()]
        kept.append(range(start + own.start * each, start + own.stop * each))
        start += number * each
    return kept


def divided_by(
    model: nn.Module, named: Mapping[str, str], ranks: int
) -> list[tuple[nn.Module, str, int]]:
    """The attributes that are a number of heads or channels, and what becomes of them."""
    found = []
    for name in (name for name, kind in named.items() if kind == "number"):
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        value = getattr(module, attribute)
        if value % ranks:
            raise UsageError(f"'{name}' is {value!r}, which {ranks} ranks cannot share evenly")
        found.append((module, attribute, value // ranks))
    return found


def agreed(
    model: nn.Module, named: Mapping[str, str], layers: Sequence[Layer], sequence: bool
) -> tuple[dict[nn.Parameter, Held], list[nn.Parameter]]:
    """The part of each parameter that is kept, and the parameters whose gradients are summands.

    A tied parameter must be used in the same way by all that share it.
    """
    cuts = {
        (layer.name, p): rows(p.shape, kept, axis)
        for layer in layers
        for p, kept, axis in layer.cuts()
    }
    said: dict[nn.Parameter, tuple[str, Held, bool, bool]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        part, kind = cuts.get((owner, p), whole(p)), named.get(name, named.get(owner))
        # Of what every rank has: it works on this rank's heads, or on this rank's positions.
        is_summand = (owner, p) not in cuts and (
            kind == "inside" or (sequence and kind in ("norm", "rows"))
        )
        first, *before = said.setdefault(p, (name, part, is_summand, kind == "vocabulary"))
        if before != [part, is_summand, kind == "vocabulary"]:
            raise UsageError(
                f"'{first}' and '{name}' are one parameter, and the workload's splits cut or use "
                "it in two ways; a head that is tied to an embedding is split as 'vocabulary' too"
            )
    held = {p: part for p, (_, part, *_) in said.items()}
    return held, [p for p, (_, _, is_summand, _) in said.items() if is_summand]


# ------------------------------------------------------------------ what is refused


def _dropouts(model: nn.Module) -> list[str]:
    named = model.named_modules()
    return [name for name, m in named if isinstance(m, _DropoutNd) and m.p > 0]


def _refuse_for_sequence(named: Mapping[str, str]) -> None:
    """Sequence parallelism needs to know where the stream is split, and who sees a part of it."""
    blocks = [name for name, kind in named.items() if kind == "block"]
    if not blocks:
        raise UsageError(
            "sequence parallelism: the workload's splits name no 'block' through which the "
            "residual stream goes; name them, or leave out sequence"
        )
    for name, text in named.items():
        kind, around = text.partition(" ")[0], list(_around(name))
        is_in_block = any(outer in blocks for outer in around)
        if kind == "heads" and not any(named.get(outer) == "branch" for outer in around):
            raise UsageError(
                f"sequence parallelism: '{name}' makes heads, and the module around it counts the "
                "positions that it is given: name that module a 'branch'"
            )
        if kind == "whole" and is_in_block:
            raise UsageError(
                f"sequence parallelism: '{name}' is 'whole', and in a block it would see some of "
                "the positions; say 'norm' if it treats each position by itself"
            )
        if kind in ("norm", "branch") and not is_in_block:
            raise UsageError(
                f"sequence parallelism: '{name}' is a '{kind}' outside of the blocks, where every "
                "rank has all positions; say 'whole', or name the module around it a 'block'"
            )


def _refuse_read_outside(
    model: nn.Module, loss: LossFn, sample: Batch, parts: Collection[nn.Parameter]
) -> None:
    """Refuse a parameter that forward or loss reads outside of its module, as a weight penalty
    does: there a rank would take its part for the whole, or its gradient for a summand.

    For one sample, modules get stand-ins for their parameters while they run. A gradient that
    reaches the parameter itself did not come through its module.
    """
    owners = {
        name: {key: p for key, p in module._parameters.items() if p in parts}
        for name, module in model.named_modules()
        if any(p in parts for p in module._parameters.values())
    }

    def with_stand_ins(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        own = model.get_submodule(name)._parameters
        for key, p in owners[name].items():
            own[key] = nn.Parameter(p.detach(), requires_grad=p.requires_grad)
        try:
            return original(*args, **kwargs)
        finally:
            own |= owners[name]

    with probing(model):  # in which frozen parameters have gradients too
        try:
            with intercepted(model, list(owners), with_stand_ins):
                value = loss(model, sample)
        except (RuntimeError, ValueError, IndexError):
            return  # it cannot be run on one sample alone
        wanted = [p for p in parts if p.requires_grad]
        if not wanted or not value.requires_grad:
            return
        gradients = torch.autograd.grad(value, wanted, allow_unused=True)
    read = {p for p, gradient in zip(wanted, gradients, strict=True) if gradient is not None}
    for name, p in model.named_parameters():
        if p in read:
            raise UsageError(
                f"tensor parallelism: the forward or the loss reads '{name}' outside of its module "
                "(a weight penalty?), where a rank has only a part of it; use weight_decay for a "
                "penalty, or say 'whole' for the module in the workload's splits"
            )


# ------------------------------------------------------------------ what becomes of the modules


def _made(
    layer: Layer,
    made: Mapping[nn.Parameter, nn.Parameter],
    branches: Sequence[str],
    stream: Stream,
) -> nn.Module:
    """What takes the layer's place."""
    old, weight, group = layer.module, made[layer.weight], stream.group
    if layer.kind == "vocabulary":
        vocabulary = Vocabulary(cut_range(layer.weight.shape[layer.axis], group.size()), group)
        if isinstance(old, nn.Embedding):
            return VocabularyEmbedding(weight, old.padding_idx, vocabulary, layer.name)
    bias = old._parameters.get("bias")
    bias = None if bias is None else made.get(bias, bias)
    if layer.kind == "vocabulary":
        return VocabularyHead(weight, bias, layer.is_transposed, vocabulary, layer.name)
    if layer.kind == "rows":
        return RowLinear(weight, bias, layer.is_transposed, stream, layer.name)
    is_shared = any(outer in branches for outer in _around(layer.name))
    entered = None if is_shared else stream
    return ColumnLinear(weight, bias, layer.is_transposed, entered, layer.name)


def _share_input(module: nn.Module, stream: Stream, name: str) -> None:
    """What the branch is given enters once for all layers in it. Its first tensor is the stream;
    others that need a gradient, such as another model's output, get the sum of theirs too."""

    def enter_once(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        seen: list[Tensor] = []

        def enter_one(x: Tensor) -> Tensor:
            seen.append(x)
            if len(seen) == 1:
                return stream.enter(x, name)
            return enter(x, stream.group, name) if x.requires_grad else x

        return map_tensors(args, enter_one), map_tensors(kwargs, enter_one)

    module.register_forward_pre_hook(enter_once, with_kwargs=True)


def _begin_at(module: nn.Module, stream: Positions, name: str) -> None:
    def begin(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _first_changed((args, kwargs), lambda x: stream.begin(x, name))

    def note(*args: Any, **kwargs: Any) -> None:
        """A later stage of a pipeline does not run the block, and must know the positions too."""
        stream.divide(tensors_of((args, kwargs))[0])

    module.register_forward_pre_hook(begin, with_kwargs=True)
    vars(module)[WHEN_SKIPPED] = note


def _end_at(module: nn.Module, stream: Positions, name: str) -> None:
    def end(_module: nn.Module, _args: Any, output: Any) -> Any:
        return _first_changed(output, lambda x: stream.end(x, name))

    module.register_forward_hook(end)


def _first_changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with its first tensor changed."""
    seen: list[Tensor] = []

    def change_first(x: Tensor) -> Tensor:
        seen.append(x)
        return change(x) if len(seen) == 1 else x

    return map_tensors(value, change_first)
