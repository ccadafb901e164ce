"""How context_parallel cuts the sequences of transformers' models, whose workload need not say.

Their causal language models take the positions of their tokens, and their attention calls
``F.scaled_dot_product_attention`` unless another implementation was asked for.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardlab.errors import UsageError
from shardlab.workloads.base import Batch, ContextSplit, Workload
from shardlab.workloads.samples import IGNORED

TOKENS = "input_ids"
CUT = (TOKENS, "inputs_embeds", "token_type_ids")  # inputs of a value for each token


def context_of(workload: Workload, model: nn.Module) -> ContextSplit | None:
    """The workload's own, or transformers' if it is a model of theirs; None if there is neither."""
    if workload.context is not None:
        return workload.context
    library = sys.modules.get("transformers")  # a model of theirs has imported it
    is_theirs = library is not None and isinstance(model, library.PreTrainedModel)
    return of_transformers(model) if is_theirs else None


def of_transformers(model: nn.Module) -> ContextSplit | None:
    """How to cut a model of transformers'. None if its forward takes no positions."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return None
    modules = dict(model.named_modules())
    attention = tuple(
        name
        for name, module in modules.items()
        if "Attention" in type(module).__name__
        and not any("Attention" in type(m).__name__ for m in list(module.modules())[1:])
    )
    # In both directions, in transformers' word; what does not say so is causal.
    sees_all = next((n for n in attention if not getattr(modules[n], "is_causal", True)), None)
    config: Any = model.config
    windows = [getattr(config, word, None) for word in ("sliding_window", "attention_chunk_size")]
    window = min((w for w in windows if w), default=None)

    def take(batch: Batch, positions: Tensor) -> Batch:
        if window is not None and window < length_of(batch):
            raise UsageError(
                f"context_parallel: the model's attention sees a window of {window} tokens, and "
                f"the sequences have {length_of(batch)}; the ring knows attention to all of them: "
                f"use data.seq_len {window} or less, or a model without a window"
            )
        part, mask = take_positions(batch, positions), batch.inputs.get("attention_mask")
        if sees_all is not None and mask is not None and not bool(mask.all()):
            raise UsageError(
                f"context_parallel: the attention_mask hides padding, and '{sees_all}' attends in "
                "both directions; the ring knows attention to all tokens, and would attend to "
                "padding too: give it sequences of one length, without padding"
            )
        return part

    return ContextSplit(length_of, take, attention, pads=True)


def length_of(batch: Batch) -> int:
    """The tokens of each row of a batch for transformers."""
    if not isinstance(batch.inputs, dict) or TOKENS not in batch.inputs:
        raise UsageError(
            f"context_parallel: a model of transformers' is cut by its '{TOKENS}', and the batch's "
            f"inputs are {_kind(batch.inputs)}; give the workload a context of its own"
        )
    return int(batch.inputs[TOKENS].shape[1])


def _kind(inputs: Any) -> str:
    return ", ".join(map(str, inputs)) if isinstance(inputs, dict) else type(inputs).__name__


def take_positions(batch: Batch, positions: Tensor) -> Batch:
    """A part of each row.

    Labels that the model shifts by itself are shifted here, before they are cut: the target of a
    part's last token is the first token of the next piece, which is on another rank. Padding at the
    end is seen by no token before it, so that causal attention needs no mask for it.
    """
    given = dict(batch.inputs)
    rows = len(given[TOKENS])
    mask = given.pop("attention_mask", None)
    if mask is not None:
        _refuse_early_padding(mask)
    labels = given.pop("labels", None)
    for name in given:
        if name not in CUT:
            raise UsageError(
                f"context_parallel: it is not known how to cut the input '{name}' along the "
                "sequence; leave it out, or give the workload a context of its own"
            )
    length = length_of(batch)
    at = positions.clamp(max=length - 1)  # behind the end, any token will do
    inputs = {name: value[:, at] for name, value in given.items()}
    # All ones, and given all the same: without it, a jump in the positions would be taken for
    # the beginning of another sequence.
    inputs["attention_mask"] = torch.ones(rows, len(positions), device=positions.device).long()
    inputs["position_ids"] = positions.expand(rows, -1)
    targets = batch.targets
    if labels is not None:
        targets = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    targets = targets[:, at].masked_fill(positions >= length, IGNORED)  # (batch, part)
    if labels is not None:
        inputs["labels"] = inputs["shift_labels"] = targets
    count = int((targets != IGNORED).sum()) if batch.count else 0
    return replace(batch, inputs=inputs, targets=targets, count=count)


def _refuse_early_padding(mask: Tensor) -> None:  # (batch, tokens), 1 where there is a token
    if mask.dim() != 2 or bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise UsageError(
            "context_parallel: the attention_mask hides tokens before others that it shows; pad "
            "at the end of a sequence (padding_side='right')"
        )
