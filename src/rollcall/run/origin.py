"""Records in the run directory what a run began with: its rows, its model and the user's code. A resume with different rows or a
different model is refused. Changed code is only reported, because a user may fix a reward and continue the run."""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rollcall.base.atomic import write_atomic
from rollcall.base.errors import CheckpointError, ModelFilesError
from rollcall.base.patience import persist
from rollcall.base.words import ANOTHER_RUN, are, counted
from rollcall.checkpoint.run_dir import has_begun
from rollcall.config import Config
from rollcall.config.environments import AgentEnvironment, named_code
from rollcall.config.rewards import ModelReward
from rollcall.config.yaml import read_small
from rollcall.learner.learner import Learner
from rollcall.loop.data.columns import DataError
from rollcall.loop.data.load import PromptSet
from rollcall.model.base import base_identities, is_adapter, used_of
from rollcall.model.load import bases_of
from rollcall.model.stored.find import adapter_folder
from rollcall.model.tokenizers import stop_token_ids, tokenizer_mark

ROWS, BASE, CODE = "data.json", "base.json", "code.json"
FORMAT = 3  # the format of a run directory; earlier formats are refused
_KEPT = {
    "reward": "groups in the journal keep their scores from the old code, except those that it failed to score; the new code scores "
    "these and all later groups; do not compare held-out results from before the change with later results",
    "environment": "episodes in the journal were played with the old code, and later ones are played with the new code",
}
T = TypeVar("T")


# Rows


def refuse_changed_rows(run_dir: Path, split: str, prompts: PromptSet, *, limit: int | None = None) -> None:
    """Raise an error if the rows of ``data.train`` or ``data.val`` changed since the run began. ``prompts`` are the current rows. If
    ``limit`` changed, only the rows that exist in both are compared."""
    noted = _noted(run_dir, ROWS, lambda found: _read_rows(found, split))
    if noted is None:
        return
    (before, limit_before), now = noted, _identities(prompts)
    shared = min(len(before), len(now))
    differ = np.flatnonzero(before[:shared] != now[:shared])
    changes = []
    if len(before) != len(now) and limit == limit_before:
        changes.append(f"it had {counted(len(before), 'row')} and now has {len(now):,}")
    if len(differ):
        changes.append(
            f"{counted(len(differ), 'row')} {are(len(differ))} different; the first is {prompts.prompts[differ[0]].id!r}"
        )
    if changes:
        raise DataError(
            f"data.{split}={prompts.source} has changed since the run in {run_dir} began: {'; '.join(changes)}. The rows of a run must "
            f"stay the same in all columns and in their tokens: restore the file (or the tokenizer and the chat template), or start "
            f"another run with these rows: {ANOTHER_RUN}"
        )


def _identities(prompts: PromptSet) -> np.ndarray:
    """Return for each row an 8-byte hash of everything that a run reads from it."""
    hashes = bytearray()
    for prompt in prompts.prompts:
        read = [prompt.id, prompt.text, prompt.answer, prompt.metadata]
        text = json.dumps(read, sort_keys=True, default=str).encode()
        hashes += blake2b(text + prompt.token_ids.tobytes(), digest_size=8).digest()
    return np.frombuffer(hashes, dtype="<u8")


def _read_rows(found: Any, split: str) -> tuple[np.ndarray, int | None]:
    return np.frombuffer(bytes.fromhex(found[split]["rows"]), dtype="<u8"), found[split]["limit"]


# The models


def sampled_weights(config: Config) -> dict[str, str]:
    """Identify the weights in local folders that ``base_of`` does not cover: those of reward models, and of adapters that the run starts
    from. Reads only samples of each file, which is enough to detect weights that were trained differently."""
    folders = [Path(reward.path).expanduser() for reward in config.reward if isinstance(reward, ModelReward)]
    path = Path(config.model.path).expanduser()
    if path.is_dir() and (adapter := adapter_folder(path)) is not None:
        below = [Path(base).expanduser() for base in bases_of(adapter, where=f"model.path={path}")]
        folders += [adapter, *filter(None, (adapter_folder(base) for base in below if base.is_dir()))]
    return {str(folder): _sampled(folder) for folder in folders if folder.is_dir()}


def _sampled(folder: Path) -> str:
    digest = blake2b(digest_size=8)
    for path in sorted((*folder.glob("*.safetensors"), *folder.glob("*.bin"))):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for place in range(0, size, max(1 << 16, size >> 6)):
                file.seek(place)
                digest.update(file.read(1 << 16))
    return digest.hexdigest()


def base_of(learner: Learner, tokenizer: Any) -> dict[str, Any]:
    """Identify the model at ``model.path`` by its weights, the config that affects them, its tokenizer and its stop tokens. Call it on
    all ranks of a gang, before a checkpoint is loaded into the model."""
    model, body = learner.model, learner.body
    weights = learner.base_identities if learner.adapter else base_identities(body.base_tensors(), dtype=body.dtype)
    stops = stop_token_ids(tokenizer, model.config, model.generation_config)
    return {
        "base": weights,
        "config": {**used_of(model.config), "eos_token_id": list(stops)},
        "tokenizer": tokenizer_mark(tokenizer),
        "chat template": blake2b(json.dumps(tokenizer.chat_template, default=str).encode(), digest_size=8).hexdigest(),
    }


