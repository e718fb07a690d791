"""What ends a completion: the same ids for rollouts and for the exported model, special tokens written as strings, and the
search for stop strings against decoding everything at every look."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import make_tokenizer, save_model
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from rollcall.base.types import FinishReason
from rollcall.checkpoint.export import export_model
from rollcall.config import RolloutSection
from rollcall.engine.protocol import Request, Sampling
from rollcall.engine.sequence import Sequence, cut_at_stop_string, text_of, texts_of
from rollcall.model.load import load_causal_lm, load_tokenizer
from rollcall.model.tokenizers import check_stop_strings, stop_token_ids

IM_END = "<|im_end|>"


def chat_tokenizer() -> Any:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [IM_END]})
    return tokenizer


def ids_for(tokenizer: Any, *, config: Any = None, generation: Any = None, **rollout: Any) -> tuple[int, ...]:
    config = config or SimpleNamespace(vocab_size=len(tokenizer), eos_token_id=None)
    return stop_token_ids(tokenizer, config, generation, rollout=RolloutSection(**rollout))


def test_a_special_token_among_the_stop_strings_stops_by_its_id() -> None:
    tokenizer = chat_tokenizer()
    check_stop_strings(tokenizer, [IM_END, "a b"])
    assert ids_for(tokenizer, stop=[IM_END, "a b"]) == (tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(IM_END))


def test_a_stop_string_that_mixes_text_and_a_special_token_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"rollout.stop has 'a<\|im_end\|>', and '<\|im_end\|>' in it is a special token"
    ):
        check_stop_strings(chat_tokenizer(), ["a<|im_end|>"])


def test_text_that_the_tokenizer_does_not_know_is_an_ordinary_stop_string() -> None:
    check_stop_strings(make_tokenizer(), ["ZZ"])
    assert ids_for(make_tokenizer(), stop=["ZZ"]) == (make_tokenizer().eos_token_id,)


def test_an_eos_that_is_no_token_id_is_refused() -> None:
    with pytest.raises(ValueError, match="generation_config.json has eos_token_id='x', which is not a token ID"):
        ids_for(make_tokenizer(), generation=SimpleNamespace(eos_token_id="x"))


def test_stop_token_ids_of_the_run_file_are_added_and_held_to_the_vocabulary() -> None:
    tokenizer = make_tokenizer()
    assert ids_for(tokenizer, stop_token_ids=[9, 7]) == (tokenizer.eos_token_id, 7, 9)
    for wrong in (40, -1):
        with pytest.raises(
            ValueError, match=f"rollout.stop_token_ids has {wrong}, but the model has 40 tokens, 0 to 39"
        ):
            ids_for(tokenizer, stop_token_ids=[wrong])


def test_an_eos_that_a_config_class_fills_in_is_no_stop_where_it_is_an_ordinary_token() -> None:
    tokenizer = make_tokenizer()
    ordinary = LlamaConfig(vocab_size=40, eos_token_id=12)  # an id that some family's vocabulary ends texts with
    guessed = GenerationConfig.from_model_config(ordinary)
    assert ids_for(tokenizer, config=ordinary, generation=guessed) == (tokenizer.eos_token_id,)
    explicit = GenerationConfig(eos_token_id=[12])
    assert ids_for(tokenizer, config=ordinary, generation=explicit) == (tokenizer.eos_token_id, 12)


def test_no_known_stop_at_all_is_refused() -> None:
    tokenizer = make_tokenizer()
    with pytest.raises(ValueError, match="outside the model's vocabulary of 0 tokens"):
        ids_for(tokenizer, config=SimpleNamespace(vocab_size=0, eos_token_id=None))


@pytest.mark.parametrize("rollout", [{}, {"stop_token_ids": [12, 9]}, {"stop": ["<pad>", "ab"]}], ids=str)
def test_a_rollout_the_export_and_a_rollout_of_the_export_stop_at_the_same_tokens(
    tmp_path: Path, rollout: dict[str, Any]
) -> None:
    section = RolloutSection(**rollout)

    def load(path: Path) -> tuple[Any, Any]:
        import torch

        model = load_causal_lm(str(path), device=torch.device("cpu"), dtype=torch.float32)
        return model, load_tokenizer(str(path), chat_template=None)

    model, tokenizer = load(save_model(tmp_path / "first", "llama-tied", eos_token_id=12))
    (tmp_path / "first" / "generation_config.json").unlink()
    model, tokenizer = load(tmp_path / "first")
    stops = stop_token_ids(tokenizer, model.config, model.generation_config, rollout=section)
    out = export_model(model, tokenizer, tmp_path / "out", stops=stops)
    written = json.loads((out / "generation_config.json").read_text())["eos_token_id"]
    assert ([written] if isinstance(written, int) else written) == list(stops)
    exported, tokenizer = load(out)
    assert stop_token_ids(tokenizer, exported.config, exported.generation_config) == stops


# The search for stop strings


def naive_cut(tokens: list[int], looks: list[int], stops: list[str], tokenizer: Any) -> int | None:
    """Tokens kept, by decoding everything at every look; None: no stop."""
    before = 0
    for look in looks:
        if any(stop in text_of(tokens[:look], tokenizer) for stop in stops):
            for count in range(before + 1, look + 1):
                if any(stop in text_of(tokens[:count], tokenizer) for stop in stops):
                    return count
        before = look
    return None


def watched_cut(tokens: list[int], looks: list[int], stops: list[str], tokenizer: Any) -> int | None:
    sampling = Sampling(
        temperature=1.0, top_p=1.0, top_k=0, max_tokens=10_000, stop_token_ids=(), stop_strings=tuple(stops)
    )
    prompt = np.zeros(1, dtype=np.int32)
    sequence = Sequence(request=Request(id="r", prompt_ids=prompt, seed=0, sampling=sampling), number=0)
    for look in looks:
        before = len(sequence.token_ids)
        sequence.token_ids += tokens[before:look]
        sequence.logprobs += [0.0] * (look - before)
        if cut_at_stop_string(sequence, before, tokenizer):
            assert sequence.finish is FinishReason.STOP and len(sequence.logprobs) == len(sequence.token_ids)
            return len(sequence.token_ids)
    return None


def _symbols() -> dict[int, str]:
    """Bytes as byte-level BPE writes them."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) if byte in printable else chr(256 + moved.index(byte)) for byte in range(256)}


