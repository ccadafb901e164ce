"""Any causal language model of Hugging Face's, fine-tuned to rate reviews: text in, stars out.

The loss is on the answer's tokens alone; reviews have many lengths, so each batch is padded to its
longest. transformers is imported when a model is asked for, not before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from shardlab.config import SYNTHETIC, DataConfig
from shardlab.data import download, reviews
from shardlab.data.reviews import Reviews
from shardlab.errors import UsageError, unknown
from shardlab.workloads import synthetic
from shardlab.workloads.base import Batch, Sums, Workload
from shardlab.workloads.samples import IGNORED

TINY = "tiny"  # random weights, a byte is a token: needs no download
SIZES = {
    TINY: None,
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
}
BEFORE, AFTER = "Review: ", "\nStars:"  # around the text; then the answer, " 1" to " 5"

Encode = Callable[[str], list[int]]


# ------------------------------------------------------------------ reviews as tokens


class ReviewDataset:
    """Sample i: the prompt with review i, cut to ``max_length`` tokens, and its stars."""

    def __init__(self, texts: Reviews, encode: Encode, max_length: int) -> None:
        self.reviews = texts
        self.encode = encode
        self.answers = answers(encode, texts.classes)
        self.before, self.after = encode(BEFORE), encode(AFTER)
        longest = max(len(answer) for answer in self.answers)
        self.room = max_length - len(self.before) - len(self.after) - longest
        if self.room < 1:
            raise UsageError(
                f"causal_lm's prompt and answer take {max_length - self.room} tokens: data.seq_len "
                f"{max_length} leaves none for the review"
            )

    def __len__(self) -> int:
        return len(self.reviews.texts)

    def sample(self, i: int) -> tuple[list[int], list[int]]:
        """Prompt and answer, in tokens."""
        # A token is a character at least: no use in encoding more than could fit.
        text = self.encode(self.reviews.texts[i][: 16 * self.room])[: self.room]
        return [*self.before, *text, *self.after], self.answers[self.reviews.labels[i]]

    def batch(self, ids: Sequence[int]) -> Batch:
        samples = [self.sample(int(i)) for i in ids]
        # The last token of the answer predicts nothing.
        rows = [([*prompt, *answer[:-1]], [IGNORED] * (len(prompt) - 1) + answer)
                for prompt, answer in samples]  # fmt: skip
        if not rows:  # the models cannot take zero rows: one of which nothing counts
            length = max(len(answer) for answer in self.answers)
            rows = [([0] * length, [IGNORED] * length)]
        inputs = {
            "input_ids": _padded([tokens for tokens, _ in rows], 0),
            "attention_mask": _padded([[1] * len(tokens) for tokens, _ in rows], 0),
        }
        targets = _padded([wanted for _, wanted in rows], IGNORED)
        count = sum(len(answer) for _, answer in samples)
        return Batch(inputs=inputs, targets=targets, count=count, samples=len(samples))


def _padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:  # (batch, longest)
    tensors = [torch.tensor(row) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=value)


def answers(encode: Encode, classes: int) -> list[list[int]]:
    """The tokens of each rating. They may begin alike (a space), but must then differ."""
    made = [encode(f" {stars}") for stars in range(1, classes + 1)]
    if len({tuple(tokens[: deciding(made) + 1]) for tokens in made}) < classes:
        raise UsageError("this tokenizer does not tell the ratings apart by one token")
    return made


def deciding(made: Sequence[Sequence[int]]) -> int:
    """The place of the token that tells the answers apart."""
    place = 0
    while all(len(tokens) > place + 1 and tokens[place] == made[0][place] for tokens in made):
        place += 1
    return place


def answer_loss(model: nn.Module, batch: Batch) -> Tensor:
    return _loss_of(model(**batch.inputs).logits, batch.targets)


def _loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The summed loss of logits (batch, longest, vocabulary), targets (batch, longest)."""
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED
    )


def rate(made: Sequence[Sequence[int]]) -> Callable[[nn.Module, Batch], Sums]:
    """Loss, and right ratings: the likeliest of the ratings' deciding tokens is the answer."""
    place = deciding(made)
    choices = [tokens[place] for tokens in made]

    def evaluate(model: nn.Module, batch: Batch) -> Sums:
        logits, targets = model(**batch.inputs).logits, batch.targets
        first = (targets != IGNORED).int().argmax(1)  # (batch,) where the answer begins
        rows = torch.arange(len(targets), device=targets.device)
        candidates = torch.tensor(choices, device=targets.device)
        chosen = candidates[logits[rows, first + place][:, candidates].argmax(1)]
        loss = _loss_of(logits, targets)
        return {"loss": loss, "correct": (chosen == targets[rows, first + place]).sum()}

    return evaluate


# ------------------------------------------------------------------ the workload


