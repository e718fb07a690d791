"""A run whose episodes programs play."""

from __future__ import annotations

import json
from pathlib import Path

import programs
from runs import column, finish, make_run

from rollcall.base.journal import Journal
from rollcall.base.types import EndReason
from rollcall.view.audit import audit

# Two turns, the second behind the exact ids of the first; and beside it a conversation of its own.
BODY = """
status, answer = post("/completions", {"prompt": row["prompt"], "max_tokens": 4, "return_token_ids": True})
choice = answer["choices"][0]
ids = choice["prompt_token_ids"] + choice["token_ids"] + [5]
post("/completions", {"prompt": ids, "max_tokens": 2})
post("/completions", {"prompt": [7, 8, 9], "max_tokens": 2})
print(json.dumps({"reward": float(choice["text"].count("a"))}))
"""


def test_a_run_trains_on_what_its_programs_ask(tmp_path: Path) -> None:
    command = programs.write(tmp_path, BODY)
    config = make_run(
        tmp_path,
        "environment.type=agent",
        f"environment.run={json.dumps(command)}",
        "data.prompts_per_step=2",
        "rollout.samples_per_prompt=2",
        "rollout.max_response_tokens=16",
        "trainer.steps=1",
        reward=[{"type": "environment"}],
    )
    finish(config)
    groups = Journal(config.run.dir / "journal").read(1)
    assert len(groups) == 2 and audit(config.run.dir).is_clean and len(column(config, "train/loss")) == 1
    for completion in (one for group in groups for one in group.completions):
        episode = completion.episode
        assert episode is not None and episode.ended is EndReason.DONE, episode
        assert len(episode.turns) == 2 and len(episode.branches) == 1 and episode.reward is not None
        assert episode.branches[0].prompt_ids.tolist() == [7, 8, 9]
        first = episode.turns[0]
        assert completion.mask.tolist() == [True] * first.num_sampled + [False] + [True] * episode.turns[1].num_sampled
