"""The run file: what is refused and how that reads, overrides, round trips."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from rollcall import config as config_module
from rollcall.config import (
    Algorithm,
    Cispo,
    Config,
    ConfigError,
    Dapo,
    default_run,
    dump_config,
    load_config,
    parse_config,
)
from rollcall.config_errors import nearest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("**/*.yaml"))


def refusal(**sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(sections)
    return str(caught.value)


def refused_override(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, list(overrides))
    return str(caught.value)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("rollout.max_tokens", "rollout.max_response_tokens"),
        ("rollout.temprature", "rollout.temperature"),
        ("rollout.topk", "rollout.top_k"),
        ("rollout.num_samples", "rollout.samples_per_prompt"),
        ("actor.learning_rate", "actor.lr"),
        ("actor.warmup", "actor.warmup_steps"),
        ("actor.weigth_decay", "actor.weight_decay"),
        ("cluster.num_gpus", "cluster.num_gpus_per_node"),
        ("trainer.num_steps", "trainer.steps"),
        ("algorithm.clip_hi", "algorithm.clip_high"),
        ("modle", "model"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(path: str, meant: str) -> None:
    raw: dict[str, Any] = {"algorithm": {"name": "grpo"}}
    section, _, key = path.rpartition(".")
    (raw.setdefault(section, {}) if section else raw)[key] = 1
    assert refusal(**raw) == f"{path} is not a field; did you mean {meant}?"


def test_an_unknown_key_inside_a_list_and_a_variant_is_looked_up_there() -> None:
    message = refusal(reward=[{"type": "exact"}, {"type": "countdown", "format_scor": 0.2}])
    assert message == "reward.1.format_scor is not a field; did you mean reward.1.format_score?"
    assert (
        refusal(algorithm={"name": "ppo", "lamda": 1}) == "algorithm.lamda is not a field; did you mean algorithm.lam?"
    )
    assert "did you mean" not in refusal(algorithm={"name": "grpo", "lamda": 1}), "grpo has no such field"


def test_an_unknown_key_like_no_other_lists_the_fields() -> None:
    assert refusal(reward=[{"type": "exact", "zzz": 2}]) == (
        "reward.0.zzz is not a field; the fields are weight, timeout_s, type"
    )
    assert refusal(zzz=1).startswith("zzz is not a field; the fields are run, cluster, model, data")


def test_an_unknown_key_of_a_list_that_may_be_absent_is_looked_up_there_too() -> None:
    assert "cluster.nodes.0.zzz is not a field; the fields are gpus" in refusal(cluster={"nodes": [{"zzz": 3}]})
    message = refusal(cluster={"nodes": [{"gpus": 8}, {"gpus": 8, "gpu": 3}]})
    assert message == "cluster.nodes.1.gpu is not a field; did you mean cluster.nodes.1.gpus?"


@pytest.mark.parametrize(("value", "shown"), [(True, "true"), (1.5, "1.5"), ([0, 1], "[0, 1]"), (None, "None")])
def test_slots_are_text_or_a_number_and_never_what_yaml_makes_of_yes(value: Any, shown: str) -> None:
    message = refusal(cluster={"component_placement": {"actor,rollout": value}})
    assert message.startswith(f"cluster.component_placement.actor,rollout: {shown} is not a set of slots; write all, a")
    assert "\n" not in message, "one mistake, one line"


def test_nearest_has_no_answer_among_no_names() -> None:
    assert nearest("anything", []) is None


def test_every_mistake_is_told_at_once() -> None:
    lines = refusal(rollout={"temperature": 0, "top_p": 2}, actor={"lr": "fast"}).splitlines()
    assert lines == [
        "rollout.temperature=0: input should be greater than 0",
        "rollout.top_p=2: input should be less than or equal to 1",
        "actor.lr='fast': input should be a valid number, unable to parse string as a number",
    ]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (dict(rollout={"engine": "vllm7"}), "rollout.engine='vllm7': input should be 'native' or 'vllm'"),
        (dict(model={"dtype": "int4"}), "model.dtype='int4': input should be 'auto', 'float32' or 'bfloat16'"),
        (dict(trainer={"loggers": ["consle"]}), "trainer.loggers.0='consle': input should be 'console'"),
        (dict(actor=5), "actor=5 is not a map; its keys are lr, "),
        (dict(reward=[{"type": "regex"}]), "reward.0.pattern is missing; give it a value"),
        (dict(reward=[{"type": "regx", "pattern": "a"}]), "reward.0.type='regx' is not known; did you mean regex?"),
        (dict(reward=[{"weight": 1}]), "reward.0 has no type; .* reward.0.type=exact"),
        (dict(algorithm={"name": "grop"}), "algorithm.name='grop' is not known; did you mean grpo?"),
        (dict(algorithm={"name": "zzz"}), "algorithm.name='zzz' is not known; there are grpo, dr_grpo, dapo"),
        (dict(algorithm={"kl_coef": 0.1}), "algorithm has no name; .* algorithm.name=grpo"),
        (dict(reward=[]), "reward is empty; give at least one"),
        (
            dict(data={"prompts_per_step": 30}, actor={"minibatches": 4}),
            "data.prompts_per_step=30 cannot be split into actor.minibatches=4; use a divisor of 30",
        ),
        (
            dict(algorithm={"name": "ppo"}, data={"prompts_per_step": 30}, critic={"minibatches": 4}),
            "data.prompts_per_step=30 cannot be split into critic.minibatches=4",
        ),
        (
            dict(rollout={"samples_per_prompt": 1}),
            "algorithm grpo compares .* rollout.samples_per_prompt=1 leaves nothing to compare; use 2 or more",
        ),
        (
            dict(algorithm={"name": "intuitor"}, reward=[{"type": "exact"}]),
            r"intuitor learns from self-certainty alone; write reward: \[\{type: self_certainty\}\]",
        ),
        (
            dict(rollout={"top_p": 0.9}, algorithm={"name": "grpo", "old_logprobs": "engine"}),
            "behaviour log-probs cannot stand in .* set algorithm.old_logprobs=learner, or top_p=1 and top_k=0",
        ),
        (
            dict(rollout={"top_k": 5}, algorithm={"name": "grpo", "old_logprobs": "engine"}),
            "behaviour log-probs cannot stand in",
        ),
        (
            dict(algorithm={"name": "cispo", "dual_clip": 3}),
            "algorithm.dual_clip=3.0 bounds a ratio that carries the gradient, and cispo's does not; leave dual_clip out",
        ),
        (
            dict(algorithm={"name": "dapo", "overlong_buffer": 9}, rollout={"max_response_tokens": 8}),
            "algorithm.overlong_buffer=9 is longer than rollout.max_response_tokens=8, .* use at most 8",
        ),
        (
            dict(cluster={"num_nodes": 2}, trainer={"elastic": {"min_nodes": 3}}),
            "trainer.elastic.min_nodes=3, but the cluster has 2 nodes when all are there; use at most 2",
        ),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_with_what_to_write(sections: dict[str, Any], message: str) -> None:
    assert re.search(message, refusal(**sections)), refusal(**sections)


@pytest.mark.parametrize(
    "sections",
    [
        dict(algorithm={"name": "ppo"}, rollout={"samples_per_prompt": 1}),
        dict(algorithm={"name": "reinforce_pp"}, rollout={"samples_per_prompt": 1}),
        dict(algorithm={"name": "intuitor"}, reward=[{"type": "self_certainty"}]),
        dict(algorithm={"name": "grpo", "dual_clip": 3}),
        dict(algorithm={"name": "dapo", "overlong_buffer": 8}, rollout={"max_response_tokens": 8}),
        dict(algorithm={"name": "grpo"}, data={"prompts_per_step": 30}, critic={"minibatches": 4}),
        dict(rollout={"top_p": 0.9}),
        dict(cluster={"num_nodes": 2}, trainer={"elastic": {"min_nodes": 2}}),
    ],
)
def test_what_is_next_to_a_refusal_is_allowed(sections: dict[str, Any]) -> None:
    parse_config(sections)


@pytest.mark.parametrize("variant", get_args(get_args(Algorithm)[0]))
def test_every_algorithm_is_chosen_by_its_name(variant: Any) -> None:
    name = variant().name
    reward = [{"type": "self_certainty" if name == "intuitor" else "exact"}]
    assert type(parse_config({"algorithm": {"name": name}, "reward": reward}).algorithm) is variant


def test_a_variant_has_its_own_defaults() -> None:
    assert (Dapo().clip_high, Dapo().dynamic_sampling) == (0.28, True)
    assert Cispo().clip_high == 4.0


def test_overrides_reach_nested_keys_list_items_and_null() -> None:
    config = load_config(
        None,
        [
            "actor.lr=1e-5", "actor.betas=[0.8,0.9]", "rollout.temperature=0.7", "reward.0.weight=0.5", "data.val=null",
            "rollout.stop=[a, 'b c']", "run.name=two words", "model.dtype=bf16",
            "actor.activation_checkpointing=true", "cluster.num_nodes=4", "algorithm.kl_coef=1E-3",
        ],
    )  # fmt: skip
    assert config.actor.lr == 1e-5 and config.actor.betas == (0.8, 0.9)
    assert config.rollout.temperature == 0.7 and config.rollout.stop == ["a", "b c"]
    assert config.reward[0].weight == 0.5 and config.data.val is None
    assert config.run.name == "two words" and config.model.dtype == "bfloat16"
    assert config.actor.activation_checkpointing is True and config.algorithm.kl_coef == 1e-3
    assert config.cluster is not None and config.cluster.num_nodes == 4 and config.cluster.num_slots == 4


def test_a_list_item_is_overridden_where_the_file_has_the_list(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", "reward: [{type: exact}, {type: number}]")
    config = load_config(path, ["reward.1={type: regex, pattern: a+}", "reward.0.weight=2"])
    assert [reward.type for reward in config.reward] == ["exact", "regex"] and config.reward[0].weight == 2


def test_a_later_override_wins() -> None:
    assert load_config(None, ["actor.lr=1", "actor.lr=2e-3"]).actor.lr == 2e-3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor.lr", "override 'actor.lr' is not key=value; write for example actor.lr=1e-5"),
        ("=3", "override '=3' is not key=value"),
        ("reward.7.weight=1", "override 'reward.7.weight=1': 7 is not an index into a list of 1"),
        ("reward.x=1", "override 'reward.x=1': x is not an index into a list of 1"),
        ("actor.lr.x=1", "override 'actor.lr.x=1': lr is a value, not a section"),
        ("rollout.max_tokens=9", "rollout.max_tokens is not a field; did you mean rollout.max_response_tokens?"),
        ("actor.lr=", "actor.lr=None: input should be a valid number"),
    ],
)
def test_a_wrong_override_is_refused(override: str, message: str) -> None:
    assert message in refused_override(override)


def test_the_number_formats_of_yaml_files_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", "actor: {lr: 1e-6, eps: 1.0e-9}\nmodel: {dtype: fp32}")
    config = load_config(path)
    assert (config.actor.lr, config.actor.eps, config.model.dtype) == (1e-6, 1e-9, "float32")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "is not YAML"),
        ("- 1\n- 2", r"must hold sections \(run, model, data, ...\), not list"),
        ("", r"must hold sections .* not NoneType"),
    ],
)
def test_a_file_that_is_no_run_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path / "run.yaml", text))


def test_a_section_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("trainer: {steps: 7}\nrun: {name: one}\ntrainer: {staleness: 1}\n")
    with pytest.raises(
        ConfigError, match="trainer stands twice in the mapping that begins in line 1; write its keys in one"
    ):
        load_config(path)
    path.write_text("run: {name: one}\ntrainer: {steps: 7, steps: 8}\n")
    with pytest.raises(ConfigError, match="steps stands twice in the mapping that begins in line 2"):
        load_config(path)
    path.write_text("trainer: {<<: {steps: 7, staleness: 1}, steps: 8}\n")
    trainer = load_config(path).trainer
    assert (trainer.steps, trainer.staleness) == (8, 1), "a merged key may be set again"


def test_a_value_where_a_section_belongs_is_told_its_keys() -> None:
    assert "trainer.elastic=2 is not a map; its keys are min_nodes, wait_s" in refusal(trainer={"elastic": 2})
    words = refusal(cluster={"component_placement": "all"})
    assert "cluster.component_placement='all' is not a map, such as {name: value}" in words
    assert "trainer=3 is not a map; its keys are steps, " in refusal(trainer=3)
    assert "cluster.node_env.2=3 is not a map, such as" in refusal(cluster={"node_env": {2: 3}})


def test_a_key_of_another_section_is_found_there() -> None:
    assert "did you mean trainer.in_flight?" in refusal(rollout={"in_flight": True})
    assert "did you mean cluster.node_weights?" in refusal(trainer={"node_weights": [1]})
    assert "did you mean trainer.staleness?" in refusal(staleness=1)
    assert "did you mean reward.0.weight?" in refusal(reward=[{"type": "exact", "weights": 1}])


def test_a_missing_or_unreadable_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.yaml does not exist"):
        load_config(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\xd8")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "binary.yaml")


def test_a_dumped_config_reads_back_the_same(tmp_path: Path) -> None:
    config = load_config(
        None,
        [
            "algorithm={name: ppo, value_clip: null, mismatch_mask: [0.5, 2.0]}", "cluster.num_nodes=2", "rollout.stop=['\\n', '#']",
            "reward=[{type: regex, pattern: '^a: b$', weight: -1}, {type: function, path: 'm:f'}]", "actor.eps=1e-12",
        ],
    )  # fmt: skip
    path = write(tmp_path / "run.yaml", dump_config(config))
    assert load_config(path) == config
    assert dump_config(load_config(path)) == dump_config(config)


def test_the_dump_names_every_section_and_field() -> None:
    dumped = yaml.safe_load(dump_config(load_config()))
    assert list(dumped) == list(Config.model_fields)
    assert set(dumped["actor"]) == set(config_module.OptimizerSection.model_fields)


def test_the_embedded_default_and_every_example_load() -> None:
    assert load_config() == parse_config(default_run())
    assert EXAMPLES, "there are examples"
    for path in EXAMPLES:
        load_config(path)


def test_every_default_passes_its_own_validation() -> None:
    assert Config() == parse_config({})


def test_a_config_cannot_be_changed_after_it_was_checked() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config().actor.lr = 1.0  # type: ignore[misc]


def test_a_reference_is_needed_only_for_a_kl() -> None:
    assert not parse_config({}).needs_reference
    assert parse_config({"algorithm": {"name": "grpo", "kl_coef": 0.1}}).needs_reference


def test_completions_per_step_is_the_product() -> None:
    config = parse_config({"data": {"prompts_per_step": 6}, "rollout": {"samples_per_prompt": 4}})
    assert config.completions_per_step == 24
