"""What a run is: frozen structs, read from YAML and flags, refused here if wrong.

Precedence: the defaults below < the YAML file < flags. A value's type and range are checked first,
then combinations, so a ``Config`` that was loaded can be run, as far as is known without files and
a process group (``Config.check_paths`` looks at files, once per command). torch is not imported
here: ``shardlab --help`` and every refusal would wait for it.
"""

from __future__ import annotations

import copy
import errno
import glob
import math
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import yaml
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from shardlab import naming, runfolder
from shardlab.axes import axes_of
from shardlab.errors import UsageError, unknown
from shardlab.faults import spec as injected
from shardlab.naming import WORKLOADS, kind_of
from shardlab.optim.schedule import SCHEDULES

# The classes of torch.optim, in lower case. (Not all can be used: the refusal says why.)
OPTIMIZERS = (
    "adamw", "adam", "sgd", "adadelta", "adafactor", "adagrad", "adamax", "asgd", "lbfgs", "muon",
    "nadam", "radam", "rmsprop", "rprop", "sparseadam",
)  # fmt: skip
Precision = Literal["fp32", "bf16", "fp16", "fp64"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
LOSS_SCALE = 65536.0  # fp16 begins with it by default, and halves it where it is too large
CONTINUOUS = "continuous"
Epoch = Literal["continuous", "padded", "exact"]  # shardlab.data.sampler says what they are
EPOCHS: tuple[str, ...] = get_args(Epoch)
AUTO, STDLIB, SYNTHETIC = "auto", "stdlib", "synthetic"
# Data sets that `shardlab data fetch` knows, or, the digits, that scikit-learn brings along.
DATA_SETS = ("fineweb", "yelp", "cifar10", "mnist", "fashion_mnist", "digits")
DATA_WORDS = (AUTO, STDLIB, SYNTHETIC, *DATA_SETS)  # a data source that is no path
DEFAULT_BATCH = 8

# For what evaluates nothing: a run's settings of its evaluations.
NO_EVALUATION = dict.fromkeys(
    ("training.evaluate_every", "training.evaluate_samples", "training.patience")
)

# ------------------------------------------------------------------ what a value may be

MOST = 2**63 - 1  # what a tensor's element and PyTorch's seed can hold
LARGEST = 1e308
MOST_S = 1e8  # three years; timers overflow beyond some thousand
Whole = Annotated[int, Meta(ge=0, le=MOST)]
Count = Annotated[int, Meta(ge=1, le=MOST)]
Port = Annotated[int, Meta(ge=0, le=65535)]
AtLeast0 = Annotated[float, Meta(ge=0, le=LARGEST)]
Above0 = Annotated[float, Meta(gt=0, le=LARGEST)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Inside = Annotated[float, Meta(gt=0, lt=1)]
Seconds = Annotated[float, Meta(gt=0, le=MOST_S)]


def _refuse(reasons: Mapping[str, bool]) -> None:
    """Raise the first of these messages that is true."""
    for message, is_true in reasons.items():
        if is_true:
            raise UsageError(message)


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


class ModelConfig(Struct, frozen=True):
    workload: str = "gpt2"  # a name of ours, or your own: path/to/file.py:attr, package.module:attr
    size: str | None = None  # a preset of the workload; None: the workload's own default
    options: dict[str, Any] = field(default_factory=dict)  # passed to the workload by name

    def __post_init__(self) -> None:
        if ":" not in self.workload and self.workload not in WORKLOADS:
            raise unknown("workload", self.workload, WORKLOADS)


class DataConfig(Struct, frozen=True):
    # "auto": the workload's own data set if `shardlab data` has fetched it, else the nearest that
    # is on this machine; a run says which, and its config.yaml names it. "stdlib": the text of
    # Python's library; "synthetic": made up; the name of a data set that was fetched; else a file,
    # folder or glob
    source: str = AUTO
    seq_len: Count | None = None  # tokens per sample; None: the model's context
    shuffle: bool = True  # a new order each epoch, from seed and epoch alone
    # What becomes of the samples that fill no whole batch at an epoch's end. "continuous": the next
    # epoch fills it up; "padded": samples of this one again; "exact": a short batch
    epoch: Epoch = "continuous"
    prefetch: Whole = 2  # steps whose batches a thread prepares ahead; 0: no


class TrainingConfig(Struct, frozen=True):
    steps: Whole = 20  # 0: not known yet, because epochs are given
    # Passes over the data: steps follow from its size, data.epoch and global_batch
    epochs: Above0 | None = None
    # Samples per step, over all ranks and micro-batches; 8, or with micro_batch what the ranks take
    # at a time. 0: not known yet, because the number of ranks is not
    global_batch: Whole = DEFAULT_BATCH
    # The most samples that a rank takes at a time; it accumulates gradients over as many
    # micro-batches as its share of global_batch needs. None: its share at once
    micro_batch: Count | None = None
    optimizer: str = "adamw"  # a class of torch.optim, or your own: file.py:Class, module:Class
    learning_rate: AtLeast0 = 1e-3
    weight_decay: AtLeast0 = 0.0
    no_decay: Literal["nothing", "norms_and_biases"] = "nothing"  # fewer than two dimensions
    # Other arguments of the class: {momentum: 0.9}, {betas: [0.9, 0.95], eps: 1e-8}
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    # "cosine": the rate falls to min_rate of itself over the run; or your own: file.py:function,
    # module:function, which gives the factor of a step, from 0
    schedule: str = "constant"
    warmup_steps: Whole = 0  # first steps, over which the rate rises in a line
    min_rate: Fraction = 0.0  # of the learning rate; cosine only
    clip_norm: Above0 | None = None  # largest norm of the gradient; None: any
    # A moving average of the parameters, kept with the optimizer's state, and evaluated instead of
    # them: this much of it stays at each step. None: no average
    ema_decay: Inside | None = None
    activation_checkpointing: bool = False  # blocks are computed again in backward, not kept
    # torch.compile. "blocks": each by itself, so that gradients still come one block at a time.
    # "model": as one, which is faster, but all gradients come at the end and nothing overlaps.
    compile: Literal["none", "blocks", "model"] = "none"
    # What a NaN or infinite loss or gradient does: "stop"; "skip" the update, which costs the norm
    # of the gradient in each step; or "ignore". (fp16 skips by itself what its loss scale made
    # overflow.)
    on_nonfinite: Literal["stop", "skip", "ignore"] = "stop"
    evaluate_every: Whole | None = None  # steps; 0: at the end; None: never
    evaluate_samples: Count | None = None  # held-out ones; None: all
    # The run ends when so many evaluations in a row have not lowered the held-out loss; None: no
    patience: Count | None = None
    seed: Whole = 0

    def __post_init__(self) -> None:
        if ":" not in self.optimizer and self.optimizer not in OPTIMIZERS:
            raise unknown("training.optimizer", self.optimizer, OPTIMIZERS)
        has_own_schedule = ":" in self.schedule
        if not has_own_schedule and self.schedule not in SCHEDULES:
            raise unknown("training.schedule", self.schedule, SCHEDULES)
        _refuse({
            "training.steps must be at least 1, got 0": self.steps == 0 and self.epochs is None,
            "training.global_batch must be at least 1, got 0":
                self.global_batch == 0 and self.micro_batch is None,
            "training.evaluate_samples is for a run that evaluates; set training.evaluate_every":
                self.evaluate_samples is not None and self.evaluate_every is None,
            "training.patience counts evaluations between steps; set training.evaluate_every to "
            "1 or more": self.patience is not None and not self.evaluate_every,
            f"training.no_decay {self.no_decay} has no effect without training.weight_decay":
                self.no_decay != "nothing" and self.weight_decay == 0,
            "training.warmup_steps applies only to built-in schedules, and training.schedule is "
            f"{self.schedule}": self.warmup_steps > 0 and has_own_schedule,
            f"training.warmup_steps {self.warmup_steps} is longer than the run of {self.steps} "
            "steps": self.warmup_steps > self.steps > 0,
            f"training.min_rate is for the cosine schedule; {self.schedule} does not fall":
                self.min_rate > 0 and self.schedule != "cosine",
        })  # fmt: skip


class PrecisionConfig(Struct, frozen=True):
    # bf16, fp16: autocast over fp32 weights; fp64: weights and compute, for proofs
    compute: Precision = "fp32"
    loss_scale: Above0 | None = None  # fp16 begins with it; None: LOSS_SCALE

    def __post_init__(self) -> None:
        _refuse({
            f"precision.loss_scale is for fp16; gradients in {self.compute} do not vanish":
                self.loss_scale is not None and self.compute != "fp16",
        })  # fmt: skip


class StrategyConfig(Struct, frozen=True):
    name: str = "simple_ddp"
    options: dict[str, Any] = field(default_factory=dict)  # passed to the strategy by name

    def __post_init__(self) -> None:
        known = naming.EVERY_STRATEGY
        if ":" not in self.name and self.name not in known:
            raise unknown("strategy", self.name, [*known, *naming.ALIASES])

    @property
    def label(self) -> str:
        """The name as it is shown, with what sets it apart from others of that name."""
        options = ", ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name} ({options})" if options else self.name


class ProfileConfig(Struct, frozen=True):
    # Steps whose collectives are written out one by one; of later ones the totals are.
    ledger_steps: Whole = 200
    enabled: bool = False  # --profile: traces of some steps, by PyTorch's profiler
    wait: Whole = 1  # steps left alone before each window
    warmup: Count = 1  # then recorded and thrown away; counted, to say how large the trace will be
    active: Count = 3  # then recorded and kept
    repeat: Count = 1  # windows
    shapes: bool = False  # record every operator's argument shapes; the costs: docs/capture.md
    stacks: bool = False  # the Python calls around every operator
    memory: bool = False  # every allocation and release
    memory_snapshot: bool = False  # GPU only: a file for PyTorch's memory viewer

    def __post_init__(self) -> None:
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


class LaunchConfig(Struct, frozen=True):
    world: Count | None = None  # ranks; None: the launcher's, or 2 of our own
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # auto: gloo on CPU or on a shared GPU, nccl with a GPU for each rank
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    port: Port = 0  # of rank 0, under srun and mpirun; 0: one that the job gives
    # Where rank 0 listens, under srun and mpirun. None: the first node, as far as they name it
    address: str | None = None
    # The network interface that ranks use, under torchrun, srun and mpirun. None: Gloo's or NCCL's
    interface: str | None = None
    threads_per_rank: Count = 1  # on CPU; 2 ranks on 2 cores want 1
    timeout_s: Seconds = 300.0  # a collective that waits longer ends the run
    # When a rank dies, from the last checkpoint; torchrun has its own flag.
    max_restarts: Whole = 0
    min_world: Count | None = None  # a restart may have fewer ranks, down to this; None: the same

    def __post_init__(self) -> None:
        least = self.min_world
        _refuse({
            f"launch.min_world must be 1 to launch.world, got {least}":
                least is not None and least > (self.world or least),
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


class CheckpointConfig(Struct, frozen=True):
    # Steps between checkpoints; the last step always has one. None: no checkpoints
    every: Count | None = None
    keep_last: Count = 2  # this many of the newest stay
    keep_every: Count | None = None  # and those of steps that this divides
    asynchronous: bool = False  # written by a thread while the run continues
    # "auto": the newest run of this config that did not finish, or a new one; a run folder:
    # continue there from its newest valid checkpoint; a checkpoint: begin with it in a new folder
    resume: str | None = None

    def __post_init__(self) -> None:
        _refuse({
            f"checkpoint.{key} is for a run with checkpoints; set checkpoint.every":
                bool(getattr(self, key)) and self.every is None
            for key in ("asynchronous", "keep_every")
        })  # fmt: skip


class GuardConfig(Struct, frozen=True):
    # A run in which no rank moves for this long has hung, and is ended with a verdict. None: 60 s,
    # or ten times the longest pause until then; until the first step is made, nine tenths of
    # launch.timeout_s, as whenever model and data are built or a checkpoint is written. 0: never
    hang_s: AtLeast0 | None = None
    # First steps whose collectives are compared before they are launched.
    check_steps: Whole = 3
    # Steps; then all collectives that were launched are compared by a fingerprint.
    check_every: Whole = 10
    # Steps after which replicas are compared, bit for bit; and before each checkpoint, with the
    # optimizer's state. 0: never
    drift_every: Whole = 100


class OutputConfig(Struct, frozen=True):
    dir: str | None = None  # this run's folder; None: runs/<time>-<workload>-<strategy>-w<world>
    root: str = "runs"
    # Steps between two lines of a log, where stderr is no terminal. None: a tenth of the run, at
    # most 100
    log_every: Count | None = None
    tensorboard: bool = False  # train also writes its numbers to <dir>/tensorboard
    wandb: bool = False  # and to Weights & Biases, by its own settings (WANDB_MODE=offline …)


class Config(Struct, frozen=True):
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
        batch, shares = self.training.global_batch, self.data_ranks
        if 0 < batch < shares:
            raise UsageError(
                f"training.global_batch {batch} is too small for {shares} ranks, which take one "
                f"sample or more each; use {shares} or more"
            )

    # -------------------------------------------------------------- the batch

    @property
    def data_ranks(self) -> int:
        """Among how many a batch is shared out: ranks that cut one model between them count once.
        1, if the number of ranks is not known yet."""
        return 1 if self.launch.world is None else data_ranks(self.strategy, self.launch.world)

    @property
    def accumulate(self) -> int:
        """Micro-batches of a rank in a step."""
        micro_batch = self.training.micro_batch
        return 1 if micro_batch is None else self._share_over(micro_batch)

    def at_world(self, world: int) -> Config:
        """The same run on this many ranks."""
        return _with_batch(replace(self, launch=replace(self.launch, world=world)))

    def in_parts(self, times: int) -> Config:
        """The same batch, of which each rank takes its share in this many micro-batches."""
        micro_batch = None if times == 1 else self._share_over(times)
        return replace(self, training=replace(self.training, micro_batch=micro_batch))

    def _share_over(self, number: int) -> int:
        """A rank's share of the batch divided by a number, rounded up."""
        return max(1, -(-self.training.global_batch // (self.data_ranks * number)))

    def started_anew(self) -> Config:
        """The same run in a folder of its own, from its first step."""
        output, checkpoint = replace(self.output, dir=None), replace(self.checkpoint, resume=None)
        return replace(self, output=output, checkpoint=checkpoint)

    # -------------------------------------------------------------- files

    def check_paths(self) -> None:
        """Before any work: the data exists, and a folder for the files can be made."""
        self._refuse_missing_data()
        self._refuse_used_folder()
        if self.checkpoint.resume in (None, AUTO):  # a run that resumes has a folder
            runfolder.refuse_unwritable(located(self.output.dir or self.output.root))

    def _refuse_missing_data(self) -> None:
        path = located(self.data.source)  # what is in it, the workload checks
        if not (self.data.source in DATA_WORDS or path.exists() or glob.glob(str(path))):  # noqa: PTH207
            raise UsageError(
                f"no such data: {path}; data.source is a file, folder or glob, or "
                f"one of {', '.join(DATA_WORDS)}"
            )

    def _refuse_used_folder(self) -> None:
        """The output folder must be new or empty; with resume: auto it may be a run's."""
        if self.output.dir is None:
            return
        folder = located(self.output.dir)
        is_new = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
        is_resumed = self.checkpoint.resume == AUTO
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

    # -------------------------------------------------------------- to and from plain values

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    def with_overrides(self, overrides: Mapping[str, Any]) -> Config:
        """A copy with ``{"training.steps": 3}`` applied, checked again."""
        return from_dict(_over(self.to_dict(), overrides)) if overrides else self


def data_ranks(strategy: StrategyConfig, world: int) -> int:
    """Among how many a batch is shared out: ranks that cut one model between them count once."""
    axes, _ = axes_of(strategy.name, strategy.options, world)
    return world if axes is None else axes.data


def _with_batch(config: Config) -> Config:
    """The config with the global batch that follows from the micro-batch and the ranks."""
    training = config.training
    if training.global_batch or config.launch.world is None:
        return config
    assert training.micro_batch is not None
    batch = config.data_ranks * training.micro_batch
    return replace(config, training=replace(training, global_batch=batch))


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
    is_shells_pipe = stat.S_ISFIFO(status.st_mode) and not path.resolve().exists()
    if not (is_shells_pipe or stat.S_ISREG(status.st_mode)):
        raise OSError(errno.EINVAL, "not a regular file")
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"more than {MOST_BYTES >> 20} MiB")
    return content.decode("utf-8")


def load(
    source: str | Path | Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    base: Mapping[str, Any] | None = None,
) -> Config:
    """The config of a file, or of what it says, with the overrides on top; what it leaves out is
    ``base``'s, or default."""
    given = settings_in(Path(source)) if isinstance(source, str | Path) else source or {}
    values = dict(base or {})
    for name, inside in given.items():
        is_section = isinstance(inside, Mapping) and isinstance(values.get(name), Mapping)
        values[name] = _section_over(values[name], inside) if is_section else inside
    return from_dict(_over(values, overrides or {}))


def _over(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with each ``section.key`` (or ``section.options.key``) set."""
    for dotted in overrides:
        if "." not in dotted and dotted != "faults":
            raise UsageError(f"'{dotted}' is not section.key, as in training.steps")
    result = dict(values)
    if isinstance(training := result.get("training"), Mapping):
        prefix = "training."
        above = {k.removeprefix(prefix): v for k, v in overrides.items() if k.startswith(prefix)}
        result["training"] = _section_over(training, above)
    return with_settings(result, overrides)


def _section_over(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """A section in which ``upper`` has the last word: its steps also replace ``lower``'s epochs."""
    merged = {**lower, **upper}
    for key, rival in (("steps", "epochs"), ("epochs", "steps")):
        if upper.get(key) and not upper.get(rival):
            merged.pop(rival, None)
    return merged


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


def from_dict(values: Mapping[str, Any]) -> Config:
    """The config of these sections. Each refusal names the key, the value, and what is right."""
    ready = {name: _ready(name, inside) for name, inside in values.items()}
    try:
        return _with_batch(msgspec.convert(ready, Config))
    except msgspec.ValidationError as error:
        raise _in_our_words(str(error), ready) from None


# The type of each key, by section.
SECTIONS: dict[str, dict[str, Any]] = {
    name: get_type_hints(kind) for name, kind in get_type_hints(Config).items() if name != "faults"
}
# Keys that are gone, and what does the same.
GONE = {
    "training.accumulate": "training.micro_batch",
    "training.batch_split": "training.micro_batch",
    "training.momentum": "training.optimizer_options.momentum",
    "training.betas": "training.optimizer_options.betas",
    "training.eps": "training.optimizer_options.eps",
    "training.clip_value": "training.clip_norm",
}


def _ready(name: Any, inside: Any) -> Any:
    """A section's values as msgspec takes them. A key that nobody knows is refused."""
    if name == "faults":
        return inside or []
    if name not in SECTIONS:
        raise _unknown_key(name, "", [*SECTIONS, "faults"])
    hints = SECTIONS[name]
    if not isinstance(inside, Mapping | None):
        keys = ", ".join(hints)
        raise UsageError(f"{name} is a section, not a {kind_of(inside)}; its keys: {keys}")
    result = {}
    for key, value in (inside or {}).items():
        if key not in hints:
            raise _unknown_key(key, name, hints)
        hint = hints[key]
        is_word = get_origin(hint) is Literal or (key == "optimizer" and ":" not in str(value))
        if is_word and isinstance(value, str):
            value = value.lower()  # FP16, AdamW
        if value is None and get_origin(hint) is dict:
            value = {}
        result[key] = value
    training = name == "training"
    if training and result.get("epochs") is not None:
        result.setdefault("steps", 0)
    if training and result.get("micro_batch") is not None:
        result.setdefault("global_batch", 0)
    if name == "strategy" and isinstance(result.get("name"), str):
        result["name"] = naming.strategy_named(result["name"])
    return result


# Sections with keys that no other section has, where a key in the wrong place is looked for.
_LOOKED_IN = ("data", "training", "precision", "launch")


def _unknown_key(key: object, where: str, names: Iterable[str]) -> UsageError:
    """A key that is gone, or stands in the wrong section, is answered with the right one; any other
    with the nearest."""
    kind, word = f"key in {where}" if where else "section", str(key)
    right = GONE.get(f"{where}.{word}") or GONE.get(f"training.{word}")
    found = [f"{s}.{word}" for s in _LOOKED_IN if word in SECTIONS[s]]
    if right or found:
        return UsageError(f"unknown {kind} '{word}'; did you mean '{right or found[0]}'?")
    return unknown(kind, key, names)


# ------------------------------------------------------------------ msgspec's refusals in our words

_KINDS = {
    "int": "whole number", "float": "number", "str": "text", "bool": "true or false",
    "object": "mapping", "array": "list",
}  # fmt: skip
_LIMITS = {">=": "at least", ">": "above", "<=": "at most", "<": "below"}
_REFUSAL = re.compile(r"(?P<what>.*?) - at `(?P<key>key` in `)?\$\.?(?P<path>.*)`", re.DOTALL)
_EXPECTED = re.compile(r"Expected `(?P<kind>\w+)[^`]*`(?: (?P<limit>[<>]=?) (?P<number>\S+))?")


def _in_our_words(text: str, values: Mapping[str, Any]) -> UsageError:
    """``Expected `int` >= 1 - at `$.training.steps` `` with the value that was given."""
    found = _REFUSAL.fullmatch(text)
    if found is None:
        return UsageError(f"the config: {text}")
    path = found["path"]
    value = _value_at(values, path)
    if found["key"]:
        return UsageError(f"the keys of {path} must be text: {value!r}")
    words = _known_at(path)
    if words and isinstance(value, str):
        return unknown(path, value, words)
    expected = _EXPECTED.match(found["what"])
    if expected is None:
        return UsageError(f"{path}: {found['what']}, got {value!r}")
    if expected["limit"]:
        number = float(expected["number"])
        shown = f"{int(number):,}" if number.is_integer() and number < 1e15 else expected["number"]
        limit = f"{_LIMITS[expected['limit']]} {shown}"
        return UsageError(f"{path} must be {limit}, got {value}")
    kind = "text" if words else _KINDS.get(expected["kind"], expected["kind"])
    return UsageError(f"{path} must be a {kind}, got {kind_of(value)}: {value!r}")


def _value_at(values: Any, path: str) -> Any:
    """What stands at ``training.steps`` or ``faults[0]``."""
    for part in re.findall(r"\w+", path):
        values = values[int(part)] if isinstance(values, list) else values[part]
    return values


def _known_at(path: str) -> tuple[str, ...]:
    """The words that a key may be, if it is one of a few."""
    section, _, key = path.partition(".")
    hint = SECTIONS.get(section, {}).get(key)
    return get_args(hint) if get_origin(hint) is Literal else ()
