"""Loads models and tokenizers."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollcall.base.errors import ModelFilesError
from rollcall.model.adapter import Adapter, add_to_weights
from rollcall.model.base import refuse_other_model
from rollcall.model.decoder import Decoder, UnsupportedModel, fuse_parameters, refuse_unsupported
from rollcall.model.fetch import fetch_model
from rollcall.model.files import check_model_dir, model_folder
from rollcall.model.hub import HubError, cached_folder, first_line, hub_options
from rollcall.model.peft_files import read_base, read_section, read_tensors
from rollcall.model.stored.files import StoredError
from rollcall.model.stored.find import ADAPTER_CONFIG, adapter_folder, is_model_dir
from rollcall.model.stored.open import open_stored
from rollcall.model.stored.outline import ROTARY
from rollcall.model.stored.safetensors import read_header, weight_files
from rollcall.model.stored.tensors import DTYPES, Stored, first_tensors, name_of, other_tensors, refuse_whole_numbers

HEAD = "lm_head.weight"

# transformers (5.x) patches ``tie_weights`` on its class while it loads. If two threads loaded at once, the patch could remain.
_one_at_a_time = threading.RLock()


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelFilesError("model.device=cuda, but torch sees no CUDA device; use model.device=cpu or auto")
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name == "bfloat16" and device.type == "cpu" and not has_bfloat16():
        raise ModelFilesError(
            "model.dtype=bfloat16 needs a CUDA device or a CPU with bfloat16 instructions (AVX-512, ARM with bf16), but this machine has "
            "neither; use model.dtype=float32 or auto"
        )
    return getattr(torch, name)


def has_bfloat16() -> bool:
    """Return whether torch supports bfloat16 matrix products on this CPU. Without AMX or similar, they may not be faster."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class WholeOnly(ModelFilesError):
    """The weights cannot be read in blocks. The message says why."""


