"""Decides which settings a resume may change. Compares the run file in the run directory with the new one, key by key.

Changes that would contradict the journal or the checkpoints are refused; the error shows the key and both values. All other changes
are applied and shown in one list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rollcall.base.atomic import TEMPORARY
from rollcall.base.errors import ConfigError
from rollcall.base.journal import Journal
from rollcall.base.words import ANOTHER_RUN, counted
from rollcall.checkpoint.run_dir import RUN_FILE, newest_step
from rollcall.config import Config, load_saved_run, public_dump
from rollcall.config.errors import shown
from rollcall.config.lora import modules_of
from rollcall.model.stored.find import checkpoint_of, is_model_dir

# With other values, the journal or the checkpoints' optimizer state would not match.
FIXED = (
    "run.seed", "model.path", "model.dtype", "data", "rollout.samples_per_prompt", "algorithm.name", "reward",
    "actor.optimizer.name", "critic.optimizer.name", "model.lora",
)  # fmt: skip
FREE_OF_LORA = ("dropout", "export")
# Reward settings that affect how a reward runs, not how it scores.
FREE_OF_REWARDS = (
    "timeout_s", "env", "network", "memory_mb", "file_mb", "processes", "url", "key_env", "concurrency", "retries", "outage_s",
)  # fmt: skip
NOT_SET = "not set"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key}: {_told(self.before)} -> {_told(self.after)}"

    @property
    def is_fixed(self) -> bool:
        parts = self.key.split(".")
        if parts[0] == "reward" and len(parts) == 3 and parts[2] in FREE_OF_REWARDS:
            return False
        if parts[:2] == ["model", "lora"] and parts[2:] and parts[2] in FREE_OF_LORA:
            return False
        return any(self.key == key or self.key.startswith(f"{key}.") for key in FIXED)


def changes_on_resume(config: Config, run_dir: Path) -> list[Change]:
    """Return the keys that a resume changes, in run file order; empty if nothing changes or there is no run yet.

    Raises ``ConfigError`` for a directory that is not a run, and for changes that are not allowed.
    """
    path = run_dir / RUN_FILE
    if not path.exists():
        # A process that was killed while writing this file leaves a temporary file behind.
        if run_dir.exists() and any(not child.name.startswith(TEMPORARY) for child in run_dir.iterdir()):
            raise ConfigError(
                f"run.dir={run_dir} contains files but no {RUN_FILE}, so it is not a run; choose another run.dir, or "
                "move it aside with --fresh"
            )
        return []
    try:
        before = load_saved_run(path)
    except ConfigError as error:
        raise ConfigError(
            f"{error}\n{path} records this run's settings; restore it, correct the error above, or start over "
            "with --fresh (the old directory is moved aside)"
        ) from None
    found = list(differences("", public_dump(before), public_dump(config)))
    if config.algorithm.name != "ppo":  # only PPO uses the critic's section
        found = [change for change in found if not change.key.startswith("critic.")]
    if fixed := [change for change in found if change.is_fixed]:
        raise ConfigError(
            f"run.dir={run_dir} contains a run with different settings: {'; '.join(map(str, fixed))}. These cannot "
            f"change within a run; {ANOTHER_RUN}"
        )
    done = newest_step(run_dir) or 0
    if (run_dir / "journal").is_dir():
        with Journal(run_dir / "journal") as journal:
            done = max([done, *journal.trained()])
    if config.trainer.steps < done:
        raise ConfigError(
            f"trainer.steps={config.trainer.steps}, but the run in {run_dir} has already trained {counted(done, 'step')}; "
            f"use {done} or more, {ANOTHER_RUN}"
        )
    return found


def refuse_changing_base(config: Config) -> None:
    """Refuse to train an adapter if ``model.path`` is a run directory. An adapter belongs to one model, but a run's newest model changes
    at each save."""
    path = Path(config.model.path).expanduser()
    if config.model.lora is None or is_model_dir(path):
        return
    found = checkpoint_of(path)
    if found is not None and found != path:
        raise ConfigError(
            f"model.path={config.model.path} refers to that run's newest checkpoint, which changes when the run continues, but an "
            "adapter "
            f"(model.lora) needs a model that stays the same; write model.path={found}, or a directory that `rollcall merge` made from it"
        )


def differences(key: str, before: Any, after: Any) -> Iterator[Change]:
    """Yield the leaves that differ. Lists of sections are compared item by item, other lists as a whole."""
    if key == "run.dir":  # always this directory, even if it is spelled differently
        return
    if isinstance(before, dict) and isinstance(after, dict):
        names = dict.fromkeys([*before, *after])
        parts = [(name, before.get(name, NOT_SET), after.get(name, NOT_SET)) for name in names]
    elif _is_of_sections(before) and _is_of_sections(after):
        parts = [(place, *pair) for place, pair in enumerate(zip_longest(before, after, fillvalue=NOT_SET))]
    else:
        if before != after and not _means_the_same(key, before, after):
            yield Change(key=key, before=before, after=after)
        return
    for name, one, other in parts:
        yield from differences(f"{key}.{name}" if key else str(name), one, other)


def _means_the_same(key: str, before: Any, after: Any) -> bool:
    if NOT_SET in (before, after) or None in (before, after):
        return False
    if key == "model.path":
        return before.rstrip("/") == after.rstrip("/")
    return key == "model.lora.targets" and modules_of(before) == modules_of(after)


def _is_of_sections(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _told(value: Any) -> str:
    if value == NOT_SET:
        return NOT_SET
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return shown(value)
