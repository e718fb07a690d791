"""What tensors the model of a config.json has: names, shapes and which are tied, without any weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollcall.config.yaml import read_small
from rollcall.stored.files import StoredError
from rollcall.stored.usual import usual_shapes

MOST_BYTES = 1 << 24
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


def usual_outline(fields: Mapping[str, Any]) -> Outline | None:
    """Of the fields of a config.json; None: the model is not a usual one."""
    if (shapes := usual_shapes(fields)) is None:
        return None
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if fields["tie_word_embeddings"] else {}
    return Outline(shapes=shapes, tied=tied, written=shapes)


def outline_of(folder: Path) -> Outline | None:
    """None: transformers does not know this kind of model. Nothing of the folder is run, even if it brings code of its own."""
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        fields = json.loads(read_small(folder / "config.json", most=MOST_BYTES))
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
