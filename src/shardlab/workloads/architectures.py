"""How Hugging Face's causal language models may be split over ranks, by their architecture."""

from __future__ import annotations

from typing import Any

from torch import nn

# Architectures whose attention counts its heads from what its layers give it. Others may look up
# their number elsewhere, so that it would be wrong where ranks share the heads.
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "granite", "olmo", "smollm3")
GPT2 = "gpt2"

_COLUMNS = ("gate_proj", "up_proj", "c_fc")
_ROWS = ("o_proj", "down_proj", "c_proj")


def known_splits(model: nn.Module) -> dict[str, str] | None:
    """What ``Workload.splits`` would say of such a model; None, if it is of none of these."""
    theirs: Any = model  # with methods that a plain nn.Module does not have
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind not in (*LLAMA_LIKE, GPT2) or not hasattr(model, "get_output_embeddings"):
        return None
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    of_layer = {
        "q_proj": f"heads {heads}",
        "k_proj": f"heads {kv_heads}",
        "v_proj": f"heads {kv_heads}",
        "c_attn": f"heads {heads} {heads} {heads}",
        **dict.fromkeys(_COLUMNS, "columns"),
        **dict.fromkeys(_ROWS, "rows"),
        **dict.fromkeys(("self_attn", "attn", "mlp"), "branch"),
    }
    found: dict[str, str] = {}
    layers = next((n for n, m in model.named_modules() if isinstance(m, nn.ModuleList)), "")
    for name, module in model.named_modules(remove_duplicate=False):
        inside = name.removeprefix(f"{layers}.") if layers and name != layers else name
        _, _, rest = inside.partition(".")
        last = name.rpartition(".")[2]
        if module in (theirs.get_input_embeddings(), theirs.get_output_embeddings()):
            found[name] = "vocabulary"
        elif inside == name:
            if list(module.parameters(recurse=False)):
                found[name] = "whole"  # positions, the last norm
        elif not rest:
            found[f"{layers}.*"] = "block"
        elif last in of_layer:
            found[f"{layers}.*.{rest}"] = of_layer[last]
        elif type(module).__name__.endswith("Norm"):
            found[f"{layers}.*.{rest}"] = "norm" if "." not in rest else "inside"
    if kind == GPT2:
        found[f"{layers}.*.attn.split_size"] = "number"
    return found
