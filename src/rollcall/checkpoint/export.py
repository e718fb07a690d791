"""Writes model directories for ``transformers`` and ``vllm``: config, weights, tokenizer and chat template.

Weights are written tensor by tensor, so at most one tensor is copied at a time. This also works for parameters that are views into a
fused tensor: each is written like a separate tensor.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from rollcall.base.atomic import fsync_tree, staging, swap_in
from rollcall.base.errors import CheckpointError
from rollcall.checkpoint.probe import TrainedProbe, with_probe
from rollcall.model.stored.find import PROBE
from rollcall.model.stored.safetensors import write_header
from rollcall.model.tokenizers import special_ids, stop_token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The content of a weight file. ``values`` yields the tensors one by one, in the order of ``kinds``."""

    kinds: Mapping[str, tuple[torch.dtype, torch.Size]]
    values: Iterable[tuple[str, torch.Tensor]]


def export_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dir: Path,
    *,
    stops: Sequence[int] = (),
    probe: TrainedProbe | None = None,
    weights: Weights | None = None,
    adapter: Mapping[str, bytes] | None = None,
) -> Path:
    """Write ``model`` and ``tokenizer`` to ``dir`` atomically.

    Replaces an existing model directory at ``dir``. ``stops`` are the tokens that end a generation; by default, they are those that
    end a rollout of this model. ``probe`` is written next to the weights. If ``model`` is only an outline, pass the ``weights``. To
    write an adapter in place of the weights, pass its files as ``adapter``.
    """
    dir = Path(dir)
    ours = any((dir / name).exists() for name in ("config.json", PROBE))  # either may be missing
    if dir.exists() and (not dir.is_dir() or (any(dir.iterdir()) and not ours)):
        raise ValueError(
            f"{dir} exists and is not a model directory; choose another directory, or remove this one yourself"
        )
    for left in dir.parent.glob(f".tmp-{dir.name}-*"):  # left by an export that was killed
        shutil.rmtree(left, ignore_errors=True)
    try:
        with staging(dir) as tmp:
            files = config_files(model, tokenizer, dtype=model.dtype, stops=stops)
            files = {**(files if probe is None else with_probe(files, probe)), **(adapter or {})}
            for name, data in files.items():
                (tmp / name).parent.mkdir(exist_ok=True)
                (tmp / name).write_bytes(data)
            if adapter is None:
                _write_safetensors(weights or _weights_of(model), tmp / "model.safetensors", dtype=model.dtype)
            fsync_tree(tmp)
            swap_in(tmp, dir)
    except OSError as error:
        raise CheckpointError(
            f"model directory {dir} cannot be written: {error.strerror or error}; free space or make the folder "
            "writable and export again",
            errno=error.errno,
        ) from error
    return dir


def config_files(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, dtype: torch.dtype, stops: Sequence[int] = ()
) -> dict[str, bytes]:
    """Return the config files of a model directory: configs, tokenizer and chat template. ``model`` needs no weights."""
    config = copy.deepcopy(model.config)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    generation = copy.deepcopy(model.generation_config) or GenerationConfig()
    ids = list(stops or stop_token_ids(tokenizer, config, generation))
    config.eos_token_id = generation.eos_token_id = ids[0] if len(ids) == 1 else ids
    generation._from_model_config = False  # otherwise loaders would take these ids for class defaults
    if generation.pad_token_id not in special_ids(tokenizer):
        generation.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    with tempfile.TemporaryDirectory(prefix="rollcall-") as folder:
        config.save_pretrained(folder)
        # save_pretrained would refuse sampling flags that some published models set.
        generation.to_json_file(Path(folder) / "generation_config.json")
        tokenizer.save_pretrained(folder)
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def _weights_of(model: PreTrainedModel) -> Weights:
    """Return the state dict under the names that a loader expects, without tensors that the loader ties."""
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for name, source in getattr(model, "all_tied_weights_keys", {}).items():
        if name in tensors and source in tensors and tensors[name].data_ptr() == tensors[source].data_ptr():
            del tensors[name]
    tensors = revert_weight_conversion(model, tensors)
    return Weights(kinds={name: (one.dtype, one.shape) for name, one in tensors.items()}, values=tensors.items())


def _write_safetensors(weights: Weights, path: Path, *, dtype: torch.dtype) -> None:
    stored = {name: dtype if own.is_floating_point else own for name, (own, _) in weights.kinds.items()}
    with path.open("wb") as file:
        shapes = ((name, stored[name], shape) for name, (_, shape) in weights.kinds.items())
        write_header(file, shapes, metadata={"format": "pt"})
        for name, tensor in weights.values:
            if tensor.is_meta:
                raise ValueError(f"tensor {name} has no values (it is on the meta device), so it cannot be saved")
            flat = tensor.detach().to(device="cpu", dtype=stored[name]).contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)
