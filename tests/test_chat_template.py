"""Chat templates in their process: the text is transformers' own, and a hostile one is stopped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from tiny import make_tokenizer
from transformers.utils import chat_template_utils

from rollcall.base.process_table import environment_of
from rollcall.model import chat_template
from rollcall.model.chat_template import TemplateError, environment, render_chats

CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "é {{ 1 }} \N{GRINNING FACE} <b>"},
    {"role": "assistant", "content": "\ud800"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"x": None}}}]


def a_tokenizer(template: str) -> Any:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(chat_template, "LIMIT_S", 0.3)
    chat_template.close()
    yield
    chat_template.close()


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}\n  [{{ m.role }}]{{ m['content'] | trim }}\n{% endfor %}{% if add_generation_prompt %}[a]{% endif %}",
        "{{ tools | tojson(indent=2) if tools }}{{ messages | tojson }}{{ eos_token }}{{ documents }}{{ bos_token }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}",
        "{{ strftime_now('%Y') }}{% set n = namespace(x=1) %}{% set n.x = 2 %}{{ n.x }}{{ messages[::-1] | length }}",
    ],
)
@pytest.mark.parametrize("tools", [[], TOOLS])
def test_the_text_is_that_of_transformers(template: str, tools: list[dict[str, Any]]) -> None:
    tokenizer = a_tokenizer(template)
    for adds in (True, False):
        expected = tokenizer.apply_chat_template(CHAT, tools=tools or None, add_generation_prompt=adds, tokenize=False)
        assert render_chats(tokenizer, [CHAT, CHAT], tools=tools, add_generation_prompt=adds) == [expected] * 2
        assert render_chats(tokenizer, [CHAT], tools=tools, add_generation_prompt=adds) == [expected]


def test_templates_find_the_names_that_transformers_gives_them() -> None:
    ours, theirs = environment(), chat_template_utils._compile_jinja_template("").environment
    for names in ("filters", "globals", "tests"):
        assert getattr(ours, names).keys() == getattr(theirs, names).keys()
    assert {tag for each in ours.extensions.values() for tag in each.tags} == {
        tag for each in theirs.extensions.values() for tag in each.tags
    }
    assert (ours.trim_blocks, ours.lstrip_blocks) == (theirs.trim_blocks, theirs.lstrip_blocks)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "it takes more than 0.3 s"),
        ("{% set x = 10 ** 99999999 // 3 %}", "it takes more than 0.3 s"),
        ("{{ 'a' * 10**10 }}", "it takes more than 2 GiB of memory"),
        ("{% set n = namespace(x='aaaa') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "it takes more than"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for", "unexpected 'end of template'|expected token"),
        ("{{ messages.x.y }}", "has no attribute 'x'"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)  # fmt: skip
def test_a_template_that_never_ends_or_takes_all_memory_is_refused_and_the_next_is_rendered(
    template: str, message: str, short_limit: None
) -> None:
    with pytest.raises(TemplateError, match=message):
        render_chats(a_tokenizer(template), [CHAT])
    assert render_chats(a_tokenizer("{{ messages | length }}"), [CHAT]) == ["2"]


def test_texts_that_fill_memory_together_are_refused() -> None:
    with pytest.raises(TemplateError, match="it writes more than 67,108,864 characters") as caught:
        render_chats(a_tokenizer("{{ 'a' * 10**7 }}"), [CHAT] * 8)
    assert caught.value.place == 6


def test_the_conversation_that_a_template_refuses_is_named_by_its_place() -> None:
    template = "{% if messages | length == 2 %}{{ raise_exception('two') }}{% endif %}"
    with pytest.raises(TemplateError, match="two") as caught:
        render_chats(a_tokenizer(template), [CHAT[:1], CHAT, CHAT[:1]])
    assert caught.value.place == 1


def test_the_process_has_none_of_the_secrets_and_a_fork_starts_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    chat_template.close()
    tokenizer = a_tokenizer("{{ messages | length }}")
    assert render_chats(tokenizer, [CHAT, CHAT]) == ["2", "2"]
    process = chat_template._worker
    assert process is not None and "HF_TOKEN" not in (environment_of(process.pid) or {"HF_TOKEN": ""})
    child = os.fork()
    if child == 0:
        status = 1
        try:
            own = render_chats(tokenizer, [CHAT[:1], []]) == ["1", "0"] and chat_template._worker is not process
            status = 0 if own else 2
            chat_template.close()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert render_chats(tokenizer, [CHAT, CHAT]) == ["2", "2"], "the parent's goes on"
