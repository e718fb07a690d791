"""PEFT's adapter files: ``adapter_model.safetensors`` and ``adapter_config.json``.

PEFT uses transformers' tensor names with the prefix ``base_model.model.``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
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
from rollcall.model.stored.tensors import first_tensors, other_tensors

PICKLED = "adapter_model.bin"
PREFIX = "base_model.model."
MAX_CONFIG_BYTES = 1 << 20
# PEFT config keys that change what an adapter computes and that Rollcall does not support.
OTHER_KINDS = (
    "use_rslora", "use_dora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out", "rank_pattern", "alpha_pattern",
    "modules_to_save", "layers_to_transform", "layer_replication", "trainable_token_indices", "alora_invocation_tokens",
    "target_parameters", "arrow_config", "kasa_config", "monteclora_config",
)  # fmt: skip
# With other initialisations (pissa, olora, ...), PEFT also changes the model's weights every time it opens the adapter.
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")


def _other_kind(fields: Mapping[str, Any]) -> str | None:
    """Return the key that makes this an unsupported kind of adapter, if any."""
    if fields.get("peft_type", "LORA") != "LORA":
        return "peft_type"
    if fields.get("bias", "none") not in ("none", None):
        return "bias"
    if fields.get("init_lora_weights") not in PLAIN_STARTS:
        return "init_lora_weights"
    return next((key for key in OTHER_KINDS if fields.get(key)), None)


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], section: LoraSection, *, base: str) -> None:
    for name, data in adapter_files(tensors, section, base=base).items():
        (folder / name).write_bytes(data)


def adapter_files(tensors: Mapping[str, Tensor], section: LoraSection, *, base: str) -> dict[str, bytes]:
    """Return PEFT's two files by name. ``tensors`` are keyed by decoder names."""
    stored = {PREFIX + module_names(name)[0]: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": section.rank,
        "lora_alpha": int(section.alpha) if section.alpha == int(section.alpha) else section.alpha,
        "lora_dropout": section.dropout,
        "target_modules": list(section.modules),
        "inference_mode": True,
    }  # PEFT's defaults apply to everything else
    data = save(stored, metadata={"format": "pt"})
    return {ADAPTER_WEIGHTS: data, ADAPTER_CONFIG: json.dumps(config, indent=2).encode()}


def read_adapter(folder: Path, section: LoraSection, like: Mapping[str, Tensor], *, where: str) -> dict[str, Tensor]:
    """Read the tensors, keyed by decoder names. Refuse an adapter that does not match ``section`` or the model. ``like`` has the expected
    shapes. ``where`` names the adapter in messages."""
    found = read_section(folder, where=where)
    for name in ("rank", "alpha", "targets"):
        given, there = (_shown(one, name) for one in (section, found))
        if given != there:
            raise ModelFilesError(
                f"{where} has {name} {there}, but model.lora.{name} is {given}; set model.lora.{name}={there}"
            )
    return read_tensors(folder, like, where=where)


def _shown(section: LoraSection, name: str) -> str:
    return f"[{','.join(section.modules)}]" if name == "targets" else f"{getattr(section, name):g}"


def read_section(folder: Path, *, where: str) -> LoraSection:
    """Read the settings in ``adapter_config.json``. Refuse keys that Rollcall does not support."""
    if not (folder / ADAPTER_CONFIG).is_file():
        raise ModelFilesError(f"{where} has no {ADAPTER_CONFIG}; use a directory with an adapter from PEFT or Rollcall")
    try:
        fields = json.loads(read_small(folder / ADAPTER_CONFIG, most=MAX_CONFIG_BYTES))
        if (key := _other_kind(fields)) is not None:
            raise ModelFilesError(
                f"{where}: {ADAPTER_CONFIG} has {key}={json.dumps(fields[key])[:80]}, which is not supported; use a plain LoRA adapter for "
                "linear layers"
            )
        targets = _targets(folder, fields.get("target_modules"), where=where)
        given = dict(rank=fields["r"], alpha=fields["lora_alpha"], dropout=fields.get("lora_dropout") or 0.0)
        return LoraSection.model_validate({**given, "targets": targets})
    except ModelFilesError:
        raise
    except ValidationError as error:
        raise ModelFilesError(
            f"{where}: {ADAPTER_CONFIG} does not describe a LoRA adapter that Rollcall supports: {explain_all(error, LoraSection)}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFilesError(
            f"{where}: {ADAPTER_CONFIG} does not describe a LoRA adapter: {type(error).__name__} {error}"
        ) from None


