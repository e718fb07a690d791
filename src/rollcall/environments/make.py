"""The run file's environment, made."""

from __future__ import annotations

import os

from rollcall.config import EnvironmentSection
from rollcall.config.environments import (
    AgentEnvironment,
    ClassEnvironment,
    StepEnvironment,
    VerifiersEnvironment,
    kinds_of,
)
from rollcall.debug.here import POST_MORTEM
from rollcall.environments.agent import AgentEnvironments
from rollcall.environments.calls import format_of
from rollcall.environments.endpoint import refuse_without_packages
from rollcall.environments.host import RunsHere
from rollcall.environments.processes import ProcessEnvironments, Setup
from rollcall.environments.program import ProgramsHere
from rollcall.environments.protocol import Environments
from rollcall.environments.taskset import TasksetPrograms

Driven = AgentEnvironment | VerifiersEnvironment  # by a program


def make_environments(section: EnvironmentSection, *, chat_template: str | None) -> Environments:
    """Waits until episodes can begin; ConfigError: what the section names cannot be used, and why."""
    if isinstance(section, Driven):
        refuse_without_packages()
    made = make_here(section, chat_template=chat_template)
    if isinstance(made, ProcessEnvironments):
        return made
    return AgentEnvironments(section, chat_template=chat_template, programs=made)


def make_here(section: EnvironmentSection, *, chat_template: str | None) -> RunsHere:
    """What runs in processes of this node; the same on a host as in the process of the run."""
    if isinstance(section, AgentEnvironment):
        return ProgramsHere(section.run, env=section.env, memory_mb=section.memory_mb, max_running=section.max_running)
    if isinstance(section, VerifiersEnvironment):
        return TasksetPrograms(section)
    return ProcessEnvironments(setup_of(section, chat_template=chat_template), max_processes=section.max_running)


def setup_of(section: ClassEnvironment | StepEnvironment, *, chat_template: str | None) -> Setup:
    is_class = isinstance(section, ClassEnvironment)
    call_format = ""
    if is_class:
        call_format = format_of(chat_template) if section.call_format == "auto" else section.call_format
    return Setup(
        type=section.type,
        paths=kinds_of(section.path),
        kwargs={"": section.kwargs} if isinstance(section.path, str) else section.kwargs,
        tools=list(section.tools) if is_class else [],
        call_format=call_format,
        is_chat=chat_template is not None,
        env=list(section.env),
        memory_mb=section.memory_mb,
        python=section.python,
        post_mortem=bool(os.environ.get(POST_MORTEM)),
    )
