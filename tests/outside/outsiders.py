"""Architectures of other people's libraries, tiny, with random weights: nothing is fetched.

Each name of ``OUTSIDERS`` is a workload, ``--workload tests/outside/outsiders.py:NAME``, and stands
there with no more than what its smallest configuration needs. Of architectures that differ in sizes
and activations alone there is one: a new one must do something that no other does.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor, nn

from shardlab.workloads.base import Batch, Workload, tensors_of
from shardlab.workloads.token_loss import token_loss

SAMPLES, WORDS, LENGTH, PIXELS, CLASSES = 32, 64, 12, 32, 5
IGNORED = -100

# `make test-deep` installs torchvision into a folder that nothing else looks into: transformers
# imports torchvision wherever it finds it, and PyPI's torchvision is built for CUDA. With a PyTorch
# for CPUs it has no operators, and cannot be imported unless they are declared. Its classifiers use
# none.
_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
_DEEP = str(Path(sys.prefix) / "deep")
sys.path.append(_DEEP)
try:
    import torchvision
except ModuleNotFoundError:
    pass
except RuntimeError:
    for name in ("nms", "qnms"):
        _OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision  # noqa: F401
finally:
    sys.path.remove(_DEEP)  # a process that we start would inherit it

Inputs = Callable[[torch.Generator], tuple[Any, Tensor | None]]  # of all samples, with targets
Make = Callable[[], nn.Module]


@dataclass(frozen=True)
class Outsider:
    make: Make
    inputs: Inputs
    package: str = "transformers"


# ------------------------------------------------------------------ samples and losses


def _tokens(draw: torch.Generator, length: int = LENGTH) -> Tensor:
    return torch.randint(3, WORDS, (SAMPLES, length), generator=draw)


def words(draw: torch.Generator) -> tuple[Any, Tensor]:
    """Predict each next word."""
    tokens = _tokens(draw, LENGTH + 1)
    return {"input_ids": tokens[:, :-1]}, tokens[:, 1:]


def gaps(draw: torch.Generator) -> tuple[Any, Tensor]:
    """Predict the words that are masked, which differ in number; some rows end in padding."""
    tokens = _tokens(draw)
    masked = torch.rand(tokens.shape, generator=draw) < 0.3
    masked[:, 0] = True
    mask = torch.ones_like(tokens)
    mask[1::3, -2:] = 0
    inputs = {"input_ids": tokens.masked_fill(masked, 1), "attention_mask": mask}
    return inputs, tokens.masked_fill(~masked | (mask == 0), IGNORED)


def answers(draw: torch.Generator) -> tuple[Any, Tensor]:
    """An encoder's words, and a decoder's, each of which is to be predicted from those before."""
    tokens = _tokens(draw, LENGTH + 1)
    inputs = {"input_ids": _tokens(draw), "decoder_input_ids": tokens[:, :-1]}
    return inputs, tokens[:, 1:]


def images(draw: torch.Generator, size: int = PIXELS, name: str = "pixel_values") -> Any:
    pixels = torch.randn(SAMPLES, 3, size, size, generator=draw)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=draw)
    return (pixels if name == "" else {name: pixels}), labels


def real(**shapes: tuple[int, ...]) -> Inputs:
    """Numbers in these shapes. What is to be predicted is a wave of each sample."""

    def inputs(draw: torch.Generator) -> tuple[Any, None]:
        return {n: torch.randn(SAMPLES, *size, generator=draw) for n, size in shapes.items()}, None

    return inputs


@dataclass
class Samples:
    inputs: Any
    targets: Tensor | None  # (SAMPLES,) or (SAMPLES, words)

    def __len__(self) -> int:
        return SAMPLES

    def batch(self, ids: Sequence[int]) -> Batch:
        rows = torch.as_tensor(list(ids), dtype=torch.int64)
        given = self.inputs
        inputs = {n: v[rows] for n, v in given.items()} if isinstance(given, dict) else given[rows]
        if self.targets is None:
            return Batch(inputs, rows, len(rows), len(rows))
        targets = self.targets[rows]
        return Batch(inputs, targets, int((targets != IGNORED).sum()), len(rows))


def _called(model: nn.Module, batch: Batch) -> Tensor:
    """The first tensor that the model returns."""
    found: Any = model(**batch.inputs) if isinstance(batch.inputs, dict) else model(batch.inputs)
    return next(iter(tensors_of(found.to_tuple() if hasattr(found, "to_tuple") else found)))


def named(model: nn.Module, batch: Batch) -> Tensor:
    """The cross-entropy of classes or words, summed."""
    return token_loss(lambda: _called(model, batch), batch.targets)


def waved(model: nn.Module, batch: Batch) -> Tensor:
    """The squares of what differs from a wave of each sample, summed."""
    found = _called(model, batch).flatten(1)  # (rows, numbers)
    places = torch.arange(found.shape[1], dtype=found.dtype, device=found.device)
    wave = torch.cos(places + batch.targets[:, None])
    return (found - wave).square().sum() / found.shape[1]


# ------------------------------------------------------------------ models

SIZES = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 32, "num_labels": CLASSES,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "use_cache": False,
}  # fmt: skip


def hub(kind: str, head: str, inputs: Inputs, **options: Any) -> Outsider:
    """A model of transformers, of this kind and with this head; ``...`` leaves a size out."""
    given = {name: value for name, value in {**SIZES, **options}.items() if value is not ...}

    def make() -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()
        config = transformers.AutoConfig.for_model(kind, **given)
        theirs = getattr(transformers, head)
        model: nn.Module = getattr(theirs, "from_config", theirs)(config)
        return model

    return Outsider(make, inputs)


def causal(kind: str, **options: Any) -> Outsider:
    return hub(kind, "AutoModelForCausalLM", words, **options)


def masked(kind: str, **options: Any) -> Outsider:
    return hub(kind, "AutoModelForMaskedLM", gaps, **options)


def pair(kind: str, **options: Any) -> Outsider:
    return hub(kind, "AutoModelForSeq2SeqLM", answers, **options)


def seen(
    kind: str, size: int = PIXELS, head: str = "AutoModelForImageClassification", **options: Any
) -> Outsider:
    inputs = functools.partial(images, size=size)
    return hub(kind, head, inputs, **{"image_size": size, "patch_size": 8, **options})


def shown(make: Callable[[Any], nn.Module], size: int = PIXELS) -> Outsider:
    """A classifier made from what is in ``torchvision.models``."""

    def made() -> nn.Module:
        from torchvision import models

        return make(models)

    inputs = functools.partial(images, size=size, name="")
    return Outsider(made, inputs, "torchvision")


SEQ2SEQ = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "decoder_start_token_id": 1,
}  # fmt: skip
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
      "num_decoder_layers": 2, "decoder_start_token_id": 0}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
SOUNDS = {
    "conv_dim": (16, 16), "conv_kernel": (10, 4), "conv_stride": (5, 4),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "layerdrop": 0.0,
}  # fmt: skip


def heard(kind: str, **options: Any) -> Outsider:
    return hub(kind, "AutoModel", real(input_values=(400,)), **{**SOUNDS, **options})


# fmt: off
TEXT = {
    "llama": causal("llama", num_hidden_layers=4, **GROUPED),
    "mixtral": causal("mixtral", num_local_experts=4, num_experts_per_tok=2, **GROUPED),
    "qwen3_next": causal(
        "qwen3_next", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
        shared_expert_intermediate_size=24, linear_num_value_heads=4, linear_num_key_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"], **GROUPED
    ),
    "gemma3": causal("gemma3_text", **GROUPED),
    "phi": causal("phi"),
    "gpt_neox": causal("gpt_neox", num_hidden_layers=4),
    "gpt_neo": causal(
        "gpt_neo", num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
        window_size=4
    ),
    "gptj": causal("gptj", n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=32),
    "gpt_oss": causal("gpt_oss", num_local_experts=4, num_experts_per_tok=2, **GROUPED),
    "bloom": causal("bloom", n_layer=2, n_head=4),
    "opt": causal("opt", ffn_dim=48, word_embed_proj_dim=32, layerdrop=0.0, dropout=0.0),
    "opt_layerdrop": causal("opt", ffn_dim=48, word_embed_proj_dim=32, layerdrop=0.3),
    "deepseek_v3": causal(
        "deepseek_v3", moe_intermediate_size=24, n_routed_experts=4, n_shared_experts=1,
        num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1, kv_lora_rank=16,
        q_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8,
        num_key_value_heads=4
    ),
    "mamba": causal("mamba", state_size=8, expand=2, conv_kernel=4),
    "mamba2": causal(
        "mamba2", state_size=8, num_heads=8, head_dim=8, expand=2, n_groups=2, chunk_size=8
    ),
    "rwkv": causal("rwkv", attention_hidden_size=32),
    "recurrent_gemma": causal(
        "recurrent_gemma", lru_width=32, num_hidden_layers=3, attention_window_size=8,
        num_key_value_heads=1
    ),
    "jamba": causal(
        "jamba", num_experts=2, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
        expert_layer_offset=1, mamba_d_state=8, use_mamba_kernels=False, num_key_value_heads=2
    ),
    "xlstm": causal(
        "xlstm", num_heads=4, chunk_size=8, embedding_dim=32, num_blocks=2, qk_dim_factor=0.5
    ),
    "lfm2": causal("lfm2", layer_types=["conv", "full_attention"], num_key_value_heads=2),
    "xlnet": hub(
        "xlnet", "AutoModelForTokenClassification", gaps, num_labels=WORDS,
        max_position_embeddings=..., num_hidden_layers=..., d_model=32, n_layer=2, n_head=4,
        d_inner=48
    ),
    "roberta": masked("roberta", **STILL),
    "albert": masked("albert", embedding_size=16, **STILL),
    "deberta": masked(
        "deberta-v2", relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"]
    ),
    "squeezebert": masked("squeezebert", embedding_size=32),
    "funnel": masked(
        "funnel", num_hidden_layers=..., num_attention_heads=..., d_model=32, n_head=4, d_head=8,
        d_inner=48, block_sizes=[1, 1]
    ),
    "fnet": hub("fnet", "AutoModelForMaskedLM", words),
    "modernbert": masked("modernbert", local_attention=4, global_attn_every_n_layers=2),
    "big_bird": masked("big_bird", attention_type="original_full"),
    "longformer": hub("longformer", "AutoModelForMaskedLM", gaps, attention_window=[4, 4]),
    "esm": masked("esm", mask_token_id=1, position_embedding_type="rotary"),
    "perceiver": hub(
        "perceiver", "AutoModelForMaskedLM", gaps, num_latents=4, d_latents=32, d_model=32,
        num_blocks=1, num_self_attends_per_block=2, num_self_attention_heads=4,
        num_cross_attention_heads=4, max_position_embeddings=LENGTH, qk_channels=32, v_channels=32
    ),
    "t5": pair("t5", dropout_rate=0.0, **T5),
    "switch": pair(
        "switch_transformers", num_experts=4, num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1, **T5
    ),
    "bart": pair("bart", **SEQ2SEQ),
    "led": pair(
        "led", attention_window=[4, 4], max_encoder_position_embeddings=32,
        max_decoder_position_embeddings=32, **SEQ2SEQ
    ),
    "prophetnet": pair(
        "prophetnet", num_hidden_layers=..., num_encoder_layers=2, num_decoder_layers=2,
        num_encoder_attention_heads=4, num_decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, num_buckets=8, relative_max_distance=16
    ),
}

VISION = {
    "vit": seen("vit"),
    "swinv2": seen(
        "swinv2", patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4,
        num_attention_heads=..., num_hidden_layers=...
    ),
    "convnext": seen("convnext", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2),
    "segformer": seen(
        "segformer", hidden_sizes=[16, 32], depths=[1, 1], num_encoder_blocks=2, sr_ratios=[2, 1],
        patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[2, 2], mlp_ratios=[2, 2],
        decoder_hidden_size=16
    ),
    "mobilevit": seen(
        "mobilevit", hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 48],
        patch_size=2
    ),
    "levit": seen(
        "levit", 64, head="LevitForImageClassification", hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 2, 2], depths=[1, 1, 1], key_dim=[8, 8, 8], patch_size=16
    ),
    "dinov2": seen("dinov2"),
    "hiera": seen(
        "hiera", embed_dim=16, depths=[1, 1], num_heads=[1, 2], patch_size=[7, 7],
        patch_stride=[4, 4], patch_padding=[3, 3], num_query_pool=1, query_stride=[2, 2],
        masked_unit_size=[2, 2], image_size=[32, 32]
    ),
    "siglip_vision": hub(
        "siglip_vision_model", "AutoModel", real(pixel_values=(3, 32, 32)), image_size=32,
        patch_size=8
    ),
    "vit_mae": hub(
        "vit_mae", "AutoModel", real(pixel_values=(3, 32, 32)), image_size=32, patch_size=8
    ),
    "videomae": hub(
        "videomae", "AutoModelForVideoClassification", real(pixel_values=(4, 3, 16, 16)),
        image_size=16, patch_size=8, num_frames=4
    ),
    "dpt": hub(
        "dpt", "AutoModelForDepthEstimation", real(pixel_values=(3, 32, 32)), image_size=32,
        patch_size=8, num_hidden_layers=4, backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=16
    ),
    "swin2sr": hub(
        "swin2sr", "AutoModel", real(pixel_values=(3, 16, 16)), image_size=16, patch_size=1,
        embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4, num_attention_heads=...,
        num_hidden_layers=..., hidden_size=...
    ),
}

SOUND = {
    "wav2vec2": heard("wav2vec2"),
    "wav2vec2_layerdrop": heard("wav2vec2", layerdrop=0.3),
    "wav2vec2_bert": hub(
        "wav2vec2-bert", "AutoModel", real(input_features=(16, 20)),
        feature_projection_input_dim=20, layerdrop=0.0, mask_time_prob=0.0
    ),
    "wav2vec2_conformer": heard("wav2vec2-conformer", conv_depthwise_kernel_size=3),
    "spectrogram": hub(
        "audio-spectrogram-transformer", "AutoModel", real(input_values=(24, 16)), patch_size=8,
        num_mel_bins=16, max_length=24, frequency_stride=8, time_stride=8
    ),
    "whisper_encoder": hub(
        "whisper", "WhisperForAudioClassification", real(input_features=(8, 40)), num_mel_bins=8,
        max_source_positions=20, **SEQ2SEQ
    ),
}

SERIES = {
    "patchtst": hub(
        "patchtst", "PatchTSTForPrediction", real(past_values=(24, 2)), num_input_channels=2,
        context_length=24, prediction_length=6, patch_length=4, patch_stride=4, d_model=16,
        ffn_dim=24, loss="mse"
    ),
}

TORCHVISION = {
    "tv_resnext": shown(lambda m: m.resnet.ResNet(
        m.resnet.Bottleneck, [2, 1, 1, 1], CLASSES, groups=8, width_per_group=1
    )),
    "tv_mobilenet_v3": shown(lambda m: m.mobilenet_v3_small(num_classes=CLASSES, width_mult=0.25)),
    "tv_shufflenet": shown(lambda m: m.ShuffleNetV2([2, 2, 2], [8, 16, 32, 32, 32], CLASSES)),
    "tv_squeezenet": shown(lambda m: m.SqueezeNet("1_1", CLASSES), 64),
    "tv_densenet": shown(lambda m: m.DenseNet(4, (2, 2), 8, num_classes=CLASSES)),
    "tv_efficientnet": shown(lambda m: m.EfficientNet([
        m.efficientnet.MBConvConfig(4, 3, 2, 16, 16, 2),
        m.efficientnet.FusedMBConvConfig(2, 3, 1, 16, 24, 2),
    ], 0.2, num_classes=CLASSES)),
    "tv_swin": shown(lambda m: m.SwinTransformer(
        [4, 4], 16, [2, 2], [2, 2], [4, 4], stochastic_depth_prob=0.0, num_classes=CLASSES
    )),
    "tv_maxvit": shown(lambda m: m.MaxVit(
        (PIXELS, PIXELS), 8, 4, [8, 16], [1, 1], 8, 0.1, num_classes=CLASSES
    )),
}

OUTSIDERS = {**TEXT, **VISION, **SOUND, **SERIES, **TORCHVISION}

# The words of each refusal. What no sample uses, or only some, PyTorch's DDP would wait for.
UNUSED = {"pytorch_ddp": "set the strategy's option find_unused_parameters"}
DROPS = {**UNUSED, "pytorch_zero3": "FSDP needs all ranks to run the same blocks"}
REFUSED: dict[str, dict[str, str]] = {
    **dict.fromkeys((
        "big_bird", "dinov2", "dpt", "esm", "fnet", "led", "longformer", "siglip_vision",
        "squeezebert", "switch", "wav2vec2_conformer", "xlnet",
    ), UNUSED),
    "opt_layerdrop": DROPS,
    "wav2vec2_layerdrop": DROPS,
}
# The same of those that are cut along the axes as well.
TENSOR = ("tensor_parallel", "sequence_parallel", "pytorch_tensor_parallel")
PIPELINES = (
    "pipeline_gpipe", "pipeline_1f1b", "pipeline_interleaved", "pipeline_zero_bubble",
    "pytorch_pipeline",
)
NO_SPLITS = dict.fromkeys(TENSOR, "give it splits")
NO_CONTEXT = {"context_parallel": "give it a context"}
FEW_BLOCKS = {"pipeline_interleaved": "4 stages need as many blocks"}
STRIDED = {"pytorch_pipeline": "input tensor has to be contiguous"}
RANDOM = dict.fromkeys((*TENSOR, "context_parallel", *PIPELINES), "draws random numbers")
CUT: dict[str, dict[str, str]] = {
    "llama": {},
    "gpt_neox": NO_SPLITS,
    "mixtral": {**NO_SPLITS, **FEW_BLOCKS},
    "gemma3": {**NO_SPLITS, **FEW_BLOCKS},
    "gpt_oss": {**NO_SPLITS, **FEW_BLOCKS, "context_parallel": "attn_implementation='sdpa'"},
    "qwen3_next": {**NO_SPLITS, **FEW_BLOCKS, "context_parallel": "differs by"},
    "bloom": {**NO_SPLITS, **NO_CONTEXT, **FEW_BLOCKS},
    "mamba": {**NO_SPLITS, **NO_CONTEXT, **FEW_BLOCKS},
    "roberta": {**NO_SPLITS, **FEW_BLOCKS, "context_parallel": "differs by"},
    "albert": {
        **NO_SPLITS, **dict.fromkeys(PIPELINES, "the workload names no blocks"),
        "context_parallel": "attends in both directions",
    },
    "t5": {**NO_SPLITS, **NO_CONTEXT, **FEW_BLOCKS, **STRIDED},
    "vit": {**NO_SPLITS, **NO_CONTEXT, **FEW_BLOCKS},
    "convnext": {**NO_SPLITS, **NO_CONTEXT, **FEW_BLOCKS, **STRIDED},
    "patchtst": {**NO_SPLITS, **NO_CONTEXT, **FEW_BLOCKS},
    "tv_resnext": {
        **NO_SPLITS, **NO_CONTEXT, **dict.fromkeys(PIPELINES, "outside of the blocks changes the"),
        **FEW_BLOCKS,
    },
    # It draws for layers that it may leave out, which are none here.
    "opt": {**RANDOM, **NO_SPLITS, **FEW_BLOCKS},
    "tv_swin": {**NO_SPLITS, **NO_CONTEXT, **FEW_BLOCKS},
}
# fmt: on


def workload(name: str) -> Workload:
    outsider = OUTSIDERS[name]
    inputs, targets = outsider.inputs(torch.Generator().manual_seed(0))
    return Workload(
        name, outsider.make, waved if targets is None else named, Samples(inputs, targets)
    )


def __getattr__(name: str) -> Workload:
    if name not in OUTSIDERS:
        raise AttributeError(name)
    return workload(name)
