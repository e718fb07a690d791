"""Estimates the disk space that a run directory will need, before the first step."""

from __future__ import annotations

from rollcall.base.patience import free_bytes
from rollcall.base.words import counted
from rollcall.config import Config
from rollcall.plan.memory import GIB, ModelSizes, state_width


def checkpoint_bytes(config: Config, sizes: ModelSizes, *, width: int) -> int:
    """Return the size of a checkpoint. ``width`` is the number of bytes per weight."""
    trained = sizes.num_parameters if (lora := config.model.lora) is None else sizes.adapter_parameters(lora)
    critic = sizes.body_parameters if config.algorithm.name == "ppo" else 0
    each = ((trained, config.actor), (critic, config.critic))
    return sum(count * (width + state_width(section, width=width)) for count, section in each)


def size_words(config: Config, *, checkpoint: int, model: int) -> str | None:
    """Return a message about the disk space for checkpoints and model, given their sizes in bytes; None if it is small and fits."""
    trainer, run_dir, on_nodes = config.trainer, config.run.dir, config.checkpoint.place == "local"
    saves = -(-trainer.steps // trainer.save_every) if trainer.save_every else 1  # the last step included
    kept = trainer.keep_last + (trainer.keep_best if config.data.val is not None else 0)
    held = sum(
        path.stat().st_size
        for name in ("checkpoints", "model")
        for path in (run_dir / name).rglob("*")
        if path.is_file()
    )
    free = (free_bytes(run_dir.absolute()) or 0) + held
    # A new checkpoint is complete before an old one is removed.
    peak = model + (0 if on_nodes else min(saves, kept + 1) * checkpoint)
    if peak <= free and min(saves, kept) * checkpoint + model < GIB:
        return None
    count = f"{counted(min(saves, kept), 'checkpoint')} of {checkpoint / GIB:,.1f} GiB"
    text = (
        f"{run_dir} will hold a model of {model / GIB:,.1f} GiB and {'each node its parts of ' if on_nodes else ''}{count}: up to "
        f"{peak / GIB:,.1f} GiB in {run_dir} while it saves, and its disk has {free / GIB:,.1f} GiB for it"
    )
    if peak <= free:
        return text
    return (
        f"warning: {text}, and that is too little. Lower trainer.keep_last or trainer.keep_best, free space, or choose a run.dir on "
        "another disk; a save that finds no room waits for it"
    )
