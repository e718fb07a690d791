"""A reward model: a sequence classifier with one label that scores a completion after its prompt.

It has its own tokenizer, so it reads text instead of the policy's token IDs. A prompt that was rendered from chat
messages stores them in ``metadata["prompt_messages"]``, and the reward model renders them with its own chat template.

A decoder scores a text at its last token. `transformers` takes the last token that differs from the padding token. If the
end-of-text token is also the padding token, a text that ends with it would be scored one token too early. So we pad rows with
a token that does not occur in any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from rollcall.base.types import Completion, Prompt
from rollcall.config.rewards import Reward
from rollcall.model.chat_template import render_chats
from rollcall.model.hub import hub_options
from rollcall.model.load import loading, refuse_cast, refuse_loaded
from rollcall.reward.trl import MESSAGES

_ROWS_PER_FORWARD = 16


class RewardModel:
    """Scores completions for a ``model`` reward. Texts that are too long keep their last ``max_tokens`` tokens."""

    def __init__(
        self, path: str, *, device: str | torch.device, max_tokens: int, trust_remote_code: bool = False
    ) -> None:
        trust = {"trust_remote_code": trust_remote_code, **hub_options(path, key="reward.path")}
        with loading(f"reward.path={path}"):
            config = AutoConfig.from_pretrained(path, **trust)
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path, **trust)
        if config.num_labels != 1:
            raise ValueError(
                f"reward model {path!r} has {config.num_labels} labels, but a reward is one number; "
                "use a sequence classifier trained with num_labels=1"
            )
        self._device = torch.device(device)
        dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        with loading(f"reward.path={path}"):
            model, info = AutoModelForSequenceClassification.from_pretrained(
                path, config=config, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **trust
            )
        if "score.weight" in info["missing_keys"]:
            raise ValueError(
                f"reward model {path!r} has no trained score.weight; use a sequence classifier, not a language model"
            )
        # The file may still contain a language model head, which a classifier does not have.
        refuse_loaded(f"reward.path={path}", info, leave_out=lambda name: name.startswith("lm_head."))
        refuse_cast(f"reward.path={path}", path, model)
        self._model: Any = model.to(self._device).eval()
        self._max_tokens = max_tokens
        self._text_config: Any = model.config.get_text_config()
        self._reads_last_token = hasattr(model, "score")  # every decoder has `score`; encoders read their first token
        if not self._reads_last_token and self._text_config.pad_token_id is None:
            raise ValueError(f"reward model {path!r} has no padding token; set pad_token_id in its config.json")

    def __call__(self, prompt: Prompt, completions: tuple[Completion, ...]) -> list[float]:
        rows = [self._encode(prompt, completion) for completion in completions]
        # Rows of similar length share a forward pass to reduce padding.
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        scores = [0.0] * len(rows)
        for start in range(0, len(order), _ROWS_PER_FORWARD):
            chosen = order[start : start + _ROWS_PER_FORWARD]
            for index, score in zip(chosen, self._forward([rows[index] for index in chosen]), strict=True):
                scores[index] = score
        return scores

    def _encode(self, prompt: Prompt, completion: Completion) -> list[int]:
        if self._tokenizer.chat_template:
            before = prompt.metadata.get(MESSAGES) or [{"role": "user", "content": prompt.text}]
            messages = [*before, {"role": "assistant", "content": completion.text}]
            (text,) = render_chats(self._tokenizer, [messages], add_generation_prompt=False)
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = self._tokenizer.encode(prompt.text + completion.text)
        return ids[-self._max_tokens :] or [self._tokenizer.eos_token_id or self._tokenizer.bos_token_id or 0]

    @torch.inference_mode()
    def _forward(self, rows: list[list[int]]) -> list[float]:
        if self._reads_last_token:
            self._text_config.pad_token_id = pad_id = _unused_id(rows, vocab_size=self._text_config.vocab_size)
            if pad_id is None and len(rows) > 1:
                return [score for row in rows for score in self._forward([row])]
        ids = torch.full((len(rows), max(map(len, rows))), self._text_config.pad_token_id or 0)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = torch.tensor(row)
            mask[index, : len(row)] = 1
        logits = self._model(input_ids=ids.to(self._device), attention_mask=mask.to(self._device)).logits
        return logits.float().squeeze(-1).tolist()


def _unused_id(rows: list[list[int]], *, vocab_size: int) -> int | None:
    """Return a token ID that no row contains, or None if the rows contain all of them.

    >>> _unused_id([[0, 2], [1]], vocab_size=4), _unused_id([[0, 1]], vocab_size=2)
    (3, None)
    """
    used = {token for row in rows for token in row}
    return next((token for token in range(vocab_size) if token not in used), None)


def load_reward_models(
    rewards: Sequence[Reward], *, device: torch.device, trust_remote_code: bool
) -> dict[int, RewardModel]:
    """Load the run file's reward models, keyed by their index in its list."""
    return {
        index: RewardModel(
            reward.path, device=device, max_tokens=reward.max_tokens, trust_remote_code=trust_remote_code
        )
        for index, reward in enumerate(rewards)
        if reward.type == "model"
    }
