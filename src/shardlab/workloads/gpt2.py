"""GPT-2 on token shards: the published sizes, and three small ones for a CPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardlab.axes import Axes
from shardlab.config import SYNTHETIC, Config, DataConfig
from shardlab.data import sources
from shardlab.data.tokens import TokenDataset
from shardlab.errors import UsageError, unknown
from shardlab.workloads import huggingface, kernels
from shardlab.workloads.base import Batch, ContextSplit, Dataset, Sums, Workload, hold_out
from shardlab.workloads.synthetic import Tokens


@dataclass(frozen=True)
class Shape:
    layers: int
    heads: int
    dim: int
    context: int = 1024
    vocab: int = 50257


SIZES = {
    # For a CPU: a byte is a token.
    "tiny": Shape(layers=2, heads=2, dim=64, context=64, vocab=256),  # 0.12 M parameters
    "mini": Shape(layers=4, heads=4, dim=256, context=128, vocab=256),  # 3.3 M
    "midi": Shape(layers=6, heads=6, dim=384, context=256, vocab=256),  # 10.8 M
    # As published.
    "small": Shape(layers=12, heads=12, dim=768),  # 124,439,808
    "medium": Shape(layers=24, heads=16, dim=1024),  # 354,823,168
    "large": Shape(layers=36, heads=20, dim=1280),  # 774,030,080
    "xl": Shape(layers=48, heads=25, dim=1600),  # 1,557,611,200
}


HEADS = ("plain", "float8")
FLOAT8_HEAD = "model.options.head: float8"


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.dim // shape.heads  # how many heads there are, the layers say
        self.qkv = nn.Linear(shape.dim, 3 * shape.dim)
        self.proj = nn.Linear(shape.dim, shape.dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        qkv = self.qkv(x)
        qkv = qkv.view(batch, seq, 3, qkv.shape[-1] // (3 * self.head_dim), self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, seq, head_dim)
        # The fused kernel: the (seq, seq) scores are never materialised.
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(y.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.dim)
        self.attention = Attention(shape)
        self.ln_2 = nn.LayerNorm(shape.dim)
        self.up = nn.Linear(shape.dim, 4 * shape.dim)
        self.down = nn.Linear(4 * shape.dim, shape.dim)

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, dim)
        x = x + self.attention(self.ln_1(x))
        out: Tensor = x + self.down(kernels.linear_gelu(self.ln_2(x), self.up))
        return out


class Head(nn.Linear):
    """The logits of each position; or, given the targets, the sum of their losses."""

    SUMS_LOSS = True  # so tensor parallelism may put a head in its place that does the same
    float8 = False  # whether a training step's products are of float8 (see kernels.py)

    def forward(self, input: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return F.linear(input, self.weight)  # (batch, seq, vocab)
        if kernels.is_fused(input, self.weight):
            flat = input.flatten(0, 1), targets.flatten()
            return kernels.head_loss(flat[0], self.weight, flat[1], self.float8)
        if self.float8 and torch.is_grad_enabled():
            raise UsageError(
                f"{FLOAT8_HEAD} is for compiled training steps with fp32 weights, and this is none"
            )
        padding = -self.out_features % kernels.TILE
        if not (padding and input.is_cuda and torch.compiler.is_compiling()):
            logits = F.linear(input, self.weight)
        else:  # compiled, the padding's columns cost nothing: they are masked on the fly
            logits = F.linear(input, F.pad(self.weight, (0, 0, 0, padding)))
            is_token = torch.arange(logits.shape[-1], device=logits.device) < self.out_features
            logits = logits.float().masked_fill(~is_token, -torch.inf)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


class GPT2(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.wte = nn.Embedding(shape.vocab, shape.dim)
        self.wpe = nn.Embedding(shape.context, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.dim)
        self.head = Head(shape.dim, shape.vocab, bias=False)
        self.head.weight = self.wte.weight  # tied: one parameter, two gradients that add up
        self.apply(self._init)
        # Each block adds to the residual stream twice: keep its variance from growing with depth.
        for name, parameter in self.named_parameters():
            if name.endswith(("proj.weight", "down.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Logits (batch, seq, vocab) of tokens (batch, seq); given targets, their summed loss.
        ``positions`` (seq,) are given where the tokens are a part of a longer sequence.

        The loss is in here to be compiled with the rest: on a GPU the logits are the largest
        tensor by far, and would be read and written several times more.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)  # (batch, seq, dim)
        if _computes_in_bf16(x.device.type):
            x = x.bfloat16()  # else the residual stream, which every layer reads, is twice as large
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.ln_f(x), targets)
        return out


def _computes_in_bf16(device: str) -> bool:
    if device == "meta":  # where FLOPs are counted; there is no autocast to ask for
        return False
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    is_part = isinstance(batch.inputs, tuple)  # with its positions: see take_positions
    tokens, positions = batch.inputs if is_part else (batch.inputs, None)
    loss: Tensor = model(tokens, batch.targets, positions)
    return loss


def take_positions(batch: Batch, positions: Tensor) -> Batch:
    """A part of each sequence. The targets are the next tokens already, so that they are cut at the
    same positions: the last token of a part has its target although the next token is elsewhere."""
    targets = batch.targets[:, positions]  # (batch, part)
    inputs = batch.inputs[:, positions], positions
    return replace(batch, inputs=inputs, targets=targets, count=targets.numel())


CONTEXT = ContextSplit(
    length=lambda batch: int(batch.inputs.shape[1]),
    take=take_positions,
    attention=("blocks.*.attention",),
)


def next_token_sums(model: nn.Module, batch: Batch) -> Sums:
    return {"loss": next_token_loss(model, batch)}


def flops_per_token(shape: Shape, seq_len: int) -> float:
    """Forward and backward take 6 for each weight of a matrix product, 12 for each of a token's
    scores and channels. The embeddings' look-up costs none; the tied head is a product.
    """
    weights = 12 * shape.layers * shape.dim**2 + shape.vocab * shape.dim
    return 6 * weights + 12 * shape.layers * shape.dim * seq_len


def gpt2(
    data: DataConfig,
    *,
    size: str | None = None,
    layers: int | None = None,
    heads: int | None = None,
    dim: int | None = None,
    context: int | None = None,
    vocab: int | None = None,
    weights: str | None = None,
    held_out: float = 0.01,
    head: str = "plain",
) -> Workload:
    """GPT-2, next-token loss on token shards; sizes tiny, mini, midi, small, medium, large, xl."""
    if size is not None and size not in SIZES:
        raise unknown("gpt2 size", size, SIZES)
    if head not in HEADS:
        raise unknown("gpt2 head", head, HEADS)
    folder = None if weights is None else sources.located(weights)
    start = SIZES[size or "mini"] if folder is None or size else shape_of(folder)
    given = {"layers": layers, "heads": heads, "dim": dim, "context": context, "vocab": vocab}
    shape = replace(start, **{k: v for k, v in given.items() if v is not None})
    _check(shape)
    if folder is not None and shape != shape_of(folder):
        raise UsageError(f"the weights in {folder} are of {shape_of(folder)}, not {shape}")
    seq_len = data.seq_len or shape.context
    if seq_len > shape.context:
        raise UsageError(
            f"data.seq_len {seq_len} is longer than the model's context {shape.context}"
        )

    def make_model() -> GPT2:
        model = GPT2(shape) if folder is None else load_model(folder)
        model.head.float8 = head == "float8"
        return model

    source, why = _choose(data.source, shape.vocab)
    train, test, about = _split(source, seq_len, shape.vocab, held_out)
    return Workload(
        name=f"gpt2-{size or ('mini' if folder is None else folder.name)}",
        make_model=make_model,
        loss=next_token_loss,
        dataset=train,
        tokens_per_sample=seq_len,
        blocks=tuple(f"blocks.{i}" for i in range(shape.layers)),
        compile_also=("head",),
        splits=splits_of(shape),
        context=CONTEXT,
        held_out=test,
        evaluate=next_token_sums,
        flops_per_sample=seq_len * flops_per_token(shape, seq_len),
        data=about + (f" ({why})" if why else ""),
        chosen={"data.source": source} if data.source == sources.AUTO else {},
        refuse=partial(_refuse_float8, shape) if head == "float8" else None,
    )


def _refuse_float8(shape: Shape, config: Config, axes: Axes | None, device: torch.device) -> None:
    wrong = None
    if axes is not None and axes.tensor > 1:
        wrong = "needs the whole vocabulary on each rank: leave out tensor, or the head"
    elif config.precision.compute != "bf16":
        wrong = f"needs precision.compute: bf16, not {config.precision.compute}"
    elif config.training.compile == "none":
        wrong = "needs a compiled model: set training.compile to model or blocks"
    elif shape.dim % kernels.FLOAT8_TILE:
        wrong = f"needs a dim that is a multiple of {kernels.FLOAT8_TILE}, not {shape.dim}"
    elif reason := kernels.no_float8(device):
        wrong = f"needs a GPU of the Hopper generation or newer, and {reason}"
    if wrong:
        raise UsageError(f"{FLOAT8_HEAD} {wrong}")


def splits_of(shape: Shape) -> dict[str, str]:
    """How ranks may split the model between them: strategies/tensor/splits.py has the words."""
    return {
        "wte": "vocabulary",
        "wpe": "whole",
        "blocks.*": "block",
        "blocks.*.ln_*": "norm",
        "blocks.*.attention": "branch",
        "blocks.*.attention.qkv": f"heads {shape.heads} {shape.heads} {shape.heads}",
        "blocks.*.attention.proj": "rows",
        "blocks.*.up": "columns",
        "blocks.*.down": "rows",
        "ln_f": "whole",
        "head": "vocabulary",
    }


FINEWEB, FINEWEB_VOCAB = "fineweb", 50257


def _choose(source: str, vocab: int) -> tuple[str, str]:
    """Where the tokens are read from, and why not from FineWeb: "auto" prefers it, but its tokens
    need GPT-2's whole vocabulary, which the small sizes do not have."""
    sources.refuse_other_words(source, (sources.STDLIB, FINEWEB), "gpt2")
    if source != sources.AUTO:
        return source, ""
    is_there = sources.is_downloaded(FINEWEB)
    if vocab < FINEWEB_VOCAB:
        too_large = f"fineweb's {FINEWEB_VOCAB:,} tokens do not fit this model's {vocab:,}"
        return sources.STDLIB, too_large if is_there else ""
    return (FINEWEB, "") if is_there else (sources.STDLIB, sources.absent(FINEWEB))


