"""One rank of many, run on tensors that have shapes and no content: what would it hold?

The real strategy, model, loss and optimizer run here, on PyTorch's fake tensors, in a world of
any size whose other ranks do not exist: a collective returns at once. Nothing is computed and
nothing is sent, but every tensor is made and let go as it would be, so the peak and what it is
made of are those of the strategy's own code. There is no formula that could drift from it.

What a fake tensor cannot show: memory that a kernel or a backend takes for itself. Gloo's own
copies are made here as Gloo makes them, and ``kernels`` knows what kernels of the CPU take.

While it runs it has changed PyTorch for the whole process and made it a rank: run it in one of
its own.
"""

from __future__ import annotations

import itertools
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.parallel import distributed as ddp
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from shardlab import comm
from shardlab.axes import Axes, axes_of
from shardlab.config import Config, LaunchConfig
from shardlab.errors import UsageError
from shardlab.launch import launcher_env
from shardlab.ledger import LEDGER
from shardlab.measure import events as noted
from shardlab.measure import memory
from shardlab.measure.events import Log
from shardlab.measure.kernels import Kernels
from shardlab.measure.longest import Found, look, of_longest
from shardlab.measure.memory import Allocation, Causes
from shardlab.measure.values import GUESSES, NO_VALUES, Values, in_a_line
from shardlab.plan.graph import Event, Step
from shardlab.strategies.base import Setup, Strategy
from shardlab.strategies.cut_model import Cut, CutModel
from shardlab.strategies.lockstep import Lockstep
from shardlab.strategies.pipeline import pipeline, schedules, stages
from shardlab.strategies.pipeline.executor import Executor, Signature, signature_of
from shardlab.strategies.pipeline.schedules import Action
from shardlab.strategies.pipeline.stages import Shape
from shardlab.strategies.probing import probing
from shardlab.training import builders, loop
from shardlab.workloads import context
from shardlab.workloads.base import Batch, LossFn, Workload
from shardlab.world import World, choose, data_mesh

BACKEND = "shardlab_solo"
KERNEL = -1  # the number of no storage: what a kernel holds while it runs
CUDA_BLOCK = 512  # bytes: PyTorch's CUDA allocator gives out multiples of it


# ------------------------------------------------------------------ a world of one


def _imitation(op: str, whole: int | None = 0, copied: bool = False) -> Any:
    """A collective without peers. ``whole``: the argument that holds what all ranks' parts are."""

    def collective(self: Solo, *args: Any, **_: Any) -> Any:
        tensors = _tensors(args)
        moved = [] if whole is None else _tensors(args[whole])
        if copied and self.copies:
            [torch.empty_like(t) for t in moved]  # all at once, and freed
        self.on_tensors(tensors)
        peer = args[1] if op in ("send", "recv") else None
        return self.log.started(self, op, moved, tensors, peer)

    return collective


class Solo(dist.ProcessGroup):
    """A process group whose other ranks are not there. Every collective is done at once."""

    kind = "gloo"  # whose ways it imitates: strategies and FSDP ask
    copies = True  # in the memory that is looked at; Gloo copies a GPU's tensors to the host
    on_tensors: Callable[[list[Tensor]], None] = staticmethod(lambda _tensors: None)
    log = Log()  # is told of every collective

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._place = rank, size

    def rank(self) -> int:
        return self._place[0]

    def size(self) -> int:
        return self._place[1]

    def name(self) -> str:
        return self.kind

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's
        return self.kind

    @property
    def pg_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    @property
    def group_name(self) -> Any:
        return self.pg_name

    broadcast = _imitation("broadcast")
    allreduce = allreduce_coalesced = _imitation("all_reduce")
    all_to_all_single = alltoall = _imitation("all_to_all", 1)
    barrier = _imitation("barrier", None)
    send = _imitation("send")
    recv = _imitation("recv")
    # Gloo receives into a flat buffer of the output's size, and copies.
    allgather = allgather_coalesced = _imitation("all_gather", copied=True)
    all_gather_single = all_gather_single_coalesced = allgather
    # Gloo all-reduces a copy of the whole, and copies a part of that.
    reduce_scatter = reduce_scatter_single = _imitation("reduce_scatter", 1, copied=True)
    reduce_scatter_single_coalesced = reduce_scatter
    # The same, by the names of torch 2.11.
    _allgather_base = allgather_into_tensor_coalesced = allgather
    _reduce_scatter_base = reduce_scatter_tensor_coalesced = reduce_scatter
    alltoall_base = all_to_all_single


