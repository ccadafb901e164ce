"""What a run is: frozen dataclasses, read from YAML and flags, refused here if wrong.

Precedence: the defaults below < the YAML file < flags. A value is checked when its section
is built (type, range, name) and combinations when the whole is, so a ``Config`` that
exists can be run, as far as is known without a process group. torch is not imported here:
``shardlab --help`` and every refusal would wait for it.
"""

from __future__ import annotations

import copy
import dataclasses
import errno
import functools
import glob
import math
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast, get_type_hints

import yaml

from shardlab import naming, runfolder
from shardlab.axes import axes_of
from shardlab.errors import UsageError, unknown
from shardlab.faults import spec as injected
from shardlab.naming import WORKLOADS, kind_of, typed
from shardlab.optim.schedule import SCHEDULES

T = TypeVar("T")

# The classes of torch.optim, in lower case. (Not all can be used: the refusal says why.)
OPTIMIZERS = (
    "adamw", "adam", "sgd", "adadelta", "adafactor", "adagrad", "adamax", "asgd", "lbfgs", "muon",
    "nadam", "radam", "rmsprop", "rprop", "sparseadam",
)  # fmt: skip
MOMENTUM = ("sgd", "rmsprop", "muon")  # those with such a setting
NO_DECAY = ("nothing", "norms_and_biases")
PRECISIONS = ("fp32", "bf16", "fp16", "fp64")
LOSS_SCALE = 65536.0  # fp16 begins with it by default, and halves it where it is too large
CONTINUOUS = "continuous"
EPOCHS = (CONTINUOUS, "padded", "exact")  # shardlab.data.sampler says what they are
AUTO, STDLIB, SYNTHETIC = "auto", "stdlib", "synthetic"
# Data sets that `shardlab data fetch` knows, or, the digits, that scikit-learn brings along.
DATA_SETS = ("fineweb", "yelp", "cifar10", "mnist", "fashion_mnist", "digits")
DATA_WORDS = (AUTO, STDLIB, SYNTHETIC, *DATA_SETS)  # a data source that is no path


# For what evaluates nothing: a run's settings of its evaluations.
NO_EVALUATION = dict.fromkeys(
    ("training.evaluate_every", "training.evaluate_samples", "training.patience")
)


# ------------------------------------------------------------------ what a value may be


class Limit(NamedTuple):
    words: str  # "must be ..."
    holds: Callable[[Any], bool]


AT_LEAST_0 = Limit("0 or more", lambda value: 0 <= value < math.inf)
AT_LEAST_1 = Limit("at least 1", lambda value: value >= 1)
COUNTED = Limit("at least 1 (it is counted, to say how large the trace will be)", AT_LEAST_1.holds)
NEVER_OR = Limit("0 (never) or more seconds", AT_LEAST_0.holds)
ABOVE_0 = Limit("above 0", lambda value: 0 < value < math.inf)
INSIDE = Limit("above 0 and below 1", lambda value: 0 < value < 1)
FRACTION = Limit("a fraction of the learning rate, 0 to 1", lambda value: 0 <= value <= 1)
PORT = Limit("0 to 65535", lambda value: 0 <= value < 65536)
MOST_S = 1e8  # three years; timers overflow beyond some thousand
WAITED = Limit(f"above 0 and at most {MOST_S:,.0f} seconds", lambda value: 0 < value <= MOST_S)
MOST = 2**63 - 1  # what a tensor's element and PyTorch's seed can hold
# 0 stands for a number that follows from others, and is refused where nothing says it.
COUNT = Limit("at least 1", lambda value: value >= 0)


def limited(default: Any, limit: Limit) -> Any:
    """A field whose values are within a limit. None, where it is the default, is allowed."""
    return field(default=default, metadata={"limit": limit})


def one_of(*known: str) -> Any:
    """A field that is one of these words; the first is the default."""
    return field(default=known[0], metadata={"known": known})


def _refuse(reasons: Mapping[str, bool]) -> None:
    """Raise the first of these messages that is true."""
    for message, is_true in reasons.items():
        if is_true:
            raise UsageError(message)


