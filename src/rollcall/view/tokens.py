"""One completion token by token: what each token says, and every number that is kept of it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from rollcall.config import Config
from rollcall.observe.token_scores import FOLDER, file_name, scores_in
from rollcall.types import Floats, Group
from rollcall.view.groups import NoGroupError, TrainedDraws, advantages_of


class Vocabulary:
    """Token ids into text, by the tokenizer that a run directory holds. Tokens of one character come as they are; those of half a
    character get it with the last of them, and are empty before."""

    def __init__(self, data: bytes) -> None:
        # The library below transformers. It loads in a tenth of a second, and without torch.
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_buffer(data)
        self._special = {
            number for number, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        }

    def texts(self, ids: list[int]) -> list[str]:
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(self._tokenizer, number) or "" if self.knows(number) else "" for number in ids]

    def piece(self, number: int) -> str | None:
        """As the tokenizer writes it; None: it has no such token."""
        return self._tokenizer.id_to_token(number) if number >= 0 else None

    def knows(self, number: int) -> bool:
        return self.piece(number) is not None

    def is_special(self, number: int) -> bool:
        return number in self._special


class Vocabularies:
    """One for each run directory that was looked at, the last few."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Path, Vocabulary | None] = OrderedDict()

    def of(self, root: Path) -> Vocabulary | None:
        """None: the directory holds no tokenizer, which may change while a run goes on."""
        with self._lock:
            if self._kept.get(root) is None:
                self._kept[root] = _read_vocabulary(root)
            self._kept.move_to_end(root)
            while len(self._kept) > 4:
                self._kept.popitem(last=False)
            return self._kept[root]


def _read_vocabulary(root: Path) -> Vocabulary | None:
    for folder in (root, root / "model", *sorted(root.glob("checkpoints/*/model"), reverse=True)):
        try:
            return Vocabulary((folder / "tokenizer.json").read_bytes())
        except Exception:  # noqa: BLE001 - the library raises a plain Exception for a file that is not a tokenizer
            continue
    return None


def read_scores(root: Path, group: Group, *, completion: int, trained: TrainedDraws) -> dict[str, Floats] | None:
    """Log-probs and entropy of each token; None: they were not kept for this group."""
    step = trained.step_of(group.draw) or group.step
    try:
        with (root / FOLDER / file_name(step)).open("rb") as file:
            return scores_in(file, group, completion=completion)
    except FileNotFoundError:
        return None


def show_tokens(
    group: Group,
    *,
    completion: int,
    config: Config | None,
    vocabulary: Vocabulary | None,
    learner: dict[str, Floats] | None,
) -> dict[str, Any]:
    """Columns of equal length, one entry for each token. ``learner`` has what the learner said of the same tokens, if that was
    kept."""
    if not 0 <= completion < len(group.completions):
        raise NoGroupError(f"the group has {len(group.completions)} completions, and no number {completion}")
    one, score = group.completions[completion], group.scores[completion]
    advantages = advantages_of(group, config)
    ids = one.token_ids.tolist()
    columns: dict[str, Any] = {"id": ids, "logprob": _short(one.logprobs), "mask": one.mask.astype(int).tolist()}
    columns["version"] = [segment.version for segment in one.segments for _ in range(segment.num_tokens)]
    if advantages is not None:
        columns["advantage"] = _short(np.where(one.mask, advantages[completion], 0.0))
    if learner is not None:
        difference = learner["logprobs"] - one.logprobs
        columns["entropy"] = _short(learner["entropy"])
        columns["learner"] = _short(learner["logprobs"])
        columns["mismatch"] = _short(np.where(one.mask, difference, 0.0))
        columns["ratio"] = _short(np.where(one.mask, np.exp(np.clip(difference, -20, 20)), 1.0))
    whole_prompt = one.prompt_ids(group.prompt.token_ids)
    prompt = whole_prompt[-2000:].tolist()  # the end: a completion answers it
    return {
        "step": group.step,
        "draw": group.draw,
        "completion": completion,
        "of": len(group.completions),
        "prompt_id": group.prompt.id,
        "finish": one.finish.value,
        "reward": score.value,
        "has_text": vocabulary is not None,
        "columns": columns,
        "texts": _texts(ids, vocabulary),
        "pieces": _pieces(ids, vocabulary),
        "special": _special(ids, vocabulary),
        "prompt": {"texts": _texts(prompt, vocabulary), "ids": prompt, "special": _special(prompt, vocabulary),
                   "left_out": len(whole_prompt) - len(prompt)},
    }  # fmt: skip


def _texts(ids: list[int], vocabulary: Vocabulary | None) -> list[str] | None:
    return None if vocabulary is None else vocabulary.texts(ids)


def _pieces(ids: list[int], vocabulary: Vocabulary | None) -> dict[str, str]:
    """How the tokenizer writes each token that occurs."""
    if vocabulary is None:
        return {}
    return {str(number): piece for number in set(ids) if (piece := vocabulary.piece(number)) is not None}


def _special(ids: list[int], vocabulary: Vocabulary | None) -> list[int]:
    """Places of the special tokens."""
    return [] if vocabulary is None else [place for place, number in enumerate(ids) if vocabulary.is_special(number)]


def _short(values: Any) -> list[float | None]:
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in np.asarray(values).tolist()]
