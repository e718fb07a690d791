"""Tokenizers: where a completion stops, whether all processes have the same tokenizer, and the tokenizer of the embedded model.

Rollouts, evaluation and the exported generation config use the same rule. A completion stops at a token (an end-of-text or other
special token, or a token ID from the run file), or when its text contains one of the run file's stop strings. Text is decoded without
special tokens, so a special token among the stop strings is treated as a token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollcall.base.errors import ConfigError
from rollcall.config import RolloutSection


def stop_token_ids(
    tokenizer: Any, model_config: Any, generation_config: Any, *, rollout: RolloutSection | None = None
) -> tuple[int, ...]:
    """Return every token ID that ends a completion, the tokenizer's eos first.

    The other IDs come from the model's generation config and the run file. A config class fills in default IDs from the vocabulary of its
    own family, and a different tokenizer may use them for ordinary tokens. So IDs that may be such defaults count only if they are
    special tokens.
    """
    special = special_ids(tokenizer)
    found: set[int] = set(_ids(model_config)) & special
    given = set(_ids(generation_config))
    found |= given & special if getattr(generation_config, "_from_model_config", None) else given
    if rollout is not None:
        vocab_size = model_config.vocab_size
        if unknown := [id for id in rollout.stop_token_ids if not 0 <= id < vocab_size]:
            raise ConfigError(
                f"rollout.stop_token_ids has {unknown[0]}, but the model has {vocab_size} tokens, 0 to {vocab_size - 1}; "
                "use IDs from its tokenizer"
            )
        found.update(rollout.stop_token_ids)
        found.update(stop for text in rollout.stop if (stop := special_id(tokenizer, text)) is not None)
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    # A tokenizer class may define an eos token that is outside the model's vocabulary.
    known = [stop for stop in (*own, *sorted(found.difference(own))) if 0 <= stop < model_config.vocab_size]
    if not known:
        raise ConfigError(
            f"the eos ids {sorted(found.union(own))} are outside the model's vocabulary of {model_config.vocab_size} tokens, so no "
            "completion could ever stop; set eos_token in the tokenizer_config.json to a token in the model's vocabulary"
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
                f"contain special tokens, so this string would never be found; list {name!r} as a separate stop string, or leave it out"
            )


def special_id(tokenizer: Any, text: str) -> int | None:
    """Return the ID of the special token that is written exactly as ``text``, or None."""
    found = tokenizer.convert_tokens_to_ids(text)
    is_special = found in special_ids(tokenizer) and tokenizer.convert_ids_to_tokens(found) == text
    return found if is_special else None


def special_ids(tokenizer: Any) -> set[int]:
    """Return the IDs of the tokens that decoding leaves out."""
    return {*tokenizer.all_special_ids, *(id for id, token in tokenizer.added_tokens_decoder.items() if token.special)}


def _ids(config: Any) -> list[int]:
    eos = getattr(config, "eos_token_id", None)
    found = [] if eos is None else eos if isinstance(eos, list | tuple) else [eos]
    if not all(isinstance(one, int) for one in found):
        raise ConfigError(
            f"the model's generation_config.json has eos_token_id={eos!r:.80}, which is not a token ID; restore the file"
        )
    return list(found)


def is_plain_fast(tokenizer: Any, *methods: str) -> bool:
    """Return whether the tokenizer's Rust backend does the work of these methods."""
    from transformers import PreTrainedTokenizerFast as Plain

    return isinstance(tokenizer, Plain) and all(getattr(type(tokenizer), one) is getattr(Plain, one) for one in methods)


def tokenizer_mark(tokenizer: Any) -> str:
    """Return a mark that is equal for tokenizers with the same tokenisation and end token. The marks of a run's processes are compared,
    because each process loads the tokenizer from its own node's files. Without a Rust tokenizer, the mark covers only the vocabulary
    and the special tokens."""
    rust = getattr(tokenizer, "backend_tokenizer", None)
    if rust is None:
        described = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    else:
        # Each call sets padding and truncation itself.
        described = {
            key: part for key, part in json.loads(rust.to_str()).items() if key not in ("padding", "truncation")
        }
    digest = hashlib.blake2b(json.dumps(described, sort_keys=True).encode(), digest_size=8)
    digest.update(f"{sorted(tokenizer.all_special_ids)}\0{tokenizer.eos_token_id}".encode())
    return digest.hexdigest()


def refuse_other_tokenizers(ours: str, marks: Mapping[str, str], *, path: str) -> None:
    """Refuse tokenizers whose mark differs from ``ours``, the mark of the tokenizer that encodes the prompts. ``marks`` maps the names of
    processes to their marks."""
    if others := [who for who, mark in marks.items() if mark != ours]:
        raise ValueError(
            f"the tokenizer of {path} differs between {', '.join(others)} and the controller, which tokenises the prompts; "
            "copy the same files to each node, or put the model in a folder that all nodes share"
        )


# The embedded model is a character-level decoder with about a million parameters (`scripts/make_arithmetic_model.py` trains it). It can
# add, but usually does not carry. Reinforcement learning teaches it to carry.
SPECIAL = ("<eos>", "<pad>", "<unk>", "<bos>")
ALPHABET = "0123456789+="


def char_tokenizer(alphabet: str) -> Any:
    """Build a tokenizer with one token per character. Text survives a round trip, because there are no merges, normalisation or added
    spaces."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<bos>",
        clean_up_tokenization_spaces=False,
    )