def _split(
    source: str, seq_len: int, vocab: int, fraction: float
) -> tuple[Dataset, Dataset | None, str]:
    """To train on, and to evaluate on: the shards called ``_val_``, or the end of the stream; and
    what they are, in words."""
    if not 0 <= fraction <= 0.5:
        raise UsageError(f"gpt2's held_out is a fraction of the data, 0 to 0.5, got {fraction}")
    if source == SYNTHETIC:
        return Tokens(seq_len, vocab, "train"), Tokens(seq_len, vocab, "test"), "synthetic tokens"
    if source == sources.STDLIB:
        shards = [sources.stdlib_shard()]
        about = "stdlib: the text of Python's library, a byte is a token"
    else:
        folder = str(sources.downloaded(FINEWEB)) if source == FINEWEB else source
        shards = sources.find_shards(folder)
        about = f"{source}: {len(shards):,} token shard{'s' if len(shards) > 1 else ''}"
        tokenizer = (sources.described(shards[0].parent) or {}).get("tokenizer")
        about += f", tokenizer {tokenizer}" if tokenizer else ""
    validation = [path for path in shards if "_val_" in path.name]
    if validation and len(validation) < len(shards):
        training = [path for path in shards if path not in validation]
        train, test = (TokenDataset(part, seq_len, vocab) for part in (training, validation))
        return train, test, about
    whole = TokenDataset(shards, seq_len, vocab)
    return (*(hold_out(whole, fraction) if fraction else (whole, None)), about)