def causal_lm(
    data: DataConfig, *, size: str = "smollm2-360m", model: str | None = None
) -> Workload:
    """A Hugging Face language model that learns to rate reviews; SmolLM2-360M-Instruct by default.

    ``model`` is a name on the hub or a local folder. The size ``tiny`` needs no download.
    """
    if size not in SIZES:
        raise unknown("causal_lm size", size, SIZES)
    name = model or SIZES[size]
    if data.source == SYNTHETIC:
        train, test = synthetic.reviews("train"), synthetic.reviews("test")
    else:
        train, test = _load(data.source, "train"), _load(data.source, "test")
    config, encode, make = _tiny() if name is None else _from_hub(name)
    max_length = min(data.seq_len or 256, getattr(config, "max_position_embeddings", 1 << 30))
    dataset = ReviewDataset(train, encode, max_length)
    blocks, flops = _structure(config)
    lengths = [len(dataset.sample(i)[0]) for i in range(min(64, len(dataset)))]
    return Workload(
        name=f"causal_lm-{Path(name).name if name else TINY}",
        make_model=make,
        loss=answer_loss,
        dataset=dataset,
        blocks=blocks,
        held_out=ReviewDataset(test, encode, max_length),
        evaluate=rate(dataset.answers),
        # For a review of average length; padding, which is computed as well, is not counted.
        flops_per_sample=flops(sum(lengths) / len(lengths)),
    )


# A comparison builds its workload for every visit; 650,000 reviews are many.
_load = lru_cache(maxsize=2)(reviews.load)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UsageError("causal_lm needs transformers: pip install 'shardlab[models]'") from None
    return transformers


@lru_cache(maxsize=1)
def _from_hub(name: str) -> tuple[Any, Encode, Callable[[], nn.Module]]:
    """Config, tokenizer and maker of a model on the hub or in a folder."""
    library = _transformers()
    local = Path(name).expanduser()
    source = str(local) if local.is_dir() else name
    if not local.is_dir() and name.startswith((".", "/", "~")):
        raise UsageError(f"no folder {local} with a model")
    config, tokenizer = (
        _fetch(kind, source) for kind in (library.AutoConfig, library.AutoTokenizer)
    )

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def make() -> nn.Module:
        model: nn.Module = _fetch(library.AutoModelForCausalLM, source, dtype=torch.float32)
        return _trained_on(model)

    return config, encode, make


def _fetch(kind: Any, source: str, **options: Any) -> Any:
    """Load from the disk if it is there, else from the hub; or say what to do instead."""
    try:
        return kind.from_pretrained(source, local_files_only=True, **options)
    except (OSError, ValueError):
        if Path(source).is_dir():
            raise UsageError(f"{source} is not a folder with a whole model of Hugging Face's: "
                             "config.json, tokenizer and *.safetensors") from None  # fmt: skip
    try:
        _refuse_without_network()
        return kind.from_pretrained(source, **options)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise UsageError(
            f"cannot load {source} from the hub: {reason}. Without a network: fetch it elsewhere "
            f"(`hf download {source} --local-dir DIR`) and name the folder with "
            "model.options.model, or use --size tiny"
        ) from None


def _refuse_without_network() -> None:
    """The hub's own client tries for half a minute before it says so."""
    try:
        download.refuse_unreachable(os.environ.get(download.HUB, "https://huggingface.co"))
    except download.Unreachable as reason:
        raise ConnectionError(str(reason)) from None


def _trained_on(model: nn.Module) -> nn.Module:
    model.config.use_cache = False  # type: ignore[union-attr]  # keys and values are for generation
    return model.train()


# ------------------------------------------------------------------ a model that needs nothing


def _tiny() -> tuple[Any, Encode, Callable[[], nn.Module]]:
    """Config, tokenizer and maker of a small Llama with random weights; a byte is a token."""
    library = _transformers()
    config = library.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )

    def encode(text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def make() -> nn.Module:
        return _trained_on(library.AutoModelForCausalLM.from_config(config))

    return config, encode, make


# ------------------------------------------------------------------ what the model is made of


def _structure(config: Any) -> tuple[tuple[str, ...], Callable[[float], float]]:
    """The names of its layers, and the FLOPs of a sample, forward and backward, by its length.

    6 for each weight of a matrix product (in the layers, and the head), 12 for each of a token's
    scores and channels.
    """
    with torch.device("meta"):
        model = _transformers().AutoModelForCausalLM.from_config(config)
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    layers = max(lists, key=lambda n: sum(p.numel() for p in lists[n].parameters()), default=None)
    if layers is None:
        raise UsageError(f"a {config.model_type} model has no list of layers to work on")
    blocks = tuple(f"{layers}.{i}" for i in range(len(lists[layers])))
    weights = sum(p.numel() for p in lists[layers].parameters() if p.dim() > 1)
    weights += model.get_output_embeddings().weight.numel()
    scores = 12 * len(blocks) * int(getattr(config, "hidden_size", 0))
    return blocks, lambda length: length * (6.0 * weights + scores * length)
