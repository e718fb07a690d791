"""Messages about the cost of too little memory, for `rollcall plan` and for a run that has to cope with it. Pure arithmetic."""

from __future__ import annotations

from rollcall.base.words import counted, size
from rollcall.config import Config
from rollcall.config.sections import OptimizerChoice
from rollcall.plan.choose import ENOUGH_TOKENS

FEW = 8  # an engine is slow if it can decode less than 1/FEW of its completions at once
SMALL = ENOUGH_TOKENS // 4  # tokens; smaller micro-batches are memory-bound


def on_kv(config: Config, *, tokens: int, longest: int, per_token: int, num_engines: int) -> str | None:
    """Warn about a small KV cache that ``auto`` chose. ``longest`` counts the tokens of prompt and completion."""
    at_once = min(config.rollout.max_running, -(-config.completions_per_step // num_engines))
    rows = max(1, tokens // longest)
    if rows * FEW >= at_once:
        return None
    missing = size((at_once - rows) * longest * per_token)
    return (
        f"the KV cache has room for {rows} of the {at_once} completions that an engine gets in a step (of {longest} tokens each), so "
        f"decoding takes up to {at_once // rows} times as long as with {missing} more. {_more_room(config)}"
    )


def on_microbatch(
    config: Config, name: str, *, tokens: int, longest: int, num_ranks: int, needed: int = 0, room: int = 0
) -> str | None:
    """Warn about a small micro-batch that ``auto`` chose for the learner ``name``. ``needed`` is the number of bytes for a pass, and
    ``room`` the number of free bytes."""
    section = config.critic if name == "critic" else config.actor
    rows = -(-config.completions_per_step // (section.minibatches * num_ranks))
    passes = -(-rows * longest // tokens)
    if needed > room:
        cost = f"and by estimate even that needs {size(needed)} where {size(max(room, 0))} are free"
    elif tokens < SMALL and passes > FEW:
        cost = f"so an update of {counted(rows, 'completion')} takes up to {passes} passes, each too small for the card"
    else:
        return None
    return f"{name}: a micro-batch has room for {tokens} tokens, {cost}. {_more_room(config)}"


def _more_room(config: Config) -> str:
    actor, ways = config.actor, ["lower rollout.max_response_tokens or data.max_prompt_tokens"]
    if config.model.lora is None:
        ways.insert(0, "train an adapter (model.lora.rank=16)")
        if actor.optimizer == OptimizerChoice() and actor.master_weights and not actor.cpu_offload:
            ways.insert(0, "set actor.optimizer.state=bfloat16")
    return f"To make room: {', '.join(ways)}, or use more cards (cluster.component_placement, actor.sharding=fsdp)"
