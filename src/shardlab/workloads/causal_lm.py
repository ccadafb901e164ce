"""Any causal language model of Hugging Face's, fine-tuned to rate reviews: text in, stars out.

The loss is on the answer's tokens alone; reviews have many lengths, so each batch is padded to its
longest. transformers is imported when a model is asked for, not before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from shardlab.config import SYNTHETIC, DataConfig
from shardlab.data import hub, reviews, sources
from shardlab.data.reviews import Reviews
from shardlab.errors import UsageError, unknown
from shardlab.workloads import synthetic
from shardlab.workloads.base import Batch, Sums, Workload
from shardlab.workloads.samples import IGNORED
from shardlab.workloads.token_loss import token_loss

TINY = "tiny"  # for a CPU: has no published weights
SIZES = {
    TINY: None,
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
}
# The architecture of each, as published in its config.json: layers, heads, heads of keys and
# values, width, width of the MLP, vocabulary, context, base of the rotary positions.
SHAPES = {
    TINY: (2, 4, 2, 64, 128, 256, 512, 10_000.0),
    "smollm2-135m": (30, 9, 3, 576, 1536, 49152, 8192, 100_000.0),  # 134,515,008 parameters
    "smollm2-360m": (32, 15, 5, 960, 2560, 49152, 8192, 100_000.0),  # 361,821,120
    "smollm2-1.7b": (24, 32, 32, 2048, 8192, 49152, 8192, 130_000.0),  # 1,711,376,384
}
OWN, BYTES = "own", "bytes"
TOKENIZERS = (OWN, BYTES)
# Files of a model, on the hub and in a folder; one of them is enough.
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
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
        if not rows:  # the models cannot take zero rows: they get one in which nothing counts
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
    return token_loss(lambda: model(**batch.inputs).logits, batch.targets)


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
        loss = token_loss(lambda: logits, targets)
        return {"loss": loss, "correct": (chosen == targets[rows, first + place]).sum()}

    return evaluate


# ------------------------------------------------------------------ the workload


def causal_lm(
    data: DataConfig,
    *,
    size: str = "smollm2-360m",
    model: str | None = None,
    pretrained: bool | None = None,
    tokenizer: str | None = None,
) -> Workload:
    """A Hugging Face language model that learns to rate reviews; SmolLM2-360M-Instruct by default.

    A size has its published weights if they are in the hub's cache, else random ones; the option
    ``pretrained`` asks for either. ``model`` is a name on the hub or a local folder, with its
    weights unless ``pretrained`` is false. ``tokenizer`` is "own" or "bytes" (a byte is a token).
    """
    if size not in SIZES:
        raise unknown("causal_lm size", size, SIZES)
    if tokenizer is not None and tokenizer not in TOKENIZERS:
        raise unknown("option tokenizer", tokenizer, TOKENIZERS)
    sources.refuse_other_words(data.source, (reviews.YELP,), "causal_lm")
    source, why = reviews.choose() if data.source == sources.AUTO else (data.source, "")
    if source == SYNTHETIC:
        train, test = synthetic.reviews("train"), synthetic.reviews("test")
    else:
        train, test = _load(source, "train"), _load(source, "test")
    found = _find(size, model, pretrained, tokenizer)
    longest = getattr(found.config, "max_position_embeddings", 1 << 30)
    max_length = min(data.seq_len or 256, longest)
    dataset = ReviewDataset(train, found.encode, max_length)
    blocks, flops = _structure(found.config)
    lengths = [len(dataset.sample(i)[0]) for i in range(min(64, len(dataset)))]
    length = sum(lengths) / len(lengths)
    kind = "synthetic reviews" if source == SYNTHETIC else source
    about = f"{kind}: {len(train.texts):,} reviews of {train.classes} ratings, "
    about += f"{len(test.texts):,} held out, {length:.0f} tokens on average"
    about += f" ({why})" if why else ""
    chosen = {"data.source": source} if data.source == sources.AUTO else {}
    return Workload(
        name=f"causal_lm-{found.name}",
        make_model=found.make,
        loss=answer_loss,
        dataset=dataset,
        blocks=blocks,
        held_out=ReviewDataset(test, found.encode, max_length),
        evaluate=rate(dataset.answers),
        # For a review of average length; padding, which is computed as well, is not counted.
        flops_per_sample=flops(length),
        notes=found.notes,
        data=about,
        chosen={**chosen, **found.chosen},
    )


# A comparison builds its workload for every visit; 650,000 reviews are many.
_load = lru_cache(maxsize=2)(reviews.load)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UsageError("causal_lm needs transformers: pip install 'shardlab[models]'") from None
    return transformers


# ------------------------------------------------------------------ which model, and whose weights


@dataclass(frozen=True)
class Model:
    name: str
    config: Any
    encode: Encode
    make: Callable[[], nn.Module]
    notes: tuple[str, ...] = ()
    chosen: Mapping[str, Any] = field(default_factory=dict)


@lru_cache(maxsize=1)
def _find(size: str, model: str | None, pretrained: bool | None, tokenizer: str | None) -> Model:
    """The model that the options name; what they leave open is decided by what is on this machine.

    Only a model that was named is fetched from the hub, or one whose weights were asked for.
    """
    library = _transformers()
    source = model or SIZES[size]
    if source is None:
        if pretrained or tokenizer == OWN:
            raise UsageError(f"causal_lm's size {TINY} has random weights, and a byte is a token")
        return Model(TINY, _built_in(size), encode_bytes, _maker(_built_in(size)))
    local = Path(source).expanduser()
    if local.is_dir():
        source = str(local)
    elif source.startswith((".", "/", "~")):
        raise UsageError(f"no folder {local} with a model")
    name, notes = Path(source).name, list[str]()
    chosen: dict[str, Any] = {}
    make: Callable[[], nn.Module]
    if pretrained is None:
        pretrained = model is not None or _is_here(source, WEIGHTS)
        if model is None:
            chosen["model.options.pretrained"] = pretrained
    if tokenizer is None:
        tokenizer = OWN if pretrained or _is_here(source, TOKENIZER) else BYTES
        if not pretrained:
            chosen["model.options.tokenizer"] = tokenizer
    if pretrained:
        if tokenizer == BYTES:
            raise UsageError(
                "the weights of a model know its own tokens alone: leave out the option tokenizer, "
                "or take random weights (model.options.pretrained=false)"
            )
        config = _fetch(library.AutoConfig, source)
        make = partial(_fetch, library.AutoModelForCausalLM, source, dtype=torch.float32)
    else:
        config = _fetch(library.AutoConfig, source) if model else _built_in(size)
        make = _maker(config)
        why = ""
        if chosen.get("model.options.pretrained") is False:
            why = f": {source} is not in the hub's cache (hf download {source})"
        notes.append(f"{name} begins with random weights{why}")
    if tokenizer == BYTES:
        if config.vocab_size < 256:
            raise UsageError(f"{name} knows {config.vocab_size} tokens, and there are 256 bytes")
        notes.append(
            f"a byte is a token, of {name}'s vocabulary of {config.vocab_size:,}: a text has some "
            "four times as many tokens as in its own, and more of it is cut off at data.seq_len"
        )
        encode: Encode = encode_bytes
    else:
        encode = _encoder(_fetch(library.AutoTokenizer, source))
    return Model(name, config, encode, lambda: _trained_on(make()), tuple(notes), chosen)


def _is_here(source: str, names: Sequence[str]) -> bool:
    """Whether a model's folder, or the hub's cache, has one of these files."""
    if Path(source).is_dir():
        return any((Path(source) / name).is_file() for name in names)
    from huggingface_hub import try_to_load_from_cache  # transformers needs it: it is there

    return any(isinstance(try_to_load_from_cache(source, name), str) for name in names)


def _built_in(size: str) -> Any:
    """The configuration of a size, for transformers' own Llama."""
    layers, heads, kv_heads, width, mlp, vocab, context, base = SHAPES[size]
    return _transformers().LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": base},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )


