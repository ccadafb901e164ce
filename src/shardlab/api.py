"""The lab from Python: what the commands do, as functions that return objects.

``train``, ``compare``, ``prove``, ``memory`` and ``predict`` start processes of their own, which
import your workload by its path: in a script, call them below ``if __name__ == "__main__":``.
``strategy`` is for your own training loop, under torchrun.
"""

from __future__ import annotations

import atexit
import inspect
import io
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlab import config as configs
from shardlab import specs
from shardlab.config import CheckpointConfig, Config, LaunchConfig
from shardlab.errors import UsageError
from shardlab.files import write_json
from shardlab.launch import cluster, launch, launcher_env
from shardlab.naming import EVERY_STRATEGY, STRATEGIES

if TYPE_CHECKING:
    import torch
    from rich.console import RenderableType
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardlab.batch import Batch
    from shardlab.strategies.base import Strategy
    from shardlab.world import World

Settings = Mapping[str, Any]  # config keys and values: {"training.global_batch": 16}
OneOrMore = int | Sequence[int]


@dataclass(frozen=True)
class Result:
    """What a command found. It shows itself as a table, in a terminal and in a notebook."""

    data: Mapping[str, Any]  # all of it: the content of the JSON file
    folder: Path  # where its files are
    rows: list[dict[str, Any]]  # the table's rows
    shown: tuple[Any, ...]  # tables and lines, as rich draws them
    passed: bool = True  # everything ran and, where something was proved, it was right

    def __rich__(self) -> RenderableType:
        from rich.console import Group

        return Group(*self.shown)

    def __str__(self) -> str:
        return self._drawn()[0]

    def _repr_html_(self) -> str:
        return self._drawn()[1]

    def _drawn(self) -> tuple[str, str]:
        from shardlab.report.terminal import SafeConsole

        console = SafeConsole(file=io.StringIO(), record=True, width=100)
        console.print(self)
        text = console.export_text(clear=False)
        page = '<pre style="line-height:1.2">{code}</pre>'
        return text.rstrip(), console.export_html(inline_styles=True, code_format=page)

    def to_dataframe(self) -> Any:
        """The rows as a pandas DataFrame, nested values under dotted names."""
        try:
            import pandas as pd
        except ModuleNotFoundError:
            raise UsageError("to_dataframe() needs pandas: pip install pandas") from None
        return pd.json_normalize(self.rows)


def train(
    workload: str | Callable[..., Any] = "gpt2",
    strategy: str | None = None,
    *,
    world: int | None = None,
    steps: int | None = None,
    out: str | Path | None = None,
    settings: Settings | None = None,
    config: str | Path | None = None,
    progress: bool = False,
) -> Result:
    """Train with one strategy on ranks of this machine; the rows are rank 0's steps.

    Without ``strategy``, with the one of the config file; without that, with simple_ddp.
    """
    from shardlab.files import read_jsonl
    from shardlab.report import console, terminal
    from shardlab.training import restart

    named: dict[str, Any] = {"training.steps": steps}
    if strategy is not None:
        named["strategy.name"], options = specs.parse_spec(strategy)
        named["strategy.options"] = options or None
    resolved = _config(workload, config, settings, out, {**named, "launch.world": world})
    if resolved.launch.world is None:
        resolved = resolved.at_world(launch.default_world(resolved))
    with console.training_progress(enabled=progress) as on_event:
        summary = restart.train(resolved, "shardlab.train()", on_event)
    folder = Path(summary["folder"])
    rows = read_jsonl(folder / "rank0.jsonl")
    text = (console.training_line(summary), *terminal.about(summary), f"files: {folder}")
    is_saved = not (summary["checkpoint"] or {}).get("error")
    return Result(summary, folder, rows, text, is_saved)


