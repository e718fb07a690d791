"""Computes the disk space that a run directory will take, before the first step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rollcall.base.patience import free_bytes
from rollcall.config import Config, OptimizerSection

GIB, MIB = 1 << 30, 1 << 20
LARGE = GIB  # a smaller run is not worth a message


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSize:
    """Bytes. ``free`` is what the disk has for the run, what the run already holds there included."""

    checkpoint: int
    num_checkpoints: int  # kept at the end
    most_checkpoints: int  # at once: a new one is whole before an old one goes
    model: int
    free: int
    on_nodes: bool = False  # checkpoints are on the nodes' own disks

    @property
    def end(self) -> int:
        return (0 if self.on_nodes else self.num_checkpoints * self.checkpoint) + self.model

    @property
    def peak(self) -> int:
        return max(0 if self.on_nodes else self.most_checkpoints * self.checkpoint, self.end)

    def words(self, run_dir: Path) -> str | None:
        """A message for the user; None if the run is small and fits."""
        fits = self.peak <= self.free
        if fits and self.num_checkpoints * self.checkpoint + self.model < LARGE:
            return None
        count = "1 checkpoint" if self.num_checkpoints == 1 else f"{self.num_checkpoints} checkpoints"
        held = f"{run_dir} will hold {count} of {_shown(self.checkpoint)} and a model of {_shown(self.model)}"
        if self.on_nodes:
            peak = _shown(self.most_checkpoints * self.checkpoint)
            held = (
                f"the nodes' temporary folders will hold {count} of {_shown(self.checkpoint)}, up to {peak} in all while it "
                f"saves, and {run_dir} a model of {_shown(self.model)}"
            )
        room = f"{_shown(self.end)} in all, up to {_shown(self.peak)} while it saves; the disk has {_shown(self.free)} for it"
        if fits:
            return f"{held}: {room}"
        return (
            f"warning: {held}: {room}, which is too little. Lower trainer.keep_last or trainer.keep_best, free space, or "
            "choose a run.dir on another disk; a save that finds no room waits for it"
        )


def run_size(
    config: Config,
    *,
    num_parameters: int,
    critic_parameters: int,
    width: int,
    run_dir: Path,
    adapter_parameters: int | None = None,
) -> RunSize:
    """``width`` is the bytes of a weight; ``critic_parameters`` is 0 where the algorithm has no critic; ``adapter_parameters`` is None
    where the model's own weights are trained."""
    trained = num_parameters if adapter_parameters is None else adapter_parameters
    lora = config.model.lora
    checkpoint = _trained(trained, config.actor, width=width)
    if critic_parameters:
        checkpoint += _trained(critic_parameters, config.critic, width=width)
    trainer = config.trainer
    saves = -(-trainer.steps // trainer.save_every) if trainer.save_every else 1  # one of them after the last step
    kept = trainer.keep_last + (trainer.keep_best if config.data.val is not None else 0)
    return RunSize(
        checkpoint=checkpoint,
        num_checkpoints=min(saves, kept),
        most_checkpoints=min(saves, kept + 1),
        model=(trained if lora is not None and lora.export == "adapter" else num_parameters) * width,
        on_nodes=config.checkpoint.place == "local",
        free=(free_bytes(run_dir.absolute()) or 0) + _held(run_dir / "checkpoints") + _held(run_dir / "model"),
    )


def _trained(num_parameters: int, section: OptimizerSection, *, width: int) -> int:
    """Weights, two moments, and float32 masters where the weights are narrower. Other optimizers than Adam's keep less."""
    masters = width < 4 and section.master_weights
    return num_parameters * (width + (4 + 8 if masters else 2 * width))


def _held(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _shown(size: int) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= GIB / 10 else f"{size / MIB:,.1f} MiB"
