"""Every planted bug that a proof must find, with the check that must fail and what it must say.

To add one: a strategy that is wrong goes into ``saboteurs.py``, a mistake in one layer into
``planted.py``, a wrong piece of the code that cuts a model into ``planted_mesh.py``.
"""

from __future__ import annotations

import planted_mesh
from bug import Bug

# Strategies whose results are wrong.
NOT_EQUAL = {
    "NoAveraging": "gradients are exactly 2.0x: summed over the ranks, not averaged",
    "AveragesWeights": "each rank has the gradients of its own data only: they are not reduced",
    "ReducesOnlyTheLast": "only the last of 3 micro-batches is reduced over the ranks",
    "NoBroadcast": "rank 1 starts from other weights ('offset'): equal on rank 0 only",
    "NoBufferBroadcast": "buffer 'blocks.0.drift'",
    "MeanOfMeans": "each rank divides by its own count: a mean of means",
    "ReadsAnothersData": "the data of rank 1 is not in it, the rest 2.0x: ranks read the same",
    "BucketTooEarly": "gradient 'blocks.5.weight': the last micro-batch of the other ranks is not",
    "NobodyWaits": "nobody waits for all_reduce 'grad",
    "WaitsTooLate": "equal by luck: nobody waits for all_reduce 'grad",
    "EveryMicrobatch": "the sum so far is all-reduced after each",
    "ShardOffByOne": "shifted by one element, as by a shard's offset that is off by one",
    "LosesTheEdge": "in only 1 of 50,176",
    "ForgetsToGather": "not updated in this step; were the shards gathered?",
}
# Strategies whose results are right, and which do not do what they claim: on any model,
NOT_AS_CLAIMED = {
    "WholeOptimizer": ("state", "the optimizer state on each rank is full size"),
    "Leaks": ("state", "gradients that are not freed?"),
    "SendsEachTime": ("bytes", "the claim: it communicates in each of the 2 micro-batch"),
    "HookEachTime": ("bytes", "the claim: it communicates in each of the 2 micro-batch"),
    "SendsUnseen": ("bytes", "of all_gather were sent, of which nothing is claimed"),
}
# or seen on the stack alone.
ON_THE_STACK = {
    "FreesAtTheEnd": ("state", "full gradients are kept until backward ends"),
    "GathersEverything": ("state", "it gathers the whole model for forward"),
    "SendsLate": ("overlap", "overlap is claimed, but 0% of the gradients' bytes launched"),
    "SendsEarly": ("overlap", "no overlap is claimed, but 100% of the gradients' bytes"),
    "SendsOnceMore": ("bytes", "on the stack, from step 1 on, all_reduce sent"),
    "BuffersEachTime": ("bytes", "on the stack, from step 1 on, 2.62 KiB of broadcast were"),
    "GathersAgain": ("bytes", "on the stack, all_gather sent"),
    "LaunchesAtTheEnd": ("overlap", "overlap is claimed, but 84% of the gradients' bytes wait"),
    "HalfAtTheEnd": ("overlap", "overlap is claimed, but 34% of"),
    "Noisy": ("reproducible", "two runs differ, first in stack, step 0: gradient"),
}
# Mistakes in one layer of a model, each under a strategy that leaves parameters where they are or
# one that takes them away; and under PyTorch's, which wrap modules or put others in their place.
IN_A_LAYER = {
    "Zero2Factor": "gradient 'layers.2.weight': gradients are exactly 1.001x",
    "Zero2Doubled": "gradient 'layers.2.bias': micro-batch 0 of rank 1 counts 2.0x",
    "Zero3Forgotten": "gradient 'layers.2.weight': only the first of 2 micro-batches is in it",
    "Zero3Swapped": "gradient 'layers.2.weight': off by",
    "Zero2Edge": "gradient 'layers.2.weight': off by",
    "Zero2Skipped": "forward differs first in the output of 'layers.2', on rank 1 in micro-batch 0",
    "PyTorchDDPSkipped": "forward differs first in the output of 'layers.2', on rank 1",
    "PyTorchZero3Skipped": "forward differs first in the output of 'layers.2', on rank 1",
    "Zero3Transposed": "forward differs first in the output of 'layers.2', on rank 0",
    "Zero3Stale": "forward differs first in the output of 'layers.2', on rank 1 in micro-batch 0",
    "Zero3Another": "forward differs first in the output of 'layers.2', on rank 0 in micro-batch 0",
    "Zero2Overwritten": "backward differs first in the gradient of the input of 'layers.2', on",
}
# Workers that take steps of their own.
OF_WORKERS = {
    "WrongAnchor": "step 3 of tied-layers, parameter 'inlet.weight': off by",
    "AnchorNotMoved": "step 3 of tied-layers, parameter 'inlet.weight': off by",
    "WrongSign": "step 1 of tied-layers, parameter 'inlet.weight': off by",
    "MomentumNotKept": "step 3 of tied-layers, parameter 'inlet.weight': off by",
    "NoNesterov": "step 1 of tied-layers, parameter 'inlet.weight': off by",
    "EqualWeights": "each rank divides by its own count: a mean of means",
    "OneStepEarly": "step 1 of tied-layers, gradient 'outlet.bias': off by",
    "CountsAllSteps": "step 2 of tied-layers, parameter 'inlet.weight': off by",
    "InnerStateReset": "step 2 of tied-layers, parameter 'inlet.weight': off by",
    "BuffersForgotten": "forward differs first in the output of the model itself, on rank 1",
    "TiedTwice": "step 1 of tied-layers, parameter 'layers.0.weight': off by",
    "DividesByAll": "step 0 of tied-layers, parameter 'inlet.weight': off by",
    "OwnLoss": "step 0 of tied-layers, loss: off by",
    "FragmentSkipped": "step 2 of tied-layers, parameter 'layers.2.weight': off by",
    "DelayIgnored": "step 0 of tied-layers, parameter 'inlet.weight': off by",
    "MixIgnored": "step 1 of tied-layers, parameter 'inlet.weight': off by",
    "TakesWhatIsThere": "step 1 of tied-layers, parameter 'inlet.weight': off by",
}
# AdamW does not mind a factor.
OPTIMIZERS = {"DividesByAll": {"training.optimizer": "sgd"}}
CLIPS = {"training.clip_norm": 0.01}

BUGS: dict[str, Bug] = {
    **{name: Bug(f"saboteurs:{name}", message) for name, message in NOT_EQUAL.items()},
    **{
        name: Bug(f"saboteurs:{name}", message, check, workload="planted:layers")
        for name, (check, message) in NOT_AS_CLAIMED.items()
    },
    **{
        name: Bug(f"saboteurs:{name}", message, check)
        for name, (check, message) in ON_THE_STACK.items()
    },
    **{
        name: Bug(f"planted:{name}", message, workload="planted:layers")
        for name, message in IN_A_LAYER.items()
    },
    "ForgetsToClip": Bug(
        "saboteurs:ForgetsToClip",
        "though the gradients are equal: look at the update",
        workload="planted:layers",
        settings=CLIPS,
    ),
    "RightWhenSeen": Bug(
        "saboteurs:RightWhenSeen",
        "if nobody looks in between, step 1 of layers, ",
        workload="planted:layers",
    ),
    **{
        name: Bug(
            f"saboteurs:{name}",
            message,
            workload="planted:tied_layers",
            settings=OPTIMIZERS.get(name, {}),
        )
        for name, message in OF_WORKERS.items()
    },
    **planted_mesh.BUGS,
}
