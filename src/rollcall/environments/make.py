"""The run file's environment, made."""

from __future__ import annotations

from rollcall.config import EnvironmentSection
from rollcall.environments.protocol import Environments
from rollcall.errors import ConfigError


def make_environments(section: EnvironmentSection, *, chat_template: str | None) -> Environments:
    raise ConfigError(f"environment.type={section.type} cannot be run yet; leave the environment out")
