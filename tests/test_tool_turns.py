"""Ten thousand turns that use a tool, in whole runs: what the engine sampled is what the learner trains on, token by token, and no
text that was sampled is tokenised again.

The tokenizer reads two digits as one token, and the model also writes them as two, so tokenising its text again would give other ids.
"""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import column, finish, groups, letter_rows, make_run
from tiny import make_model

from rollcall.base.types import Completion, Sample
from rollcall.config import Config
from rollcall.engine.protocol import Made, Request
from rollcall.engine.ticker import Ticker
from rollcall.engine.vllm.setup import PYTHON_VARIABLE, VllmUnavailable, find_python
from rollcall.learner.learner import Learner
from rollcall.model.tokenizers import SPECIAL

NUM_TURNS = 10_000
TOLERANCE = 1e-4  # nats: what the tests of engines allow for completions of one turn
ROLES = ("<user>", "<tool>", "<assistant>")
CALL, CLOSE = '<tool_call>{"name": "look", "arguments": {"place": "', '"}}</tool_call>'
DIGITS = tuple("0123456789")
PAIRS = tuple(a + b for a in DIGITS for b in DIGITS)
VOCABULARY = (*SPECIAL, *ROLES, CALL, CLOSE, *DIGITS, *PAIRS, *"abcdef= ")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{# calls: <tool_call> #}"
)


class Drawers:
    """A number lies in each place."""

    def reset(self, **row: Any) -> None:
        self.seen: list[int] = []

    def look(self, place: str) -> str:
        """Look what lies in a place.

        Args:
            place: Digits.
        """
        self.seen.append(int(place) * 7 % 1000)
        return f"a {self.seen[-1]}"

    def get_reward(self) -> float:
        return sum(number % 2 for number in self.seen) / max(len(self.seen), 1)


def make_tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    whole = [*ROLES, CALL.replace("{", r"\{"), CLOSE.replace("}", r"\}"), r"\d\d", "."]
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(whole)), behavior="isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<bos>",
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = TEMPLATE
    return made


