"""The object behind a name or an import path, and its docstring without importing it.

Options are checked against the types that the object's parameters declare.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from shardlab.errors import UsageError, unknown

# Import paths and not classes, so that a name is checked (and ``--help`` answered) without torch.
# The strategies stand in order of difficulty.
STRATEGIES = {
    "single": "shardlab.strategies.data_parallel.single:Single",
    "simple_ddp": "shardlab.strategies.data_parallel.simple_ddp:SimpleDDP",
    "simple_ddp_ga": (
        "shardlab.strategies.data_parallel.simple_ddp_ga:SimpleDDPGradientAccumulation"
    ),
    "simple_ddp_hook": "shardlab.strategies.data_parallel.simple_ddp_hook:SimpleDDPHook",
    "simple_ddp_async": "shardlab.strategies.data_parallel.simple_ddp_async:SimpleDDPAsync",
    "bucket_ddp_async": "shardlab.strategies.data_parallel.bucket_ddp_async:BucketDDPAsync",
    "zero1": "shardlab.strategies.sharded.zero1:Zero1",
    "zero2": "shardlab.strategies.sharded.zero2:Zero2",
    "zero3": "shardlab.strategies.sharded.zero3:Zero3",
    "pytorch_ddp": "shardlab.strategies.data_parallel.pytorch_ddp:PyTorchDDP",
    "pytorch_zero1": "shardlab.strategies.sharded.pytorch_zero1:PyTorchZero1",
    "pytorch_zero2": "shardlab.strategies.sharded.pytorch_fsdp:PyTorchZero2",
    "pytorch_zero3": "shardlab.strategies.sharded.pytorch_fsdp:PyTorchZero3",
    "pytorch_hsdp": "shardlab.strategies.sharded.pytorch_fsdp:PyTorchHSDP",
    "local_sgd": "shardlab.strategies.local.local_sgd:LocalSGD",
    "diloco": "shardlab.strategies.local.diloco:DiLoCo",
    "streaming_diloco": "shardlab.strategies.local.streaming_diloco:StreamingDiLoCo",
}
# Model parallelism (axes.NAMED). A comparison of all strategies leaves these out, because not every
# model can be cut.
MESH_STRATEGIES: dict[str, str] = {
    "tensor_parallel": "shardlab.strategies.tensor.tensor_parallel:TensorParallel",
    "sequence_parallel": "shardlab.strategies.tensor.tensor_parallel:SequenceParallel",
    "context_parallel": "shardlab.strategies.context.context_parallel:ContextParallel",
    "pipeline_gpipe": "shardlab.strategies.pipeline.pipeline:PipelineGPipe",
    "pipeline_1f1b": "shardlab.strategies.pipeline.pipeline:PipelineOneFOneB",
    "pipeline_interleaved": "shardlab.strategies.pipeline.pipeline:PipelineInterleaved",
    "pipeline_zero_bubble": "shardlab.strategies.pipeline.pipeline:PipelineZeroBubble",
    "pytorch_tensor_parallel": (
        "shardlab.strategies.tensor.pytorch_tensor_parallel:PyTorchTensorParallel"
    ),
    "pytorch_pipeline": "shardlab.strategies.pipeline.pytorch_pipeline:PyTorchPipeline",
}
# The function that cuts the model along an axis. PyTorch's twins have their own.
CUTS = {
    "tensor": "shardlab.strategies.tensor.tensor_parallel:cut",
    "context": "shardlab.strategies.context.context_parallel:cut",
    "pipeline": "shardlab.strategies.pipeline.pipeline:cut",
}
TWINS_CUTS = {
    "pytorch_tensor_parallel": {"tensor": "shardlab.strategies.tensor.pytorch_tensor_parallel:cut"},
    "pytorch_pipeline": {"pipeline": "shardlab.strategies.pipeline.pytorch_pipeline:cut"},
}
EVERY_STRATEGY = {**STRATEGIES, **MESH_STRATEGIES}
# What the field calls them, in any case, with - or _: the words of PyTorch's first FSDP, and those
# of published experiments.
ALIASES = {
    "baseline": "single",
    "ddp": "pytorch_ddp",
    "no_shard": "pytorch_ddp",
    "fsdp": "pytorch_zero3",
    "full_shard": "pytorch_zero3",
    "fsdp_full_shard": "pytorch_zero3",
    "shard_grad_op": "pytorch_zero2",
    "fsdp_shard_grad_op": "pytorch_zero2",
    "hsdp": "pytorch_hsdp",
    "hybrid_shard": "pytorch_hsdp",
}

# What can be trained.
WORKLOADS = {
    "gpt2": "shardlab.workloads.gpt2:gpt2",
    "resnet_cifar10": "shardlab.workloads.resnet:resnet_cifar10",
    "cnn_mnist": "shardlab.workloads.cnn:cnn_mnist",
    "causal_lm": "shardlab.workloads.causal_lm:causal_lm",
}
_WORDS = {
    int: "whole number", float: "number", str: "text", bool: "true or false", dict: "mapping",
    list: "list",
}  # fmt: skip
_TYPES = (int, float, str, bool)
PLAIN = (*_TYPES, *(kind | None for kind in _TYPES))


def strategy_named(name: str) -> str:
    """Our name of a strategy that the field may call otherwise. Import paths and typing errors stay
    as they are."""
    return name if name in EVERY_STRATEGY else ALIASES.get(name.lower().replace("-", "_"), name)


def resolve(name: str, known: Mapping[str, str], kind: str) -> Any:
    """The object behind a name of ours, ``package.module:attr`` or ``path/to/file.py:attr``."""
    path = name if ":" in name else known.get(name)
    if path is None:
        raise unknown(kind, name, known)
    module_name, _, attribute = path.rpartition(":")
    if ":" in name:  # the user's own
        _make_importable(Path(module_name).parent if module_name.endswith(".py") else None)
    try:
        is_file = module_name.endswith(".py")
        module = _load_file(Path(module_name)) if is_file else _import(module_name)
    except UsageError as error:
        if kind != "strategy" or strategy_named(module_name) not in known:
            raise
        raise UsageError(f"'{attribute}' in '{name}' is not option=value, and {error}") from None
    try:
        return getattr(module, attribute)
    except AttributeError:
        names = [n for n in vars(module) if not n.startswith("_")]
        raise unknown(f"name in {module_name}", attribute, names) from None


def _make_importable(folder: Path | None) -> None:
    """The folder of the user's file, as if Python ran that file; and the current folder, behind
    everything else. Every rank comes through here, also under torchrun."""
    if folder is not None and str(folder.resolve()) not in sys.path:
        sys.path.insert(0, str(folder.resolve()))
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.append(str(Path.cwd()))


def _import(module_name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Only the user's own name is a usage error; a missing import inside it is a crash there.
        if error.name and module_name.startswith(error.name):
            raise UsageError(f"no module named '{error.name}' (in '{module_name}')") from None
        raise


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"no file {path}")
    # A module name of its own, the same in each rank, so that its classes can be pickled.
    digest = hashlib.sha1(str(path.resolve()).encode(), usedforsecurity=False).hexdigest()[:8]
    name = f"shardlab_user_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def check_options(
    target: Callable[..., Any], options: Mapping[str, Any], kind: str, others: Iterable[str] = ()
) -> None:
    """Refuse an option that ``target`` does not take, or not as such a value.

    Options are the keyword-only parameters; those annotated as a plain type are checked. What is in
    ``others`` would have been taken elsewhere, and may have been meant.
    """
    parameters = inspect.signature(target, eval_str=True).parameters.values()
    known = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in options:
            raise UsageError(f"{kind} needs its option '{name}', which has no default")
    for name, value in options.items():
        if name not in known:
            raise unknown(f"option of {kind}", name, [*known, *others])
        if (hint := known[name].annotation) in PLAIN:
            typed(value, hint, f"{kind}'s {name}")


def kind_of(value: Any) -> str:
    """The type of a value, in words."""
    return _WORDS.get(type(value), "nothing" if value is None else type(value).__name__)


def typed(value: Any, hint: Any, path: str) -> Any:
    """``value`` if it has the type. Nothing is converted but a whole number to a float."""
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
        raise UsageError(f"{path} must be a {_WORDS[wanted]}, got {kind_of(value)}: {value!r}")
    if wanted is list:
        (inner,) = typing.get_args(hint)
        items = typing.cast(list[Any], value)
        return [typed(item, inner, f"{path}[{i}]") for i, item in enumerate(items)]
    return value


def summary(import_path: str) -> str:
    """The first line of the object's docstring, read from its source: nothing is imported."""
    module_name, _, attribute = import_path.rpartition(":")
    spec = importlib.util.find_spec(module_name)
    assert spec is not None
    assert spec.origin is not None
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == attribute:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    raise LookupError(import_path)
