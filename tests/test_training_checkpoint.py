"""What a checkpoint gives back to learners: the trained weights, or a refusal that names what does not fit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from learners import critic_of, learner_of, step
from ranks import Ranks
from safetensors.torch import load_file, save_file
from saved import save
from tiny import make_tokenizer

from rollcall.base.errors import ModelFilesError, NonFiniteError
from rollcall.checkpoint.training import export_learner, open_role, read_critic, read_learner
from rollcall.learner.gang import Gang
from rollcall.model.decoder import module_names

FLOAT: dict[str, Any] = dict(dtype=torch.float32)
MASTERS: dict[str, Any] = dict(dtype=torch.bfloat16)
PLAIN: dict[str, Any] = dict(dtype=torch.bfloat16, master_weights=False)


def write(gang: Gang, changes: dict[str, Any], directory: Path) -> dict[str, torch.Tensor]:
    """The whole weights of a trained learner, which are in the checkpoint, with a critic beside it."""
    learner, critic = learner_of(gang, **changes), critic_of(gang, **changes)
    for seed in (1, 2):
        step(learner, seed)
        step(critic, seed)
    save(gang, directory, learner=learner, critic=critic)
    return {name: tensor.detach().clone() for name, tensor in learner.body.whole_tensors()}


def read(
    gang: Gang, changes: dict[str, Any], directory: Path
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights of policy and critic after the checkpoint was read, and that they can be stepped on."""
    learner, critic = learner_of(gang, **changes), critic_of(gang, **changes)
    read_learner(learner, directory)
    read_critic(critic, directory)
    found = tuple(
        {name: tensor.detach().clone() for name, tensor in one.body.whole_tensors()} for one in (learner, critic)
    )
    step(learner, 3)
    step(critic, 3)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("sharded", "before", "after"),
    [
        pytest.param(
            sharded, *kinds, marks=() if sharded == (False, False) or kinds == (MASTERS, PLAIN) else pytest.mark.slow
        )
        for sharded in ((False, False), (True, False), (False, True))
        for kinds in itertools.permutations((FLOAT, MASTERS, PLAIN), 2)
    ],
)
def test_a_resume_with_or_without_masters_has_the_trained_policy(
    ranks: Ranks, tmp_path: Path, before: Any, after: Any, sharded: tuple[bool, bool]
) -> None:
    writer, reader = ({**one, **(dict(sharding="fsdp") if split else {})}
                      for one, split in zip((before, after), sharded, strict=True))  # fmt: skip
    trained = ranks.run(write, writer, tmp_path, size=2 if sharded[0] else 1)[0]
    policy, critic = ranks.run(read, reader, tmp_path, size=2 if sharded[1] else 1)[0]
    base = dict(learner_of(Gang.alone(), **after).body.whole_tensors())
    dtype, stored = after["dtype"], saved_critic(tmp_path)
    for name, tensor in policy.items():
        torch.testing.assert_close(tensor, trained[name].to(dtype), rtol=1e-2, atol=1e-3)
        assert not torch.equal(tensor, base[name]), f"{name} is the base model's"
    for name, tensor in critic.items():
        assert torch.equal(tensor, stored[name].to(dtype)), name


def test_state_of_an_optimizer_that_is_none_comes_back_as_none(tmp_path: Path) -> None:
    learner, again = learner_of(Gang.alone(), **FLOAT), learner_of(Gang.alone(), **FLOAT)
    step(learner, 1)
    for state in learner.optimizer.adamw.state.values():
        state["factor"] = None
    save(Gang.alone(), tmp_path, learner=learner, critic=critic_of(Gang.alone(), **FLOAT))
    read_learner(again, tmp_path)
    for name, state in learner.optimizer.states().items():
        found = again.optimizer.states()[name]
        assert found["factor"] is None and torch.equal(found["exp_avg"], state["exp_avg"])


def saved_critic(directory: Path) -> dict[str, torch.Tensor]:
    """Its weights at the precision that updates go to."""
    stored = open_role(directory, "critic")
    prefix = "master/" if "master/score.weight" in stored.tensors else ""
    names = critic_of(Gang.alone()).body.named
    return {name: torch.cat([stored.read(prefix + part) for part in module_names(name)]) for name in names}


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    write(Gang.alone(), {}, tmp_path)
    file = tmp_path / "model" / "model.safetensors"
    whole = load_file(file)
    others = {name: tensor for name, tensor in whole.items() if name != "model.norm.weight"}
    for change, message in (
        (others, r"1 tensor is missing \(model\.norm\.weight\)"),
        (
            {**whole, "model.layers.2.mlp.up_proj.weight": torch.ones(1)},
            r"not part of the model.*model\.layers\.2\.mlp\.up_proj",
        ),
        (
            {**whole, "model.norm.weight": torch.ones(1)},
            r"of a different shape \(model\.norm\.weight is \[1\], not \[64\]\)",
        ),
    ):
        save_file(change, file)
        with pytest.raises(ModelFilesError, match=message):
            read_learner(learner_of(Gang.alone()), tmp_path)
    file = tmp_path / "critic" / "part-00000-of-00001.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if name != "score.weight"}, file)
    with pytest.raises(ModelFilesError, match=r"1 tensor is missing \(score\.weight\)"):
        read_critic(critic_of(Gang.alone()), tmp_path)


def refused(gang: Gang, changes: dict[str, Any], directory: Path) -> list[str]:
    """What is said when the weights of the last rank have diverged, and something is to be written."""
    learner, critic = learner_of(gang, **changes), critic_of(gang, **changes)
    with torch.no_grad():
        for one in (learner, critic) if gang.rank == gang.size - 1 else ():
            one.body.named["layers.1.qkv"][-1] = float("inf")
    said = []
    for write in (
        lambda: save(gang, directory, learner=learner),
        lambda: export_learner(learner, make_tokenizer(), directory / "model"),
        lambda: save(gang, directory, critic=critic),
    ):
        try:
            write()
        except NonFiniteError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize(("size", "changes"), [(1, {}), (2, {}), (2, dict(sharding="fsdp"))])
def test_diverged_weights_are_refused_on_all_ranks_before_anything_is_written(
    ranks: Ranks, tmp_path: Path, size: int, changes: dict[str, Any]
) -> None:
    actor = "there are NaN or infinite values in the actor's model.layers.1.self_attn.q_proj.weight"
    critic = "there are NaN or infinite values in the critic's layers.1.qkv"
    assert ranks.run(refused, changes, tmp_path, size=size) == [[actor, actor, critic]] * size
    assert list(tmp_path.iterdir()) == []
