"""Creates the run file's environment."""

from __future__ import annotations

from rollcall.config import EnvironmentSection
from rollcall.config.environments import AgentEnvironment, VerifiersEnvironment
from rollcall.environments.agent import AgentEnvironments
from rollcall.environments.endpoint import refuse_without_packages
from rollcall.environments.host import RunsHere
from rollcall.environments.processes import ProcessEnvironments
from rollcall.environments.program import ProgramsHere
from rollcall.environments.protocol import Environments
from rollcall.environments.taskset import TasksetPrograms

Driven = AgentEnvironment | VerifiersEnvironment  # environments driven by a program


def make_environments(section: EnvironmentSection, *, chat_template: str | None) -> Environments:
    """Create the environment and wait until episodes can start. Raise ConfigError if the section cannot be used."""
    if isinstance(section, Driven):
        refuse_without_packages()
    made = make_here(section, chat_template=chat_template)
    if isinstance(made, ProcessEnvironments):
        return made
    return AgentEnvironments(section, chat_template=chat_template, programs=made)


def make_here(section: EnvironmentSection, *, chat_template: str | None) -> RunsHere:
    """Start the processes that play episodes on this node, which is either a host or the run's own node."""
    if isinstance(section, AgentEnvironment):
        return ProgramsHere(section.run, env=section.env, memory_mb=section.memory_mb, max_running=section.max_running)
    if isinstance(section, VerifiersEnvironment):
        return TasksetPrograms(section)
    return ProcessEnvironments(section, chat_template=chat_template)
