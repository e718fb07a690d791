"""The tensors that a model's config.json implies: names, shapes and tied tensors, without any weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollcall.config.yaml import read_small
from rollcall.model.hub import first_line
from rollcall.model.stored.files import StoredError

ROTARY = ".rotary_emb.inv_freq"  # a buffer that a model computes by itself, but that some writers store


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    shapes: dict[str, tuple[int, ...]]
    tied: dict[str, str]  # tied tensor -> the tensor whose values it shares
    # Shapes as stored in a model directory: transformers fuses some tensors on loading, such as a layer's experts.
    written: dict[str, tuple[int, ...]]

    def like(self, names: Iterable[str]) -> Outline:
        """Return the outline with a model directory's tensor names if the stored tensors (``names``) have those names."""
        apart = any(name in self.written and name not in self.shapes for name in names)
        return replace(self, shapes=self.written) if apart else self


def outline_of(folder: Path) -> Outline | None:
    """Build the outline with transformers, or return None if transformers does not support this kind of model. Code in the folder is not
    run."""
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        fields = json.loads(read_small(folder / "config.json"))
        if "auto_map" in fields or fields["model_type"] not in CONFIG_MAPPING:
            return None
        config: Any = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        named = next((getattr(transformers, one, None) for one in config.architectures or ()), None)
        with torch.device("meta"):
            model: Any = (
                transformers.AutoModelForCausalLM.from_config(config) if named is None else named._from_config(config)
            )
            state = model.state_dict()
            written = revert_weight_conversion(model, state)
    except Exception as error:  # noqa: BLE001 - transformers raises all kinds
        raise StoredError(
            f"{folder / 'config.json'} does not describe a model that transformers can build ({first_line(error)}); restore the file"
        ) from None
    shapes, apart = ({name: tuple(one.shape) for name, one in tensors.items()} for tensors in (state, written))
    tied = {name: source for name, source in getattr(model, "all_tied_weights_keys", {}).items() if source in shapes}
    return Outline(shapes=shapes, tied=tied, written=apart)


_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
)  # fmt: skip


# model_type -> its class, and whether q/k/v, the attention output and the MLP have biases (or the config.json key that says so).
_FAMILIES: dict[Any, tuple[str, bool | str, bool | str, bool | str]] = {
    "llama": ("LlamaForCausalLM", "attention_bias", "attention_bias", "mlp_bias"),
    "mistral": ("MistralForCausalLM", False, False, False),
    "qwen2": ("Qwen2ForCausalLM", True, False, False),
    "qwen3": ("Qwen3ForCausalLM", "attention_bias", "attention_bias", False),
}


def known_outline(fields: Mapping[str, Any]) -> Outline | None:
    """Build the outline of a Llama, Mistral, Qwen2 or Qwen3 model from config.json without transformers, which takes seconds to import. A
    test compares it with ``outline_of``. Return None for a config that this does not cover; use ``outline_of`` then. ``fields`` must
    come from ``read_model_config``, which checks the sizes."""
    family = str(fields.get("model_type"))
    is_plain = not {"quantization_config", "auto_map"} & fields.keys()
    if family not in _FAMILIES or not is_plain or any(key not in fields for key in _SIZES):
        return None
    architecture, *keys = _FAMILIES[family]
    qkv_bias, output_bias, mlp_bias = (fields.get(key) if isinstance(key, str) else key for key in keys)
    vocab, hidden, inner, layers, heads, kv_heads = (fields[key] for key in _SIZES)
    # Qwen3 has a different default head size.
    head_dim = fields.get("head_dim", None if family == "qwen3" or hidden % heads else hidden // heads)
    flags = (qkv_bias, output_bias, mlp_bias, fields.get("tie_word_embeddings"))
    is_known = fields.get("architectures") == [architecture] and all(isinstance(one, bool) for one in flags)
    if not is_known or not isinstance(head_dim, int):
        return None
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for name, rows, columns, bias in (
            ("self_attn.q_proj", heads * head_dim, hidden, qkv_bias),
            ("self_attn.k_proj", kv_heads * head_dim, hidden, qkv_bias),
            ("self_attn.v_proj", kv_heads * head_dim, hidden, qkv_bias),
            ("self_attn.o_proj", hidden, heads * head_dim, output_bias),
            ("mlp.gate_proj", inner, hidden, mlp_bias),
            ("mlp.up_proj", inner, hidden, mlp_bias),
            ("mlp.down_proj", hidden, inner, mlp_bias),
        ):
            shapes[f"{at}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{at}.{name}.bias"] = (rows,)
        if family == "qwen3":
            shapes |= {f"{at}.self_attn.{one}_norm.weight": (head_dim,) for one in "qk"}
        shapes |= {f"{at}.{one}_layernorm.weight": (hidden,) for one in ("input", "post_attention")}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if fields["tie_word_embeddings"] else {}
    return Outline(shapes=shapes, tied=tied, written=shapes)