class Section:
    """A part of the config. Each field says which values it may have; they are checked here."""

    def __post_init__(self) -> None:
        section = type(self).__name__.removesuffix("Config").lower()
        for spec in dataclasses.fields(cast(Any, self)):
            value = getattr(self, spec.name)
            known: Iterable[str] | None = spec.metadata.get("known")
            if known is not None and value not in known:
                if value.lower() not in known:
                    raise unknown(f"{section}.{spec.name}", value, known)
                object.__setattr__(self, spec.name, value.lower())  # FP16
            if isinstance(value, int) and abs(value) > MOST:
                raise UsageError(f"{section}.{spec.name} must be at most {MOST}, got {value}")
            limit: Limit | None = spec.metadata.get("limit")
            if limit is not None and value is not None and not limit.holds(value):
                raise UsageError(f"{section}.{spec.name} must be {limit.words}, got {value}")


def located(text: str) -> Path:
    """A path that a user wrote, if it can be one at all."""
    try:
        path = Path(text).expanduser()
        path.exists()
        if "\0" in text:  # Python only says that such a path does not exist
            raise ValueError("embedded null byte")
    except (OSError, ValueError, RuntimeError) as error:  # too long; a NUL; ~nobody
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"'{text[:80]}' is no path: {reason}") from None
    return path


# ------------------------------------------------------------------ the sections


@dataclass(frozen=True)
class ModelConfig(Section):
    workload: str = "gpt2"  # a name of ours, or your own: path/to/file.py:attr, package.module:attr
    size: str | None = None  # a preset of the workload; None: the workload's own default
    options: dict[str, Any] = field(default_factory=dict)  # passed to the workload by name

    def __post_init__(self) -> None:
        if ":" not in self.workload and self.workload not in WORKLOADS:
            raise unknown("workload", self.workload, WORKLOADS)


@dataclass(frozen=True)
class DataConfig(Section):
    # "auto": the workload's own data set if `shardlab data` has fetched it, else the nearest that
    # is on this machine; a run says which, and its config.yaml names it. "stdlib": the text of
    # Python's library; "synthetic": made up; the name of a data set that was fetched; else a file,
    # folder or glob
    source: str = AUTO
    seq_len: int | None = limited(None, AT_LEAST_1)  # tokens per sample; None: the model's context
    shuffle: bool = True  # a new order each epoch, from seed and epoch alone
    # What becomes of the samples that fill no whole batch at an epoch's end. "continuous": the next
    # epoch fills it up; "padded": samples of this one again; "exact": a short batch
    epoch: str = one_of(*EPOCHS)
    prefetch: int = limited(2, AT_LEAST_0)  # steps whose batches a thread prepares ahead; 0: no

    def __post_init__(self) -> None:
        super().__post_init__()
        # A missing path is refused before anything starts; what is in it, the workload checks.
        path = located(self.source)
        if not (self.source in DATA_WORDS or path.exists() or glob.glob(str(path))):  # noqa: PTH207
            raise UsageError(
                f"no such data: {path}; data.source is a file, folder or glob, or "
                f"one of {', '.join(DATA_WORDS)}"
            )


