"""What a run is: frozen dataclasses, read from YAML and flags, refused here if wrong.

Precedence: the defaults below < the YAML file < flags. A value is checked when its section
is built (type, range, name) and combinations when the whole is, so a ``Config`` that
exists can be run, as far as can be told without a process group. No torch here: this is
what ``shardlab --help`` and every refusal wait for.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from shardlab import faults as injected
from shardlab import strategies, workloads
from shardlab.data import sources
from shardlab.errors import UsageError, unknown
from shardlab.schedule import SCHEDULES

T = TypeVar("T")

# The classes of torch.optim, in lower case. (Not all can be used: the refusal says why.)
OPTIMIZERS = (
    "adamw", "adam", "sgd", "adadelta", "adafactor", "adagrad", "adamax", "asgd", "lbfgs", "muon",
    "nadam", "radam", "rmsprop", "rprop", "sparseadam",
)  # fmt: skip
MOMENTUM = ("sgd", "rmsprop", "muon")  # those with such a setting
NO_DECAY = ("nothing", "norms_and_biases")
PRECISIONS = ("fp32", "bf16", "fp16", "fp64")
LOSS_SCALE = 65536.0  # what fp16 starts with when nobody says; it halves itself where too large
DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "gloo", "nccl")
COMPILE = ("none", "blocks", "model")
ON_NONFINITE = ("stop", "skip", "ignore")
BATCH_SPLITS = ("exact", "uneven")
CONTINUOUS = "continuous"
EPOCHS = (CONTINUOUS, "padded", "dropped", "exact")  # shardlab.data.sampler tells what they are


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)


def _one_of(key: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise unknown(key, value, known)


@dataclass(frozen=True)
class ModelConfig:
    workload: str = "gpt2"  # a name of ours, or your own: path/to/file.py:attr, package.module:attr
    size: str | None = None  # a preset of the workload; none: the workload's own default
    options: dict[str, Any] = field(default_factory=dict)  # passed to the workload by name

    def __post_init__(self) -> None:
        if ":" not in self.workload:
            _one_of("workload", self.workload, workloads.WORKLOADS)


@dataclass(frozen=True)
class DataConfig:
    # "auto": the workload's own (the text of Python's library, or what `shardlab data` fetched);
    # "stdlib": that text; else a file, folder or glob
    source: str = sources.AUTO
    seq_len: int | None = None  # tokens per sample; none: the model's context
    shuffle: bool = True  # a new order each epoch, from seed and epoch alone
    # What becomes of the samples that fill no whole batch at an epoch's end. "continuous": the next
    # epoch fills it up; "padded": samples of this one again; "dropped"; "exact": a short batch
    epoch: str = CONTINUOUS
    prefetch: int = 2  # steps whose batches are prepared ahead, in a thread; 0: none
    audit: bool = False  # count what is fed; say after the run what was repeated or missed

    def __post_init__(self) -> None:
        _require(
            self.seq_len is None or self.seq_len >= 1,
            f"data.seq_len must be at least 1, got {self.seq_len}",
        )
        _one_of("data.epoch", self.epoch, EPOCHS)
        _require(self.prefetch >= 0, f"data.prefetch must be 0 or more, got {self.prefetch}")
        sources.check(self.source)  # a missing path is refused before anything starts


@dataclass(frozen=True)
class TrainingConfig:
    steps: int = 20
    global_batch: int = 8  # samples per optimizer step, over all ranks and micro-batches
    accumulate: int = 1  # micro-batches per rank and step
    batch_split: str = "exact"  # "uneven": some ranks get a sample less; the loss stays exact
    optimizer: str = (
        "adamw"  # a class of torch.optim, or your own: path/to/file.py:Class, module:Class
    )
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    no_decay: str = "nothing"  # "norms_and_biases": parameters of fewer than two dimensions
    momentum: float = 0.0  # sgd, rmsprop, muon; 0: the class's own
    betas: list[float] | None = None  # for Adam-like optimizers; None: the class's default
    eps: float | None = None  # none: the class's own
    optimizer_options: dict[str, Any] = field(default_factory=dict)  # other arguments of the class
    # "cosine": the rate falls to min_rate of itself over the run; or your own: file.py:function,
    # module:function, which gives the factor of a step, from 0
    schedule: str = "constant"
    warmup_steps: int = 0  # the rate rises in a line over so many steps, before either
    min_rate: float = 0.0  # cosine only: a fraction of the learning rate
    clip_norm: float | None = None  # the largest norm of the whole gradient; none: any
    clip_value: float | None = None  # gradients are clipped to this size; None: they are not
    # A moving average of the parameters, kept with the optimizer's state, and evaluated instead of
    # them: so much of it stays at each step. None: no average
    ema_decay: float | None = None
    activation_checkpointing: bool = False  # blocks are computed again in backward, not kept
    # torch.compile. "blocks": each by itself, so that gradients still come one block at a time.
    # "model": as one, which is faster, but all gradients come at the end and nothing overlaps.
    compile: str = "none"
    # Of a NaN or infinite loss or gradient: "stop"; "skip" the update, which costs the norm of the
    # gradient in each step; or "ignore". (fp16 skips by itself what its loss scale made overflow.)
    on_nonfinite: str = "stop"
    evaluate_every: int | None = None  # steps; 0: after the last alone; none: never
    evaluate_samples: int | None = None  # so many held-out ones, evenly spread; none: all
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("steps", "global_batch", "accumulate"):
            value = getattr(self, key)
            _require(value >= 1, f"training.{key} must be at least 1, got {value}")
        for key in ("learning_rate", "weight_decay", "momentum"):
            value = getattr(self, key)
            _require(0 <= value < float("inf"), f"training.{key} must be 0 or more, got {value}")
        for key in ("seed", "warmup_steps"):
            value = getattr(self, key)
            _require(value >= 0, f"training.{key} must be 0 or more, got {value}")
        _require(
            self.evaluate_every is None or self.evaluate_every >= 0,
            f"training.evaluate_every must be 0 or more, got {self.evaluate_every}",
        )
        _require(
            self.evaluate_samples is None or self.evaluate_samples >= 1,
            f"training.evaluate_samples must be at least 1, got {self.evaluate_samples}",
        )
        _require(
            self.evaluate_samples is None or self.evaluate_every is not None,
            "training.evaluate_samples is for a run that evaluates; set training.evaluate_every",
        )
        if ":" not in self.optimizer:
            object.__setattr__(self, "optimizer", self.optimizer.lower())
            _one_of("training.optimizer", self.optimizer, OPTIMIZERS)
        _one_of("training.no_decay", self.no_decay, NO_DECAY)
        _require(
            self.no_decay == NO_DECAY[0] or self.weight_decay > 0,
            f"training.no_decay {self.no_decay} is for a run with decay; set training.weight_decay",
        )
        _one_of("training.batch_split", self.batch_split, BATCH_SPLITS)
        _require(
            self.momentum == 0 or self.optimizer in MOMENTUM or ":" in self.optimizer,
            f"training.momentum is for sgd; {self.optimizer} has no such setting",
        )
        if ":" not in self.schedule:
            _one_of("training.schedule", self.schedule, SCHEDULES)
        _require(
            self.warmup_steps == 0 or ":" not in self.schedule,
            f"training.warmup_steps is for a schedule of ours; {self.schedule} says it all itself",
        )
        _one_of("training.compile", self.compile, COMPILE)
        _one_of("training.on_nonfinite", self.on_nonfinite, ON_NONFINITE)
        _require(
            self.warmup_steps <= self.steps,
            f"training.warmup_steps {self.warmup_steps} is longer than the run of {self.steps} "
            "steps",
        )
        _require(
            0 <= self.min_rate <= 1,
            f"training.min_rate is a fraction of the learning rate, 0 to 1, got {self.min_rate}",
        )
        _require(
            self.min_rate == 0 or self.schedule == "cosine",
            f"training.min_rate is for the cosine schedule; {self.schedule} does not fall",
        )
        for key in ("clip_norm", "clip_value", "eps"):
            value = getattr(self, key)
            _require(
                value is None or 0 < value < float("inf"),
                f"training.{key} must be above 0, got {value}",
            )
        _require(
            self.clip_norm is None or self.clip_value is None,
            "training.clip_norm and training.clip_value: which comes first? Set one of them",
        )
        for value in self.betas or ():
            _require(0 <= value < 1, f"training.betas are 0 or more and below 1, got {value}")
        _require(
            self.ema_decay is None or 0 < self.ema_decay < 1,
            f"training.ema_decay must be above 0 and below 1, got {self.ema_decay}",
        )


@dataclass(frozen=True)
class PrecisionConfig:
    # bf16, fp16: autocast over fp32 weights; fp64: weights and compute, for proofs
    compute: str = "fp32"
    loss_scale: float | None = None  # fp16 only: the factor to start with; none: 65536

    def __post_init__(self) -> None:
        _one_of("precision.compute", self.compute, PRECISIONS)
        if self.loss_scale is not None:
            _require(
                self.compute == "fp16",
                f"precision.loss_scale is for fp16; gradients in {self.compute} do not vanish",
            )
            _require(
                0 < self.loss_scale < float("inf"),
                f"precision.loss_scale must be above 0, got {self.loss_scale}",
            )


@dataclass(frozen=True)
class StrategyConfig:
    name: str = "simple_ddp"
    options: dict[str, Any] = field(default_factory=dict)  # passed to the strategy by name

    def __post_init__(self) -> None:
        known = strategies.STRATEGIES
        if self.name in strategies.ALIASES:
            object.__setattr__(self, "name", strategies.ALIASES[self.name])
        elif ":" not in self.name and self.name not in known:
            raise unknown("strategy", self.name, [*known, *strategies.ALIASES])

    @property
    def label(self) -> str:
        """As it is shown: the name, and what sets it apart from others of that name."""
        options = ", ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name} ({options})" if options else self.name


@dataclass(frozen=True)
class ProfileConfig:
    ledger_steps: int = 200  # steps whose collectives are written out one by one; later: totals
    enabled: bool = False  # --profile: traces of some steps, by PyTorch's profiler
    wait: int = 1  # steps left alone before each window
    warmup: int = 1  # then recorded, counted and thrown away
    active: int = 3  # then recorded and kept
    repeat: int = 1  # windows
    shapes: bool = False  # of every operator's arguments; what each costs: docs/capture.md
    stacks: bool = False  # the Python calls around every operator
    memory: bool = False  # every allocation and release
    memory_snapshot: bool = False  # GPU only: a file for PyTorch's memory viewer

    def __post_init__(self) -> None:
        for key, least in (
            ("ledger_steps", 0), ("wait", 0), ("warmup", 1), ("active", 1), ("repeat", 1)
        ):  # fmt: skip
            value = getattr(self, key)
            atleast = "0 or more" if least == 0 else f"at least {least}"
            why = " (it is counted, to say how large the trace will be)" if key == "warmup" else ""
            _require(value >= least, f"profile.{key} must be {atleast}{why}, got {value}")
        for key in ("shapes", "stacks", "memory", "memory_snapshot"):
            _require(
                self.enabled or not getattr(self, key),
                f"profile.{key} is for a profiled run; add --profile, or profile.enabled: true",
            )

    @property
    def window(self) -> int:
        """Steps from the beginning of one window to that of the next."""
        return self.wait + self.warmup + self.active

    def part(self, step: int) -> str:
        """What of a window a step is: wait, warmup, active; or none: outside."""
        if not 0 <= step < self.repeat * self.window:
            return "none"
        place = step % self.window
        if place < self.wait:
            return "wait"
        return "warmup" if place < self.wait + self.warmup else "active"


@dataclass(frozen=True)
class LaunchConfig:
    world: int | None = None  # ranks; none: torchrun's world, or 2 when we start the ranks
    device: str = "auto"
    backend: str = "auto"  # gloo on CPU or on a shared GPU, nccl with a GPU for each rank
    port: int = 0  # 0: a free one
    threads_per_rank: int = 1  # on CPU; 2 ranks on 2 cores want 1
    timeout_s: float = 300.0  # a collective that waits longer ends the run
    max_restarts: int = 0  # when a rank dies, from the last checkpoint; torchrun has its own flag
    min_world: int | None = None  # a restart may have fewer ranks, down to this; none: as many

    def __post_init__(self) -> None:
        _require(
            self.world is None or self.world >= 1,
            f"launch.world must be at least 1, got {self.world}",
        )
        _require(0 <= self.port < 65536, f"launch.port must be 0 to 65535, got {self.port}")
        _require(
            self.threads_per_rank >= 1,
            f"launch.threads_per_rank must be at least 1, got {self.threads_per_rank}",
        )
        _require(self.timeout_s > 0, f"launch.timeout_s must be above 0, got {self.timeout_s}")
        _require(
            self.max_restarts >= 0,
            f"launch.max_restarts must be 0 or more, got {self.max_restarts}",
        )
        if self.min_world is not None:
            _require(
                1 <= self.min_world <= (self.world or self.min_world),
                f"launch.min_world must be 1 to launch.world, got {self.min_world}",
            )
            _require(
                self.max_restarts > 0,
                "launch.min_world is for a run that is restarted; set launch.max_restarts",
            )
        _one_of("launch.device", self.device, DEVICES)
        _one_of("launch.backend", self.backend, BACKENDS)
        _require(
            not (self.backend == "nccl" and self.device == "cpu"),
            "the nccl backend needs GPUs; use launch.backend gloo with launch.device cpu",
        )


@dataclass(frozen=True)
class CheckpointConfig:
    every: int | None = None  # steps between checkpoints; the last step has one too; none: none
    keep_last: int = 2  # so many of the newest stay
    keep_every: int | None = None  # and those of steps that this divides
    asynchronous: bool = False  # written by a thread while the run goes on
    # "auto": the newest run of this config that did not finish, or a new one; a run folder: on in
    # it, from its newest whole checkpoint; a checkpoint: from it, in a new folder
    resume: str | None = None

    def __post_init__(self) -> None:
        for key in ("every", "keep_last", "keep_every"):
            value = getattr(self, key)
            _require(
                value is None or value >= 1, f"checkpoint.{key} must be at least 1, got {value}"
            )
        for key in ("asynchronous", "keep_every"):
            _require(
                self.every is not None or not getattr(self, key),
                f"checkpoint.{key} is for a run with checkpoints; set checkpoint.every",
            )


@dataclass(frozen=True)
class GuardConfig:
    # A run in which no rank moves for so long has hung, and is ended with a verdict. None: 60 s, or
    # ten times the longest pause so far; until the first step is made, nine tenths of
    # launch.timeout_s, and while model and data are built or a checkpoint is written in any case.
    # 0: never
    hang_s: float | None = None
    check_steps: int = 3  # first steps whose collectives are compared before they are launched
    check_every: int = 10  # steps; then all that were launched are compared by a fingerprint
    # steps after which replicas are compared, bit for bit; and before each checkpoint, with the
    # optimizer's state. 0: never
    drift_every: int = 100

    def __post_init__(self) -> None:
        for key in ("check_steps", "check_every", "drift_every"):
            value = getattr(self, key)
            _require(value >= 0, f"guard.{key} must be 0 or more, got {value}")
        _require(
            self.hang_s is None or 0 <= self.hang_s < float("inf"),
            f"guard.hang_s must be 0 (never) or more seconds, got {self.hang_s}",
        )


@dataclass(frozen=True)
class OutputConfig:
    dir: str | None = None  # this run's folder; none: runs/<time>-<workload>-<strategy>-w<world>
    root: str = "runs"
    tensorboard: bool = False  # train also writes its numbers to <dir>/tensorboard
    wandb: bool = False  # and to Weights & Biases, by its own settings (WANDB_MODE=offline …)


@dataclass(frozen=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    faults: list[str] = field(default_factory=list)  # --inject: shardlab.faults tells which

    def __post_init__(self) -> None:
        has_checkpoints = self.checkpoint.every is not None
        injected.check_steps(self.faults, self.training.steps, has_checkpoints)
        needed = self.profile.repeat * self.profile.window
        _require(
            not self.profile.enabled or self.training.steps >= needed,
            f"the profile needs {needed} steps ({self.profile.repeat} x {self.profile.wait} wait + "
            f"{self.profile.warmup} warmup + {self.profile.active} active), and training.steps is "
            f"{self.training.steps}",
        )
        _require(
            not (self.profile.enabled and self.training.evaluate_every),
            "an evaluation between steps would be in the profile; with --profile, evaluate at the "
            "end: training.evaluate_every 0",
        )
        _require(
            self.launch.max_restarts == 0 or self.checkpoint.every is not None,
            "launch.max_restarts would begin at step 0 each time; set checkpoint.every",
        )
        self._check_folder()
        hang_s, timeout_s = self.guard.hang_s, self.launch.timeout_s
        _require(
            hang_s is None or hang_s < timeout_s,
            f"guard.hang_s {hang_s} is not below launch.timeout_s {timeout_s:g}, after which a "
            "collective fails by itself and nothing is said of who was missing; raise that too",
        )
        world = self.launch.world
        if world is None:
            return
        _require(
            world == 1 or self.strategy.name != "single",
            f"strategy 'single' is one process; launch.world is {world}: use --world 1, "
            "or another strategy",
        )
        check_batch(self.training, world)

    def _check_folder(self) -> None:
        """The output folder must be new or empty; with resume: auto it may be the run to go on."""
        if self.output.dir is None:
            return
        folder = sources.located(self.output.dir)
        is_new = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
        if self.checkpoint.resume == "auto":
            _require(
                is_new or (folder / "config.yaml").is_file(),
                f"the output folder {folder} is not empty and not the folder of a run; choose "
                "another",
            )
        else:
            _require(is_new, f"the output folder {folder} exists and is not empty; choose another")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    def with_overrides(self, overrides: Mapping[str, Any]) -> Config:
        """A copy with ``{"training.steps": 3}`` applied, checked anew."""
        return from_dict(_merged(self.to_dict(), overrides))


def check_batch(training: TrainingConfig, world: int) -> None:
    """Refuse a global batch that ``world`` ranks cannot share as asked."""
    parts = world * training.accumulate
    batch = training.global_batch
    if training.batch_split == "uneven" or batch % parts == 0:
        return
    lower, upper = batch // parts * parts, (batch // parts + 1) * parts
    near = f"{lower} or {upper}" if lower else str(upper)
    raise UsageError(
        f"a global batch of {batch} cannot be divided evenly over {world} ranks x "
        f"{training.accumulate} micro-batches; use {near}, or training.batch_split: uneven"
    )


# ------------------------------------------------------------------ from YAML and flags


class _Loader(yaml.SafeLoader):
    """YAML 1.1, but ``1e-4`` is a number (the standard wants a dot and a sign: ``1.0e-4``)."""

    # A copy: the class attribute is shared, and adding to it would change every SafeLoader.
    yaml_implicit_resolvers = copy.deepcopy(yaml.SafeLoader.yaml_implicit_resolvers)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


MOST_VALUES = 10_000  # in a config; a few lines of YAML can stand for billions


def parse_yaml(text: str) -> Any:
    """What a YAML text says; ValueError, with the line and the problem, if it is none."""
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(where + (getattr(error, "problem", None) or "not YAML")) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    left = [value]
    for _ in range(MOST_VALUES + 1):
        if not left:
            return value
        node = left.pop()
        if isinstance(node, dict):
            left += node.values()
        elif isinstance(node, list | set | tuple):
            left += node
    raise ValueError(f"more than {MOST_VALUES:,} values")


def parse_value(text: str) -> Any:
    """A flag's text as YAML would read it: ``3`` is a number, ``true`` a bool."""
    try:
        return parse_yaml(text)
    except ValueError:
        return text


