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

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from shardlab import comm
from shardlab.axes import cut_range
from shardlab.errors import UsageError, unknown
from shardlab.strategies.layout import rows
from shardlab.strategies.shards import Runs, every

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


# ------------------------------------------------------------------ what the workload says


def read(model: nn.Module, splits: Mapping[str, str] | None) -> dict[str, str]:
    """What becomes of which module, parameter or attribute, by its name, in the model's order."""
    if not splits or not isinstance(splits, Mapping):
        raise UsageError(
            f"tensor parallelism: the workload does not say how its model, a "
            f"{type(model).__name__}, is split; give it splits, a mapping (docs/workloads.md)"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    named: dict[str, tuple[str, str]] = {}
    for pattern, text in splits.items():
        kind = text.partition(" ")[0] if isinstance(text, str) else text
        if kind not in KINDS:
            raise unknown(f"split of '{pattern}'", str(kind), KINDS)
        if not re.fullmatch(r"heads( [1-9]\d*)+" if kind == "heads" else kind, text):
            raise UsageError(
                f"the split of '{pattern}' is '{text}': say '{kind}', and of heads how many they "
                "are, as in 'heads 8', or 'heads 8 2 2' for queries, keys and values"
            )
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


def around(name: str) -> Iterator[str]:
    """The name, and those of the modules around it, inmost first."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _refuse_forgotten(model: nn.Module, named: Mapping[str, str]) -> None:
    for name, _ in model.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        kind = named.get(name, named.get(owner, "")).partition(" ")[0]
        is_known = kind in (*LAYERS, "inside", "norm", "whole")
        if not is_known and not any(named.get(outer) == "whole" for outer in around(owner)):
            what = f"module '{owner}' ({type(model.get_submodule(owner)).__name__})"
            raise UsageError(
                f"tensor parallelism: {what if owner else repr(name)} has no place in the "
                "workload's splits; say 'columns', 'rows' or another of "
                "strategies/tensor/splits.py, or 'whole' if every rank is to compute all of it"
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
    weight = module._parameters.get("weight")
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    is_plain = is_known and weight is not None and not (weight._backward_hooks or any(hooks))
    counts_tokens = is_embedding and module.scale_grad_by_freq
    if not is_plain or counts_tokens or (is_embedding and kind != "vocabulary"):
        wanted = "nn.Linear, or an nn.Embedding without scale_grad_by_freq"
        wanted = wanted if kind == "vocabulary" else "nn.Linear"
        raise UsageError(
            f"{what} cannot be split as {kind}: only an unmodified {wanted} can, without hooks, "
            "and without a weight that is computed from others (parametrizations, weight_norm)"
        )
    size, ranks = weight.shape[(kind == "rows") != is_conv], group.size()
    kept = [cut_range(size, ranks)[group.rank()]]
    if heads:
        kept = _by_heads(what, size, [int(number) for number in heads], group)
    dropped = dropouts(model)
    if kind in ("columns", "rows") and size % ranks and dropped:
        raise UsageError(
            f"{what} has {size}, which {ranks} ranks cannot share evenly, and '{dropped[0]}' "
            "would draw different numbers on them; use a size that divides, or no dropout"
        )
    return Layer(name, module, kind, weight, is_conv, kept)


def _by_heads(what: str, size: int, heads: list[int], group: comm.Group) -> list[range]:
    """This rank's heads of the queries, of the keys and of the values."""
    ranks, each, kept, start = group.size(), size // sum(heads), [], 0
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
) -> tuple[dict[str, Runs], list[str]]:
    """The part of each parameter and buffer that is kept, by its first name, and the names of the
    parameters whose gradients are summands.

    A tied parameter must be used in the same way by all that share it.
    """
    cuts = {
        (layer.name, p): rows(p.shape, kept, axis)
        for layer in layers
        for p, kept, axis in layer.cuts()
    }
    said: dict[nn.Parameter, tuple[str, Runs, bool, bool]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        part, kind = cuts.get((owner, p), every(p.shape)), named.get(name, named.get(owner))
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
    held = {name: every(buffer.shape) for name, buffer in model.named_buffers()}
    held |= {name: part for name, part, *_ in said.values()}
    return held, [name for name, _, is_summand, _ in said.values() if is_summand]


# ------------------------------------------------------------------ what is refused


def dropouts(model: nn.Module) -> list[str]:
    named = model.named_modules()
    return [name for name, m in named if isinstance(m, _DropoutNd) and m.p > 0]


def refuse_for_sequence(named: Mapping[str, str]) -> None:
    """Inside of the blocks a rank sees some of the positions. The comparison before the first step
    shows whether all that they hold treats each by itself, or is in a branch, which is given all.
    It does not see a module that its sample does not use, so each must stand where its split fits.
    """
    blocks = {name for name, kind in named.items() if kind == "block"}
    if not blocks:
        raise UsageError(
            "sequence parallelism: the workload's splits name no 'block' through which the "
            "residual stream goes; name them, or leave out sequence"
        )
    for name, kind in named.items():
        is_in_block = not blocks.isdisjoint(around(name))
        if (kind == "whole" and is_in_block) or (kind in ("norm", "branch") and not is_in_block):
            raise UsageError(
                f"sequence parallelism: '{name}' cannot be '{kind}' where it is; in a block say "
                "'norm' of what treats each position by itself, and 'branch' of the module around "
                "'heads'; outside of the blocks say 'whole'"
            )