def refuse_changed_base(run_dir: Path, now: Mapping[str, Any], *, path: str) -> None:
    """Raise an error if the base model, or other weights that the run uses, changed since the run began. ``now`` is the result of
    ``base_of`` for the model at ``path``, with the result of ``sampled_weights`` as "samples"."""
    before = _noted(run_dir, BASE, lambda found: {part: found[part] for part in now})
    if before is None:
        return
    weights = {} if is_adapter(path) else before["base"]
    changes = ["other weights"] if any(now["base"].get(kind, one) != one for kind, one in weights.items()) else []
    changes += [
        f"other weights in {each}" for each, one in before["samples"].items() if now["samples"].get(each, one) != one
    ]
    changes += [f"another {part}" for part in ("tokenizer", "chat template") if before[part] != now[part]]
    config = now["config"]
    changes += [f"{key}: {one} -> {config.get(key)}" for key, one in before["config"].items() if config.get(key) != one]
    if changes:
        raise ModelFilesError(
            f"model.path={path} is not the model that the run in {run_dir} began with ({'; '.join(changes)}): restore the original "
            f"model, or start another run with this one: {ANOTHER_RUN}"
        )


# The user's code


def code_of(config: Config) -> dict[str, dict[str, str]]:
    """Return the checksums of the code that the run file names for the rewards and the environment."""
    found: dict[str, dict[str, str]] = {"reward": {}, "environment": {}}
    for key, path in named_code(config.reward, config.environment).items():
        found[key.partition(".")[0]] |= _modules(path.partition(":")[0])
    if isinstance(config.environment, AgentEnvironment):
        files = filter(os.path.isfile, (word.strip("'\"") for word in config.environment.run.split()))
        # Large files named in the command are data, not code.
        texts = {name: Path(name).read_bytes() for name in files if os.path.getsize(name) < 1 << 20}
        found["environment"] = {name: sha256(text).hexdigest() for name, text in texts.items() if b"\0" not in text}
    return found


def changed_code(run_dir: Path, now: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Describe the code changes since the run's last start and their effect: one line for rewards, one for the environment."""
    before = _noted(run_dir, CODE, lambda found: {part: dict(found[part]) for part in _KEPT})
    if before is None:
        return []
    changes = []
    for part, kept in _KEPT.items():
        names = sorted({name for name, _ in {*before[part].items()} ^ {*now[part].items()}})
        if names:
            changes.append(
                f"the {part} code has changed since the run in {run_dir} last ran ({', '.join(names)}): {kept}. If this "
                f"is a mistake, stop the run, and restore the code or {ANOTHER_RUN}"
            )
    return changes


def _modules(name: str) -> dict[str, str]:
    """Return checksums of a module and its imports, except installed ones. Imports nothing: only reward processes run this code."""
    found: dict[str, str] = {}
    waiting, seen = [name], set[str]()
    while waiting:
        name = waiting.pop()
        is_ours = name.partition(".")[0] not in ("", "rollcall", *sys.stdlib_module_names)
        path = _source(name) if is_ours and name not in seen else None
        seen.add(name)
        if path is not None:
            source = path.read_bytes()
            found[name] = sha256(source).hexdigest()
            waiting += _imports(source, name, is_package=path.name == "__init__.py")
    return found


def _source(name: str) -> Path | None:
    relative = name.replace(".", "/")
    for folder in (os.getcwd(), *sys.path):
        for path in (Path(folder, relative, "__init__.py"), Path(folder, f"{relative}.py")):
            if path.is_file():
                return None if {"site-packages", "dist-packages"} & {*path.parts} else path
    return None


def _imports(source: bytes, name: str, *, is_package: bool) -> Iterator[str]:
    package = name if is_package else name.rpartition(".")[0]
    yield name.rpartition(".")[0]
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):  # a later import reports what is wrong
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: -node.level + 1 or None] if node.level else []
            module = ".".join(filter(None, [*above, node.module]))
            yield from (module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names))


# Files


def note_origin(
    run_dir: Path,
    *,
    train: PromptSet,
    val: PromptSet | None,
    limit: int | None,
    base: Mapping[str, Any],
    code: Mapping[str, Any],
) -> None:
    """Record the run's code and, if the run has not begun yet, its rows and its model. ``limit`` is the limit on ``val``."""
    if not has_begun(run_dir):
        sets = {"train": (train, None)} | ({} if val is None else {"val": (val, limit)})
        rows = {
            split: {"rows": _identities(prompts).tobytes().hex(), "limit": most}
            for split, (prompts, most) in sets.items()
        }
        _write(run_dir / ROWS, rows)
        _write(run_dir / BASE, base)
    _write(run_dir / CODE, code)


def _write(path: Path, facts: Mapping[str, Any]) -> None:
    data = json.dumps({"format": FORMAT, **facts})
    persist(lambda: write_atomic(path, data), path=path, what=f"the record of what the run began with ({path.name})")


def _noted(run_dir: Path, name: str, read: Callable[[Any], T]) -> T | None:
    """Read a record. Returns None if the run has not begun."""
    path = run_dir / name
    if not has_begun(run_dir):
        return None
    try:
        found = json.loads(read_small(path, most=1 << 31))
        if found["format"] < FORMAT:
            raise ValueError(f"its format is {found['format']}, but this version needs {FORMAT}")
        return read(found)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is missing, damaged or from an earlier version of Rollcall ({type(error).__name__}: {error}); restore the file, "
            f"finish the run with that version, or {ANOTHER_RUN}"
        ) from None