def load(
    path: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    base: Mapping[str, Any] | None = None,
) -> Config:
    """The file's config with the overrides on top; what it leaves out is ``base``'s, or default."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            content = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise UsageError(f"cannot read the config {path}: {reason}") from None
        try:
            loaded = parse_yaml(content)
        except ValueError as error:
            joint = ", " if str(error).startswith("line") else ": "
            raise UsageError(f"{path}{joint}{error}") from None
        _require(
            loaded is None or isinstance(loaded, dict),
            f"{path}: a config is a mapping of sections, not a {type(loaded).__name__}",
        )
        values = loaded or {}
    sections = {key: dict(value) for key, value in (base or {}).items()}
    for key, value in values.items():
        if isinstance(value, Mapping) and key in sections:
            sections[key].update(value)
        else:
            sections[key] = value
    return from_dict(_merged(sections, overrides or {}))


def from_dict(values: Mapping[str, Any]) -> Config:
    return _build(Config, values, "")


def _merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with each ``section.key`` (or ``section.options.key``) set."""
    result = {k: dict(v) if isinstance(v, Mapping) else v for k, v in values.items()}
    for dotted, value in overrides.items():
        *parents, key = dotted.split(".")
        _require(
            bool(parents) or key == "faults",
            f"'{dotted}' is not section.key, as in training.steps",
        )
        node = result
        for parent in parents:
            child = node.get(parent)
            node[parent] = dict(child) if isinstance(child, Mapping) else {}
            node = node[parent]
        node[key] = value
    return result


