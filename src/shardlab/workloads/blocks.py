"""The blocks of a model: a guess where it names none, and a check of those that it names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.parameter import is_lazy

from shardlab.errors import UsageError, unknown

LISTS = (nn.ModuleList, nn.ModuleDict)  # they cannot be called, so they are never blocks
SMALL = 0.1  # a group with less than this part of its container's parameters is no block


def guess_blocks(model: nn.Module) -> tuple[str, ...]:
    """The outermost repeated modules: two or more of one class in a ``ModuleList`` or
    ``Sequential``. They do not nest, and share no parameter with anything outside.

    A list of lists (``ModuleList([attention, feed_forward])`` for each layer) counts as one list.
    What holds little of its container (the BatchNorms between convolutions) is left out.
    """
    owners = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    seen: set[int] = set()

    def find(name: str, module: nn.Module) -> Iterator[str]:
        children = list(_children(name, module))
        groups: dict[type, list[nn.Module]] = {}
        if isinstance(module, (nn.Sequential, *LISTS)):
            for _, child in children:
                if _size(child) and not isinstance(child, LISTS):
                    groups.setdefault(type(child), []).append(child)
        least = SMALL * sum(_size(child) for _, child in children)
        repeated = {
            id(child)
            for group in groups.values()
            if len(set(group)) > 1 and sum(map(_size, group)) >= least
            for child in group
        }
        for child_name, child in children:
            if id(child) in seen:  # the same module under another name
                continue
            seen.add(id(child))
            if id(child) not in repeated:
                yield from find(child_name, child)
            elif all(owners[id(p)] == 1 for p in child.parameters()):
                yield child_name

    return tuple(find("", model))


def _children(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Its children, and instead of a list in a list that one's."""
    for key, child in module.named_children():
        full = f"{name}.{key}" if name else key
        if isinstance(module, LISTS) and isinstance(child, LISTS):
            yield from _children(full, child)
        else:
            yield full, child


def _size(module: nn.Module) -> int:
    return sum(0 if is_lazy(p) else p.numel() for p in module.parameters())


def check_blocks(model: nn.Module, blocks: Sequence[str]) -> None:
    """Refuse blocks that the model does not have, or that lie inside each other."""
    if not isinstance(blocks, list | tuple):
        raise UsageError(
            f"blocks is a {type(blocks).__name__}: a list of names belongs there, such as "
            "['layers.0', 'layers.1']"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    for block in blocks:
        if block not in modules or not block:
            raise unknown("block", block, [name for name in modules if name])
        if isinstance(modules[block], LISTS):
            raise UsageError(
                f"the block '{block}' is a {type(modules[block]).__name__}, which is never called: "
                f"name its modules, '{block}.0' and so on"
            )
    for outer in blocks:
        for inner in blocks:
            if inner.startswith(f"{outer}."):
                raise UsageError(f"the block '{inner}' lies inside the block '{outer}': name one")


def show_blocks(blocks: Sequence[str]) -> str:
    """Their names in a few words: the first, the last, how many."""
    if len(blocks) <= 3:
        return ", ".join(blocks)
    return f"{blocks[0]}, {blocks[1]} … {blocks[-1]} ({len(blocks)})"