def byte_level() -> Any:
    """A token per byte, and one special token."""
    backend = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in _symbols().items()}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", clean_up_tokenization_spaces=False)


def byte_fallback() -> Any:
    """Words with a mark for the space before them, and a token per byte for all other text, as sentencepiece has it."""
    words = ["▁", "▁a", "a", "b", "▁the", "!", "é", "▁."]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {word: 256 + index for index, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    ])  # fmt: skip
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", clean_up_tokenization_spaces=True)


TOKENIZERS = {"byte level": byte_level(), "byte fallback": byte_fallback()}
PIECES = ["a", "b", "!", "é", "你", "好", "👍", " the", ".", " .", "\n", "ab", "a a"]


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_watching_the_end_cuts_where_decoding_everything_cuts(kind: str, data: st.DataObject) -> None:
    """Characters split over tokens, broken ones, special tokens, long runs of bytes; looks at any distance."""
    tokenizer = TOKENIZERS[kind]
    size = len(tokenizer)
    as_bytes = st.sampled_from(PIECES).map(lambda text: list(text.encode()))
    piece = st.one_of(as_bytes, as_bytes, st.lists(st.integers(0, size - 1), min_size=1, max_size=3))
    parts = data.draw(st.lists(st.tuples(piece, st.integers(1, 40)), min_size=1, max_size=25))
    tokens = [token for tokens, times in parts for token in tokens * times]
    steps = data.draw(st.lists(st.integers(1, 16), min_size=1, max_size=5))
    looks = [*np.cumsum(steps * (len(tokens) // sum(steps) + 1)).tolist()]
    looks = sorted({min(look, len(tokens)) for look in looks})
    whole = text_of(tokens, tokenizer)
    start = data.draw(st.integers(0, max(0, len(whole) - 1)))
    stop = whole[start : start + data.draw(st.integers(1, 12))] or "zz"
    others = data.draw(st.lists(st.sampled_from(["!b", "好👍", ". the", "zz"]), max_size=1))
    expected = naive_cut(tokens, looks, [stop, *others], tokenizer)
    assert watched_cut(tokens, looks, [stop, *others], tokenizer) == expected


def test_a_look_decodes_no_more_of_a_long_completion_than_of_a_short_one() -> None:
    tokenizer = TOKENIZERS["byte level"]
    decoded: list[int] = []

    def decode(ids: list[int], skip_special_tokens: bool) -> str:
        decoded.append(len(ids))
        return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    tokens = list("你好, all is well. ".encode() * 400)
    looks = list(range(8, len(tokens), 8))
    assert watched_cut(tokens, looks, ["</answer>"], SimpleNamespace(decode=decode)) is None
    assert max(decoded) < 300 and sum(decoded) < 30 * len(tokens)


@pytest.mark.parametrize("cleans", [False, True])
def test_many_texts_at_once_are_the_texts_one_by_one(cleans: bool) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.clean_up_tokenization_spaces = cleans
    draw = np.random.default_rng(0)
    many = [draw.integers(0, len(tokenizer), length).tolist() for length in (0, 1, 7, 64)]
    assert texts_of(many, tokenizer) == [text_of(token_ids, tokenizer) for token_ids in many]