def compare(
    workload: str | Callable[..., Any] = "gpt2",
    strategies: str | Sequence[str] = (),
    *,
    world: OneOrMore | None = None,
    repeats: int = 4,
    warmup: int = 1,
    steps: int = 2,
    prove: bool = True,
    out: str | Path | None = None,
    settings: Settings | None = None,
    config: str | Path | None = None,
    progress: bool = False,
) -> Result:
    """Measure strategies side by side, on the same model, data, seed and global batch."""
    from shardlab.measure import compare as comparison
    from shardlab.measure.cells import Plan, axes_of, cells_of
    from shardlab.report import compare as report
    from shardlab.report import compare_terminal, console, terminal

    resolved = _config(workload, config, settings, out)
    plan = Plan(repeats=repeats, warmup=warmup, steps=steps, prove=prove, profile=None)
    axes = axes_of(resolved, _worlds(world), None, None, launch.DEFAULT_WORLD)
    cells = cells_of(resolved, _specs(strategies), axes, plan)
    with console.comparison_progress(enabled=progress) as on_progress:
        found = comparison.compare(cells, plan, "shardlab.compare()", on_progress)
    folder = resolved.new_folder("compare")
    report.write(folder, found)
    lines = *compare_terminal.verdict_lines(found), *terminal.about(found["env"])
    text = (compare_terminal.compare_table(found), *lines)
    is_right = all((cell.get("proof") or {}).get("pass") is not False for cell in found["cells"])
    some_ran = any(cell["status"] == "ok" for cell in found["cells"])
    return Result(found, folder, found["cells"], text, is_right and some_ran)


def prove(
    workload: str | Callable[..., Any] = "gpt2",
    strategies: str | Sequence[str] = (),
    *,
    world: OneOrMore | None = None,
    steps: int = 3,
    out: str | Path | None = None,
    settings: Settings | None = None,
    config: str | Path | None = None,
    progress: bool = False,
) -> Result:
    """Prove that strategies equal one process, and hold, send and overlap what they claim."""
    from shardlab.proof import prove as proofs
    from shardlab.report import console
    from shardlab.report import proof as report

    asked = _config(workload, config, settings, out)
    worlds = proofs.worlds_of(_worlds(world), asked)
    resolved = proofs.small(asked, steps, worlds, set(settings or ()))
    cases = proofs.cases_of(resolved, _specs(strategies), worlds)
    with console.comparison_progress(enabled=progress) as on_progress:
        found = proofs.prove(cases, worlds, "shardlab.prove()", on_progress)
    folder = resolved.new_folder("prove")
    write_json(folder / "prove.json", found)
    text = (
        report.table(found),
        *report.reasons(found),
        *report.notes(found),
        report.summary(found),
    )
    passed = bool(found["verdicts"]) and all(v["pass"] for v in found["verdicts"])
    return Result(found, folder, found["verdicts"], text, passed)


def memory(
    workload: str | Callable[..., Any] = "gpt2",
    strategies: str | Sequence[str] = (),
    *,
    world: int = 2,
    micro_batch: int | None = None,
    fits: str | None = None,
    out: str | Path | None = None,
    settings: Settings | None = None,
    config: str | Path | None = None,
    progress: bool = False,
) -> Result:
    """What each rank will hold at the peak of a step, without running it, in a world of any size.

    ``micro_batch``: samples that a rank takes at a time. ``fits``: "24GB", to ask whether a step
    fits into that, and which batch is the largest that does.
    """
    from shardlab.measure import estimate
    from shardlab.report import console, terminal
    from shardlab.report import memory as report
    from shardlab.text import parse_bytes

    if world < 1:
        raise UsageError(f"world must be at least 1, got {world}")
    limit = None if fits is None else parse_bytes(fits, "fits")
    resolved = _config(workload, config, settings, out)
    has_batch = config or (settings or {}).keys() & {
        "training.global_batch",
        "training.micro_batch",
    }
    size = micro_batch or (None if has_batch else 1)
    rows = estimate.rows_of(resolved, _specs(strategies), world, size)
    with console.comparison_progress(enabled=progress) as on_progress:
        found = estimate.estimate(
            rows, resolved.launch.device, limit, "shardlab.memory()", None, on_progress
        )
    folder = resolved.new_folder("memory")
    write_json(folder / "memory.json", found)
    text = (report.table(found), *report.sentences(found), *terminal.about(found))
    some_ran = any(row["status"] == "ok" for row in found["rows"])
    return Result(found, folder, found["rows"], text, some_ran)