def save_caller(folder: Path) -> Path:
    """A model that has learned to look into a place in each of its turns."""
    tokenizer, rng = make_tokenizer(), random.Random(0)
    model = make_model("llama-tied", scale=1.0, vocab_size=len(VOCABULARY), hidden_size=128, head_dim=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    number = {token: index for index, token in enumerate(VOCABULARY)}
    for _ in range(80):
        rows = torch.tensor([_conversation(rng, number, tokenizer) for _ in range(8)])
        model(rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _conversation(rng: random.Random, number: dict[str, int], tokenizer: Any, *, length: int = 96) -> list[int]:
    ids = tokenizer(f"<user>{rng.randrange(10)}{rng.choice('abcd')}=<eos>")["input_ids"]
    while len(ids) < length:
        place = rng.choices((*DIGITS, *PAIRS[::5]), k=rng.randint(1, 3))
        ids += [number[token] for token in ("<assistant>", CALL, *place, CLOSE, "<eos>")]
        ids += tokenizer(f"<tool>a {rng.randrange(1000)}<eos>")["input_ids"]
    return ids[:length]


class Watch:
    """Everything that was tokenised, sampled and trained."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts: list[str] = []
        self.turns: dict[str, list[tuple[np.ndarray, Completion]]] = defaultdict(list)  # by the engine's session
        self.rows: list[Sample] = []
        tokenizers = type(make_tokenizer())
        encode, generate, update = tokenizers._encode_plus, Ticker.generate, Learner.update
        watch = self

        def noted_encode(self: Any, text: Any, *args: Any, **kwargs: Any) -> Any:
            watch.texts += [text] if isinstance(text, str) else [str(part) for part in text]
            return encode(self, text, *args, **kwargs)

        async def noted_generate(self: Any, request: Request) -> Made:
            made = await generate(self, request)
            assert request.session is not None
            watch.turns[request.session].append((request.prompt_ids, made.completion))
            return made

        def noted_update(self: Any, samples: Any) -> Any:
            watch.rows += samples
            return update(self, samples)

        monkeypatch.setattr(tokenizers, "_encode_plus", noted_encode)
        monkeypatch.setattr(Ticker, "generate", noted_generate)
        monkeypatch.setattr(Learner, "update", noted_update)

    def check_rows(self) -> None:
        """Each row is the engine's turns of one session, each behind exactly the ids before it, with the engine's log-probs."""
        turns_of: dict[bytes, list[tuple[np.ndarray, Completion]]] = {}
        for turns in self.turns.values():
            turns_of[np.concatenate((turns[-1][0], turns[-1][1].token_ids)).tobytes()] = turns
        for row in self.rows:
            ids = np.concatenate((row.prompt_ids, row.response_ids))
            sampled = np.zeros(len(ids), dtype=bool)
            for prompt_ids, turn in turns_of[ids.tobytes()]:
                begin, end = len(prompt_ids), len(prompt_ids) + len(turn.token_ids)
                assert np.array_equal(ids[:begin], prompt_ids) and np.array_equal(ids[begin:end], turn.token_ids)
                sampled[begin:end] = True
            assert np.array_equal(row.mask, sampled[len(row.prompt_ids) :])
            assert not row.behaviour_logprobs[~row.mask].any()


def play(folder: Path, *overrides: str) -> Config:
    """A run of more turns than ``NUM_TURNS``, because some end their episode early: 32 prompts a step, 4 episodes each, 8 turns each."""
    rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in letter_rows(64)]
    config = make_run(
        folder,
        "environment.type=class",
        "environment.path=tests.test_tool_turns:Drawers",
        "environment.max_turns=8",
        "environment.max_turn_tokens=8",
        "data.prompts_per_step=32",
        "rollout.max_response_tokens=160",
        "rollout.max_running=128",
        f"trainer.steps={NUM_TURNS * 7 // 4 // (32 * 4 * 8) + 1}",
        "actor.lr=1e-4",
        *overrides,
        rows=rows,
        reward=[{"type": "environment"}],
        model=save_caller(folder / "model"),
    )
    finish(config)
    return config


def check(config: Config, watch: Watch) -> None:
    made = [
        one
        for step in range(1, config.trainer.steps + 1)
        for group in groups(config, step).values()
        for one in group.completions
    ]
    called = [turn for one in made if one.episode for turn in one.episode.turns if turn.calls]
    assert len(called) >= NUM_TURNS
    watch.check_rows()
    assert len(watch.rows) == len(made)
    assert (
        any("<user>" in text for text in watch.texts)
        and sum("<tool>a " in text for text in watch.texts) > NUM_TURNS / 2
    )
    again = [text for text in watch.texts if CALL in text or CLOSE in text]
    assert not again, f"{len(again)} texts that the model wrote were tokenised again, such as {again[0]!r}"
    tokenizer = make_tokenizer()
    others = [
        turn
        for turns in watch.turns.values()
        for _, turn in turns
        if tokenizer(turn.text)["input_ids"] != turn.token_ids.tolist()[:-1]
    ]
    assert len(others) > NUM_TURNS / 10, "the model's tokens are not those of its text"
    mismatches = column(config, "rollout/logprob_mismatch_max")
    assert len(mismatches) == config.trainer.steps and max(mismatches) < TOLERANCE
    print(
        f"{len(called)} turns with a call, {len(others)} of other ids than their text's, mismatch at most {max(mismatches):.1e}"
    )


@pytest.mark.slow
def test_ten_thousand_turns_with_a_tool_are_trained_as_the_native_engine_sampled_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(monkeypatch)
    check(play(tmp_path), watch)


@pytest.mark.vllm
def test_ten_thousand_turns_with_a_tool_are_trained_as_vllm_sampled_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        python = find_python(None)
    except VllmUnavailable as error:
        pytest.skip(f"{error}, or in {PYTHON_VARIABLE}")
    watch = Watch(monkeypatch)
    check(play(tmp_path, "rollout.engine=vllm", f"rollout.vllm.python={python}"), watch)
