"""Turns a run file into a version for a debugger, with everything in one process."""

from __future__ import annotations

from rollcall.config.run import Config, load_config

_WHOLE = {
    "sharding": "replicate",
    "sharding_group_size": None,
    "tensor_parallel_size": 1,
    "sequence_parallel": False,
    "context_parallel_size": 1,
    "cpu_offload": False,
    "compile": False,
}


def in_one_process(config: Config, *, keeps_dir: bool = True) -> Config:
    """Return the same run without its cluster: nothing is split over processes or compiled, and the native engine samples.
    Episodes run one at a time, so that a breakpoint stops in only one. Model, data, rewards, algorithm and sizes stay. The run
    directory is a different one unless ``keeps_dir``, so the real run's checkpoints and journal stay as they are."""
    environment, run_dir = config.environment, config.run.dir
    if not keeps_dir:
        run_dir = run_dir.with_name(f"{run_dir.name}-local-debug")
    sections = {
        "run": config.run.model_copy(update={"dir": run_dir}),
        "cluster": None,
        "launch": None,
        "actor": config.actor.model_copy(update=_WHOLE),
        **({"critic": config.critic.model_copy(update=_WHOLE)} if config.algorithm.name == "ppo" else {}),
        "rollout": config.rollout.model_copy(update={"engine": "native", "compile": False}),
        **({"environment": environment.model_copy(update={"max_running": 1})} if environment is not None else {}),
        "trainer": config.trainer.model_copy(update={"elastic": None}),
        "checkpoint": config.checkpoint.model_copy(update={"place": "shared"}),
    }
    return load_config(config.model_copy(update=sections).model_dump(warnings=False))
