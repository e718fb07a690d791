"""Rollcall: reinforcement learning for language models. Start with ``rollcall --help`` or docs/python.md.

    import rollcall

    run = rollcall.train("run.yaml", trainer={"steps": 20}, on_step=lambda done: print(done.step, done.reward_mean))
    run.metrics, run.samples, run.checkpoints

Each name is imported when it is first used, so ``import rollcall`` itself is fast.
"""

# pyright: strict
import os
from importlib import import_module
from typing import TYPE_CHECKING

from rollcall.base.version import __version__

if TYPE_CHECKING:
    from rollcall.base.errors import ConfigError
    from rollcall.base.types import Completion, Group, Prompt, Score
    from rollcall.config import Config
    from rollcall.environments.stepwise import Observation, StepResult
    from rollcall.loop.callbacks import CallbackError, CheckpointSaved, EvaluationDone, StepDone
    from rollcall.run.api import Run, SavedCheckpoint, evaluate, load_run, train
    from rollcall.run.evaluation import EvalReport

__all__ = [
    "CallbackError",
    "CheckpointSaved",
    "Completion",
    "Config",
    "ConfigError",
    "EvalReport",
    "EvaluationDone",
    "Group",
    "Observation",
    "Prompt",
    "Run",
    "SavedCheckpoint",
    "Score",
    "StepDone",
    "StepResult",
    "__version__",
    "evaluate",
    "load_run",
    "train",
]
_FROM = {
    "rollcall.run.api": ("Run", "SavedCheckpoint", "evaluate", "load_run", "train"),
    "rollcall.config": ("Config",),
    "rollcall.environments.stepwise": ("Observation", "StepResult"),
    "rollcall.base.errors": ("ConfigError",),
    "rollcall.run.evaluation": ("EvalReport",),
    "rollcall.loop.callbacks": ("CallbackError", "CheckpointSaved", "EvaluationDone", "StepDone"),
    "rollcall.base.types": ("Completion", "Group", "Prompt", "Score"),
}

# torch for ARM has its own allocator (mimalloc), which returns the memory of freed tensors to the kernel after 10 ms. An update on a
# CPU would then spend a seventh of its time getting new pages. The allocator reads its settings once, when torch is loaded, so they
# must be set before anything else is imported. ``host_memory`` does the same for glibc.
if "MIMALLOC_PURGE_DELAY" not in os.environ:
    os.putenv("MIMALLOC_PURGE_DELAY", "-1")
# Otherwise, torch's kernels for ARM write a map of their code to /tmp for each process, for a profiler that nobody uses.
if "ONEDNN_JIT_PROFILE" not in os.environ:
    os.putenv("ONEDNN_JIT_PROFILE", "0")


if not TYPE_CHECKING:  # otherwise, a type checker would accept any name

    def __getattr__(name: str) -> object:
        for module, names in _FROM.items():
            if name in names:
                value = globals()[name] = getattr(import_module(module), name)
                return value
        raise AttributeError(f"module 'rollcall' has no attribute {name!r}; its attributes are {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
