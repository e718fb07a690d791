"""The tokenizer and alphabet of the embedded model, a character-level decoder with about a million parameters.

`scripts/make_arithmetic_model.py` trains it. It can add but forgets most carries, which are left for reinforcement
learning.
"""

from __future__ import annotations

from typing import Any

SPECIAL = ("<eos>", "<pad>", "<unk>", "<bos>")
ALPHABET = "0123456789+="


def char_tokenizer(alphabet: str) -> Any:
    """Build a tokenizer with one token per character. Text survives a round trip: no merges, normalisation or added spaces."""
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
