"""Steps that taught nothing: every advantage was 0."""

from __future__ import annotations

from rollcall.words import counted

ADVANTAGE = "train/advantage_abs_mean"
WORTH_SAYING = 0.1  # of the steps
ADVICE = (
    "In such a step all completions of each group scored alike or were left out of the loss, so there was nothing to prefer. Use "
    "prompts that the model solves sometimes but not always, raise rollout.samples_per_prompt, or let the reward give more than "
    "right and wrong"
)


def no_signal(num: int, *, num_steps: int) -> str | None:
    """In words; None: it is not worth a word.

    >>> no_signal(11, num_steps=12), no_signal(12, num_steps=12), no_signal(1, num_steps=12)
    ('11 of 12 steps had no signal', 'no step had a signal: nothing was learned in 12 steps', None)
    """
    if num == 0 or num < WORTH_SAYING * num_steps:
        return None
    if num == num_steps:
        return f"no step had a signal: nothing was learned in {counted(num, 'step')}"
    return f"{num} of {num_steps} steps had no signal"
