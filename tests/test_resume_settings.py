"""What a resume may change: applied and told, or refused by its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from runs import finish, make_run
from safetensors.torch import load_file

from rollcall.base.errors import ConfigError
from rollcall.base.journal import Journal
from rollcall.config import Config, dump_config, load_config
from rollcall.loop.resume import FREE_OF_REWARDS, changes_on_resume
from rollcall.run.training import train


def a_run(folder: Path, *, trained: int = 0, **sections: Any) -> Path:
    """A run directory with a run file, of which this many steps are trained."""
    (folder / "run").mkdir(parents=True, exist_ok=True)
    (folder / "run" / "run.yaml").write_text(dump_config(config_of(folder, **sections)))
    with Journal(folder / "run" / "journal") as journal:
        for step in range(1, trained + 1):
            journal.mark_trained(step, draws=[step], version=step)
    return folder / "run"


def config_of(folder: Path, **sections: Any) -> Config:
    path = folder / "given.yaml"
    path.write_text(yaml.safe_dump({"run": {"dir": str(folder / "run")}, **sections}))
    return load_config(path)


def told(folder: Path, **sections: Any) -> list[str]:
    return [str(change) for change in changes_on_resume(config_of(folder, **sections), folder / "run")]


def test_the_same_settings_change_nothing(tmp_path: Path) -> None:
    a_run(tmp_path, actor={"lr": 1e-3})
    assert told(tmp_path, actor={"lr": 1e-3}) == []


def test_what_may_change_is_told_key_by_key(tmp_path: Path) -> None:
    a_run(tmp_path)
    sections: dict[str, Any] = {
        "actor": {"weight_decay": 0.1, "betas": [0.8, 0.9], "optimizer": {"kwargs": {"foreach": False}}},
        "reward": [{"type": "exact", "timeout_s": 3}],
        "rollout": {"kv_tokens": 4096},
    }
    assert told(tmp_path, **sections) == [
        "rollout.kv_tokens: null -> 4096",
        "reward.0.timeout_s: 10.0 -> 3.0",
        "actor.betas: [0.9, 0.999] -> [0.8, 0.9]",
        "actor.weight_decay: 0.0 -> 0.1",
        "actor.optimizer.kwargs.foreach: not set -> false",
    ]


def test_what_is_written_in_another_way_has_not_changed(tmp_path: Path) -> None:
    linear = ["down_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]
    a_run(tmp_path, model={"path": "m", "lora": {"rank": 4}})
    assert told(tmp_path, model={"path": "m/", "lora": {"rank": 4, "targets": linear}}) == []
    for other in ({"path": "m2", "lora": {"rank": 4}}, {"path": "m", "lora": {"rank": 4, "targets": linear[1:]}}):
        with pytest.raises(ConfigError, match="contains a run with different settings"):
            told(tmp_path, model=other)


def test_how_a_reward_runs_may_change(tmp_path: Path) -> None:
    function = {"type": "function", "path": "rewards_bad:share_of_answer"}
    a_run(tmp_path, reward=[function])
    limits = {"timeout_s": 3, "env": ["MODE"], "network": False, "memory_mb": 512, "file_mb": 8, "processes": 2}
    found = told(tmp_path, reward=[{**function, **limits}])
    assert [line.partition(":")[0] for line in found] == [f"reward.0.{key}" for key in limits]
    judge = {"type": "judge", "model": "m", "rubric": "{completion}", "url": "http://node7/v1"}
    a_run(tmp_path / "judged", reward=[judge])
    asking = {"url": "http://node8/v1", "key_env": "MY_KEY", "concurrency": 1, "retries": 0, "outage_s": 1}
    found = told(tmp_path / "judged", reward=[{**judge, **asking}])
    assert [line.partition(":")[0] for line in found] == [f"reward.0.{key}" for key in asking]
    assert sorted({*limits, *asking}) == sorted(FREE_OF_REWARDS)


def test_secrets_of_workers_are_not_told(tmp_path: Path) -> None:
    a_run(tmp_path, cluster={"env": {"HF_TOKEN": "hf_old_secret", "MODE": "a"}})
    found = told(tmp_path, cluster={"env": {"HF_TOKEN": "hf_new_secret", "MODE": "b"}})
    assert found == ["cluster.env.MODE: 'a' -> 'b'"]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, {"data": {"prompts_per_step": 24}}, r"different settings: data\.prompts_per_step: 48 -> 24\. These"),
        (
            {},
            {"actor": {"optimizer": {"name": "torch.optim.SGD"}}},
            r"actor\.optimizer\.name: .*AdamW' -> .*SGD'\. These",
        ),
        (
            {},
            {"reward": [{"type": "number", "timeout_s": 1}]},
            r"settings: reward\.0\.type: 'exact' -> 'number'\. These",
        ),
        (
            {"reward": [{"type": "exact"}, {"type": "number"}]},
            {"reward": [{"type": "exact"}]},
            r"settings: reward\.1: \{.*\} -> not set\. These",
        ),
        (
            {},
            {"data": {"prompts_per_step": 24, "system": "s", "shuffle": False, "max_prompt_tokens": 9}},
            r"data\.system: null -> 's'; data\.prompts_per_step: 48 -> 24; data\.max_prompt_tokens: .* -> 9; data\.shuffle: ",
        ),
    ],
)
def test_what_cannot_change_is_refused_by_its_keys_alone(tmp_path: Path, before: Any, after: Any, message: str) -> None:
    a_run(tmp_path, **before)
    with pytest.raises(ConfigError, match=message):
        told(tmp_path, **after)


def test_the_critics_optimizer_is_fixed_only_where_there_is_a_critic(tmp_path: Path) -> None:
    other = {"critic": {"optimizer": {"name": "torch.optim.SGD"}}}
    a_run(tmp_path / "grpo")
    assert told(tmp_path / "grpo", **other) == []
    a_run(tmp_path / "ppo", algorithm={"name": "ppo"})
    with pytest.raises(ConfigError, match=r"critic\.optimizer\.name"):
        told(tmp_path / "ppo", algorithm={"name": "ppo"}, **other)


def test_a_run_is_made_longer_but_never_shorter_than_it_is(tmp_path: Path) -> None:
    a_run(tmp_path, trained=7, trainer={"steps": 400})
    assert told(tmp_path, trainer={"steps": 500}) == ["trainer.steps: 400 -> 500"]
    assert told(tmp_path, trainer={"steps": 7}) == ["trainer.steps: 400 -> 7"]
    with pytest.raises(
        ConfigError, match=r"trainer\.steps=1, but the run in .* has already trained 7 steps; use 7 or more"
    ):
        told(tmp_path, trainer={"steps": 1})
    (tmp_path / "run" / "checkpoints" / "step-000020").mkdir(parents=True)
    with pytest.raises(ConfigError, match="has already trained 20 steps"):
        told(tmp_path, trainer={"steps": 7})


def test_settings_changed_on_resume_are_applied_told_and_recorded(tmp_path: Path, capsys: Any) -> None:
    """Weight decay alone: a resume with it has other weights than one without."""
    ends: dict[str, dict[str, torch.Tensor]] = {}
    for name, decay in (("plain", 0.0), ("decayed", 10.0)):
        finish(make_run(tmp_path, "trainer.steps=2", name=name))
        config = make_run(tmp_path, "trainer.steps=4", f"actor.weight_decay={decay}", name=name)
        train(config)
        state = torch.load(config.run.dir / "checkpoints" / "step-000004" / "actor" / "optimizer.pt", weights_only=True)
        assert state["param_groups"][0]["weight_decay"] == decay
        ends[name] = load_file(config.run.dir / "model" / "model.safetensors")
        events = map(json.loads, (config.run.dir / "events.jsonl").read_bytes().splitlines())
        changed = [event["changed"] for event in events if "changed" in event]
        expected = {"trainer.steps": [2, 4], **({"actor.weight_decay": [0.0, 10.0]} if decay else {})}
        assert changed == [expected]
        screen = capsys.readouterr().out
        assert "generated with the old values" in screen
        assert "trainer.steps: 2 -> 4" in screen and ("actor.weight_decay: 0.0 -> 10.0" in screen) is bool(decay)
    assert not torch.equal(ends["plain"]["model.embed_tokens.weight"], ends["decayed"]["model.embed_tokens.weight"])


def test_a_refused_resume_leaves_the_run_file_as_it_was(tmp_path: Path) -> None:
    finish(make_run(tmp_path, "trainer.steps=3", "trainer.save_every=0"))
    path = tmp_path / "run" / "run.yaml"
    before = path.read_text()
    for override in ("trainer.steps=1", "actor.optimizer.name=torch.optim.SGD", "data.max_prompt_tokens=9"):
        with pytest.raises(ConfigError, match=override.partition("=")[0]):
            finish(make_run(tmp_path, *(["trainer.steps=3"] if "steps" not in override else []), override))
        assert path.read_text() == before


def test_a_resume_that_the_checkpoint_refuses_leaves_the_run_file_as_it_was(tmp_path: Path) -> None:
    finish(make_run(tmp_path, "trainer.steps=2"))
    path = tmp_path / "run" / "run.yaml"
    before = path.read_text()
    with pytest.raises(ValueError, match="keep the old value"):
        finish(make_run(tmp_path, "trainer.steps=3", "actor.optimizer.kwargs={amsgrad: true}"))
    assert path.read_text() == before


def test_a_start_that_was_killed_as_it_wrote_its_run_file_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".tmp-run.yaml-0a1b2c3d").touch()
    assert told(tmp_path) == []
    (tmp_path / "run" / "mine.txt").touch()
    with pytest.raises(ConfigError, match="contains files but no run.yaml"):
        told(tmp_path)


def test_a_change_to_a_finished_run_is_said_to_have_no_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    finish(make_run(tmp_path, "trainer.steps=1"))
    assert caplog.text == ""
    train(make_run(tmp_path, "trainer.steps=1", "actor.lr=0.5"))
    assert "the run is finished, so these changes have no effect: actor.lr: " in caplog.text
