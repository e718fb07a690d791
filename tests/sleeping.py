"""Another sleep for one module. Patching ``time.sleep`` itself would change every thread of the tests, and those of other tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest


def set_sleep(monkeypatch: pytest.MonkeyPatch, module: ModuleType, sleep: Callable[[float], object]) -> None:
    monkeypatch.setattr(module, "time", SimpleNamespace(**{**vars(time), "sleep": sleep}))
