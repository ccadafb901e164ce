"""A model of Hugging Face's with its own loss, on tokenised samples:

shardlab compare --workload examples/hugging_face.py:workload
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def workload():
    ids = torch.randint(0, 256, (500, 32), generator=torch.Generator().manual_seed(0))
    samples = [{"input_ids": row, "labels": row} for row in ids]  # a label of -100 does not count
    config = GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2,
                        bos_token_id=0, eos_token_id=0)  # fmt: skip
    return GPT2LMHeadModel(config), samples, None  # None: the model computes its loss