def load_causal_lm(path: str, *, device: torch.device, dtype: torch.dtype, trust_remote_code: bool = False) -> Any:
    """Load an AutoModelForCausalLM with fused parameters. The model only stores the weights; its own forward method is not used.

    The weights are copied to the device piece by piece, so that loading takes little host memory, even if many processes on a node
    load at once. transformers loads files in other formats, and files whose tensor names must be converted."""
    check_model_path(path)
    if (folder := adapter_folder(Path(path).expanduser())) is not None:
        return _load_with_adapter(path, folder, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    outline = outline_causal_lm(path, dtype=dtype, trust_remote_code=trust_remote_code)
    try:
        return fill(outline, open_unread(path, outline), device=device, path=path)
    except WholeOnly:
        if is_stored(path):
            raise
    from transformers import AutoModelForCausalLM

    with loading(f"model.path={path}"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            trust_remote_code=trust_remote_code,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            **hub_options(path),
        )
    model, info = loaded
    refuse_loaded(f"model.path={path}", info, leave_out=lambda name: name.endswith(ROTARY))
    refuse_cast(f"model.path={path}", path, model)
    return _ready(model.to(device), path)


def open_unread(path: str, model: Any, *, fetch: bool = False, compares_head: bool = True) -> Stored:
    """Open the stored weights of ``model``, the outline of the model at ``path``. This may be any kind of checkpoint that ``stored/`` can
    open, or a model directory with safetensors whose tensor names and shapes match the model. Raise WholeOnly for everything else. With
    ``fetch``, download a hub model first if it is not in the cache. With ``compares_head``, if the config ties the head, but there is a
    stored head, compare it with the embeddings. This reads both in full, so only one process of a gang does it."""
    folder = Path(path).expanduser() if is_stored(path) else _folder_of(path, fetch=fetch)
    try:
        stored = open_stored(folder)
    except StoredError as error:
        raise WholeOnly(f"model.path={path}: {error}") from None
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = {name: tensor.shape for name, tensor in stored.tensors.items()}
    extra = {name for name in found.keys() - wanted.keys() if name == HEAD or name.endswith(ROTARY)}
    try:
        refuse_other_tensors(
            f"model.path={path}", wanted=wanted, found={name: found[name] for name in found.keys() - extra}
        )
    except ModelFilesError as error:
        raise WholeOnly(str(error)) from None
    if HEAD in extra and compares_head and not stored.are_equal(HEAD, "model.embed_tokens.weight"):
        # transformers would use the stored head.
        raise WholeOnly(
            f"{stored.origin} has an output head that differs from the embeddings, but config.json ties them"
        )
    refuse_whole_numbers(stored.types, wanted, origin=f"model.path={path}")
    return stored


def _folder_of(path: str, *, fetch: bool) -> Path:
    """Return the weights directory of a local model or of a model in the hub cache."""
    local = model_folder(path)
    folder = local or cached_folder(path)
    if fetch and local is None and not (folder and any(folder.glob("*.safetensors"))):
        try:
            folder = fetch_model(path)
        except HubError as error:
            raise WholeOnly(str(error)) from None
    if folder is None or not any(folder.glob("*.safetensors")):
        raise WholeOnly(f"{folder or path} has no safetensors" + ("" if folder else " in the hub's cache"))
    return folder


@torch.no_grad()
def fill(outline: Any, stored: Stored, *, device: torch.device, path: str) -> Any:
    """Turn the outline into a model with the stored weights on ``device``."""
    model, rotary = outline.to_empty(device=device), outline.model.rotary_emb
    model.model.rotary_emb = type(rotary)(rotary.config).to(device)  # computed, not stored
    with _one_at_a_time:
        model.tie_weights()
    for name, parameter in model.named_parameters():
        for start, piece in stored.runs(name):
            parameter[start : start + len(piece)].copy_(piece.to(parameter.dtype))
    return _ready(model, path)


def _ready(model: Any, path: str) -> Any:
    model = model.eval().requires_grad_(False)
    refuse_diverged(path, non_finite_of(dict(model.named_parameters()), dtype=model.dtype))
    fuse_parameters(model)
    return model


def each_tensor(model: Any, stored: Stored, *, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield an outline's stored weights one by one, in the outline's dtype."""
    for name, parameter in model.named_parameters():
        tensor = stored.read(name).to(parameter.dtype)
        refuse_diverged(path, non_finite_of({name: tensor}, dtype=tensor.dtype))
        yield name, tensor


def refuse_cast(what: str, path: str, model: Any) -> None:
    """Refuse a loaded model whose files contain weights that are not floating-point numbers, because transformers casts them silently."""
    folder = model_folder(path) or cached_folder(path)
    if folder is None or getattr(model.config, "quantization_config", None) is not None:
        return  # the config says how to read them
    paths = weight_files(folder)[0]
    types = {name: entry.dtype for file in paths for name, entry in read_header(file)[0].items()}
    for file in () if paths else folder.glob("pytorch_model*.bin"):
        held = torch.load(file, map_location="meta", weights_only=True)
        types |= {name: DTYPES[name_of(one.dtype)] for name, one in held.items() if isinstance(one, Tensor)}
    refuse_whole_numbers(types, dict(model.named_parameters(remove_duplicate=False)), origin=what)


def refuse_diverged(path: str, bad: Sequence[str]) -> None:
    """Refuse the model if ``bad``, the names of the tensors with non-finite values, is not empty."""
    if bad:
        raise ModelFilesError(
            f"model.path={path}: {first_tensors(bad, 'not finite')}, so the model has diverged; use "
            "another one, such as an older checkpoint"
        )


def _load_with_adapter(
    path: str, folder: Path, *, device: torch.device, dtype: torch.dtype, trust_remote_code: bool
) -> Any:
    """Load an adapter's base model and add the adapter to its weights."""
    where = f"model.path={path}"
    section, base = read_section(folder, where=where), bases_of(folder, where=where)[0]
    model = load_causal_lm(base, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    refuse_other_model(folder, model, Decoder.of(model).named_tensors().items(), base=base, where=where)
    outline = Adapter.make(Decoder.of(model), section, seed=0, device=device, base=base)
    tensors = read_tensors(folder, outline.named_tensors(), where=where)
    try:
        add_to_weights(model, tensors, gain=section.gain)
    except ModelFilesError as error:
        raise ModelFilesError(f"{where}: {error}") from None
    _take_generation_config(model, str(folder))  # it contains the run's own stop tokens
    return model


def _take_generation_config(model: Any, path: str) -> None:
    from transformers import GenerationConfig

    with loading(f"model.path={path}"), suppress(OSError):  # many small models have no such file
        model.generation_config = GenerationConfig.from_pretrained(path, **hub_options(path))


def bases_of(folder: Path, *, where: str) -> list[str]:
    """Return the chain of base models of an adapter. A base may be an adapter too, but the last one is a full model."""
    seen: list[Path] = []
    found: list[str] = []
    one: Path | None = folder
    while one is not None:
        if one.resolve() in seen:
            raise ModelFilesError(
                f"{where} is an adapter whose base model leads back to {one}; correct base_model_name_or_path in {one / ADAPTER_CONFIG}"
            )
        seen.append(one.resolve())
        found.append(read_base(one, where=where))
        base = Path(found[-1]).expanduser()
        one = adapter_folder(base) if base.is_dir() else None
    return found


def is_stored(path: str) -> bool:
    """Return whether a local path is a checkpoint (ours or another tool's), not a directory that transformers can open."""
    local = Path(path).expanduser()
    return local.is_dir() and not is_model_dir(local)


def outline_causal_lm(path: str, *, dtype: torch.dtype, trust_remote_code: bool = False) -> Any:
    """Build the model of ``load_causal_lm`` without loading weights. Its parameters are on the meta device."""
    from transformers import AutoModelForCausalLM

    path, config = _load_config(path, trust_remote_code=trust_remote_code)
    with loading(f"model.path={path}"), torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    _take_generation_config(model, path)
    model = model.eval().requires_grad_(False)
    fuse_parameters(model)
    return model


def check_architecture(path: str, *, trust_remote_code: bool = False) -> None:
    """Refuse a model that cannot be trained. Only its config.json is read, before any data or weights."""
    path, config = _load_config(path, trust_remote_code=trust_remote_code)
    try:
        refuse_unsupported(config)
    except UnsupportedModel as error:
        raise ModelFilesError(f"model.path={path}: {error}") from None


def _load_config(path: str, *, trust_remote_code: bool) -> tuple[str, Any]:
    """Return the folder or hub name with the model's config, and the config."""
    from transformers import AutoConfig

    check_model_path(path)
    path = str(model_folder(path) or path)
    with loading(f"model.path={path}"):
        return path, AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **hub_options(path))


@contextmanager
def loading(what: str, *, part: str = "it") -> Iterator[None]:
    """Turn transformers errors into a ModelFilesError. ``what`` names the key and its value."""
    try:
        with _one_at_a_time:
            yield
    except Exception as error:
        if "trust_remote_code" not in str(error):
            whole = "cannot be loaded" if part == "it" else f"has no {part} that transformers can load"
            raise ModelFilesError(f"{what} {whole}: {first_line(error)}") from error
        wanted = ", ".join(own_code(what.partition("=")[2])) or "see its files on the hub"
        raise ModelFilesError(
            f"{what} needs to run code that comes with it ({wanted}); none of it was run. Read that code; if you trust "
            "it, set model.trust_remote_code=true. Otherwise, use a model whose architecture is part of transformers"
        ) from error


def own_code(path: str) -> list[str]:
    """Return the Python files in a model directory that its configs ask to run."""
    files: set[str] = set()
    for name in ("config.json", "tokenizer_config.json"):
        with suppress(OSError, ValueError):  # transformers reports a broken file itself
            classes = json.loads((Path(path) / name).read_text()).get("auto_map", {}).values()
            flat = [one for entry in classes for one in (entry if isinstance(entry, list) else [entry]) if one]
            files |= {f"{one.rpartition('.')[0]}.py" for one in flat}
    return sorted(files)


def refuse_other_tensors(what: str, *, wanted: Mapping[str, Sequence[int]], found: Mapping[str, Sequence[int]]) -> None:
    """Refuse weights that do not match the model, because missing weights would be random and extra weights would be lost."""
    if faults := other_tensors(wanted=wanted, found=found):
        raise ModelFilesError(
            f"{what} does not contain the model's weights: {faults}. Use the weights that belong to its config.json"
        )


def refuse_loaded(what: str, info: Mapping[str, Any], *, leave_out: Callable[[str], bool] = lambda name: False) -> None:
    """Like ``refuse_other_tensors``, for transformers' loading report. Extra tensors selected by ``leave_out`` are ignored."""
    unexpected = [name for name in info["unexpected_keys"] if not leave_out(name)]
    misshaped = info["mismatched_keys"]
    refuse_other_tensors(
        what,
        wanted={**dict.fromkeys(info["missing_keys"], ()), **{name: wanted for name, _, wanted in misshaped}},
        found={**dict.fromkeys(unexpected, ()), **{name: stored for name, stored, _ in misshaped}},
    )


@torch.no_grad()
def non_finite_of(tensors: Mapping[str, Tensor], *, dtype: torch.dtype) -> list[str]:
    """Return the names of tensors that would not be finite in ``dtype``, using one reduction per tensor and a single device sync.

    >>> non_finite_of({"a": torch.ones(2), "b": torch.tensor([1.0, float("nan")])}, dtype=torch.float32)
    ['b']
    """
    some = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    if not some:
        return []
    # Check only the smallest and largest values: both are NaN if any value is, and rounding preserves order.
    ends = torch.stack([torch.stack(tensor.aminmax()).to(dtype) for tensor in some.values()])
    return [name for name, fine in zip(some, ends.isfinite().all(dim=1).tolist(), strict=True) if not fine]


def load_tokenizer(path: str, *, chat_template: str | None, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer and make sure it has an eos token (needed to stop) and a pad token (eos by default)."""
    from transformers import AutoTokenizer
    from transformers.utils import cached_file

    check_model_path(path)
    folder = str(model_folder(path) or path)
    with loading(f"model.path={path}", part="tokenizer"):
        # For a hub name, this fetches the file into the cache, where from_pretrained finds it.
        file = cached_file(folder, "tokenizer.json", _raise_exceptions_for_missing_entries=False, **hub_options(folder))
    if file is not None:
        _refuse_huge_ids(Path(file))
    with loading(f"model.path={path}", part="tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, **hub_options(folder))
        largest = max(tokenizer.get_vocab().values(), default=0)  # its config may name other files
    _refuse_huge_id(largest, f"the tokenizer of {path}")
    if tokenizer.eos_token_id is None:
        raise ModelFilesError(
            f"the tokenizer of {path} has no eos token, so no completion could ever stop; set eos_token in its "
            "tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def _refuse_huge_ids(file: Path) -> None:
    """Refuse huge token ids, because the tokenizers library iterates over all ids up to the largest, which could take hours."""
    if not re.search(rb"[0-9]{9}", data := file.read_bytes()):
        return
    with loading(str(file), part="tokenizer"):
        contents = json.loads(data)
        vocabulary = contents["model"]["vocab"]  # in a list, the indices are the ids
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
        largest = max([*ids, *(token["id"] for token in contents["added_tokens"])], default=0)
    _refuse_huge_id(largest, str(file))


def _refuse_huge_id(largest: int, where: str) -> None:
    if largest >= 100_000_000:
        raise ModelFilesError(
            f"{where} contains the token id {largest:,}, but no model has that many tokens, so it is damaged; copy the model again"
        )


def check_model_path(path: str) -> None:
    """Refuse a local path that is not a model directory, before transformers mistakes it for a hub name."""
    local = Path(path)
    looks_local = local.exists() or path.startswith(("/", "./", "../", "~")) or path.count("/") > 1
    if looks_local and not local.is_dir():
        raise ModelFilesError(
            f"model.path={path} is not a directory; use a model directory, a run directory, a checkpoint or a hub name"
        )
    if not looks_local:
        hub_options(path)
        return
    folder = model_folder(path)
    if folder is None and (local / ADAPTER_CONFIG).is_file():
        raise ModelFilesError(
            f"model.path={path} is an adapter without the config.json of its model; set model.path to the model and model.lora.path to "
            "the adapter"
        )
    if folder is None:
        raise ModelFilesError(
            f"model.path={path} has no config.json, so it is neither a transformers model directory nor a checkpoint that contains one"
        )
    try:
        check_model_dir(folder)
    except ModelFilesError as error:
        raise ModelFilesError(f"model.path={path}: {error}") from None
