"""A small language model with random weights and a tokenizer, in a folder as on the hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

VOCABULARY = 400


def save(
    folder: Path,
    kind: str = "llama",
    texts: Sequence[str] = (),
    *,
    norm: float = 1.0,
    weights: bool = True,
) -> str:
    """``norm``: what the last norm of a llama multiplies by, by which it can be known again."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*texts, "Review: The food was superb.\nStars:"], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    both = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "llama":
        config = transformers.LlamaConfig(
            **both, hidden_size=48, intermediate_size=96, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
            max_position_embeddings=128,
        )  # fmt: skip
    else:
        config = transformers.GPT2Config(
            **both, n_embd=48, n_layer=2, n_head=4, n_positions=128, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
    if not weights:
        config.save_pretrained(folder)
        return str(folder)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if kind == "llama":
        torch.nn.init.constant_(model.model.norm.weight, norm)
    model.save_pretrained(folder)
    return str(folder)
