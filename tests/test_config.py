"""The run file: what is refused and how that reads, overrides, round trips."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from rollcall import config as config_module
from rollcall.base.errors import ConfigError
from rollcall.config import Algorithm, Cispo, Config, Dapo, default_run, dump_config, load_config, parse_config

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
        ("environment.max_turn", "environment.max_turns"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(path: str, meant: str) -> None:
    raw: dict[str, Any] = {"algorithm": {"name": "grpo"}, "environment": {"type": "class", "path": "x:X"}}
    section, _, key = path.rpartition(".")
    (raw.setdefault(section, {}) if section else raw)[key] = 1
    assert refusal(**raw) == f"{path} is not a field; did you mean {meant}?"


def test_an_unknown_key_inside_a_list_and_a_variant_is_looked_up_there() -> None:
    message = refusal(reward=[{"type": "exact"}, {"type": "countdown", "format_scor": 0.2}])
    assert message == "reward.1.format_scor is not a field; did you mean reward.1.format_score?"
    assert (
        refusal(algorithm={"name": "ppo", "lamda": 1}) == "algorithm.lamda is not a field; did you mean algorithm.lam?"
    )
    assert "algorithm.lam?" not in refusal(algorithm={"name": "grpo", "lamda": 1}), "grpo has no such field"


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


def test_every_mistake_is_told_at_once() -> None:
    lines = refusal(rollout={"temperature": 0, "top_p": 2}, actor={"lr": "fast"}).splitlines()
    assert lines == [
        "rollout.temperature=0: input should be greater than or equal to 0.001",
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
        (dict(environment={"max_turns": 1}), "environment has no type; .* environment.type=class"),
        (dict(environment={"type": "class", "path": ""}), "environment.path is empty; write module:Class"),
        (dict(environment={"type": "step", "path": {"a": " "}}), "environment.path is empty; write module:Class"),
        (dict(environment={"type": "class", "path": {"": "m:C", "b": "m:D"}}), "environment.path has a class without a name"),
        (dict(environment={"type": "agent", "run": " "}), "environment.run is empty; write the command"),
        (dict(environment={"type": "agent", "run": "x", "call_timeout_s": 5}), "environment.call_timeout_s=5 has no effect"),
        (dict(algorithm={"name": "grop"}), "algorithm.name='grop' is not known; did you mean grpo?"),
        (dict(algorithm={"name": "zzz"}), "algorithm.name='zzz' is not known; choose from grpo, dr_grpo, dapo"),
        (dict(algorithm={"kl_coef": 0.1}), "algorithm has no name; .* algorithm.name=grpo"),
        (dict(reward=[]), "reward is empty; list at least one"),
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
            "algorithm grpo compares .* but rollout.samples_per_prompt=1 leaves nothing to compare; use 2 or more",
        ),
        (
            dict(algorithm={"name": "intuitor"}, reward=[{"type": "exact"}]),
            r"intuitor learns only from self-certainty; write reward: \[\{type: self_certainty\}\]",
        ),
        (
            dict(rollout={"top_p": 0.9}, algorithm={"name": "grpo", "old_logprobs": "engine"}),
            "behaviour log-probs cannot replace .* set algorithm.old_logprobs=learner, or top_p=1 and top_k=0",
        ),
        (
            dict(rollout={"top_k": 5}, algorithm={"name": "grpo", "old_logprobs": "engine"}),
            "behaviour log-probs cannot replace",
        ),
        (
            dict(algorithm={"name": "cispo", "dual_clip": 3}),
            "algorithm.dual_clip=3.0 limits a ratio through which the gradient flows, but in cispo no gradient flows through the ratio; remove dual_clip",
        ),
        (
            dict(algorithm={"name": "dapo", "overlong_buffer": 9}, rollout={"max_response_tokens": 8}),
            "algorithm.overlong_buffer=9 is longer than rollout.max_response_tokens=8, .* use at most 8",
        ),
        (dict(finish={"max_shard_size": "5"}), "finish.max_shard_size: '5' is not a size with a unit; write for example 5GB"),
        (
            dict(cluster={"num_nodes": 2}, trainer={"elastic": {"min_nodes": 3}}),
            "trainer.elastic.min_nodes=3, but the whole cluster has only 2 nodes; use at most 2",
        ),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_with_what_to_write(sections: dict[str, Any], message: str) -> None:
    assert re.search(message, refusal(**sections)), refusal(**sections)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.mismatch_mask=[5, 0.5]", r"algorithm.mismatch_mask: \[5, 0.5\] does not contain 1.* such as \[0.5, 2\]"),
        ("algorithm.mismatch_mask=[2, 3]", "with low below 1 and high above 1"),
        ("rollout.stop=['']", "rollout.stop: an empty string ends every completion .* remove it"),
        ("rollout.kv_tokens=-5", "rollout.kv_tokens=-5: input should be greater than or equal to 1"),
        ("actor.betas=[2, 3]", "actor.betas.0=2: input should be less than 1"),
        ("actor.betas=[0.9, 1]", "actor.betas.1=1: input should be less than 1"),
        ("rollout.temperature=1e-30", "input should be greater than or equal to 0.001"),
        ("eval.temperature=1e-30", "eval.temperature=1e-30 is too close to 0; use 0"),
        ("eval.samples_per_prompt=4", "with eval.temperature=0, all eval.samples_per_prompt=4 completions of a prompt are the same"),
        ("trainer.steps=true", "trainer.steps=true is a boolean; use a number"),
        ("actor.betas=[yes, 0.9]", "is a boolean; use a number"),
        ("trainer.num_threads=100000", "less than or equal to 1024"),
        ("trainer.steps=0x1" + "0" * 5000, "trainer.steps is an integer with 20001 bits; the largest allowed value is"),
        ("data.max_prompt_tokens=1e400", "data.max_prompt_tokens=inf: input should be a finite number"),
        ("actor.optimizer.kwargs={momentum: .nan}", "actor.optimizer.kwargs.momentum=nan is not finite"),
        ("reward.0.weight=1e300", r"reward.0.weight=1e\+300 is out of range; use 0, or a number whose absolute value is between 1e-30 and 1e\+09"),
        ("reward.0.weight=-1e10", "is out of range"),
        ("algorithm.kl_coef=1e20", "is out of range"),
        ("actor.lr=1e-320", "is out of range"),
        ("actor.lr=1e9", "input should be less than or equal to 100"),
        ("actor.betas=[1e-40, 0.9]", "actor.betas.0=1e-40 is out of range"),
        (".".join("a" * 500) + "=1", "has 500 parts, but keys of a run file have at most 4"),
        ("cluster." + ".".join("a" * 500) + "=1", "has 501 parts"),
        ("reward.0.weight=0", "every reward has weight 0"),
        ("data.prompts_per_step=1000000000000", r"x rollout.samples_per_prompt=\d+ are \d+ completions per step, more than the maximum"),
        ("rollout.samples_per_prompt=1000000000000", "completions per step, more than the maximum of 10000000"),
        ("rollout.top_k=1", "rollout.top_k=1 always takes the most likely token"),
        ("reward=[{type: regex, pattern: '('}]", r"reward.0.pattern: '\(' is not a Python regular expression"),
        ("reward=[{type: regex, pattern: ''}]", "an empty pattern matches every completion"),
        ("reward.0.timeout_s=1e30", "less than or equal to 1000000000"),
        ("run.dir=/", "run.dir: '/' contains other files"),
        ("run.dir=.", "run.dir: '.' contains other files"),
        ('run.name="a\\0b"', "run.name contains a NUL"),
        ('model.path="\\uD800"', "model.path contains a NUL character or half a surrogate pair"),
        ('finish.max_shard_size="\\uD800"', r"finish.max_shard_size: '\\ud800' is not a size with a unit"),
        ("cluster.env={'A=B': x}", "a variable name is empty or contains '='"),
        ("cluster.num_nodes=99999999", "less than or equal to 100000"),
        ("cluster={num_nodes: 90000, num_gpus_per_node: 90000}", "8,100,000,000 slots, but a cluster can have at most 100,000"),
        ("actor={lr: 1, lr: 2}", "override 'actor={lr: 1, lr: 2}': lr appears twice"),
    ],
)  # fmt: skip
def test_a_ruinous_value_is_refused_before_anything_starts(override: str, message: str) -> None:
    assert re.search(message, refused_override(override)), refused_override(override)


def test_two_settings_that_ruin_each_other_are_refused() -> None:
    message = refused_override("algorithm={name: ppo, dynamic_sampling: true}", "rollout.samples_per_prompt=1")
    assert "that is every group; use 2 or more, or algorithm.dynamic_sampling=false" in message
    message = refused_override("actor.lr=0.5", "actor.weight_decay=2")
    assert "actor.lr=0.5 x actor.weight_decay=2 is 1 or more" in message


def number_keys(section: Any, prefix: str = "") -> list[str]:
    """Every key of the run file that takes a number with a fraction, by its dotted name."""
    found: list[str] = []
    for key, info in section.model_fields.items():
        inner = [kind for kind in (info.annotation, *get_args(info.annotation)) if hasattr(kind, "model_fields")]
        if inner:
            found += number_keys(inner[0], f"{prefix}{key}.")
        elif float in (info.annotation, *get_args(info.annotation)):
            found.append(f"{prefix}{key}")
    return found


@pytest.mark.parametrize("value", ["nan", ".nan", "inf", "-.inf", "1e999"])
def test_no_number_of_the_run_file_may_be_infinite_or_none_at_all(value: str) -> None:
    keys = number_keys(Config)
    assert {"actor.lr", "rollout.temperature", "eval.threshold", "trainer.restart_window_s"} < set(keys)
    for key in (*keys, "algorithm.clip_high", "algorithm.tis_cap", "reward.0.weight"):
        needed = ["trainer.elastic.min_nodes=1"] if key.startswith("trainer.elastic") else []
        message = refused_override(*needed, f"{key}={value}")
        assert key in message and "finite" in message, message


def test_text_on_the_command_line_stays_text_where_text_belongs() -> None:
    config = load_config(
        None, ["run.name=1000", "data.train=2024", "model.path=1e5", "data.val=null", "data.system=yes"]
    )
    assert (config.run.name, config.data.train, config.model.path) == ("1000", "2024", "1e5")
    assert config.data.val is None and config.data.system == "yes"


def test_a_home_directory_in_a_file_is_the_users() -> None:
    assert load_config(None, ["run.dir=~/runs/x"]).run.dir == Path.home() / "runs/x"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [*a]", "nested more than 40 deep, or one contains itself"),
        ("a: " + "[" * 5000, "nested more than 40 deep, or one contains itself"),
        ("a: " + "{b: " * 5000, "nested more than 40 deep, or one contains itself"),
        ("- " * 5000, "nested more than 40 deep, or one contains itself"),
        ("run: {seed: !!bool maybe}", "line 1: 'maybe' is not a YAML bool"),
        ("run:\n  seed: !!timestamp x", "line 2: 'x' is not a YAML timestamp"),
        ("run: {seed: !!int ''}", "line 1: '' is not a YAML int"),
        ("run: {name: 2024-13-41}", "line 1: '2024-13-41' is not a YAML timestamp"),
        ("run: {seed: " + "1" * 5000 + "}", "is not a YAML int"),
        ("run: {name: !!python/object:os.system x}", "is not YAML: could not determine a constructor"),
        ("run: {? {a: 1} : 2}", "is not YAML"),
        ("1: {a: 2}", "1 is not the name of a section"),
        ("x" * 2_000_000, "it has more than 1,048,576 bytes; is it the right file"),
    ],
    ids=lambda value: value[:20],
)  # fmt: skip
def test_a_hostile_run_file_is_refused_at_once_by_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "run.yaml", text)
    with pytest.raises(ConfigError, match=message) as refused:
        load_config(path)
    assert str(path) in str(refused.value) and len(str(refused.value)) < 1000


def test_thousands_of_unknown_keys_are_told_in_a_few_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", "".join(f"key_number_{index}: 1\n" for index in range(2_000)))
    with pytest.raises(ConfigError, match="and 1,990 more") as refused:
        load_config(path)
    lines = str(refused.value).splitlines()
    assert len(lines) == 11 and "key_number_0 is not a field" in lines[0] and str(path) in lines[0]


def test_a_pipe_or_a_device_is_no_run_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (tmp_path / "pipe.yaml", Path("/dev/zero")):
        with pytest.raises(ConfigError, match=f"run file {path} cannot be read: it is a pipe or a device"):
            load_config(path)


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
        dict(
            algorithm={"name": "grpo", "tis_cap": 1e9, "kl_coef": 0.0}, actor={"optimizer": {"kwargs": {"scale": 1e12}}}
        ),
        dict(cluster={"num_nodes": 2}, trainer={"elastic": {"min_nodes": 2}}),
    ],
)
def test_what_is_next_to_a_refusal_is_allowed(sections: dict[str, Any]) -> None:
    config = parse_config(sections).model_dump()
    for section, keys in sections.items():
        for key, value in keys.items() if isinstance(keys, dict) else ():
            given = config[section][key]
            assert given == value or given.items() >= value.items()


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
        ("actor.lr", "override 'actor.lr' is not of the form key=value; write for example actor.lr=1e-5"),
        ("=3", "override '=3' is not of the form key=value"),
        ("reward.7.weight=1", "override 'reward.7.weight=1': 7 is not a valid index for a list of 1 item"),
        ("reward.x=1", "override 'reward.x=1': x is not a valid index for a list of 1 item"),
        ("actor.lr.x=1", "override 'actor.lr.x=1': lr is 0.0002 in the run file, not a section with keys"),
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
        ("- 1\n- 2", r"must contain sections \(run, model, data, ...\), not list"),
        ("", r"must contain sections .* not NoneType"),
    ],
)
def test_a_file_that_is_no_run_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path / "run.yaml", text))


def test_a_section_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("trainer: {steps: 7}\nrun: {name: one}\ntrainer: {staleness: 1}\n")
    with pytest.raises(ConfigError, match="trainer appears twice in the mapping that begins on line 1; write it once"):
        load_config(path)
    path.write_text("run: {name: one}\ntrainer: {steps: 7, steps: 8}\n")
    with pytest.raises(ConfigError, match="steps appears twice in the mapping that begins on line 2"):
        load_config(path)
    path.write_text("trainer: {<<: {steps: 7, staleness: 1}, steps: 8}\n")
    trainer = load_config(path).trainer
    assert (trainer.steps, trainer.staleness) == (8, 1), "a merged key may be set again"


def test_a_value_where_a_section_belongs_is_told_its_keys() -> None:
    assert "trainer.elastic=2 is not a map; its keys are min_nodes, wait_s" in refusal(trainer={"elastic": 2})
    words = refusal(cluster={"component_placement": "all"})
    assert "cluster.component_placement='all' is not a map, such as {name: value}" in words
    assert "trainer=3 is not a map; its keys are steps, " in refusal(trainer=3)
    assert "cluster.node_env.2=<a number, not shown> is not a map, such as" in refusal(cluster={"node_env": {2: 3}})


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


@pytest.mark.parametrize(
    ("text", "steps"),
    [("010", 10), ("0010", 10), ("+010", 10), ("08", 8), ("1_000", 1000), ("0x10", 16), ("0b11", 3), ("1e3", 1000)],
)
def test_a_number_is_read_as_a_person_reads_it(tmp_path: Path, text: str, steps: int) -> None:
    (tmp_path / "run.yaml").write_text(f"trainer: {{steps: {text}}}\n")
    assert load_config(None, [f"trainer.steps={text}"]).trainer.steps == steps
    assert load_config(tmp_path / "run.yaml").trainer.steps == steps
    saved = load_config(None, [f"run.name={text}"])
    (tmp_path / "saved.yaml").write_text(dump_config(saved))
    assert load_config(tmp_path / "saved.yaml").run.name == text


@pytest.mark.parametrize("text", ["1:30", "1:30.5", "0o10", "1e-3", "1.5", "on", "no", "1,000"])
def test_what_is_no_count_to_a_person_is_refused_in_an_override_and_in_a_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(f"trainer:\n  steps: {text}\n")
    with pytest.raises(ConfigError, match="trainer.steps="):
        load_config(tmp_path / "run.yaml")
    assert "trainer.steps=" in refused_override(f"trainer.steps={text}")


@pytest.mark.parametrize("text", ["on", "010", "2024-01-01"])
def test_a_text_that_yaml_takes_for_something_else_is_refused_with_what_to_do(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(f"run: {{name: {text}}}\n")
    with pytest.raises(ConfigError, match="run.name=.* is not a string; put it in quotes"):
        load_config(tmp_path / "run.yaml")
    (tmp_path / "run.yaml").write_text(f"run: {{name: '{text}'}}\n")
    assert load_config(tmp_path / "run.yaml").run.name == text


def test_a_time_of_day_in_a_run_file_is_a_text(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("run: {name: 12:30}\n")
    assert load_config(tmp_path / "run.yaml").run.name == "12:30"


def test_a_variable_that_is_too_long_to_print_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"cluster: {{env: {{TOKEN: 0x{'f' * 5000}}}}}")
    with pytest.raises(ConfigError, match="cluster.env.TOKEN=<a number, not shown> is not a string"):
        load_config(tmp_path / "run.yaml")


def test_rows_of_ones_own_are_not_evaluated_on_sums() -> None:
    assert parse_config({"data": {"train": "rows.jsonl"}}).data.val is None
    assert parse_config({"data": {"train": "rows.jsonl", "val": "held.jsonl"}}).data.val == "held.jsonl"
    assert parse_config({}).data.val == "builtin:arithmetic"


def test_a_wrong_value_that_aliases_make_enormous_is_refused_in_a_line(tmp_path: Path) -> None:
    lines = ["l0: &l0 [api_key=secret-of-mine, x, x]"]
    lines += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 12)]
    (tmp_path / "run.yaml").write_text("\n".join([*lines, "reward: *l11"]))
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "run.yaml")
    assert "reward" in str(caught.value) and "secret-of-mine" not in str(caught.value)
