"""Requests as exact tokens: what goes on from an answer, what begins anew, and the training rows that come of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from endpoints import chat_tokenizer, made

from rollcall.environments.calls import Call
from rollcall.environments.conversation import Conversations
from rollcall.environments.histories import Asked, Histories
from rollcall.environments.protocol import EnvironmentFailed

USER, AGAIN = {"role": "user", "content": "hi"}, {"role": "user", "content": "go on"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return chat_tokenizer()


def histories(tokenizer: Any, **options: Any) -> Histories:
    return Histories(Conversations(tokenizer), name="e", **options)


def answer(tokenizer: Any, asked: Asked, text: str, to: Histories, *, ends: bool = True, version: int = 0) -> Any:
    """The model answers with this text; returns the message that the program gets."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] + ([0] if ends else [])
    message = {"role": "assistant", "content": text}
    to.note(asked, made(ids, tokenizer=tokenizer, version=version), session=asked.session, message=message)
    return message


def decoded(tokenizer: Any, ids: Any) -> str:
    return tokenizer.decode(ids)


def test_messages_that_go_on_from_an_answer_extend_its_row(tokenizer: Any) -> None:
    kept = histories(tokenizer)
    first = kept.chat([USER], tools=())
    reply = answer(tokenizer, first, "hello", kept)
    second = kept.chat([USER, reply, AGAIN], tools=())
    answer(tokenizer, second, "done", kept, version=1)
    (row,) = kept.rows
    branch = row.branch()
    assert decoded(tokenizer, branch.prompt_ids) == "[user]hi<eos>[assistant]"
    assert decoded(tokenizer, branch.token_ids) == "hello<eos>[user]go on<eos>[assistant]done<eos>"
    assert decoded(tokenizer, branch.token_ids[branch.mask]) == "hello<eos>done<eos>"
    assert not branch.logprobs[~branch.mask].any() and (branch.logprobs[branch.mask] < 0).all()
    assert [(segment.version, segment.num_tokens) for segment in branch.segments] == [(0, 6 + 23), (1, 5)]
    assert first.session == second.session
    assert [(turn.num_sampled, turn.num_observed, turn.observation) for turn in row.turns] == [
        (6, 23, "go on"),
        (5, 0, ""),
    ]


def test_tokens_that_would_be_written_otherwise_stay_as_they_were_sampled(tokenizer: Any) -> None:
    """A model may spell the same text with other tokens than the tokenizer; the unknown one decodes to what it cannot spell."""
    kept = histories(tokenizer)
    first = kept.chat([USER], tools=())
    kept.note(
        first, made([50, 2, 51, 0], tokenizer=tokenizer), session="s", message={"role": "assistant", "content": "x"}
    )
    second = kept.chat([USER, {"role": "assistant", "content": "x"}, AGAIN], tools=())
    start = len(first.prompt_ids)
    assert second.prompt_ids[start : start + 4].tolist() == [50, 2, 51, 0]


def test_an_answer_without_its_end_gets_one(tokenizer: Any) -> None:
    kept = histories(tokenizer)
    reply = answer(tokenizer, kept.chat([USER], tools=()), "cut", kept, ends=False)
    second = kept.chat([USER, reply, AGAIN], tools=())
    assert decoded(tokenizer, second.added) == "<eos>[user]go on<eos>[assistant]"


def test_a_rewritten_history_is_a_branch_of_its_own(tokenizer: Any) -> None:
    kept = histories(tokenizer)
    answer(tokenizer, kept.chat([USER], tools=()), "long story", kept)
    short = [USER, {"role": "assistant", "content": "short"}, AGAIN]
    asked = kept.chat(short, tools=())
    reply = answer(tokenizer, asked, "ok", kept)
    answer(tokenizer, kept.chat([*short, reply, AGAIN], tools=()), "fine", kept)
    assert asked.behind is None and len(kept.rows) == 2
    branch = kept.rows[1].branch()
    assert decoded(tokenizer, branch.prompt_ids) == "[user]hi<eos>[assistant]short<eos>[user]go on<eos>[assistant]"
    assert decoded(tokenizer, branch.token_ids[branch.mask]) == "ok<eos>fine<eos>"


def test_going_back_to_an_earlier_answer_trains_its_tokens_once(tokenizer: Any) -> None:
    kept = histories(tokenizer)
    reply = answer(tokenizer, kept.chat([USER], tools=()), "one", kept)
    answer(tokenizer, kept.chat([USER, reply, AGAIN], tools=()), "two", kept)
    other = kept.chat([USER, reply, {"role": "user", "content": "no"}], tools=())
    answer(tokenizer, other, "three", kept)
    first, second = (row.branch() for row in kept.rows)
    assert decoded(tokenizer, second.prompt_ids).startswith("[user]hi<eos>[assistant]one<eos>[user]no")
    assert decoded(tokenizer, first.token_ids[first.mask]) == "one<eos>two<eos>"
    assert decoded(tokenizer, second.token_ids) == "three<eos>" and second.mask.all()


