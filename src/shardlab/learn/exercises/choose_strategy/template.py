"""Choose a strategy for each of three memory budgets.

The contract. ``CHOICES`` has, for each budget, what you would train with:

    strategy                    a name of `shardlab strategies`
    options                     of the strategy, e.g. {"bucket_mb": 4}
    accumulate                  micro-batches per rank and step (the global batch stays 8 samples)
    activation_checkpointing    blocks are computed again in backward instead of kept

The model is a GPT-2 of 10 thin layers (3.2 M parameters, fp32, AdamW), sequences of 32 tokens,
2 ranks. A rank may hold, at the peak of a step: 72 MiB ("roomy"), 47 MiB ("tight"), 31 MiB
("tiny"). Within that, no more may be sent or computed than needed, and communication should hide
behind backward.

Estimate before you choose:

    shardlab memory --size mini --set model.options.layers=10 --set model.options.dim=160 \\
        --data synthetic --seq-len 32 --micro-batch 4 --world 2

Check it: shardlab learn check choose_strategy
"""

CHOICES = {
    # TODO: a strategy for each.
    "roomy": {
        "strategy": None,
        "options": {},
        "accumulate": 1,
        "activation_checkpointing": False,
    },
    "tight": {
        "strategy": None,
        "options": {},
        "accumulate": 1,
        "activation_checkpointing": False,
    },
    "tiny": {
        "strategy": None,
        "options": {},
        "accumulate": 1,
        "activation_checkpointing": False,
    },
}