@dataclass(frozen=True)
class TrainingConfig(Section):
    steps: int = limited(20, COUNT)
    # Passes over the data: steps follow from its size, data.epoch and global_batch
    epochs: float | None = limited(None, ABOVE_0)
    global_batch: int = limited(8, COUNT)  # samples per step, over all ranks and micro-batches
    accumulate: int = limited(1, COUNT)  # micro-batches per rank and step
    # Samples of a rank in a micro-batch; accumulate follows from it and global_batch, or, where
    # that is not given, global_batch from it and the number of ranks. (uneven: at most this many)
    micro_batch: int | None = limited(None, AT_LEAST_1)
    # uneven: the ranks' shares differ by one sample; the loss stays exact
    batch_split: str = one_of("exact", "uneven")
    optimizer: str = "adamw"  # a class of torch.optim, or your own: file.py:Class, module:Class
    learning_rate: float = limited(1e-3, AT_LEAST_0)
    weight_decay: float = limited(0.0, AT_LEAST_0)
    no_decay: str = one_of(*NO_DECAY)  # norms_and_biases: parameters of fewer than two dimensions
    momentum: float = limited(0.0, AT_LEAST_0)  # sgd, rmsprop, muon; 0: the class's own
    betas: list[float] | None = None  # for Adam-like optimizers; None: the class's default
    eps: float | None = limited(None, ABOVE_0)  # None: the class's default
    optimizer_options: dict[str, Any] = field(default_factory=dict)  # other arguments of the class
    # "cosine": the rate falls to min_rate of itself over the run; or your own: file.py:function,
    # module:function, which gives the factor of a step, from 0
    schedule: str = "constant"
    warmup_steps: int = limited(0, AT_LEAST_0)  # first steps, over which the rate rises in a line
    min_rate: float = limited(0.0, FRACTION)  # cosine only
    clip_norm: float | None = limited(None, ABOVE_0)  # largest norm of the gradient; None: any
    clip_value: float | None = limited(None, ABOVE_0)  # largest element of the gradient; None: any
    # A moving average of the parameters, kept with the optimizer's state, and evaluated instead of
    # them: this much of it stays at each step. None: no average
    ema_decay: float | None = limited(None, INSIDE)
    activation_checkpointing: bool = False  # blocks are computed again in backward, not kept
    # torch.compile. "blocks": each by itself, so that gradients still come one block at a time.
    # "model": as one, which is faster, but all gradients come at the end and nothing overlaps.
    compile: str = one_of("none", "blocks", "model")
    # What a NaN or infinite loss or gradient does: "stop"; "skip" the update, which costs the norm
    # of the gradient in each step; or "ignore". (fp16 skips by itself what its loss scale made
    # overflow.)
    on_nonfinite: str = one_of("stop", "skip", "ignore")
    evaluate_every: int | None = limited(None, AT_LEAST_0)  # steps; 0: at the end; None: never
    evaluate_samples: int | None = limited(None, AT_LEAST_1)  # held-out ones; None: all
    # The run ends when so many evaluations in a row have not lowered the held-out loss; None: no
    patience: int | None = limited(None, AT_LEAST_1)
    seed: int = limited(0, AT_LEAST_0)

    def __post_init__(self) -> None:
        if ":" not in self.optimizer:
            object.__setattr__(self, "optimizer", self.optimizer.lower())
            if self.optimizer not in OPTIMIZERS:
                raise unknown("training.optimizer", self.optimizer, OPTIMIZERS)
        super().__post_init__()
        is_own, has_own_schedule = ":" in self.optimizer, ":" in self.schedule
        if not has_own_schedule and self.schedule not in SCHEDULES:
            raise unknown("training.schedule", self.schedule, SCHEDULES)
        _refuse({
            **{f"training.{name} must be at least 1, got 0": getattr(self, name) == 0 and not said
               for name, said in (("steps", self.epochs is not None),
                                  ("global_batch", self.micro_batch is not None),
                                  ("accumulate", self.micro_batch is not None))},
            "training.evaluate_samples is for a run that evaluates; set training.evaluate_every":
                self.evaluate_samples is not None and self.evaluate_every is None,
            "training.patience counts evaluations between steps; set training.evaluate_every to "
            "1 or more": self.patience is not None and not self.evaluate_every,
            f"training.no_decay {self.no_decay} is for a run with decay; set training.weight_decay":
                self.no_decay != NO_DECAY[0] and self.weight_decay == 0,
            f"training.momentum is for sgd; {self.optimizer} has no such setting":
                self.momentum > 0 and self.optimizer not in MOMENTUM and not is_own,
            f"training.warmup_steps is for a schedule of ours; {self.schedule} says it all itself":
                self.warmup_steps > 0 and has_own_schedule,
            f"training.warmup_steps {self.warmup_steps} is longer than the run of {self.steps} "
            "steps": self.warmup_steps > self.steps > 0,
            f"training.min_rate is for the cosine schedule; {self.schedule} does not fall":
                self.min_rate > 0 and self.schedule != "cosine",
            "training.clip_norm and training.clip_value: which comes first? Set one of them":
                self.clip_norm is not None and self.clip_value is not None,
            **{f"training.betas are 0 or more and below 1, got {value}": not 0 <= value < 1
               for value in self.betas or ()},
        })  # fmt: skip


@dataclass(frozen=True)
class PrecisionConfig(Section):
    # bf16, fp16: autocast over fp32 weights; fp64: weights and compute, for proofs
    compute: str = one_of(*PRECISIONS)
    loss_scale: float | None = limited(None, ABOVE_0)  # fp16 begins with it; None: LOSS_SCALE

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse({
            f"precision.loss_scale is for fp16; gradients in {self.compute} do not vanish":
                self.loss_scale is not None and self.compute != "fp16",
        })  # fmt: skip


