"""Refuses values that would ruin a run. It does so before anything starts, and says what to use instead.

A function such as ``check_stops`` checks one key and is attached to the key's field. ``check_ruin`` checks combinations of keys that
would ruin a run. A key that has no effect because of other keys is harmless, and run files that are shared between modes have such keys.
``unused`` lists them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from rollcall.base.errors import ConfigError
from rollcall.base.wait import say
from rollcall.base.words import are
from rollcall.config.base import read_number

MOST_COMPLETIONS = 10_000_000  # in a step; many times more than the largest runs use
HUB = "hub:"
COLDEST = 0.001  # the lowest temperature above 0; dividing an ordinary model's logits by less would overflow


def check_stops(stops: list[str]) -> list[str]:
    if "" in stops:
        raise ValueError("an empty string ends every completion at its first token; remove it")
    return stops


def check_home(path: str) -> str:
    """Refuse ``~name`` for a user that does not exist on this machine."""
    if path.startswith("~") and os.path.expanduser(path) == path:
        raise ValueError(f"{path!r} begins with the home directory of an unknown user; write the full path")
    return path


def check_directory(path: Path) -> Path:
    """Expand ``~``, which would otherwise create a folder named ``~``."""
    expanded = Path(check_home(str(path))).expanduser() if str(path).startswith("~") else path
    if expanded.name in ("", ".."):
        raise ValueError(f"{str(path)!r} contains other files; give this run its own directory, such as runs/first")
    return expanded


def check_variables(variables: dict[str, str]) -> dict[str, str]:
    for name in variables:
        if not name or "=" in name:
            raise ValueError("a variable name is empty or contains '='; write NAME: value")
    return variables


def check_variable_names(names: list[str]) -> list[str]:
    """Refuse values, because a secret among them would end up in files and command lines."""
    if any(not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) for name in names):
        raise ValueError("has an entry that is not a variable name; write only names, such as HF_TOKEN, without values")
    return names


def check_ruin(config: Any) -> None:
    """Check the run file of a new run."""
    prompts, samples = config.data.prompts_per_step, config.rollout.samples_per_prompt
    if prompts * samples > MOST_COMPLETIONS:
        raise ConfigError(
            f"data.prompts_per_step={prompts} x rollout.samples_per_prompt={samples} are {prompts * samples} completions per step, "
            f"more than the maximum of {MOST_COMPLETIONS}; lower one of them"
        )
    if config.rollout.top_k == 1 and samples > 1:
        raise ConfigError(
            f"rollout.top_k=1 always takes the most likely token, so the {samples} completions of a prompt are all the "
            "same and there is nothing to learn; use rollout.top_k=0 (all tokens), or 2 or more"
        )
    if config.algorithm.dynamic_sampling and samples < 2:
        raise ConfigError(
            f"algorithm.dynamic_sampling=true leaves out groups whose rewards are all equal, and with rollout.samples_per_prompt={samples} "
            "that is every group; use 2 or more, or algorithm.dynamic_sampling=false"
        )
    section = config.eval
    if section.samples_per_prompt > 1 and section.temperature == 0:
        raise ConfigError(
            f"with eval.temperature=0, all eval.samples_per_prompt={section.samples_per_prompt} completions of a prompt are the same; "
            "use eval.samples_per_prompt=1, or an eval.temperature above 0"
        )
    if 0 < section.temperature < COLDEST:
        raise ConfigError(
            f"eval.temperature={section.temperature:g} is too close to 0; use 0 (greedy), or {COLDEST} or more"
        )
    for name in ("actor", "critic"):
        section = getattr(config, name)
        if section.lr * section.weight_decay >= 1:
            raise ConfigError(
                f"{name}.lr={section.lr:g} x {name}.weight_decay={section.weight_decay:g} is 1 or more, so each update would "
                f"erase all weights; lower one of them (0.01 is a common {name}.weight_decay)"
            )
    if all(reward.weight == 0 for reward in config.reward):
        raise ConfigError(
            "every reward has weight 0, so there is nothing to learn; give at least one a different weight"
        )


def unused(config: Any, *, in_folder: bool = False) -> list[str]:
    """Return a sentence for each reason why keys that were set have no effect. ``in_folder`` means that the nodes share a folder
    (`--master`), so the run file's cluster does not decide where roles run."""
    algorithm, one_process = config.algorithm, config.cluster is None or config.cluster.num_slots == 1
    ppo, native, data = algorithm.name == "ppo", config.rollout.engine == "native", config.data
    alone = one_process and not in_folder
    one_slot = "the run has one slot, so everything runs in this process"
    no_ray = "nodes that share a folder do not use Ray" if in_folder else one_slot
    cases = [
        ("critic", not ppo, f"algorithm.name={algorithm.name} has no critic (only ppo does)"),
        ("rollout.vllm", native, "rollout.engine is native, not vllm"),
        ("rollout.weights", alone, "engine and learner are in one process and share the weights"),
        ("trainer.elastic", alone, "the run has only one node"),
        ("cluster.ray_address", config.cluster is not None and (one_process or in_folder), no_ray),
        ("data.split", not is_hub(data.train), "data.train is not a hub: dataset"),
        ("data.val_split", not is_hub(data.val), "data.val is not a hub: dataset"),
        ("data.subset", not is_hub(data.train) and not is_hub(data.val), "data.train is not a hub: dataset"),
        ("algorithm.kl_estimator", algorithm.kl_coef == 0, "algorithm.kl_coef=0"),
        ("algorithm.kl_in", algorithm.kl_coef == 0, "algorithm.kl_coef=0"),
        ("algorithm.max_refills", not algorithm.dynamic_sampling, "algorithm.dynamic_sampling=false"),
        ("algorithm.overlong_penalty", algorithm.overlong_buffer == 0, "algorithm.overlong_buffer=0"),
    ]
    found: dict[str, list[str]] = {}
    for key, is_idle, why in cases:
        if is_idle:
            found.setdefault(why, []).extend(_changed(config, key))
    return [f"{', '.join(keys)} {are(len(keys))} set but not used: {why}" for why, keys in found.items() if keys]


