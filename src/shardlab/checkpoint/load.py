"""A run as its checkpoint has it: every rank reads what it will hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardlab import config as configs
from shardlab import world as worlds
from shardlab.checkpoint import parts, rng, storage
from shardlab.checkpoint.manifest import EXTRA, MODEL, OWN, RANDOM, SHARED, Manifest, inside
from shardlab.checkpoint.resume import Start, together
from shardlab.config import Config
from shardlab.errors import UsageError
from shardlab.files import read_jsonl
from shardlab.strategies import steps
from shardlab.strategies.base import Strategy
from shardlab.workloads import huggingface
from shardlab.workloads.base import Batch
from shardlab.world import World


def kept_rows(folder: Path, world: World) -> list[dict[str, Any]]:
    """This rank's rows from before the resume; empty if any rank's are incomplete."""
    rows = read_jsonl(folder / f"rank{world.rank}.jsonl")
    return rows if len(set(world.gather(len(rows)))) == 1 else []


def restore(
    start: Start,
    strategy: Strategy,
    world: World,
    config: Config,
    rehearse: Callable[[], Sequence[Batch]],
) -> None:
    """Model, optimizer, schedule, scaler and random states as they were. A collective."""
    assert start.manifest is not None
    is_over = start.step >= config.training.steps
    if strategy.LEARNS_LAYOUT and world.size > 2 and not is_over:
        # DDP lays its buckets out anew after its first step, and the order in which more than two
        # ranks' gradients are added depends on that: so it makes its first step before the load.
        strategy.gradients(rehearse())
        steps.drop_gradients(strategy.params)
    put_back(start, strategy, world, config)


def put_back(start: Start, strategy: Strategy, world: World, config: Config) -> None:
    """Model, optimizer, schedule and scaler as they were; random states, and what belongs to one
    rank alone, as far as there are the same ranks. A collective."""
    assert start.manifest is not None
    own = load(start, strategy, world, config)
    if world.rank < start.manifest.world:
        with fits(start, "the random states", RuntimeError):
            rng.put(inside(own, RANDOM), world.device)
    else:  # this rank is new: it must not draw again what it drew before the first checkpoint
        worlds.seed_rank(config.training.seed, world.rank, start.step)


def load(start: Start, strategy: Strategy, world: World, config: Config) -> dict[str, Tensor]:
    """Every rank reads what it will hold, and gets what was its own: nothing, if it was not there.

    A collective.
    """
    manifest, folder = start.manifest, start.checkpoint
    assert manifest is not None
    assert folder is not None
    refuse_other_model(start, strategy)
    places = parts.Places(strategy, manifest)
    wanted = dict(places.parts)
    is_same = manifest.strategy == config.strategy.name
    shared = _to_fill(manifest, SHARED, wanted) if is_same else {}
    own = _to_fill(manifest, f"{OWN}{world.rank}/", wanted)
    together(world.gather, lambda: storage.fill(folder, manifest, wanted))
    places.settle(_update_of(manifest, config))
    has_own = is_same and manifest.world == world.size
    with fits(start, "the strategy's own tensors"):
        strategy.load_extra_state(shared, inside(own, EXTRA) if has_own else None)
    return own


@contextmanager
def fits(start: Start, what: str, also: type[Exception] = ValueError) -> Iterator[None]:
    """A checkpoint whose sums are right may still lack what its run needs."""
    try:
        yield
    except (KeyError, TypeError, ValueError, OverflowError, also) as error:
        raise UsageError(
            f"cannot continue from {start.checkpoint}: {what} in it are wrong: "
            f"{type(error).__name__}: {error}"
        ) from error


def _to_fill(manifest: Manifest, prefix: str, wanted: parts.Parts) -> dict[str, Tensor]:
    """Empty tensors for all that has the prefix; they are added to what is ``wanted``."""
    made = {
        name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        for name, entry in inside(manifest.tensors, prefix).items()
    }
    wanted |= parts.parts_of(prefix, made)
    return made


def refuse_other_model(start: Start, strategy: Strategy) -> None:
    """Refuse a checkpoint whose tensors are not the model's, with what is different."""
    manifest, folder = start.manifest, start.checkpoint
    assert manifest is not None
    assert folder is not None
    whole, saved = strategy.model_spec(), manifest.model()
    tied, here = whole.tied, dict(whole.tensors)
    for name in whole.unsaved:
        if name not in saved:  # an exported state_dict does not have it: it stays as it was made
            del here[name]
    missing = sorted(here.keys() - saved.keys())
    extra = sorted(saved.keys() - here.keys() - tied.keys())
    both = [(name, saved[name], here[name]) for name in sorted(here.keys() & saved.keys())]
    shapes = [(name, _shape(was.shape), _shape(now.shape)) for name, was, now in both]
    kinds = [
        (name, parts.kind_of(getattr(torch, was.dtype)), parts.kind_of(now.dtype))
        for name, was, now in both
    ]
    other = [
        f"'{name}' is {was} there and {now} here"
        for name, was, now in (*shapes, *kinds)
        if was != now
    ]
    found = [
        *([f"it lacks {_names(missing)}"] if missing else []),
        *([f"it has {_names(extra)} besides"] if extra else []),
        *other[:3],
        *([f"and {len(other) - 3} more differ"] if len(other) > 3 else []),
    ]
    if not found:
        found = [
            f"'{name}' and '{first}' are one tensor here, and differ there"
            for name, first in tied.items()
            if name in saved and not _are_equal(start, name, first)
        ]
    if found:
        raise UsageError(f"{folder} is of another model: {'; '.join(found)}")


def _are_equal(start: Start, *names: str) -> bool:
    """Weights from elsewhere may have a tied tensor under each of its names."""
    assert start.manifest is not None
    assert start.checkpoint is not None
    state = storage.whole(start.checkpoint, start.manifest, [MODEL + name for name in names])
    return len({bytes(huggingface.raw(tensor)) for tensor in state.values()}) == 1


def _names(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a number"


def _update_of(manifest: Manifest, config: Config) -> dict[str, Any]:
    """The update's own state. The loss scale belongs to fp16: with another precision it is new."""
    was = manifest.config.get("precision", {}).get("compute")
    state = {"steps": manifest.step, "good_steps": 0, "scale": 1.0, **manifest.update}
    if was != config.precision.compute:
        is_fp16 = config.precision.compute == "fp16"
        scale = (config.precision.loss_scale or configs.LOSS_SCALE) if is_fp16 else 1.0
        state |= {"scale": scale, "good_steps": 0}
    return state