def _tensors(values: Any) -> list[Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, Tensor)]


def _make_solo(_store: Any, rank: int, size: int, _timeout: Any) -> Solo:
    return Solo(rank, size)


class _Reducer(dist.Reducer):
    """DDP's reducer, which would lay its buckets out anew after a step as rank 0, not here, says.

    They are laid out so from the beginning, for gradients that come in the reverse order of the
    parameters. But over NCCL the first step's lie beside the new ones in the second step: PyTorch
    lets go of what DDP has sent when a thread that looks every 100 ms has seen it arrive and
    something else is sent, which is in the second backward.
    """

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        is_laid_out_anew = not args[5]  # find_unused_parameters
        if is_laid_out_anew:
            sparse, caps, last = args[3], [args[8], args[4]], len(params) - 1
            found = dist._compute_bucket_assignment_by_size(params[::-1], caps, sparse[::-1])
            buckets = [[last - i for i in bucket] for bucket in found[0]]
            args = (buckets, found[1], *args[2:])
        super().__init__(params, *args, **kwargs)
        self._of_gradients = list(params) if is_laid_out_anew else []
        self._steps = 0
        self._first_buckets: list[Tensor] = []

    def prepare_for_backward(self, outputs: Any) -> None:
        """Once in a step, before the backward that sends."""
        super().prepare_for_backward(outputs)
        self._steps += 1

    def _rebuild_buckets(self) -> bool:
        """Called at the beginning of each forward."""
        if self._steps != 1 or Solo.kind != "nccl":
            self._first_buckets = []
        elif not self._first_buckets:
            self._first_buckets = [torch.empty_like(p) for p in self._of_gradients]
        return False


class _Logger(dist.Logger):
    """DDP's, which would ask the process group for a backend in C++."""

    def set_construction_data_and_log(self, *_: Any) -> None: ...
    def set_runtime_stats_and_log(self) -> None: ...


_make_tensor, _to_list = torch.tensor, FakeTensor.tolist


def _tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:
    """torch.tensor that remembers a list: an order that rank 0 decides on, say, is then ours."""
    result: Any = _make_tensor(data, *args, **kwargs)
    if isinstance(result, FakeTensor) and isinstance(data, list):
        result.__dict__["remembered"] = data
    made: Tensor = result
    return made


def _tolist(self: Any) -> Any:
    return self.remembered if hasattr(self, "remembered") else _to_list(self)