def predict(
    workload: str | Callable[..., Any] = "gpt2",
    strategies: str | Sequence[str] = (),
    *,
    ranks: OneOrMore = 2,
    devices: str | Sequence[str] = "this",
    links: str | Sequence[str] = (),
    global_batch: int | None = None,
    micro_batch: int | None = None,
    tokens: float | str | None = None,
    price_per_hour: float | Mapping[str, float] | None = None,
    fits: bool = False,
    what_if: str | Sequence[str] = (),
    out: str | Path | None = None,
    settings: Settings | None = None,
    config: str | Path | None = None,
    progress: bool = False,
) -> Result:
    """What ``shardlab plan`` says: the step on machines that are not here, with its interval.

    ``devices``: "h100,a100,this"; ``links``: between nodes, as in ["ndr", "25gbit,50us"].
    ``global_batch`` stays the same on any number of ranks; without it a rank's samples do.
    ``tokens``: a budget, 1e12 or "1T"; ``price_per_hour``: of a device, for all or by name.
    (It is not called ``plan``: that is the package in which it is made.)
    """
    from shardlab.plan import plan as planning
    from shardlab.plan.predict import Predictor
    from shardlab.report import console
    from shardlab.report import plan as report

    named = {"training.global_batch": global_batch, "training.micro_batch": micro_batch}
    resolved = _config(workload, config, settings, out, named)
    names = planning.devices_of(devices if isinstance(devices, str) else ",".join(devices))
    prices = None if price_per_hour is None else str(price_per_hour)
    if isinstance(price_per_hour, Mapping):
        prices = ",".join(f"{name}={price}" for name, price in price_per_hour.items())
    fixes_batch = global_batch is not None or "training.global_batch" in (settings or {})
    question = planning.Question(
        resolved,
        tuple(_specs(strategies)) if strategies else planning.DEFAULT,
        specs.whole_numbers("ranks", _worlds(ranks)),
        names,
        planning.links_of([links] if isinstance(links, str) else links),
        planning.keeps_global_batch(resolved, fixes_batch),
        planning.tokens_of(None if tokens is None else str(tokens)),
        planning.prices_of(prices, names),
        tuple(map(planning.change_of, [what_if] if isinstance(what_if, str) else what_if)),
        fits,
    )
    with Predictor() as predictor, console.comparison_progress(enabled=progress) as on_progress:
        found = planning.plan(question, predictor, "shardlab.predict()", on_progress)
    folder = resolved.new_folder("plan")
    report.write(folder, found)
    text = (*report.tables(found, explain=False), *report.sentences(found))
    some_are = any(row["status"] == "ok" for row in found["rows"])
    return Result(found, folder, found["rows"], text, some_are)


