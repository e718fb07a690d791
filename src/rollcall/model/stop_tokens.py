"""Where a completion stops: the same rule for rollouts, evaluation and the exported generation config.

A completion stops at a token (an end-of-text or other special token, or a token id from the run file) or when its
text contains one of the run file's stop strings. Text is decoded without special tokens, so a special token among the
strings is treated as a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollcall.base.errors import ConfigError
from rollcall.config import RolloutSection


def stop_token_ids(
    tokenizer: Any, model_config: Any, generation_config: Any, *, rollout: RolloutSection | None = None
) -> tuple[int, ...]:
    """Return every token id that ends a completion, the tokenizer's eos first.

    The others come from the model's generation config and the run file. A config class fills in default ids from its own
    family's vocabulary, and a different tokenizer may use these for ordinary tokens. So ids that may be such defaults
    count only if they are special tokens.
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
    # A tokenizer class may define an eos token that is outside the model's vocabulary.
    known = [stop for stop in (*own, *sorted(found.difference(own))) if 0 <= stop < model_config.vocab_size]
    if not known:
        raise ConfigError(
            f"the eos ids {sorted(found.union(own))} are outside the model's {model_config.vocab_size} tokens, so no "
            "completion could ever stop; set eos_token in the tokenizer_config.json to a token that the model knows"
        )
    return tuple(known)


def check_stop_strings(tokenizer: Any, stops: Sequence[str]) -> None:
    """Refuse a stop string that mixes text and special tokens."""
    for text in stops:
        if special_id(tokenizer, text) is not None:
            continue
        special = special_ids(tokenizer).intersection(tokenizer.encode(text, add_special_tokens=False))
        # The unknown token is special too, but its name does not occur in the text.
        name = next((name for name in tokenizer.convert_ids_to_tokens(sorted(special)) if name in text), None)
        if name is not None:
            raise ConfigError(
                f"rollout.stop has {text!r}, and {name!r} in it is a special token of the model: a completion's text does not "
                f"show special tokens, so this would never be found; write {name!r} as a separate stop, or leave it out here"
            )


def special_id(tokenizer: Any, text: str) -> int | None:
    """Return the id of the special token that is written exactly as ``text``, or None."""
    found = tokenizer.convert_tokens_to_ids(text)
    is_special = found in special_ids(tokenizer) and tokenizer.convert_ids_to_tokens(found) == text
    return found if is_special else None


def special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of the tokens that decoding omits from the text."""
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
