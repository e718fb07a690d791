"""Checks the run file's keys for training in parallel, which have the names that people know from other systems."""

from __future__ import annotations

from typing import Any

from rollcall.config.base import read_number

OWN_KEYS = ("lr", "betas", "eps", "weight_decay")  # keys of the section that an optimizer's kwargs may also carry


def lift_kwargs(data: Any) -> Any:
    """``optimizer.kwargs`` with lr, betas, eps or weight_decay set the section's own keys of those names."""
    optimizer = data.get("optimizer") if isinstance(data, dict) else None
    if not isinstance(optimizer, dict) or not isinstance(kwargs := optimizer.get("kwargs"), dict):
        return data
    own = {key: kwargs[key] for key in OWN_KEYS if key in kwargs}
    for key, value in own.items():
        if key in data and read_number(data[key]) != read_number(value):
            raise ValueError(f"optimizer.kwargs.{key}={value} contradicts {key}={data[key]}; leave one of them out")
    rest = {key: value for key, value in kwargs.items() if key not in own}
    return {**data, **own, "optimizer": {**optimizer, "kwargs": rest}}


def check_section(section: Any) -> Any:
    """Refuse contradictions within one section."""
    if section.sequence_parallel and section.tensor_parallel_size == 1:
        raise ValueError(
            "sequence_parallel=true divides the tokens between the ranks of a tensor group, and tensor_parallel_size=1 has "
            "one; raise tensor_parallel_size, or leave sequence_parallel out"
        )
    if section.sharding_group_size is not None and section.sharding != "hsdp":
        raise ValueError(
            f"sharding_group_size={section.sharding_group_size} is the size of a group of sharding=hsdp, and sharding is "
            f"{section.sharding}; write sharding=hsdp, or leave it out"
        )
    if section.cpu_offload and section.sharding == "replicate":
        raise ValueError(
            "cpu_offload=true keeps a sharded learner's state in host memory, and sharding is replicate; write "
            "sharding=fsdp (one process may have it too)"
        )
    _check_kwargs(section.optimizer.kwargs)
    _check_state(section)
    return section


def _check_state(section: Any) -> None:
    """Check that ``optimizer.state: bfloat16`` goes with the rest."""
    choice = section.optimizer
    if choice.state == "float32":
        return
    if choice.name != "torch.optim.AdamW":
        raise ValueError(
            f"optimizer.state={choice.state} is for torch.optim.AdamW, and optimizer.name is {choice.name}; leave one of them out"
        )
    if choice.kwargs:
        raise ValueError(
            f"optimizer.kwargs.{next(iter(choice.kwargs))} does not go with optimizer.state={choice.state}; leave one of them out"
        )
    if not section.master_weights:
        raise ValueError(
            f"optimizer.state={choice.state} goes with float32 weights, and master_weights=false keeps none for a bfloat16 model, whose "
            "state is bfloat16 already; leave one of them out"
        )
    if section.cpu_offload:
        raise ValueError(
            f"optimizer.state={choice.state} saves memory of the card, and cpu_offload=true keeps the state in host memory; leave one "
            "of them out"
        )


def _check_kwargs(kwargs: dict[str, Any]) -> None:
    if kwargs.get("foreach") and kwargs.get("fused"):
        raise ValueError("optimizer.kwargs has foreach and fused both true, and torch takes one of them; drop one")
    for key in ("capturable", "differentiable", "maximize"):
        if kwargs.get(key):
            raise ValueError(f"optimizer.kwargs.{key}={kwargs[key]} does not fit a training step here; leave it out")


def check_batches(config: Any, *, name: str) -> None:
    """Compare sizes that follow from other keys with those given under the names of other systems."""
    section, data, rollout = getattr(config, name), config.data, config.rollout
    rows = config.completions_per_step // section.minibatches
    given = section.train_global_batch_size
    if given is not None and given != rows:
        fits = (
            config.completions_per_step % given == 0
            and data.prompts_per_step % (config.completions_per_step // given) == 0
        )
        hint = (
            f"{name}.minibatches={config.completions_per_step // given}"
            if fits
            else f"{name}.train_global_batch_size={rows}"
        )
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
            "them (longer prompts are left out), or raise it"
        )