def _build(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """The dataclass ``cls`` from a mapping: unknown keys and wrong types are refused."""
    assert dataclasses.is_dataclass(cls)
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in names:
            raise unknown(f"key in {where}" if where else "section", key, names)
        path = f"{where}.{key}" if where else str(key)
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            value = {} if value is None else value
            _require(isinstance(value, Mapping), f"{path} is a section, not a {_kind(value)}")
            arguments[key] = _build(typing.cast(type[Any], hint), value, path)
        else:
            arguments[key] = typed(value, hint, path)
    return typing.cast(T, cls(**arguments))


_WORDS = {
    int: "whole number", float: "number", str: "text", bool: "true or false", dict: "mapping",
    list: "list",
}  # fmt: skip


def _kind(value: Any) -> str:
    return _WORDS.get(type(value), "nothing" if value is None else type(value).__name__)


def typed(value: Any, hint: Any, path: str) -> Any:
    """``value`` if it has the field's type. Nothing is converted but a whole number to a float."""
    if isinstance(hint, types.UnionType):  # X | None
        if value is None:
            return None
        hint = next(a for a in hint.__args__ if a is not type(None))
    wanted: type = typing.get_origin(hint) or hint
    if wanted is float and type(value) is int:
        return float(value)
    if wanted in (dict, list) and value is None:
        return wanted()
    if type(value) is not wanted:
        raise UsageError(f"{path} must be a {_WORDS[wanted]}, got {_kind(value)}: {value!r}")
    if wanted is list:
        (inner,) = typing.get_args(hint)
        items = typing.cast(list[Any], value)
        return [typed(item, inner, f"{path}[{i}]") for i, item in enumerate(items)]
    return value