@dataclass(frozen=True)
class StrategyConfig(Section):
    name: str = "simple_ddp"
    options: dict[str, Any] = field(default_factory=dict)  # passed to the strategy by name

    def __post_init__(self) -> None:
        known = naming.EVERY_STRATEGY
        object.__setattr__(self, "name", naming.strategy_named(self.name))
        if ":" not in self.name and self.name not in known:
            raise unknown("strategy", self.name, [*known, *naming.ALIASES])

    @property
    def label(self) -> str:
        """The name as it is shown, with what sets it apart from others of that name."""
        options = ", ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name} ({options})" if options else self.name


@dataclass(frozen=True)
class ProfileConfig(Section):
    # Steps whose collectives are written out one by one; of later ones the totals are.
    ledger_steps: int = limited(200, AT_LEAST_0)
    enabled: bool = False  # --profile: traces of some steps, by PyTorch's profiler
    wait: int = limited(1, AT_LEAST_0)  # steps left alone before each window
    warmup: int = limited(1, COUNTED)  # then recorded and thrown away
    active: int = limited(3, AT_LEAST_1)  # then recorded and kept
    repeat: int = limited(1, AT_LEAST_1)  # windows
    shapes: bool = False  # record every operator's argument shapes; the costs: docs/capture.md
    stacks: bool = False  # the Python calls around every operator
    memory: bool = False  # every allocation and release
    memory_snapshot: bool = False  # GPU only: a file for PyTorch's memory viewer

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse({
            f"profile.{key} is for a profiled run; add --profile, or profile.enabled: true":
                getattr(self, key) and not self.enabled
            for key in ("shapes", "stacks", "memory", "memory_snapshot")
        })  # fmt: skip

    @property
    def window(self) -> int:
        """Steps from the beginning of one window to that of the next."""
        return self.wait + self.warmup + self.active

    def part(self, step: int) -> str:
        """The part of a window that a step is in: wait, warmup, active; or none, outside."""
        if not 0 <= step < self.repeat * self.window:
            return "none"
        place = step % self.window
        if place < self.wait:
            return "wait"
        return "warmup" if place < self.wait + self.warmup else "active"


@dataclass(frozen=True)
class LaunchConfig(Section):
    world: int | None = limited(None, AT_LEAST_1)  # ranks; None: the launcher's, or 2 of our own
    device: str = one_of("auto", "cpu", "cuda")
    # auto: gloo on CPU or on a shared GPU, nccl with a GPU for each rank
    backend: str = one_of("auto", "gloo", "nccl")
    port: int = limited(0, PORT)  # of rank 0, under srun and mpirun; 0: one that the job gives
    # Where rank 0 listens, under srun and mpirun. None: the first node, as far as they name it
    address: str | None = None
    # The network interface that ranks use, under torchrun, srun and mpirun. None: Gloo's or NCCL's
    interface: str | None = None
    threads_per_rank: int = limited(1, AT_LEAST_1)  # on CPU; 2 ranks on 2 cores want 1
    timeout_s: float = limited(300.0, WAITED)  # a collective that waits longer ends the run
    # When a rank dies, from the last checkpoint; torchrun has its own flag.
    max_restarts: int = limited(0, AT_LEAST_0)
    min_world: int | None = None  # a restart may have fewer ranks, down to this; None: as many

    def __post_init__(self) -> None:
        super().__post_init__()
        least = self.min_world
        _refuse({
            f"launch.min_world must be 1 to launch.world, got {least}":
                least is not None and not 1 <= least <= (self.world or least),
            "launch.min_world is for a run that is restarted; set launch.max_restarts":
                least is not None and self.max_restarts == 0,
            "the nccl backend needs GPUs; use launch.backend gloo with launch.device cpu":
                self.backend == "nccl" and self.device == "cpu",
            f"launch.address must be a host's name or address, without a port, got "
            f"'{self.address}'":
                self.address is not None
                and not re.fullmatch(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:]*:[0-9A-Fa-f:]*:[0-9A-Fa-f:]*",
                                     self.address),
            f"launch.interface must be the name of one network interface, got '{self.interface}'":
                self.interface is not None
                and not re.fullmatch(r"[A-Za-z0-9._-]{1,15}", self.interface),
        })  # fmt: skip