def _maker(config: Any) -> Callable[[], nn.Module]:
    """What makes the model of a configuration, with random weights."""
    return lambda: _trained_on(_transformers().AutoModelForCausalLM.from_config(config))


def encode_bytes(text: str) -> list[int]:
    return list(text.encode(errors="replace"))  # JSON may hold half of a surrogate pair


def _encoder(tokenizer: Any) -> Encode:
    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    return encode


def _fetch(kind: Any, source: str, **options: Any) -> Any:
    """Load from the disk if it is there, else from the hub; or say what to do instead."""
    try:
        return kind.from_pretrained(source, local_files_only=True, **options)
    except (OSError, ValueError):
        if Path(source).is_dir():
            raise UsageError(f"{source} is not a folder with a whole model of Hugging Face's: "
                             "config.json, tokenizer and *.safetensors") from None  # fmt: skip
    try:
        hub.refuse_unreachable(source)  # soon: the hub's own client tries for half a minute
        return kind.from_pretrained(source, **options)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise UsageError(
            f"cannot load {source} from the hub: {reason}. Without a network: fetch it elsewhere "
            f"(`hf download {source} --local-dir DIR`) and name the folder with "
            "model.options.model, or use --size tiny"
        ) from None


def _trained_on(model: nn.Module) -> nn.Module:
    model.config.use_cache = False  # type: ignore[union-attr]  # keys and values are for generation
    return model.train()


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