# ------------------------------------------------------------------ Hugging Face's format

# Our words for a shape, and theirs.
_THEIR_WORDS = {
    "layers": "n_layer",
    "heads": "n_head",
    "dim": "n_embd",
    "context": "n_positions",
    "vocab": "vocab_size",
}


def load_model(folder: Path) -> GPT2:
    """A GPT-2 from a folder of Hugging Face's: ``config.json`` and ``*.safetensors``."""
    shape = shape_of(folder)
    state = huggingface.from_huggingface(huggingface.load_folder(folder))
    _check(shape)
    if shape.layers > len(state):
        raise UsageError(f"{folder}: its config has {shape.layers} layers, its files have fewer")
    with torch.device("meta"):  # a config may ask for more than there is memory
        wanted = GPT2(shape).state_dict()
    for name, tensor in wanted.items():
        if name in state and not state[name].is_floating_point():
            raise UsageError(f"{folder}: '{name}' is of the dtype {state[name].dtype}")
        if name not in state or state[name].shape != tensor.shape:
            what = "is missing" if name not in state else f"has shape {tuple(state[name].shape)}"
            raise UsageError(
                f"{folder}: '{name}' {what}, where {tuple(tensor.shape)} belongs by its config"
            )
    if more := state.keys() - wanted.keys():
        raise UsageError(f"{folder}: '{min(more)}' has no place in the model of its config")
    model = GPT2(shape)
    model.load_state_dict(state)
    return model


def save_model(folder: Path, state: Mapping[str, Tensor], shape: Shape) -> None:
    """A folder that ``transformers.GPT2LMHeadModel.from_pretrained`` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        **{theirs: getattr(shape, ours) for ours, theirs in _THEIR_WORDS.items()},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    # With the tied lm_head.weight: load_state_dict(strict=True) asks for every name.
    tensors = huggingface.to_huggingface(state)
    huggingface.save_safetensors(folder / "model.safetensors", tensors)


def shape_of(folder: Path) -> Shape:
    config = huggingface.read_config(folder)
    if config.get("model_type") != "gpt2":
        raise UsageError(f"{folder} holds a '{config.get('model_type')}', not a gpt2")
    small = SIZES["small"]  # where a config leaves something out
    words = _THEIR_WORDS.items()
    return Shape(**{ours: config.get(word, getattr(small, ours)) for ours, word in words})


def _check(shape: Shape) -> None:
    for f in fields(shape):
        value = getattr(shape, f.name)
        if type(value) is not int or value < 1:
            raise UsageError(f"gpt2's {f.name} must be a whole number of at least 1, got {value!r}")
    if shape.dim % shape.heads:
        raise UsageError(f"gpt2's dim {shape.dim} cannot be divided over {shape.heads} heads")
