"""Writes the files of a merged model other than its weights: config files, and a model card with facts about the run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any

from rollcall.base.version import __version__
from rollcall.base.words import visible
from rollcall.config.yaml import read_small, read_yaml
from rollcall.model.stored.files import StoredError
from rollcall.model.stored.find import ADAPTER_CONFIG, PROBE, checkpoint_of
from rollcall.model.stored.tensors import DType, Stored

# Suffixes of config files
CONFIG_ENDS = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
NOT_COPIED = (
    "model.safetensors.index.json", "pytorch_model.bin.index.json", "verified.json", "README.md", ADAPTER_CONFIG,
)  # fmt: skip


def not_of_a_model(folder: Path) -> Path | None:
    """Return a path in a model directory that is not part of a model, such as a user's own file or a symlink. None if there is none."""
    suffixes, words = (*CONFIG_ENDS, ".safetensors", ".bin", ".md"), ("LICENSE", "NOTICE")

    def belongs(path: Path) -> bool:
        if path.is_symlink() or path.name.startswith("."):
            return False
        if path.is_dir():
            return path.name == "additional_chat_templates"  # transformers' folder
        return path.is_file() and (path.suffix in suffixes or path.name.startswith(words))

    return next((path for path in sorted(folder.rglob("*")) if not belongs(path)), None)


def copy_config_files(stored: Stored, folder: Path, out: Path, *, dtype: DType | None) -> None:
    """Copy the files in ``folder`` that belong to a model, and set the dtype of the weights in config.json.

    The probe is copied only from the folder with the weights, because the probe of another model would not match.
    """
    own = () if stored.folder is None else stored.folder.glob(PROBE)
    templates = folder.glob("additional_chat_templates/*.jinja")  # in the only subfolder that is copied
    others = (path for path in (*folder.iterdir(), *templates) if path.name != PROBE)
    for path in sorted((*own, *others)):
        if not path.is_file() or path.suffix not in CONFIG_ENDS or path.name in NOT_COPIED:
            continue
        try:
            data = read_small(path)
        except ValueError as error:
            raise StoredError(f"{path} cannot be copied: {error}") from None
        known = stored.files.get(path)
        if known is not None and known.blake2b != blake2b(data, digest_size=16).hexdigest():
            raise StoredError(f"{known} has changed since it was written (its checksum differs); restore the file")
        if path.name == "config.json":
            data = _config(data, path, dtype=dtype)
        if path.name == PROBE and folder != stored.folder:
            # The user chose other config files, so only the log-probs must match: drop the config files' checksums.
            with suppress(ValueError, TypeError, RecursionError):  # the next reader reports the error
                data = json.dumps({**json.loads(data), "beside": {}}, indent=1).encode()
        target = out / (path.relative_to(folder) if path.is_relative_to(folder) else path.name)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(data)


def _config(data: bytes, path: Path, *, dtype: DType | None) -> bytes:
    """Remove the local path that the model was loaded from, because it means nothing on other machines, and set the dtype."""
    try:
        fields = json.loads(data)
        name = fields.pop("_name_or_path", None)
        if isinstance(name, str) and is_hub_name(name):
            fields["_name_or_path"] = name
        if dtype is not None:
            fields.pop("torch_dtype", None)
            fields["dtype"] = dtype.name
    except (ValueError, AttributeError, RecursionError) as error:
        raise StoredError(f"{path} is not a model's config.json ({error}); restore the file") from None
    return (json.dumps(fields, indent=2) + "\n").encode()


def is_hub_name(name: str) -> bool:
    """Whether the text can be a model's name on the hub, and is not a local path.

    >>> is_hub_name("Qwen/Qwen3-0.6B"), is_hub_name("/data/models/qwen"), is_hub_name("../qwen")
    (True, False, False)
    """
    return re.fullmatch(r"[\w][\w.-]*(/[\w][\w.-]*)?", name) is not None and not Path(name).exists()


def run_facts(stored: Stored) -> dict[str, str]:
    """Return facts about the run for human readers. They contain no paths."""
    facts = stored.facts
    found: dict[str, str] = {}
    run = _run_file(Path(stored.origin))
    base = run.get("model", {}).get("path")
    if isinstance(base, str):
        found["base model"] = base if is_hub_name(base) or base.startswith("builtin:") else "a local model"
    algorithm = run.get("algorithm", {}).get("name")
    if isinstance(algorithm, str):
        found["algorithm"] = algorithm
    for key, label in (("step", "step"), ("weight_version", "weight version")):
        if isinstance(facts.get(key), int):
            found[label] = str(facts[key])
    scores = facts.get("scores") or ({"score": facts["score"]} if facts.get("score") is not None else {})
    if isinstance(scores, Mapping):
        found |= {
            str(key): f"{value:.4g}"
            for key, value in scores.items()
            # Larger integers cannot be formatted like this.
            if isinstance(value, float) or (isinstance(value, int) and abs(value) < 10**15)
        }
    return found


def _run_file(origin: Path) -> dict[str, Any]:
    """Return the run file of the run that wrote a checkpoint or an exported ``model/``. Empty if no run wrote the weights."""
    path = origin.absolute()
    if (checkpoint := checkpoint_of(path)) is not None:
        path = checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint
    elif path.name == "model" and (path.parent / "metrics.jsonl").is_file():
        path = path.parent  # without metrics, run.yaml may belong to something else
    try:
        fields = read_yaml(path / "run.yaml", what="run file")
        return {key: value for key, value in fields.items() if isinstance(value, dict)}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}


def card(
    stored: Stored, *, num_parameters: int, dtypes: Sequence[DType], facts: Mapping[str, str], notes: Sequence[str]
) -> str:
    ours = "algorithm" in facts or stored.kind in ("checkpoint", "sharded checkpoint")
    versions = {"rollcall": __version__, **{name: metadata.version(name) for name in ("torch", "transformers")}}
    rows = {
        **facts,
        "parameters": f"{num_parameters:,}",
        "type of the weights": ", ".join(sorted(one.name for one in dtypes)),
        "merged from": f"{'an' if stored.kind[0] in 'aeio' else 'a'} {stored.kind}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    base = facts.get("base model", "")
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags:",
        "- rollcall",
        "- reinforcement-learning",
        *([f"base_model: {json.dumps(base)}"] if is_hub_name(base) else []),
        "---",
        "",
        "# Model card",
        "",
        "Trained by reinforcement learning with Rollcall." if ours else "Merged by Rollcall.",
        "",
        "| fact | value |",
        "|---|---|",
        *(f"| {_cell(key)} | {_cell(value)} |" for key, value in rows.items()),
    ]
    # Leave out this machine's paths.
    lines += ["", *(f"- {_cell(note.replace(stored.origin, 'the checkpoint'))}" for note in notes)] if notes else []
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Escape untrusted text for a table cell: no markup, no links, no line breaks.

    >>> _cell("a|b <script>\\n# [x](y)")
    'a/b &lt;script> # \\\\[x](y)'
    """
    shown = visible(" ".join(text.replace("|", "/").split()))[:300]
    return re.sub(r"([\\`\[])", r"\\\1", shown).replace("&", "&amp;").replace("<", "&lt;")