def _unfaked(function: Callable[..., Any]) -> Callable[..., Any]:
    """With real tensors: for what reads the few numbers in them, such as the ranks of a mesh."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


def _without_cudnn(function: Callable[..., Any], kernels: Kernels) -> Callable[..., Any]:
    """A recurrent layer as PyTorch's own kernels compute it: cuDNN's backward needs a buffer that
    its forward does not return for tensors without content."""

    def call(*args: Any, **kwargs: Any) -> Any:
        kernels.unknown_on_gpu(function.__name__)
        before = torch.backends.cudnn.enabled
        torch._C._set_cudnn_enabled(False)
        try:
            return function(*args, **kwargs)
        finally:
            torch._C._set_cudnn_enabled(before)

    return call


def _gather_alone(values: list[Any], value: Any, *_: Any, **__: Any) -> None:
    values[:] = [value] * len(values)


def _nothing(*_: Any, **__: Any) -> None: ...


def _replacing() -> Callable[..., nn.Module]:
    """``nn.Module._apply``, which ``to()``, ``double()`` and ``bfloat16()`` call: PyTorch's own
    cannot change a fake parameter in its place. This one puts new ones there, and a tied parameter
    stays one."""
    as_it_is: Any = nn.Module._apply
    new: dict[int, tuple[Tensor, Tensor]] = {}  # by id of the old one, which is kept meanwhile
    depth = 0

    def replaced(tensor: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
        if id(tensor) not in new:
            with torch.no_grad():
                made = fn(tensor)
            if made is not tensor and isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
                made.grad = None if tensor.grad is None else fn(tensor.grad)
            new[id(tensor)] = tensor, made
        return new[id(tensor)][1]

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        nonlocal depth
        depth += 1
        try:
            children: Any = self.children() if recurse else ()
            for child in children:
                child._apply(fn)
            owned: list[dict[str, Any]] = [self._parameters, self._buffers]
            if not any(isinstance(t, FakeTensor) for tensors in owned for t in tensors.values()):
                as_it_is(self, fn, recurse=False)
                return self
            for tensors in owned:
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = replaced(tensor, fn)
            return self
        finally:
            depth -= 1
            if not depth:
                new.clear()

    return apply


@contextmanager
def without_peers() -> Iterator[None]:
    """PyTorch is content with a rank whose peers do not exist."""
    patches: list[tuple[Any, str, Any]] = [
        (dist, "Logger", _Logger),
        (dist, "all_gather_object", _gather_alone),
        (dist, "broadcast_object_list", _nothing),
        (comm, "host_group", lambda group: group),
        (Lockstep, "_agree", _nothing),
        (ddp, "_verify_param_shape_across_processes", _nothing),
    ]
    with ExitStack() as stack:
        for where, name, value in patches:
            stack.enter_context(mock.patch.object(where, name, value))
        yield


@contextmanager
def without_content(kernels: Kernels) -> Iterator[None]:
    """And with tensors that have none."""
    mesh_maker = device_mesh.init_device_mesh
    patches: list[tuple[Any, str, Any]] = [
        (nn.Module, "_apply", _replacing()),
        (context, "_refuse_early_padding", _nothing),  # a run asks the mask's values
        (torch, "tensor", _tensor),
        (FakeTensor, "tolist", _tolist),
        (dist, "Reducer", _Reducer),
        (DeviceMesh, "__init__", _unfaked(DeviceMesh.__init__)),
        (DeviceMesh, "from_group", staticmethod(_unfaked(DeviceMesh.from_group))),
    ]
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        layer = _without_cudnn(getattr(torch._VF, name), kernels)
        patches.append((torch._VF, name, layer))
    # Strategies have imported it by its name.
    makers = [m for m in sys.modules.values() if vars(m).get("init_device_mesh") is mesh_maker]
    patches += [(module, "init_device_mesh", _unfaked(mesh_maker)) for module in makers]
    with ExitStack() as stack:
        # Our all_gather asks whether a part is in its place already: no fake tensor is anywhere.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        for where, name, value in patches:
            stack.enter_context(mock.patch.object(where, name, value))
        yield


@contextmanager
def solo_world(
    size: int,
    device: torch.device,
    backend: str,
    rank: int = 0,
    on_gpu: bool = False,
    ranks_per_node: int = 0,
) -> Iterator[World]:
    """Rank ``rank`` of ``size``, alone. ``on_gpu``: it stands for one, wherever its tensors are."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _make_solo, devices=["cpu", "cuda"])
    Solo.kind, Solo.copies = backend, backend == "gloo" and not on_gpu
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=size)
    try:
        group = dist.group.WORLD
        assert group is not None
        mesh = data_mesh(group, device)
        yield World(rank, size, 0, device, backend, mesh, ranks_per_node=ranks_per_node)
    finally:
        dist.destroy_process_group()


