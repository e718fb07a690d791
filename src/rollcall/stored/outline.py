"""The tensors of the model that a config.json describes: names, shapes and which are tied, without any weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollcall.config.yaml import read_small
from rollcall.stored.files import StoredError

ROTARY = ".rotary_emb.inv_freq"  # a buffer that a model computes, and that some writers store with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    shapes: dict[str, tuple[int, ...]]
    tied: dict[str, str]  # a tensor that is the same as another: name of the other
    # As a model directory has them: transformers fuses some tensors when it loads them, such as a layer's experts.
    written: dict[str, tuple[int, ...]]

    def like(self, names: Iterable[str]) -> Outline:
        """The same model with the names of a model directory, if the stored ``names`` are those."""
        apart = any(name in self.written and name not in self.shapes for name in names)
        return replace(self, shapes=self.written) if apart else self


def outline_of(folder: Path) -> Outline | None:
    """The outline as transformers has it, or None if it does not know this kind of model. Nothing of the folder is run, even if it brings code of its own."""
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
        lines = str(error).strip().splitlines()
        raise StoredError(
            f"{folder / 'config.json'} does not describe a model that transformers can build ({lines[0] if lines else type(error).__name__}); restore the file"
        ) from None
    shapes, apart = ({name: tuple(one.shape) for name, one in tensors.items()} for tensors in (state, written))
    tied = {name: source for name, source in getattr(model, "all_tied_weights_keys", {}).items() if source in shapes}
    return Outline(shapes=shapes, tied=tied, written=apart)


_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """``*_bias`` is True, False, or the key of config.json that says so."""

    architecture: str
    qkv_bias: bool | str
    output_bias: bool | str
    mlp_bias: bool | str = False
    head_norms: bool = False
    head_dim_in_config: bool = False  # it has another default than hidden_size / num_attention_heads


_FAMILIES = {
    "llama": _Family(
        architecture="LlamaForCausalLM", qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"
    ),
    "mistral": _Family(architecture="MistralForCausalLM", qkv_bias=False, output_bias=False),
    "qwen2": _Family(architecture="Qwen2ForCausalLM", qkv_bias=True, output_bias=False),
    "qwen3": _Family(
        architecture="Qwen3ForCausalLM", qkv_bias="attention_bias", output_bias="attention_bias", head_norms=True,
        head_dim_in_config=True,
    ),
}  # fmt: skip


def known_outline(fields: Mapping[str, Any]) -> Outline | None:
    """The outline of a Llama, Mistral, Qwen2 or Qwen3 from config.json alone, since transformers takes seconds to import (a test compares
    the two). None: the config leaves something open or has anything unusual, so ask ``outline_of``. ``fields`` are those of a config.json
    whose sizes are possible (``read_model_config``)."""
    family = _FAMILIES.get(str(fields.get("model_type")))
    if family is None or not _is_plain(fields, family):
        return None
    vocab, hidden, inner, layers, heads, kv_heads = (fields[key] for key in _SIZES)
    head_dim = fields.get("head_dim", hidden // heads)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for name, rows, columns, bias in (
            ("self_attn.q_proj", heads * head_dim, hidden, family.qkv_bias),
            ("self_attn.k_proj", kv_heads * head_dim, hidden, family.qkv_bias),
            ("self_attn.v_proj", kv_heads * head_dim, hidden, family.qkv_bias),
            ("self_attn.o_proj", hidden, heads * head_dim, family.output_bias),
            ("mlp.gate_proj", inner, hidden, family.mlp_bias),
            ("mlp.up_proj", inner, hidden, family.mlp_bias),
            ("mlp.down_proj", hidden, inner, family.mlp_bias),
        ):
            shapes[f"{at}.{name}.weight"] = (rows, columns)
            if bias if isinstance(bias, bool) else fields[bias]:
                shapes[f"{at}.{name}.bias"] = (rows,)
        if family.head_norms:
            shapes |= {f"{at}.self_attn.{one}_norm.weight": (head_dim,) for one in "qk"}
        shapes |= {f"{at}.{one}_layernorm.weight": (hidden,) for one in ("input", "post_attention")}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if fields["tie_word_embeddings"] else {}
    return Outline(shapes=shapes, tied=tied, written=shapes)


def _is_plain(fields: Mapping[str, Any], family: _Family) -> bool:
    """Whether the config gives everything that the shapes depend on, and transformers has nothing to refuse."""
    if fields.get("architectures") != [family.architecture] or any(key not in fields for key in _SIZES):
        return False
    flags = {"tie_word_embeddings", *(key for key in (family.qkv_bias, family.mlp_bias) if isinstance(key, str))}
    if not all(isinstance(fields.get(key), bool) for key in flags):
        return False
    if "head_dim" in fields or family.head_dim_in_config:
        if not isinstance(fields.get("head_dim"), int):
            return False
    elif fields["hidden_size"] % fields["num_attention_heads"]:
        return False
    padding = fields.get("pad_token_id")
    if padding is not None and not (isinstance(padding, int) and 0 <= padding < fields["vocab_size"]):
        return False
    kinds = fields.get("layer_types")
    known = ("full_attention", "sliding_attention")
    if kinds is not None and not (
        isinstance(kinds, list) and len(kinds) == fields["num_hidden_layers"] and all(one in known for one in kinds)
    ):
        return False
    return (
        fields.get("hidden_act") == "silu"
        and _is_plain_rope(fields)
        and not {"quantization_config", "auto_map"} & fields.keys()
    )


def _is_plain_rope(fields: Mapping[str, Any]) -> bool:
    """As transformers 4 (``rope_theta``) and 5 (``rope_parameters``) write it for positions that are not stretched."""
    rope = fields.get("rope_parameters")
    if rope is None:
        return fields.get("rope_scaling") is None and isinstance(fields.get("rope_theta"), int | float)
    return (
        isinstance(rope, dict)
        and rope.keys() == {"rope_theta", "rope_type"}
        and rope["rope_type"] == "default"
        and isinstance(rope["rope_theta"], int | float)
    )
