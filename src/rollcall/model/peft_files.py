"""PEFT's files of an adapter: ``adapter_model.safetensors`` and ``adapter_config.json``.

PEFT calls a tensor what transformers would call it, with ``base_model.model.`` before that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from rollcall.base.errors import ModelFilesError
from rollcall.config.errors import explain_all
from rollcall.config.lora import TARGETS, LoraSection
from rollcall.config.yaml import read_small
from rollcall.model.decoder import module_names
from rollcall.model.stored.files import StoredError
from rollcall.model.stored.find import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from rollcall.model.stored.safetensors import read_header

PICKLED = "adapter_model.bin"
PREFIX = "base_model.model."
MAX_CONFIG_BYTES = 1 << 20
# Keys of PEFT that change what an adapter computes, with the values that are understood here.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": (None, []),
    "layers_to_transform": (None,),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "target_parameters": (None, []),
    # Other ways to begin (pissa, olora, ...) change the model's weights too, each time that PEFT opens the adapter.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
}


def peft_config(section: LoraSection, *, base: str) -> dict[str, Any]:
    """The content of ``adapter_config.json``; ``base`` is where the model is."""
    alpha = section.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": section.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": section.dropout,
        "target_modules": list(section.modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "layers_to_transform": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], section: LoraSection, *, base: str) -> None:
    """PEFT's two files. ``tensors`` are by the decoder's names."""
    stored = {PREFIX + module_names(name)[0]: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    (folder / ADAPTER_WEIGHTS).write_bytes(
        save(stored, metadata={"format": "pt"})
    )  # its own writer would leave it unreadable to others
    (folder / ADAPTER_CONFIG).write_text(json.dumps(peft_config(section, base=base), indent=2))


def read_adapter(folder: Path, section: LoraSection, like: Mapping[str, Tensor], *, where: str) -> dict[str, Tensor]:
    """The tensors by the decoder's names; refuses an adapter that is not what ``section`` says, or not of the model. ``like`` has their
    shapes; ``where`` names the adapter in messages."""
    found = read_section(folder, where=where)
    for name in ("rank", "alpha", "targets"):
        given, there = (_shown(one, name) for one in (section, found))
        if given != there:
            raise ModelFilesError(
                f"{where} has {name} {there}, and model.lora.{name} is {given}; write model.lora.{name}={there}"
            )
    return read_tensors(folder, like, where=where)


def _shown(section: LoraSection, name: str) -> str:
    return f"[{','.join(section.modules)}]" if name == "targets" else f"{getattr(section, name):g}"


def read_section(folder: Path, *, where: str) -> LoraSection:
    """The settings in ``adapter_config.json``; refuses by key what Rollcall does not compute."""
    if not (folder / ADAPTER_CONFIG).is_file():
        raise ModelFilesError(
            f"{where} has no {ADAPTER_CONFIG}; give a directory that PEFT or Rollcall has written an adapter to"
        )
    try:
        fields = json.loads(read_small(folder / ADAPTER_CONFIG, most=MAX_CONFIG_BYTES))
        strange = next(
            ((key, fields[key]) for key, fine in PLAIN.items() if key in fields and fields[key] not in fine), None
        )
        if strange is not None:
            raise ModelFilesError(
                f"{where}: {ADAPTER_CONFIG} has {strange[0]}={json.dumps(strange[1])[:80]}, which is not supported; give a plain LoRA adapter of "
                "linear layers"
            )
        targets = _targets(folder, fields.get("target_modules"), where=where)
        return LoraSection.model_validate(
            {
                "rank": fields["r"],
                "alpha": fields["lora_alpha"],
                "targets": targets,
                "dropout": fields.get("lora_dropout") or 0.0,
            }
        )
    except ModelFilesError:
        raise
    except ValidationError as error:
        raise ModelFilesError(
            f"{where}: {ADAPTER_CONFIG} is not that of a LoRA adapter which works here: {explain_all(error, LoraSection)}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFilesError(
            f"{where}: {ADAPTER_CONFIG} is not that of a LoRA adapter: {type(error).__name__} {error}"
        ) from None


def read_base(folder: Path, *, where: str) -> str:
    """Where the model of an adapter is, as a path or a name on the hub; refuses a path that does not exist here."""
    try:
        base = json.loads(read_small(folder / ADAPTER_CONFIG, most=MAX_CONFIG_BYTES))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        base = None
    if not isinstance(base, str) or not base:
        raise ModelFilesError(
            f"{where}: {ADAPTER_CONFIG} does not say which model the adapter is of; write its path as base_model_name_or_path"
        )
    if base.startswith(("/", "~", ".")) and not os.path.isdir(os.path.expanduser(base)):
        raise ModelFilesError(
            f"{where} is an adapter of {base}, which does not exist here; put the model there, or correct base_model_name_or_path in "
            f"{folder / ADAPTER_CONFIG}"
        )
    return base


def _targets(folder: Path, given: Any, *, where: str) -> Any:
    """PEFT takes names, a pattern or `all-linear`; what a pattern means, the weights show."""
    if isinstance(given, list) and all(isinstance(name, str) for name in given):
        return sorted(
            {name.rpartition(".")[2] for name in given}, key=lambda name: TARGETS.index(name) if name in TARGETS else 0
        )
    names = _header(folder, where=where)
    modules = {name.removesuffix(".lora_A.weight").rpartition(".")[2] for name in names if ".lora_A." in name}
    return [name for name in TARGETS if name in modules]


def _header(folder: Path, *, where: str) -> dict[str, Any]:
    """The tensors that the weights' file lists. It is a regular file, and whole."""
    if (folder / PICKLED).exists() and not (folder / ADAPTER_WEIGHTS).exists():
        raise ModelFilesError(
            f"{where} has {PICKLED}, which is not read, since such a file may run code; save the adapter as {ADAPTER_WEIGHTS}, as PEFT does by default"
        )
    try:
        return dict(read_header(folder / ADAPTER_WEIGHTS)[0])
    except StoredError as error:
        raise ModelFilesError(f"{where}: {error}") from None


def read_tensors(folder: Path, like: Mapping[str, Tensor], *, where: str) -> dict[str, Tensor]:
    header = _header(folder, where=where)
    wanted = {PREFIX + module_names(name)[0]: name for name in like}
    for fault, names in (
        ("lacks", sorted(wanted.keys() - header.keys())),
        ("has, besides those of the model,", sorted(header.keys() - wanted.keys())),
        (
            "has in another shape",
            sorted(name for name in wanted.keys() & header.keys() if header[name].shape != like[wanted[name]].shape),
        ),
    ):
        if names:
            raise ModelFilesError(
                f"{where} {fault} {_first_of(names)}: it is an adapter of another model; give one of this model"
            )
    if strange := sorted(name for name in wanted if not header[name].dtype.is_floating_point):
        raise ModelFilesError(
            f"{where} has {_first_of(strange)} as {header[strange[0]].dtype.name}; give an adapter whose numbers are floats"
        )
    try:
        stored = load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelFilesError(f"{where}: {ADAPTER_WEIGHTS} cannot be read ({error}); restore the file") from None
    if bad := sorted(name for name in wanted if not stored[name].float().isfinite().all()):
        raise ModelFilesError(
            f"{where} has values that are not finite in {_first_of(bad)}, so the adapter has diverged; give another, such as an older checkpoint"
        )
    return {own: stored[name] for name, own in wanted.items()}


def _first_of(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