def test_two_at_once_behind_one_answer_have_sessions_of_their_own(tokenizer: Any) -> None:
    kept = histories(tokenizer)
    reply = answer(tokenizer, kept.chat([USER], tools=()), "one", kept)
    left, right = (kept.chat([USER, reply, AGAIN], tools=()) for _ in range(2))
    assert left.session != right.session
    answer(tokenizer, right, "r", kept)
    answer(tokenizer, left, "l", kept)
    assert [decoded(tokenizer, row.branch().token_ids[-2:]) for row in kept.rows] == ["r<eos>", "l<eos>"]
    assert sum(int(row.branch().mask.sum()) for row in kept.rows) == 4 + 2 + 2


def test_tools_are_part_of_a_history(tokenizer: Any) -> None:
    kept = histories(tokenizer)
    tools = ({"type": "function", "function": {"name": "f"}},)
    reply = answer(tokenizer, kept.chat([USER], tools=tools), "one", kept)
    assert kept.chat([USER, reply, AGAIN], tools=tools).behind is not None
    assert kept.chat([USER, reply, AGAIN], tools=()).behind is None


def test_results_of_calls_stand_with_their_turn(tokenizer: Any) -> None:
    kept = histories(tokenizer)
    asked = kept.chat([USER], tools=())
    calls = [Call(id="c1", name="f", arguments={"a": 1}), Call(id="c2", name="g", arguments={})]
    function = [{"id": call.id, "function": {"name": call.name, "arguments": call.arguments}} for call in calls]
    message = {"role": "assistant", "content": "", "tool_calls": function}
    kept.note(asked, made([50, 0], tokenizer=tokenizer), session="s", message=message, calls=calls)
    # Programs may change the ids of calls; a result belongs to the call whose id it has.
    results = [{"role": "tool", "content": text, "tool_call_id": id} for text, id in (("two", "c2"), ("one", "c1"))]
    answer(tokenizer, kept.chat([USER, message, *results], tools=()), "end", kept)
    assert [(call.name, call.result) for call in kept.rows[0].turns[0].calls] == [("f", "one"), ("g", "two")]


def test_ids_go_on_from_the_longest_answer_they_begin_with(tokenizer: Any) -> None:
    kept = histories(tokenizer)
    first = kept.ids(np.array([10, 11], dtype=np.int32))
    kept.note(first, made([20, 21], tokenizer=tokenizer), session=first.session)
    second = kept.ids(np.array([10, 11, 20, 21, 30], dtype=np.int32))
    kept.note(second, made([22, 0], tokenizer=tokenizer), session=second.session)
    assert second.added.tolist() == [30] and kept.ids(np.array([10, 11, 20], dtype=np.int32)).behind is None
    assert kept.rows[0].branch().token_ids.tolist() == [20, 21, 30, 22, 0]


def test_text_behind_a_stop_token_is_a_row_without_it(tokenizer: Any) -> None:
    kept = histories(tokenizer)
    first = kept.plain("ab")
    kept.note(first, made([50, 51, 0], tokenizer=tokenizer), session=first.session)
    text = "ab" + tokenizer.decode([50, 51]) + "c"
    asked = kept.plain(text)
    assert asked.behind is None and asked.prompt_ids[:4].tolist() == [*first.prompt_ids.tolist(), 50, 51]


def test_a_server_forgets_what_was_used_longest_ago(tokenizer: Any) -> None:
    kept = histories(tokenizer, max_kept=40)
    first = kept.ids(np.arange(10, 30, dtype=np.int32))
    kept.note(first, made([5, 0], tokenizer=tokenizer), session="s")
    other = kept.ids(np.arange(30, 50, dtype=np.int32))
    kept.note(other, made([6, 0], tokenizer=tokenizer), session="s")
    assert kept.ids(np.array([*range(10, 30), 5, 0, 9], dtype=np.int32)).behind is None
    assert kept.ids(np.array([*range(30, 50), 6, 0, 9], dtype=np.int32)).behind is not None and not kept.rows


def test_a_template_that_rewrites_the_past_is_refused_in_training_and_rendered_whole_by_a_server() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}[{{ message.role }}]{% if loop.last or message.role != 'assistant' %}{{ message.content }}"
        "{% endif %}<eos>{% endfor %}[assistant]"
    )
    kept, served = histories(tokenizer), histories(tokenizer, max_kept=1000)
    for one in (kept, served):
        answer(tokenizer, one.chat([USER], tools=()), "gone later", one)
    later = [USER, {"role": "assistant", "content": "gone later"}, AGAIN]
    with pytest.raises(EnvironmentFailed, match="cannot be extended"):
        kept.chat(later, tools=())
    assert decoded(tokenizer, served.chat(later, tools=()).prompt_ids).startswith(
        "[user]hi<eos>[assistant]<eos>[user]go on"
    )