def strategy(
    name: str,
    model: nn.Module,
    make_optimizer: Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
    loss_fn: Callable[[nn.Module, Batch], torch.Tensor],
    *,
    blocks: Sequence[str] | None = None,
    clip_norm: float | None = None,
    schedule: Callable[[int], float] | None = None,
    ema_decay: float | None = None,
    mesh: DeviceMesh | None = None,
    **options: Any,
) -> Strategy:
    """A strategy for your own loop: ``loss = s.gradients(microbatches); s.step()``.

    Every rank calls this with the same model and the same arguments, under torchrun; without it,
    this process is a world of one. If you have not made a process group, this makes one and moves
    the model to the rank's device.

    ``make_optimizer`` is called with named parameters, as PyTorch's optimizers take them.
    ``loss_fn`` returns the *sum* of the losses of a ``shardlab.Batch``, whose ``count`` says how
    many that are: so the mean over all ranks is exact. ``blocks`` names the modules that zero3 and
    FSDP shard one by one; None lets us look for lists of equal layers. ``schedule`` gives the
    factor of the learning rate of a step. ``ema_decay`` keeps a moving average of the parameters
    as well; ``exchange_averages()`` swaps the two.
    """
    import torch.distributed as dist

    from shardlab import axes
    from shardlab import world as worlds
    from shardlab.ledger import LEDGER
    from shardlab.optim import optimizers
    from shardlab.strategies import model_checks
    from shardlab.strategies.base import Setup
    from shardlab.strategies.update import Rule, constant
    from shardlab.training import builders
    from shardlab.workloads import batchnorm
    from shardlab.workloads.blocks import guess_blocks

    training = configs.TrainingConfig(ema_decay=ema_decay)
    given = configs.load(None, {"strategy.name": name, "strategy.options": options or None})
    make = builders.resolve_strategy(given)
    if name in axes.NAMED or axes.OPTIONS.keys() & options.keys():
        raise UsageError(
            "tensor, context and pipeline are not for a loop of your own: a workload says how its "
            "model is cut; `shardlab train` has them (docs/parallel.md)"
        )
    if mesh is None:
        device = next(model.parameters()).device
        if not dist.is_initialized():
            device = _join().device
            model.to(device)
        group = dist.group.WORLD
        assert group is not None
        mesh = worlds.data_mesh(group, device)
    batchnorm.join(model, mesh.get_group("dp"))
    optimizer = optimizers.build(training, make_optimizer, None, model, "make_optimizer")
    rule = Rule(clip_norm=clip_norm, schedule=schedule or constant)
    named = guess_blocks(model) if blocks is None else blocks
    place, group = launcher_env.joined(), mesh.get_group("dp")
    per_node = 0
    if place is not None and place.size == mesh.size():
        per_node = worlds.ranks_per_node(group, place.local_rank, place.local_size)
    # Nobody reads the ledger of a loop of one's own: an entry for each collective would fill the
    # memory in a long run.
    LEDGER.reset(full_steps=0)
    LEDGER.step = 0
    LEDGER.ranks_per_node = per_node
    setup = Setup(model, optimizer, loss_fn, mesh, rule, named, per_node)
    model_checks.refuse_unsupported(model, mesh.size())
    made = make(setup, **given.strategy.options)
    model_checks.refuse_sparse_gradients(made.params)
    atexit.register(_end, made)  # what is registered last is called first: worlds.leave comes after
    return made


def _end(strategy: Strategy) -> None:
    """Before Python ends: a process that ends while a message is under way is aborted."""
    strategy.settle()
    # Gloo's threads still let go of the tensors of messages that have arrived. They need Python's
    # lock for that, and one that asks for it after Python's end aborts the process.
    time.sleep(0.2)


def save_checkpoint(strategy: Strategy, folder: str | Path, step: int, keep_last: int = 2) -> None:
    """Save a strategy after ``step`` steps of your own loop, under ``folder``. All ranks call it.

    Each rank writes what it holds: model, optimizer, moving average, schedule and its random
    state. The newest ``keep_last`` stay. What cannot be written raises ``OSError`` on every rank,
    and leaves the checkpoint before as it was.
    """
    from shardlab.checkpoint import rng
    from shardlab.checkpoint.save import About, Checkpoints

    world = _world_of(strategy)
    settings = CheckpointConfig(every=1, keep_last=keep_last)
    about = About({}, _name_of(strategy), None)
    checkpoints = Checkpoints(Path(folder), settings, world, strategy, about)
    strategy.settle()
    checkpoints.save(step, rng.get(world.device))
    assert checkpoints.last is not None
    if checkpoints.last.error is not None:
        raise OSError(f"the checkpoint of step {step} is not written: {checkpoints.last.error}")