@dataclass(frozen=True)
class CheckpointConfig(Section):
    # Steps between checkpoints; the last step always has one. None: no checkpoints
    every: int | None = limited(None, AT_LEAST_1)
    keep_last: int = limited(2, AT_LEAST_1)  # this many of the newest stay
    keep_every: int | None = limited(None, AT_LEAST_1)  # and those of steps that this divides
    asynchronous: bool = False  # written by a thread while the run continues
    # "auto": the newest run of this config that did not finish, or a new one; a run folder:
    # continue there from its newest valid checkpoint; a checkpoint: begin with it in a new folder
    resume: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse({
            f"checkpoint.{key} is for a run with checkpoints; set checkpoint.every":
                bool(getattr(self, key)) and self.every is None
            for key in ("asynchronous", "keep_every")
        })  # fmt: skip


@dataclass(frozen=True)
class GuardConfig(Section):
    # A run in which no rank moves for this long has hung, and is ended with a verdict. None: 60 s,
    # or ten times the longest pause until then; until the first step is made, nine tenths of
    # launch.timeout_s, as whenever model and data are built or a checkpoint is written. 0: never
    hang_s: float | None = limited(None, NEVER_OR)
    # First steps whose collectives are compared before they are launched.
    check_steps: int = limited(3, AT_LEAST_0)
    # Steps; then all collectives that were launched are compared by a fingerprint.
    check_every: int = limited(10, AT_LEAST_0)
    # Steps after which replicas are compared, bit for bit; and before each checkpoint, with the
    # optimizer's state. 0: never
    drift_every: int = limited(100, AT_LEAST_0)


@dataclass(frozen=True)
class OutputConfig(Section):
    dir: str | None = None  # this run's folder; None: runs/<time>-<workload>-<strategy>-w<world>
    root: str = "runs"
    # Steps between two lines of a log, where stderr is no terminal. None: a tenth of the run, at
    # most 100
    log_every: int | None = limited(None, AT_LEAST_1)
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
    faults: list[str] = field(default_factory=list)  # --inject: shardlab.faults lists them

    def __post_init__(self) -> None:
        world, has_checkpoints = self.launch.world, self.checkpoint.every is not None
        steps = self.training.steps or math.inf  # inf: the data will say how many
        injected.check_steps(self.faults, steps, has_checkpoints)
        profile, hang_s, timeout_s = self.profile, self.guard.hang_s, self.launch.timeout_s
        needed = profile.repeat * profile.window
        _refuse({
            f"the profile needs {needed} steps ({profile.repeat} x {profile.wait} wait + "
            f"{profile.warmup} warmup + {profile.active} active), and training.steps is "
            f"{self.training.steps}": profile.enabled and steps < needed,
            "an evaluation between steps would be in the profile; with --profile, evaluate at the "
            "end: training.evaluate_every 0":
                profile.enabled and bool(self.training.evaluate_every),
            "launch.max_restarts would begin at step 0 each time; set checkpoint.every":
                self.launch.max_restarts > 0 and not has_checkpoints,
            f"guard.hang_s {hang_s} is not below launch.timeout_s {timeout_s:g}, after which a "
            "collective fails by itself and nobody learns which rank was missing; raise that too":
                hang_s is not None and hang_s >= timeout_s,
            f"strategy 'single' is one process; launch.world is {world}: use --world 1, or another "
            "strategy": world not in (None, 1) and self.strategy.name == "single",
        })  # fmt: skip
        if world is not None:
            shares = data_ranks(self.strategy, world)
            object.__setattr__(self, "training", share_batch(self.training, shares))

    def refuse_used_folder(self) -> None:
        """The output folder must be new or empty; with resume: auto it may be a run's."""
        if self.output.dir is None:
            return
        folder = located(self.output.dir)
        is_new = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
        is_resumed = self.checkpoint.resume == "auto"
        _refuse({
            f"the output folder {folder} is not empty and not the folder of a run; choose another":
                is_resumed and not is_new and not (folder / "config.yaml").is_file(),
            f"the output folder {folder} exists and is not empty; choose another":
                not is_resumed and not is_new,
        })  # fmt: skip

    def new_folder(self, name: str) -> Path:
        """An empty folder for a command's files: ``output.dir``, or a new one under its root."""
        chosen = Path(self.output.dir) if self.output.dir else None
        return runfolder.new_folder(Path(self.output.root), name, chosen)

    def refuse_unwritable(self) -> None:
        """Before the work: a folder for its files can be made. (A run that resumes has one.)"""
        if self.checkpoint.resume in (None, "auto"):
            runfolder.refuse_unwritable(located(self.output.dir or self.output.root))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    def with_overrides(self, overrides: Mapping[str, Any]) -> Config:
        """A copy with ``{"training.steps": 3}`` applied, checked anew."""
        return _resolved(_merged(self.to_dict(), overrides))