def say_unused(config: Any, *, in_folder: bool = False) -> None:
    for text in unused(config, in_folder=in_folder):
        say(f"note: {text}")


def is_hub(source: str | None) -> bool:
    """Whether this source of data is a dataset on the hub rather than a file."""
    return source is not None and source.startswith(HUB)


def _changed(config: Any, key: str) -> list[str]:
    """Return the keys in a section, or the single key, whose values are not the defaults."""
    *parents, last = key.split(".")
    section = config
    for parent in parents:
        section = getattr(section, parent)
    value, default = getattr(section, last), type(section).model_fields[last].default
    if value == default:
        return []
    if default is None or not hasattr(value, "model_fields_set"):
        return [key]
    names = (name for name in type(value).model_fields if getattr(value, name) != getattr(default, name))
    return [f"{key}.{name}" for name in names]


# Keys of parallel training, with names known from other systems


def lift_kwargs(data: Any) -> Any:
    """Move lr, betas, eps and weight_decay from ``optimizer.kwargs`` to the section's keys with the same names."""
    optimizer = data.get("optimizer") if isinstance(data, dict) else None
    if not isinstance(optimizer, dict) or not isinstance(kwargs := optimizer.get("kwargs"), dict):
        return data
    own = {key: kwargs[key] for key in ("lr", "betas", "eps", "weight_decay") if key in kwargs}
    for key, value in own.items():
        if key in data and read_number(data[key]) != read_number(value):
            raise ValueError(f"optimizer.kwargs.{key}={value} contradicts {key}={data[key]}; remove one of them")
    rest = {key: value for key, value in kwargs.items() if key not in own}
    return {**data, **own, "optimizer": {**optimizer, "kwargs": rest}}


def check_section(section: Any) -> Any:
    """Refuse contradictions within one section."""
    if section.sequence_parallel and section.tensor_parallel_size == 1:
        raise ValueError(
            "sequence_parallel=true splits the tokens across the ranks of a tensor group, but with tensor_parallel_size=1 there is "
            "only one rank; raise tensor_parallel_size, or remove sequence_parallel"
        )
    if section.sharding_group_size is not None and section.sharding != "hsdp":
        raise ValueError(
            f"sharding_group_size={section.sharding_group_size} applies only to sharding=hsdp, but sharding is "
            f"{section.sharding}; set sharding=hsdp, or remove sharding_group_size"
        )
    if section.cpu_offload and section.sharding == "replicate":
        raise ValueError(
            "cpu_offload=true keeps a sharded learner's state in host memory, but sharding is replicate; set "
            "sharding=fsdp (it also works with one process)"
        )
    choice = section.optimizer
    if choice.kwargs.get("foreach") and choice.kwargs.get("fused"):
        raise ValueError("optimizer.kwargs sets both foreach and fused, but torch accepts only one of them; remove one")
    for key in ("capturable", "differentiable", "maximize"):
        if choice.kwargs.get(key):
            raise ValueError(f"optimizer.kwargs.{key}={choice.kwargs[key]} is not supported; remove it")
    problems = {
        f"works only with torch.optim.AdamW, but optimizer.name is {choice.name}": choice.name != "torch.optim.AdamW",
        f"does not work with optimizer.kwargs.{next(iter(choice.kwargs), '')}": choice.kwargs,
        "needs float32 weights, but with master_weights=false a bfloat16 model has none, and its state is bfloat16 already": (
            not section.master_weights
        ),
        "saves GPU memory, but with cpu_offload=true the state is in host memory": section.cpu_offload,
    }
    for problem, is_there in problems.items():
        if is_there and choice.state == "bfloat16":
            raise ValueError(f"optimizer.state={choice.state} {problem}; remove one of them")
    return section


def check_batches(config: Any, *, name: str) -> None:
    """Check the keys that other systems use for sizes. Rollcall computes these sizes from other keys, so the values must agree."""
    section, data, rollout = getattr(config, name), config.data, config.rollout
    rows = config.completions_per_step // section.minibatches
    given = section.train_global_batch_size
    if given is not None and given != rows:
        parts, rest = divmod(config.completions_per_step, given)
        fits = rest == 0 and data.prompts_per_step % parts == 0
        hint = f"{name}.minibatches={parts}" if fits else f"{name}.train_global_batch_size={rows}"
        raise ValueError(
            f"{name}.train_global_batch_size={given}, but an update has data.prompts_per_step x rollout.samples_per_prompt / "
            f"{name}.minibatches = {data.prompts_per_step} x {rollout.samples_per_prompt} / {section.minibatches} = {rows} "
            f"completions; write {hint}, or change one of those"
        )
    longest = data.max_prompt_tokens + rollout.max_response_tokens
    if section.max_total_sequence_length is not None and longest > section.max_total_sequence_length:
        raise ValueError(
            f"{name}.max_total_sequence_length={section.max_total_sequence_length}, but data.max_prompt_tokens + "
            f"rollout.max_response_tokens = {data.max_prompt_tokens} + {rollout.max_response_tokens} = {longest}; lower one of "
            "them (longer prompts are left out), or raise the limit"
        )
