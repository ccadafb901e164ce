"""Pipeline parallelism: every rank has some layers, and micro-batches travel through all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shardlab import comm
from shardlab.errors import UsageError, option
from shardlab.strategies import base
from shardlab.strategies.cut_model import Cut, CutModel
from shardlab.strategies.pipeline import schedules, stages
from shardlab.strategies.pipeline.executor import Executor
from shardlab.strategies.shards import every


def cut(strategy: CutModel, setup: base.Setup, kind: type[Executor] = Executor) -> Cut:
    """Keep this rank's stages, which an executor of this ``kind`` runs."""
    model, loss, axes = setup.model, setup.loss_fn, strategy.axes
    group = strategy.groups.pipeline
    if setup.sample is None:
        raise UsageError("pipeline: stages are found by running the model: Setup.sample is missing")
    if hasattr(model.forward, "_torchdynamo_orig_callable"):
        raise UsageError(
            "pipeline: a model that is compiled as one has no stages; use training.compile: blocks"
        )
    if kind is Executor:
        option("schedule", axes.schedule, schedules.SCHEDULES)
    chunks = schedules.chunks_of(axes.schedule, axes.chunks or None)
    found = stages.probe(model, setup.blocks, loss, setup.sample)
    if chunks > 1 and found.counted:
        raise UsageError(
            f"pipeline: the forward changes '{found.counted[0]}', and with {chunks} stages on a "
            "rank it runs more often than in one process; use a schedule with one, such as 1f1b"
        )
    ends = stages.ends_of(found, model, group.size() * chunks, axes.balance)
    message = torch.tensor(ends, device=next(model.parameters()).device)
    # Times differ: the first rank of all decides, also for those of other pipelines.
    comm.broadcast(message, setup.group, label="stages")
    ends = message.tolist()
    where = [schedules.rank_of(stage, group.size(), axes.schedule) for stage in range(len(ends))]
    holders = {  # the ranks of the group that hold each tensor
        name: {where[stage] for stage in on}
        for name, on in stages.holders_of(found, model, ends).items()
    }
    _refuse_idle_ranks(model, holders, where)
    held = {name for name, ranks in holders.items() if group.rank() in ranks}
    tensors = (*model.named_parameters(), *model.named_buffers())
    kept = {name: every(t.shape) for name, t in tensors if name in held}
    shared: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for name, p in model.named_parameters():
        if name in held and len(holders[name]) > 1 and p.requires_grad:
            shared.setdefault(tuple(sorted(holders[name])), []).append(p)
    stages.drop(model, held, found.changed)
    runner = stages.StageRunner(found, ends, message.device)
    executor = kind(model, loss, group, axes.schedule, chunks, where, runner)
    executor.shared = sorted(shared.items(), key=lambda item: item[0])
    return Cut(kept, executor.loss, pipeline=executor)


def _refuse_idle_ranks(
    model: nn.Module, holders: dict[str, set[int]], where: Sequence[int]
) -> None:
    trained = (holders[name] for name, p in model.named_parameters() if p.requires_grad)
    if idle := set(where).difference(*trained):
        mine = [str(stage) for stage, rank in enumerate(where) if rank == min(idle)]
        raise UsageError(
            f"pipeline: no parameter of stage {' and '.join(mine)} trains, so its rank would "
            "have nothing to update; use fewer ranks, or train more of the model"
        )


class PipelineGPipe(CutModel):
    """All forwards, then all backwards.

    Schedule of a step, for P ranks and M micro-batches (``Config.accumulate``):

        at construction     broadcast the model from rank 0; find the stages; keep one
        each micro-batch    forward; send the activations to the next rank, asynchronously
        then each of them   backward; send the input's gradient back, asynchronously
        after the last      exchange gradients that several stages hold (tied embeddings)
                            all_reduce the loss of the last stage           8 bytes
        step                update this rank's stage                        nothing

    Cost: each rank keeps the activations of all M micro-batches, and is idle while the pipeline
    fills and empties: (P-1)/M of the time that it works. ``shardlab schedule gpipe`` draws it.
    """


class PipelineOneFOneB(CutModel):
    """One forward, one backward: a micro-batch's backward runs as soon as it has come back.

    Schedule of a step: what ``pipeline_gpipe`` sends, in another order. A rank runs one forward for
    each rank behind it, then a backward after every forward.

    Cost: GPipe's idle time, but a rank keeps the activations of at most P micro-batches.
    """


class PipelineInterleaved(CutModel):
    """1F1B with several short stages on each rank, dealt round robin (option ``chunks``).

    Schedule of a step: a micro-batch goes around the ranks ``chunks`` times, so that many times as
    many messages are sent.

    Cost: the pipeline fills ``chunks`` times as fast, and is idle so many times less. The ranks
    keep more activations.
    """


class PipelineZeroBubble(CutModel):
    """1F1B whose backward is split: weight gradients run where the rank would be idle.

    Schedule of a step: 1F1B's messages. The gradient of a stage's input is computed and sent first;
    those of the weights of linear layers are put off, and fill the gaps (ZB-H1).

    Cost: a third of 1F1B's idle time if forward, input and weight gradients take as long. What is
    no plain ``nn.Linear`` computes both at once, and has nothing to put off.
    """
