"""Whether a checkpoint fits the run that would go on from it, and what is different. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from shardlab.config import Config
from shardlab.errors import UsageError

if TYPE_CHECKING:
    from shardlab.checkpoint.start import Start

# What makes a run another run: with these changed its numbers would mean nothing together.
MUST_MATCH = (
    "model.workload", "model.size", "model.options",
    "data.source", "data.seq_len", "data.shuffle", "data.epoch",
    "training.global_batch", "training.optimizer", "training.seed",
)  # fmt: skip
# What may change, and is told, because the losses will differ from the uninterrupted run's.
TOLD = (
    "strategy.name", "strategy.options", "launch.world", "training.steps", "training.accumulate",
    "training.learning_rate", "training.weight_decay", "training.momentum", "training.schedule",
    "training.warmup_steps", "training.min_rate", "training.clip_norm", "training.compile",
    "training.activation_checkpointing", "precision.compute",
)  # fmt: skip


def differences(
    saved: Mapping[str, Any], now: Mapping[str, Any], keys: Iterable[str]
) -> dict[str, tuple[Any, Any]]:
    """The settings in which two configs differ; what one does not say is the default."""
    standard = Config().to_dict()
    found = {}
    for key in keys:
        section, _, name = key.partition(".")
        default = standard[section][name]
        was, is_now = (setting(values, section, name, default) for values in (saved, now))
        if was != is_now:
            found[key] = (was, is_now)
    return found


def setting(values: Mapping[str, Any], section: str, name: str, default: Any) -> Any:
    inside = values.get(section)
    return inside.get(name, default) if isinstance(inside, Mapping) else default


def refuse_unfit(start: Start, config: Config, samples: int) -> None:
    """A checkpoint of another run is refused, with what is different; and one that is too late."""
    manifest = start.manifest
    if manifest is None:
        return
    now = config.to_dict()
    claimed = [key for key in MUST_MATCH if key.partition(".")[0] in manifest.config]
    if found := differences(manifest.config, now, claimed):
        what = ", ".join(
            f"{key} was {was!r}, is {is_now!r}" for key, (was, is_now) in found.items()
        )
        raise UsageError(f"{start.checkpoint} is of another run: {what}")
    if manifest.samples not in (None, samples):
        raise UsageError(
            f"{start.checkpoint} is of another run: the data had {manifest.samples:,} samples, and "
            f"has {samples:,}"
        )
    steps, world = config.training.steps, config.launch.world or 0
    if start.step > steps or (start.step == steps and not start.keeps_rows(world)):
        raise UsageError(
            f"{start.checkpoint} is of step {start.step} and training.steps is {steps}: nothing is "
            "left to do; ask for more with --steps"
        )


def changes(start: Start, config: Config) -> list[str]:
    """What is not as it was, in words."""
    assert start.manifest is not None
    if not start.manifest.config:
        return []
    saved = dict(start.manifest.config)
    saved["launch"] = {**saved.get("launch", {}), "world": start.manifest.world}
    found = differences(saved, config.to_dict(), TOLD)
    return [f"{key} was {was!r}, is {is_now!r}" for key, (was, is_now) in found.items()]


Named = Mapping[str, tuple[tuple[int, ...], str]]  # shapes and kinds of tensors


def refuse_other_model(start: Start, saved: Named, expected: Named, tied: Iterable[str]) -> None:
    """``tied`` are other names of the model's tensors, under which they may be there as well."""
    missing = sorted(expected.keys() - saved.keys())
    extra = sorted(saved.keys() - expected.keys() - set(tied))
    both = sorted(expected.keys() & saved.keys())
    other = [
        f"'{name}' is {_shape(saved[name][0])} there and {_shape(expected[name][0])} here"
        for name in both
        if saved[name][0] != expected[name][0]
    ]
    other += [
        f"'{name}' is {saved[name][1]} there and {expected[name][1]} here"
        for name in both
        if saved[name][1] != expected[name][1]
    ]
    found = [
        *([f"it lacks {_names(missing)}"] if missing else []),
        *([f"it has {_names(extra)} besides"] if extra else []),
        *other[:3],
        *([f"and {len(other) - 3} more differ"] if len(other) > 3 else []),
    ]
    if found:
        raise UsageError(f"{start.checkpoint} is of another model: {'; '.join(found)}")


def _names(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a number"
