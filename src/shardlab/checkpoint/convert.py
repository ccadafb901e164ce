"""Weights out of a checkpoint and into one: safetensors, and Hugging Face's GPT-2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardlab.checkpoint import files, parts, storage
from shardlab.checkpoint import manifest as manifests
from shardlab.checkpoint.manifest import MODEL, OPTIMIZER, Manifest
from shardlab.checkpoint.save import write_manifest
from shardlab.errors import UsageError, unknown
from shardlab.files import replacing
from shardlab.optim.after_step import AVERAGE
from shardlab.strategies.shards import as_state_dict
from shardlab.workloads import gpt2, huggingface

SAFETENSORS, HF_GPT2 = "safetensors", "hf-gpt2"
FORMATS = (SAFETENSORS, HF_GPT2)
IMPORTED = "imported"  # in the place of a strategy


def export(checkpoint: Path, target: Path, form: str, average: bool = False) -> tuple[int, bool]:
    """Write a checkpoint's whole model as a file (safetensors) or a folder.

    ``average``: with the moving average of the parameters in their place, which is what a run
    with training.ema_decay evaluates. Returns how many tensors, and whether there is an average.
    """
    _check(form, target)
    manifest = manifests.read(checkpoint)
    manifests.verify(checkpoint, manifest.files)
    if form == HF_GPT2:
        shape = _gpt2_shape(checkpoint, manifest)
    state = storage.whole_tensors(checkpoint, manifest, MODEL)
    averages = _averages(checkpoint, manifest)
    if average:
        if not averages:
            raise UsageError(f"{checkpoint} has no moving average: training.ema_decay keeps one")
        state |= {name: averages[name].to(state[name].dtype) for name in averages}
    state = as_state_dict(state, manifest.tied, manifest.unsaved)

    def write(part: Path) -> None:
        if form == SAFETENSORS:
            huggingface.save_safetensors(part, state)
        else:
            gpt2.save_model(part, state, shape)

    _whole_or_not_at_all(target, write)
    return len(state), bool(averages)


def _averages(checkpoint: Path, manifest: Manifest) -> dict[str, Tensor]:
    """The moving average of each parameter that has one, whole."""
    places = {f"{OPTIMIZER}{name}/{AVERAGE}": name for name in manifest.model()}
    found = storage.whole(checkpoint, manifest, places.keys() & manifest.tensors.keys())
    shapes = {name: tensor.shape for name, tensor in manifest.model().items()}
    alone = {key: torch.tensor(n) for key, n in manifest.numbers.items() if key in places}
    both = {places[key]: tensor for key, tensor in (found | alone).items()}
    return {name: tensor.reshape(shapes[name]) for name, tensor in both.items()}


def import_(source: Path, target: Path, form: str) -> int:
    """Write a checkpoint of step 0 with these weights and no optimizer; count its tensors."""
    _check(form, target)
    config: dict[str, Any] = {}
    if form == HF_GPT2:
        if not source.is_dir():
            raise UsageError(f"{source} is no folder with config.json and *.safetensors")
        model = gpt2.load_model(source)
        shape = model.shape
        options = {
            key: getattr(shape, key) for key in ("layers", "heads", "dim", "context", "vocab")
        }
        config = {"model": {"workload": "gpt2", "size": None, "options": options}}
        # Under the names of the parameters, so that a tied tensor comes once.
        state: Mapping[str, Tensor] = {n: p.detach() for n, p in model.named_parameters()}
    else:
        if source.is_dir():
            raise UsageError(f"{source} is a folder; name a .safetensors file in it")
        if not source.is_file():
            raise UsageError(f"no file {source}")
        state = huggingface.load_safetensors(source)
    if not state:
        raise UsageError(f"{source} holds no tensors")

    def write(part: Path) -> None:
        held = parts.parts_of(MODEL, state)
        tensors, _ = parts.plan([parts.offers_of(held)])
        pieces = [(MODEL + name, 0, t.reshape(-1)) for name, t in state.items() if t.numel()]
        part.mkdir(exist_ok=True)
        name = parts.file_of(0)
        manifest = Manifest(
            step=0, strategy=IMPORTED, world=0, config=config, samples=None, update={}, numbers={},
            tensors=tensors, files={name: storage.write(part / name, pieces)} if pieces else {},
        )  # fmt: skip
        write_manifest(part, manifest)

    _whole_or_not_at_all(target, write)
    return len(state)


def _check(form: str, target: Path) -> None:
    if form not in FORMATS:
        raise unknown("format", form, FORMATS)
    if target.exists():
        raise UsageError(f"{target} exists; choose another name")


def _whole_or_not_at_all(target: Path, write: Callable[[Path], None]) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as part:
            write(part)
        files.sync_folder(target.parent)
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror or error}") from None


def _gpt2_shape(checkpoint: Path, manifest: Manifest) -> gpt2.Shape:
    """The shape that the tensors show; the number of heads, which they do not, from the config."""
    tensors, model = manifest.model(), manifest.config.get("model", {})
    if model.get("workload") != "gpt2" or not {"wte.weight", "wpe.weight"} <= tensors.keys():
        raise UsageError(
            f"{checkpoint} holds the workload '{model.get('workload')}', not a gpt2; use "
            f"--format {SAFETENSORS}"
        )
    (vocab, dim), (context, _) = tensors["wte.weight"].shape, tensors["wpe.weight"].shape
    blocks = {name.split(".")[1] for name in tensors if name.startswith("blocks.")}
    options = model.get("options") or {}
    preset = gpt2.SIZES[model.get("size") or "mini"]
    if options.get("weights"):
        preset = gpt2.shape_of(Path(options["weights"]).expanduser())
    heads = options.get("heads") or preset.heads
    return replace(preset, layers=len(blocks), heads=heads, dim=dim, context=context, vocab=vocab)