def data_ranks(strategy: StrategyConfig, world: int) -> int:
    """Among how many a batch is shared out: ranks that cut one model between them count once."""
    axes, _ = axes_of(strategy.name, strategy.options, world)
    return world if axes is None else axes.data


def share_batch(training: TrainingConfig, world: int) -> TrainingConfig:
    """The same, with what follows from ``micro_batch``. A batch that ``world`` ranks cannot share
    as asked is refused."""
    micro, given = training.micro_batch, training.accumulate
    part = world * (given if micro is None else micro)  # the batch must be a multiple of this
    batch = training.global_batch or part * (given or 1)
    if batch % part and training.batch_split == "exact":
        lower = batch // part * part
        what = f"training.global_batch {batch} is no multiple of {world} ranks x "
        what += f"training.micro_batch {micro}"
        if micro is None:
            what = f"a global batch of {batch} cannot be divided evenly over {world} ranks x "
            what += f"{given} micro-batches"
        near = f"{lower} or {lower + part}" if lower else str(part)
        raise UsageError(f"{what}; use {near}, or training.batch_split: uneven")
    if micro is None:
        return training
    needed = -(-batch // part)
    if given not in (0, needed):
        raise UsageError(
            f"training.global_batch {batch} is not {world} ranks x training.micro_batch {micro} x "
            f"training.accumulate {given}; leave out training.accumulate: it would be {needed}"
        )
    return dataclasses.replace(training, global_batch=batch, accumulate=needed)


# ------------------------------------------------------------------ from YAML and flags


MOST_BITS = 1024  # of a whole number in YAML; Python prints none of more than 4,300 digits


class _Loader(yaml.SafeLoader):
    """YAML 1.1, but ``1e-4`` is a number (the standard wants a dot and a sign: ``1.0e-4``)."""

    # A copy: the class attribute is shared, and adding to it would change every SafeLoader.
    yaml_implicit_resolvers = copy.deepcopy(yaml.SafeLoader.yaml_implicit_resolvers)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """As PyYAML does it, whose constructors raise whatever Python raises for ``!!int x``."""
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int) and value.bit_length() > MOST_BITS:
                raise ValueError
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception:
            text = node.value if isinstance(node.value, str) else "…"
            text = text if len(text) <= 40 else f"{text[:39]}…"
            reason = f"'{text}' is not a valid {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, reason, node.start_mark) from None
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """PyYAML would take the last of two values without a word."""
        seen = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    reason = f"the key '{key.value[:40]}' is there twice"
                    raise yaml.constructor.ConstructorError(None, None, reason, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


MOST_BYTES = 1 << 20  # of a config
MOST_VALUES = 10_000  # in a config; a few lines of YAML can stand for billions


def parse_yaml(text: str) -> Any:
    """The value of a YAML text; ValueError, with the line and the problem, if it is not YAML."""
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


def settings_in(path: Path) -> dict[str, Any]:
    """What a config file says."""
    try:
        content = _text_of(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"cannot read the config {path}: {reason}") from None
    try:
        loaded = parse_yaml(content)
    except ValueError as error:
        joint = ", " if str(error).startswith("line") else ": "
        raise UsageError(f"{path}{joint}{error}") from None
    if not isinstance(loaded, dict | None):
        kind = type(loaded).__name__
        raise UsageError(f"{path}: a config is a mapping of sections, not a {kind}")
    return loaded or {}


def _text_of(path: Path) -> str:
    """The text of a file, or of a pipe that a shell opened: ``/dev/stdin``, ``<(…)``."""
    status = path.stat()
    # A shell's pipe has no name: it leads to /proc/7/fd/pipe:[99]. One with a name is a FIFO, and
    # opening it would wait for whoever writes into it.
    if stat.S_ISFIFO(status.st_mode) and not path.resolve().exists():
        return _piped(path, status.st_ino)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    return _limited(path)


@functools.cache
def _piped(path: Path, _inode: int) -> str:
    """It can be read once, and a command asks for its config more than once."""
    return _limited(path)


def _limited(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"more than {MOST_BYTES >> 20} MiB")
    return content.decode("utf-8")


def load(
    path: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    base: Mapping[str, Any] | None = None,
) -> Config:
    """The file's config with the overrides on top; what it leaves out is ``base``'s, or default."""
    values = {} if path is None else settings_in(Path(path))
    sections = {key: dict(value) for key, value in (base or {}).items()}
    for key, value in values.items():
        if isinstance(value, Mapping) and key in sections:
            sections[key] = _over(sections[key], value)
        else:
            sections[key] = value
    return from_dict(_merged(sections, overrides or {}))


def from_dict(values: Mapping[str, Any]) -> Config:
    """What a user asks for, whose output folder must be free: it is not looked at again."""
    config = _resolved(values)
    config.refuse_used_folder()
    return config


def _resolved(values: Mapping[str, Any]) -> Config:
    training = values.get("training")
    if isinstance(training, Mapping):
        follow = dict.fromkeys(("steps",) if training.get("epochs") is not None else (), 0)
        if training.get("micro_batch") is not None:
            follow |= {"global_batch": 0, "accumulate": 0}
        values = {**values, "training": {**follow, **training}}
    return _build(Config, values, "")


def _over(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """One section, in which ``upper`` has the last word: also on a number that would follow from
    what only ``lower`` says. Within one of them, both are kept and compared."""
    merged = {**lower, **upper}

    def says(key: str) -> bool:
        return bool(upper.get(key))

    for key, rival in (("steps", "epochs"), ("epochs", "steps")):
        if says(key) and not says(rival):
            merged.pop(rival, None)
    if merged.get("micro_batch") is not None:
        if says("accumulate") and not says("micro_batch") and merged.get("global_batch"):
            del merged["micro_batch"]
        elif (says("micro_batch") or says("global_batch")) and not says("accumulate"):
            merged.pop("accumulate", None)
    return merged


def _merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with each ``section.key`` (or ``section.options.key``) set."""
    result = dict(values)
    training, launch = result.get("training"), result.get("launch")
    if isinstance(training, Mapping):
        prefix = "training."
        above = {k.removeprefix(prefix): v for k, v in overrides.items() if k.startswith(prefix)}
        result["training"] = training = _over(training, above)
        was = launch.get("world") if isinstance(launch, Mapping) else None
        is_other = was is not None and overrides.get("launch.world", was) != was
        if is_other and training.get("micro_batch") is not None and "accumulate" not in above:
            training.pop("accumulate", None)  # it followed from the number of ranks
    for dotted in overrides:
        if "." not in dotted and dotted != "faults":
            raise UsageError(f"'{dotted}' is not section.key, as in training.steps")
    return with_settings(result, overrides)


def with_settings(values: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested ``values`` in which each dotted key is set."""
    result = dict(values)
    for dotted, value in settings.items():
        *parents, key = dotted.split(".")
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
    hints = get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in names:
            raise _unknown_key(key, where, names)
        path = f"{where}.{key}" if where else str(key)
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            value = {} if value is None else value
            if not isinstance(value, Mapping):
                keys = ", ".join(f.name for f in dataclasses.fields(cast(Any, hint)))
                raise UsageError(f"{path} is a section, not a {kind_of(value)}; its keys: {keys}")
            arguments[key] = _build(cast(type[Any], hint), value, path)
        else:
            arguments[key] = typed(value, hint, path)
    return cast(T, cls(**arguments))


# Sections with keys that no other section has, where a key in the wrong place is looked for.
_LOOKED_IN = ("data", "training", "precision", "launch")


def _unknown_key(key: object, where: str, names: Iterable[str]) -> UsageError:
    """A key that stands in the wrong section is answered with the right one; any other with the
    nearest."""
    kind, word = f"key in {where}" if where else "section", str(key)
    sections = get_type_hints(Config)
    if found := [f"{s}.{word}" for s in _LOOKED_IN if word in get_type_hints(sections[s])]:
        return UsageError(f"unknown {kind} '{word}'; did you mean '{found[0]}'?")
    return unknown(kind, key, names)
