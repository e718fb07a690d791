"""Rollcall: reinforcement learning for language models. ``rollcall --help`` and docs/python.md are the ways in.

    import rollcall

    run = rollcall.train("run.yaml", trainer={"steps": 20}, on_step=lambda done: print(done.step, done.reward_mean))
    run.metrics, run.samples, run.checkpoints

Names are imported when they are first used, so that ``import rollcall`` costs nothing.
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

# torch for ARM brings an allocator of its own (mimalloc), which gives freed tensors back to the kernel after 10 ms: an update
# on a CPU then spends a seventh of its time on fresh pages. It reads its settings once, when torch is loaded, so this stands
# before everything else; ``host_memory`` does the same for glibc.
if "MIMALLOC_PURGE_DELAY" not in os.environ:
    os.putenv("MIMALLOC_PURGE_DELAY", "-1")
# torch's kernels for ARM otherwise leave a map of their code in /tmp for each process, for a profiler that nobody runs.
if "ONEDNN_JIT_PROFILE" not in os.environ:
    os.putenv("ONEDNN_JIT_PROFILE", "0")


if not TYPE_CHECKING:  # a type checker would take every name for one of these

    def __getattr__(name: str) -> object:
        for module, names in _FROM.items():
            if name in names:
                value = globals()[name] = getattr(import_module(module), name)
                return value
        raise AttributeError(f"module 'rollcall' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