def _per_node(size: int) -> int:
    """Ranks on a node, if it is the launcher's own world that is weighed; else nobody knows."""
    place = launcher_env.joined()
    is_ours = place is not None and place.nodes > 1 and place.size == size
    return place.local_size if place is not None and is_ours else 0


# ------------------------------------------------------------------ what is held


class Tracker(TorchDispatchMode):
    """Notes when the storage of each fake tensor on one device is made, resized and let go."""

    def __init__(
        self,
        device: str,
        block: int,
        values: Values | None = None,
        log: Log | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log or Log()
        self.kernels = kernels or Kernels(device)
        self.values = values or Values()
        self.device = device
        self.block = block  # bytes: the allocator gives out multiples of it
        self.events: list[tuple[int, int, int]] = []  # time, storage, its bytes from then on
        self._references: dict[int, weakref.ref[Any]] = {}
        self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it asks again for each operator on this rank's part
        if func is torch.ops.aten._local_scalar_dense.default:
            value = self.values.answer()
            return float(value) if args[0].is_floating_point() else value
        result = func(*args, **(kwargs or {}))
        taken = None if self._is_paused else self.kernels.taken(func, args)
        if taken is not None:
            result = _at_least(result, taken[1:])
        for tensor in _tensors(result):
            self.note(tensor)
        if taken is not None:
            now = time.time_ns()
            self.events += [(now, KERNEL, taken[0]), (now + 1, KERNEL, 0)]
        if not self._is_paused and (self.log.is_on or func.namespace == noted.FUNCTIONAL):
            self.log.operator(func, args, kwargs, result)
        return result

    def note(self, tensor: Tensor) -> None:
        """Once for each storage; views share one."""
        if not isinstance(tensor, FakeTensor) or tensor.device.type != self.device:
            return
        if self._is_paused:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._references:
            self._references[key] = weakref.ref(storage, partial(self._forget, key))
            self.resized(storage)

    def resized(self, storage: Any) -> None:
        """FSDP and our ZeRO-3 free parameters by shrinking their storage to nothing."""
        if storage._cdata in self._references:
            size = -(-storage.nbytes() // self.block) * self.block
            self.events.append((time.time_ns(), storage._cdata, size))

    def _forget(self, key: int, _gone: Any) -> None:
        self.events.append((time.time_ns(), key, 0))
        del self._references[key]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For what a rank would not do: what is made inside is not noted."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def allocations(self) -> list[Allocation]:
        return memory.lives(self.events)

    @contextmanager
    def tracking(self) -> Iterator[None]:
        original = torch.UntypedStorage.resize_
        propagate = ShardingPropagator._propagate_tensor_meta_non_cached

        def resize(storage: Any, size: int) -> Any:
            result = original(storage, size)
            self.resized(storage)
            return result

        def whole_shapes(*args: Any) -> Any:
            """DTensor computes with tensors of its own, without memory, what it would be whole."""
            with self.paused():
                return propagate(*args)

        with (
            mock.patch.object(torch.UntypedStorage, "resize_", resize),
            mock.patch.object(
                ShardingPropagator, "_propagate_tensor_meta_non_cached", whole_shapes
            ),
            self,
        ):
            yield


def _at_least(result: Any, sizes: Sequence[int]) -> Any:
    """The results of a kernel; one that PyTorch takes for empty, with its bytes."""
    if not isinstance(result, tuple):
        return result
    return tuple(
        t if t is None or t.numel() or not size else t.new_empty(size // t.element_size())
        for t, size in zip(result, sizes, strict=True)
    )


def storage_number(tensor: Tensor) -> int:
    """What stands for the address of a tensor that has none."""
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def masks_left_out(config: Config) -> Iterator[None]:
    """transformers looks whether a mask is needed, and leaves it out if not. It does not look at
    tensors without content: here sequences are not packed, as nearly always, and the mask of a part
    of a sequence (context) hides nothing."""
    axes, _ = axes_of(config.strategy.name, config.strategy.options, config.launch.world or 1)
    masking: Any = sys.modules.get("transformers.masking_utils")
    answers: dict[str, Any] = {"find_packed_sequence_indices": None}
    if axes is not None and axes.context > 1:
        answers["is_tracing"] = False
    with ExitStack() as stack:
        for name, answer in answers.items():
            if hasattr(masking, name):
                stack.enter_context(mock.patch.object(masking, name, return_value=answer))
        yield


def _shapes_of(
    model: nn.Module, blocks: Sequence[str], loss: LossFn, batch: Batch
) -> list[list[Shape]]:
    """What each block returns for a batch, in the order of their calls. Nothing is changed."""
    found: list[list[Shape]] = []

    def call(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        value = original(*args, **kwargs)
        _, tensors = stages.taken_apart(value, name)
        found.append([stages.shape_of(t) for t in tensors])
        return value

    frozen = [p for p in model.parameters() if not p.requires_grad]
    with probing(model), stages.intercepted(model, blocks, call):
        for p in frozen:  # what has no gradient here has none in a step
            p.requires_grad_(False)
        loss(model, batch)
    return found


@contextmanager
def told_shapes(
    batches: Callable[[], Iterator[Batch]], unseen: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """A stage knows the shapes of what the stage before, which is not there, would send it.

    Each shape of micro-batch goes through the model once, ``unseen``, before the model is cut.
    """
    seen: dict[Signature, list[list[Shape]]] = {}
    cut = pipeline.cut

    def rehearse(strategy: CutModel, setup: Setup, kind: type[Executor] = Executor) -> Cut:
        with unseen():
            for batch in batches():
                part = batch if strategy.take_part is None else strategy.take_part(batch)
                signature = signature_of((part.inputs, part.targets))
                if signature not in seen:
                    seen[signature] = _shapes_of(setup.model, setup.blocks, setup.loss_fn, part)
        return cut(strategy, setup, kind)

    def shapes(line: Executor, stage: int, _micro: int, signature: Signature) -> list[list[Shape]]:
        if signature not in seen:
            raise UsageError(
                "the micro-batches differ in shape from one step to the next, and a plan of a "
                "pipeline is made from one step that is like all others"
            )
        found = seen[signature][: line.runner.first(stage)]
        return line.known.setdefault((stage, signature), found)

    with (
        mock.patch.object(pipeline, "cut", rehearse),
        mock.patch.object(Executor, "_shapes", shapes),
    ):
        yield


@contextmanager
def marked_actions(log: Log) -> Iterator[None]:
    """The log knows which events belong to which action of a pipeline."""
    look_ahead, finish = Executor._look_ahead, Executor._finish_sending

    def begins(line: Executor, actions: Sequence[Action], signatures: Any) -> None:
        kind, stage, micro = actions[0]
        log.mark(schedules.NAMES[kind], stage, micro)
        look_ahead(line, actions, signatures)

    def ends(line: Executor) -> None:
        log.mark("")
        finish(line)

    with (
        mock.patch.object(Executor, "_look_ahead", begins),
        mock.patch.object(Executor, "_finish_sending", ends),
    ):
        yield


# ------------------------------------------------------------------ a run


def backend_of(launch: LaunchConfig, device: str, here: bool) -> str:
    """What the ranks would talk over: ``here`` several share a GPU, elsewhere each has its own."""
    if here and device == "cuda" and torch.cuda.device_count():
        return choose(launch, 0, launch.world or 1)[1]
    if launch.backend != "auto":
        return launch.backend
    return "gloo" if device == "cpu" else "nccl"


def simulate(
    config: Config, device: str, here: bool = False, events: bool = False, longest: bool = False
) -> dict[str, Any]:
    """What the fullest rank of the config's world would hold on such a device.

    ``device`` is what the estimate is for, ``kernels`` the device whose operators were asked what
    they make, ``weights`` the bytes at the two peaks, ``steps`` the last step's events, if they are
    asked for, of one rank of each stage. If the model asks its tensors for values
    (``assumed`` has the lines), it is the larger of what two answers lead to.

    ``longest``: of the longest samples (``longest.look``), not of those that a run begins with.

    Ranks that share the data, a sequence or the tensors of a stage with rank 0 hold what it does,
    or hardly less. Stages of a pipeline differ: ``ranks`` has what one rank of each holds at the
    peak of a step.
    """
    axes = _axes(config)
    found: list[dict[str, Any]] = []
    refusal: UsageError | None = None
    asked: dict[str, None] = {}
    for guess in GUESSES:
        values = Values(guess)
        try:
            found.append(_of_ranks(config, axes, device, here, values, events, longest))
        except UsageError as error:
            refusal = refusal or error
        asked |= values.questions
        if not asked:
            break
    if found:
        largest = max(found, key=lambda s: s["weights"]["step"]["total"])
        return {**largest, "assumed": list(asked)}
    assert refusal is not None
    if not asked or NO_VALUES in str(refusal):
        raise refusal
    raise UsageError(f"{refusal}. {next(iter(asked))} asks a tensor for its value, and {NO_VALUES}")


def _of_ranks(
    config: Config,
    axes: Axes | None,
    device: str,
    here: bool,
    values: Values,
    events: bool,
    longest: bool,
) -> dict[str, Any]:
    """The fullest of those that differ, at each of the peaks: one of each place in a pipeline."""
    ranks = [0] if axes is None else list(axes.representatives)
    roles = ranks if len(ranks) > 1 else []
    found = [
        _simulate(config, rank, device, here, values, events, longest, roles) for rank in ranks
    ]
    weights = [one["weights"] for one in found]
    every = [
        {
            "rank": rank,
            "stages": [] if axes is None else schedules.stages_of(axes, rank),
            "step_bytes": own["step"],
        }
        for rank, own in zip(ranks, weights, strict=True)
    ]
    fullest = {part: max((w[part] for w in weights), key=_total) for part in weights[0]}
    steps = {"steps": [one.pop("step") for one in found]} if events else {}
    uncounted = [*dict.fromkeys(name for one in found for name in one["uncounted"])]
    return {**found[0], **steps, "weights": fullest, "ranks": every, "uncounted": uncounted}


def _total(weights: dict[str, int]) -> int:
    return weights["total"]


def _simulate(
    config: Config,
    rank: int,
    device: str,
    here: bool,
    values: Values,
    events: bool,
    longest: bool,
    roles: Sequence[int],
) -> dict[str, Any]:
    """One rank, with one answer to all questions for values.

    PyTorch without CUDA refuses fake tensors on a GPU. There, the CPU's operators stand in, with
    the GPU's optimizer, process group and allocator.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.device_count() else "cpu"
    where = torch.device(device if torch.cuda.is_available() else "cpu")
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    backend = backend_of(config.launch, device, here)
    log = Log(backend, roles)
    kernels = Kernels(device)
    block = CUDA_BLOCK if device == "cuda" else 1
    tracker = Tracker(where.type, block, values, log, kernels)
    causes = Causes(address=storage_number)
    builders.resolve_strategy(config)  # imported with PyTorch as it is
    workload = builders.build_workload(config)  # with real samples: a user's is tried out on some
    samples = _looked_at(config, workload) if longest else Found()
    workload = replace(
        of_longest(workload, samples.ids),
        make_model=in_a_line("make_model", workload.make_model, values),
        loss=in_a_line("the loss", workload.loss, values),
    )
    LEDGER.reset(full_steps=0)
    make_sample = builders.sample

    def steps(workload: Workload, config: Config, world: World) -> Iterator[list[Batch]]:
        """Real samples, made as usual; then only their shapes and types."""
        with _disable_current_modes():
            steps = loop.Batches(workload, config, replace(world, device=torch.device("cpu")))
        while True:
            with _disable_current_modes():
                real = next(steps, None)
            if real is None:
                return
            yield [_faked(batch, fake, where, tracker) for batch in real]

    def batches(workload: Workload, config: Config, world: World) -> Iterator[list[Batch]]:
        for microbatches in steps(workload, config, world):
            log.begin_step()
            log.is_on = events and log.step == config.training.steps
            yield microbatches
        log.is_on = False

    def all_batches() -> Iterator[Batch]:
        return itertools.chain.from_iterable(steps(workload, config, world))

    def sample_there(
        config: Config, workload: Workload, world: World, dtype: torch.dtype
    ) -> Batch | None:
        with _disable_current_modes():
            on_cpu = replace(world, device=torch.device("cpu"))
            real = make_sample(config, workload, on_cpu, dtype)
        return None if real is None else _faked(real, fake, where, tracker)

    with ExitStack() as stack:
        stack.enter_context(without_peers())
        stack.enter_context(without_content(kernels))
        size = config.launch.world or 1
        stands_for_gpu, nodes = device == "cuda", _per_node(size)
        solo = solo_world(size, where, backend, rank, stands_for_gpu, ranks_per_node=nodes)
        world = stack.enter_context(solo)
        note = staticmethod(causes.note_collective)
        stack.enter_context(mock.patch.object(Solo, "on_tensors", note))
        stack.enter_context(mock.patch.object(Solo, "log", log))
        stack.enter_context(masks_left_out(config))
        stack.enter_context(told_shapes(all_batches, tracker.paused))
        stack.enter_context(log.following())
        stack.enter_context(marked_actions(log))
        stack.enter_context(mock.patch.object(builders, "sample", sample_there))
        stack.enter_context(fake)
        stack.enter_context(tracker.tracking())
        on_built = refuse_rounds if events else _nothing
        built = memory.run_steps(workload, config, world, causes, batches, on_built)
        weights = memory.weights(tracker.allocations(), causes, built)
        notes = [*workload.notes, *([samples.note] if samples.note else [])]
        about = {"data": workload.data, "notes": notes}
        found: dict[str, Any] = {"device": device, "kernels": where.type}
        found |= {"weights": weights, "about": about, "longest": samples.ids}
        found["uncounted"] = list(kernels.uncounted)
        if events:
            peak = weights["step"]["total"]
            found["step"] = step_of(config, workload, log.events(), peak, rank=rank)
        return found


_samples: dict[str, Found] = {}  # by model and data: once for all strategies and batches


def _looked_at(config: Config, workload: Workload) -> Found:
    key = repr((config.model, config.data))
    if key not in _samples:
        _samples[key] = look(workload.dataset)
    return _samples[key]


def _axes(config: Config) -> Axes | None:
    """How the model is cut, if it is; what ranks without content cannot tell is refused."""
    axes, _ = axes_of(config.strategy.name, config.strategy.options, config.launch.world or 1)
    if axes is not None and axes.pipeline > 1 and axes.balance == "time":
        raise UsageError(
            "balance=time: an estimate runs nothing that takes time, so it cannot know these "
            "stages; estimate balance=parameters, or let `shardlab compare` measure it"
        )
    return axes


def refuse_rounds(strategy: Strategy) -> None:
    """One step stands for all of them only if all send the same."""
    if strategy.rounds is not None:
        every = strategy.rounds.every
        raise UsageError(
            f"its ranks exchange every {every} steps, and a plan is made from one step that is "
            "like all others; `shardlab compare --to-loss` measures such a strategy"
        )


def step_of(
    config: Config, workload: Workload, events: Sequence[Event], peak: int, **more: Any
) -> Step:
    samples = config.training.global_batch
    tokens = samples * (workload.tokens_per_sample or 0)
    return Step(config.launch.world or 1, events, samples, tokens, peak, **more)


def _faked(batch: Batch, fake: FakeTensorMode, device: torch.device, tracker: Tracker) -> Batch:
    def convert(tensor: Tensor) -> Tensor:
        result: Tensor = fake.from_tensor(tensor)
        if device.type != "cpu":
            result = result.to(device)
        tracker.note(result)
        return result

    return batch.map(convert)