def read_base(folder: Path, *, where: str) -> str:
    """Return an adapter's base model as a path or a hub name. Refuse a path that does not exist on this machine."""
    try:
        base = json.loads(read_small(folder / ADAPTER_CONFIG, most=MAX_CONFIG_BYTES))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        base = None
    if not isinstance(base, str) or not base:
        raise ModelFilesError(
            f"{where}: {ADAPTER_CONFIG} does not name the base model; set base_model_name_or_path to its path"
        )
    if base.startswith(("/", "~", ".")) and not os.path.isdir(os.path.expanduser(base)):
        raise ModelFilesError(
            f"{where} is an adapter for {base}, which does not exist on this machine; copy the model to that path, or correct "
            f"base_model_name_or_path in {folder / ADAPTER_CONFIG}"
        )
    return base


def _targets(folder: Path, given: Any, *, where: str) -> Any:
    """Resolve PEFT's target modules: names, a pattern or `all-linear`. A pattern is resolved from the stored weights."""
    if isinstance(given, list) and all(isinstance(name, str) for name in given):
        modules = {name.rpartition(".")[2] for name in given}
        return sorted(modules, key=lambda name: TARGETS.index(name) if name in TARGETS else 0)
    names = _header(folder, where=where)
    modules = {name.removesuffix(".lora_A.weight").rpartition(".")[2] for name in names if ".lora_A." in name}
    return [name for name in TARGETS if name in modules]


def _header(folder: Path, *, where: str) -> dict[str, Any]:
    """Read the list of tensors from the weights file. Refuse a file that is not regular or is incomplete."""
    if (folder / PICKLED).exists() and not (folder / ADAPTER_WEIGHTS).exists():
        raise ModelFilesError(
            f"{where} has {PICKLED}, which Rollcall does not read, because such a file can run code; save the adapter as "
            f"{ADAPTER_WEIGHTS}, as PEFT does by default"
        )
    try:
        return dict(read_header(folder / ADAPTER_WEIGHTS)[0])
    except StoredError as error:
        raise ModelFilesError(f"{where}: {error}") from None


def read_tensors(folder: Path, like: Mapping[str, Tensor], *, where: str) -> dict[str, Tensor]:
    header = _header(folder, where=where)
    wanted = {PREFIX + module_names(name)[0]: name for name in like}
    found = {name: entry.shape for name, entry in header.items()}
    if faults := other_tensors(wanted={name: like[own].shape for name, own in wanted.items()}, found=found):
        raise ModelFilesError(f"{where} is an adapter for a different model: {faults}; use an adapter for this model")
    if strange := [name for name in wanted if not header[name].dtype.is_floating_point]:
        stored_as = f"stored as {header[strange[0]].dtype.name}"
        raise ModelFilesError(
            f"{where}: {first_tensors(strange, stored_as)}; use an adapter with floating-point weights"
        )
    stored = load_file(folder / ADAPTER_WEIGHTS)
    if bad := [name for name in wanted if not stored[name].float().isfinite().all()]:
        raise ModelFilesError(
            f"{where}: {first_tensors(bad, 'not finite')}, so the adapter has diverged; use another one, such as an older checkpoint"
        )
    return {own: stored[name] for name, own in wanted.items()}
