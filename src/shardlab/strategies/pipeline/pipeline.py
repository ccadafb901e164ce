"""Pipeline parallelism: every rank has some layers, and micro-batches travel through all ranks."""

from __future__ import annotations

from shardlab.strategies import base
from shardlab.strategies.cut_model import Cut, CutModel
from shardlab.strategies.pipeline import executor
from shardlab.strategies.pipeline.executor import Executor


def cut(strategy: CutModel, setup: base.Setup, kind: type[Executor] | None = None) -> Cut:
    """Keep this rank's stages, which an executor of this ``kind`` runs; None: ours."""
    group = strategy.groups.pipeline
    kept, stages = executor.cut(setup, strategy.axes, group, setup.loss_fn, kind)
    return Cut(kept, stages.loss, pipeline=stages)


class PipelineGPipe(CutModel):
    """All forwards, then all backwards.

    Schedule of a step, for P ranks and M micro-batches (``training.accumulate``):

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
