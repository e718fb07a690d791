"""Where a completion ends: one rule for rollouts, evaluation and the exported generation config.

A completion ends at a token (an end-of-text or other special token, or one that the run file names by its id) or when its
text holds one of the run file's strings. Text is decoded without special tokens, so a special token among the strings
counts as a token too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollcall.base.errors import ConfigError
from rollcall.config import RolloutSection


def stop_token_ids(
    tokenizer: Any, model_config: Any, generation_config: Any, *, rollout: RolloutSection | None = None
) -> tuple[int, ...]:
    """Every id that ends a completion, the tokenizer's own first.

    Those are the tokenizer's eos, what a generation config that came with the model names, and what the run file names. A
    config class fills in ids of its own family's vocabulary, and with another tokenizer those are ordinary tokens: of ids
    that may come from there only special tokens count.
    """
    special = special_ids(tokenizer)
    found: set[int] = set(_ids(model_config)) & special
    given = set(_ids(generation_config))
    found |= given & special if getattr(generation_config, "_from_model_config", None) else given
    if rollout is not None:
        vocab_size = model_config.vocab_size
        if unknown := [id for id in rollout.stop_token_ids if not 0 <= id < vocab_size]:
            raise ConfigError(
                f"rollout.stop_token_ids has {unknown[0]}, and the model's {vocab_size} tokens are 0 to {vocab_size - 1}; "
                "give ids of its tokenizer"
            )
        found.update(rollout.stop_token_ids)
        found.update(stop for text in rollout.stop if (stop := special_id(tokenizer, text)) is not None)
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    # A tokenizer class may bring an eos that the model has no output for.
    known = [stop for stop in (*own, *sorted(found.difference(own))) if 0 <= stop < model_config.vocab_size]
    if not known:
        raise ConfigError(
            f"the eos ids {sorted(found.union(own))} are outside the model's {model_config.vocab_size} tokens, so no "
            "completion could ever stop; set eos_token in the tokenizer_config.json to a token that the model knows"
        )
    return tuple(known)


def check_stop_strings(tokenizer: Any, stops: Sequence[str]) -> None:
    """Refuse one that mixes text and special tokens."""
    for text in stops:
        if special_id(tokenizer, text) is not None:
            continue
        special = special_ids(tokenizer).intersection(tokenizer.encode(text, add_special_tokens=False))
        # The token for unknown text is special too, but is not part of the text.
        name = next((name for name in tokenizer.convert_ids_to_tokens(sorted(special)) if name in text), None)
        if name is not None:
            raise ConfigError(
                f"rollout.stop has {text!r}, and {name!r} in it is a special token of the model: a completion's text does not "
                f"show special tokens, so this would never be found; write {name!r} as a separate stop, or leave it out here"
            )


def special_id(tokenizer: Any, text: str) -> int | None:
    """The id of the special token that is written like this, if there is one."""
    found = tokenizer.convert_tokens_to_ids(text)
    is_special = found in special_ids(tokenizer) and tokenizer.convert_ids_to_tokens(found) == text
    return found if is_special else None


def special_ids(tokenizer: Any) -> set[int]:
    """The tokens that decoding leaves out of the text."""
    return {id for id, token in tokenizer.added_tokens_decoder.items() if token.special} | set(
        tokenizer.all_special_ids
    )


def _ids(config: Any) -> list[int]:
    eos = getattr(config, "eos_token_id", None)
    found = [] if eos is None else eos if isinstance(eos, list | tuple) else [eos]
    if not all(isinstance(one, int) for one in found):
        raise ConfigError(
            f"the model's generation_config.json has eos_token_id={eos!r:.80}, which is no token id; restore the file"
        )
    return list(found)