def load_checkpoint(strategy: Strategy, folder: str | Path) -> int:
    """Continue from the newest whole checkpoint under ``folder``, of any strategy and world.

    Returns how many steps the checkpoint has behind it; if there is no checkpoint, it returns 0 and
    changes nothing. Your data is your own: continue it from that step. All ranks call this.
    """
    from shardlab.checkpoint import files, load, manifest, resume

    world = _world_of(strategy)
    found = resume.newest_good(Path(folder), world)
    if world.rank == 0:
        files.sweep(Path(folder))  # what a killed run left half-written
    if found.manifest is None:
        if found.notes:
            raise UsageError(f"no checkpoint of {folder} is whole: {'; '.join(found.notes)}")
        return 0
    assert found.checkpoint is not None
    resume.refuse_unseen(found.checkpoint / manifest.NAME, world)
    config = configs.load(None, {"strategy.name": _name_of(strategy)})
    load.put_back(found, strategy, world, config)
    return found.step


def _world_of(strategy: Strategy) -> World:
    """The ranks of a strategy that is in a user's own loop."""
    import torch.distributed as dist

    from shardlab.world import World, data_mesh

    group, device = strategy.group, strategy.device
    mesh, backend = data_mesh(group, device), dist.get_backend(group)
    return World(group.rank(), group.size(), device.index or 0, device, backend, mesh)


def _name_of(strategy: Strategy) -> str:
    kind = type(strategy)
    place = f"{kind.__module__}:{kind.__qualname__}"
    return next((name for name, known in EVERY_STRATEGY.items() if known == place), place)


def _join() -> Any:
    """This process's place in a launcher's world, or in a world of its own."""
    from torch.distributed import HashStore

    from shardlab import world as worlds

    place = launcher_env.joined()
    atexit.register(worlds.leave)
    if place is None:
        return worlds.join(LaunchConfig(), 0, 1, 0, 1, store=HashStore())
    config = LaunchConfig()
    store = None if place.is_torchruns else cluster.store_of(place, config)
    numbers = place.rank, place.size, place.local_rank, place.local_size
    return worlds.join(config, *numbers, store=store)


def _config(
    workload: str | Callable[..., Any],
    file: str | Path | None,
    settings: Settings | None,
    out: str | Path | None,
    named: Settings | None = None,
) -> Config:
    """Defaults < the file < settings < the arguments that were given."""
    if (place := launcher_env.joined()) is not None:
        raise UsageError(f"this starts its own ranks; run it without {place.launcher}")
    given = dict(named or {})
    if file is None or workload != "gpt2":
        given["model.workload"] = workload if isinstance(workload, str) else _path_of(workload)
    given["output.dir"] = None if out is None else str(out)
    overrides = {key: value for key, value in given.items() if value is not None}
    config = configs.load(None if file is None else Path(file), {**(settings or {}), **overrides})
    config.check_paths()
    return config


def _path_of(function: Callable[..., Any]) -> str:
    """Where other processes find a function: its file and its name."""
    name = getattr(function, "__qualname__", "")
    try:
        file = inspect.getsourcefile(function)
    except TypeError:
        file = None
    if file is None or not Path(file).is_file() or not name.isidentifier():
        raise UsageError(
            "each rank must import the workload: write it as a function at the top of a file, and "
            'name it by its path, as in "my_model.py:workload"'
        )
    return f"{file}:{name}"


def _specs(strategies: str | Sequence[str]) -> list[str]:
    """The strategies that were named: one text with commas, or a list; without any, all."""
    named = strategies.split(",") if isinstance(strategies, str) else list(strategies)
    return [name.strip() for name in named] or list(STRATEGIES)


def _worlds(world: OneOrMore | None) -> str | None:
    if world is None:
        return None
    return ",".join(str(size) for size in ([world] if isinstance(world, int) else world))
