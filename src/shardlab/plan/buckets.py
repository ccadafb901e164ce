"""The bucket size with the shortest predicted step, for ``bucket_mb=auto``.

``bucket_ddp_async`` finds its own in its first step (strategies/data_parallel/bucket_size.py); the
others lay out their buckets before it.

Large buckets are few messages, but the last of them is sent when nothing is left to hide it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from shardlab.errors import UsageError
from shardlab.launch import launcher_env
from shardlab.measure.cells import has_buckets

if TYPE_CHECKING:
    from shardlab.config import Config
    from shardlab.plan.plan import Predicts
    from shardlab.plan.predict import Prediction, WhatIf

AUTO = "auto"
MEASURES = "bucket_ddp_async"
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0, 100.0)  # MB; 25 is DDP's own


def best(
    predictor: Predicts, config: Config, device: str, link: str | None, change: WhatIf
) -> tuple[float, Prediction]:
    """The size, and the step with it. Of two that take the same, the smaller."""
    found = {
        size: predictor.predict(with_size(config, size), device, link, change) for size in SIZES
    }
    size = min(SIZES, key=lambda size: found[size].step_s)
    return size, found[size]


def with_size(config: Config, size: float) -> Config:
    options = {**config.strategy.options, "bucket_mb": size}
    strategy = structs.replace(config.strategy, options=options)
    return structs.replace(config, strategy=strategy)


def settled(configs: Sequence[Config]) -> list[Config]:
    """``auto`` as a number, before any rank is started: all ranks have the same, and the run's own
    config says which. Nothing is predicted if nobody asks for it."""
    if not any(is_auto(config) for config in configs):
        return list(configs)
    from shardlab.plan.predict import Predictor, WhatIf

    place = launcher_env.joined()
    if place is not None:
        raise UsageError(
            f"bucket_mb=auto is settled before ranks are started, and {place.launcher} has started "
            "them; name the size that `shardlab plan --what-if bucket-mb=best` says"
        )
    with Predictor() as predictor:
        return [
            with_size(config, best(predictor, config, "this", None, WhatIf())[0])
            if is_auto(config)
            else config
            for config in configs
        ]


def is_auto(config: Config) -> bool:
    """Whether the size is to be found before the run."""
    if config.strategy.options.get("bucket_mb") != AUTO or config.strategy.name == MEASURES:
        return False
    if not has_buckets(config.strategy.name):
        raise UsageError(f"{config.strategy.name} has no buckets whose size could be chosen")
    return True
