"""The run file's section for training a low-rank adapter in place of the model's own weights (LoRA, arXiv:2106.09685)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator

from rollcall.config.base import Section, field
from rollcall.config.checks import check_home
from rollcall.config.errors import shown

ALL_LINEAR = "all_linear"
Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS: tuple[str, ...] = get_args(Target)
MOST_RANK_OF_VLLM = 512  # the limit in vLLM 0.32


def _targets(given: Any) -> Any:
    """Accept PEFT's name for all modules, and raise one error where a union would raise one for each member."""
    if given in ("all-linear", ALL_LINEAR):
        return ALL_LINEAR
    if isinstance(given, str):
        names = [name.strip() for name in given.strip("[]").split(",")]
        if all(name in TARGETS for name in names):
            raise ValueError(f"{shown(given)} is a string; write a list: [{', '.join(names)}]")
    unknown = [name for name in given if name not in TARGETS] if isinstance(given, list | tuple) else [given]
    some = f"{ALL_LINEAR}, or a list with any of {', '.join(TARGETS)}"
    if unknown:
        raise ValueError(f"{', '.join(map(shown, unknown))} cannot have an adapter; write {some}")
    if not given:
        raise ValueError(f"targets is empty, so there is nothing to train; write {some}")
    if twice := next((name for name in given if given.count(name) > 1), None):
        raise ValueError(f"targets lists {twice} twice; list it once")
    return given


class LoraSection(Section):
    rank: int = field(
        16, "Rank of each adapter: the number of rows in its matrix A and of columns in its matrix B.", ge=1, le=4096
    )
    alpha: float = field(32.0, "An adapter's output is multiplied by `alpha / rank`.", gt=0, le=1e6)
    targets: Annotated[Literal["all_linear"] | list[Target], BeforeValidator(_targets)] = field(
        "all_linear",
        "Which modules get an adapter, such as `[q_proj, v_proj]`. `all_linear`: all linear modules in every layer, but not the output head.",
    )
    dropout: float = field(
        0.0,
        "Share of an adapter's inputs that an update sets to 0, chosen at random from `run.seed`. Sampling and scoring use no dropout.",
        ge=0,
        lt=1,
    )
    path: Annotated[str, AfterValidator(check_home)] | None = field(
        None,
        "Directory of a PEFT adapter to start from. It must have the same rank, alpha and targets. `null`: a new adapter, which at first does not change the model.",
    )
    export: Literal["adapter", "merged"] = field(
        "adapter",
        "What the run writes to `model/`. `adapter`: only the adapter, in PEFT's format. `merged`: a complete model directory with the adapter added to the weights.",
    )

    @property
    def modules(self) -> tuple[str, ...]:
        """The targets by name, in the order in which a layer uses them."""
        return modules_of(self.targets)

    @property
    def gain(self) -> float:
        return self.alpha / self.rank


def modules_of(targets: str | Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in TARGETS if targets == ALL_LINEAR or name in targets)


def check_lora(config: Any) -> None:
    """Refuse keys that do not work with an adapter."""
    if config.model.lora is None:
        return
    if config.algorithm.name == "ppo":
        raise ValueError(
            "model.lora trains only an adapter of the policy, but algorithm ppo has a critic, all of whose weights are trained; use an "
            "algorithm without a critic (grpo, rloo, ...), or remove model.lora"
        )
    if config.rollout.engine == "vllm" and config.model.lora.rank > MOST_RANK_OF_VLLM:
        raise ValueError(
            f"model.lora.rank={config.model.lora.rank} is more than vLLM allows ({MOST_RANK_OF_VLLM}); lower it, or use rollout.engine=native"
        )
    if config.rollout.engine == "vllm" and config.rollout.vllm.sleep:
        raise ValueError(
            "rollout.vllm.sleep=true releases vLLM's memory between rollouts, which does not work with model.lora; remove "
            "rollout.vllm.sleep"
        )
    if config.checkpoint.place == "local":
        raise ValueError(
            "checkpoint.place=local spreads the parts of a large model over the nodes' disks, but with model.lora one process writes the small "
            "adapter to run.dir; remove checkpoint.place"
        )
