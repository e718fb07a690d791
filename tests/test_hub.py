"""A hub name that cannot be loaded is refused by one request, not after a minute of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError

from rollcall.model.hub import HubError, hub_options
from rollcall.model.load import load_tokenizer

NAME = "someone/some-model"


class Hub:
    """Answers with an error, if it has one; counts how often it is asked."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, error: Exception | None = None, cached: bool = False
    ) -> None:
        self.error = error
        self.asked = 0
        hub_options.cache_clear()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", self.ask)
        monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: "config.json" if cached else None)

    def ask(self, url: str, timeout: float) -> None:
        self.asked += 1
        if self.error is not None:
            raise self.error


def status(code: int) -> Exception:
    error: Any = HfHubHTTPError.__new__(HfHubHTTPError)
    error.response = SimpleNamespace(status_code=code)
    return error


@pytest.mark.parametrize("error", [OSError("no route to host"), status(503)])
def test_an_unreachable_hub_is_asked_once_and_said_in_words(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    hub = Hub(monkeypatch, error=error)
    with pytest.raises(HubError, match=rf"model.path={NAME} is not a directory .* cannot be reached .*HF_ENDPOINT"):
        load_tokenizer(NAME, chat_template=None)
    assert hub.asked == 1


def test_without_the_hub_a_name_that_is_cached_is_read_from_the_cache_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch, error=OSError("no route"), cached=True)
    assert [hub_options(NAME) for _ in range(3)] == [{"local_files_only": True}] * 3
    assert hub.asked == 1


def test_offline_mode_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set"):
        hub_options(NAME)
    assert hub.asked == 0


@pytest.mark.parametrize("error", [None, status(404), status(401)])
def test_a_hub_that_answers_is_left_to_transformers(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    Hub(monkeypatch, error=error)
    assert hub_options(NAME) == {}


def test_what_is_neither_a_directory_nor_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(monkeypatch)
    with pytest.raises(HubError, match="neither a directory nor a hub name"):
        hub_options("no such model!")
