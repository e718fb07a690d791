"""What reaches a worker's environment: declared, from where it should, sealed if it is a secret."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcall.base import redact
from rollcall.base.errors import ClusterError
from rollcall.base.redact import REDACTED
from rollcall.config import ClusterSection, parse_config
from rollcall.nodes.declared import (
    NODE_OWN,
    SEALED,
    SUBMITTED,
    UNDECLARED,
    declared,
    environment,
    for_ray,
    hint,
    job_env,
    missed,
    nodes_own,
    origins,
    passed,
    process_token,
    seal,
    sealed_values,
    submitted_env,
    unseal,
    worker_env,
)

TOKEN = "token-of-this-cluster"
SECRET = "wandb-5e77a9-not-for-you"


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact, "_remembered", set())


def section(**fields: Any) -> ClusterSection:
    return ClusterSection(num_nodes=2, **fields)


def test_the_nodes_value_goes_before_the_run_files_and_that_before_the_submitters() -> None:
    cluster = section(env={"B": "run", "C": "run"}, env_pass=["A", "B", "C"], node_env={1: {"C": "node"}})
    submitted = passed(cluster, environ=dict.fromkeys("ABC", "shell"))
    assert worker_env(cluster, submitted=submitted, node_rank=0) == {"A": "shell", "B": "run", "C": "run"}
    assert worker_env(cluster, submitted=submitted, node_rank=1) == {"A": "shell", "B": "run", "C": "node"}
    sources = {name: variable.source for name, variable in declared(cluster, submitted=submitted, node_rank=1).items()}
    assert sources == {"A": "cluster.env_pass", "B": "cluster.env", "C": "cluster.node_env.1"}


def test_only_what_is_declared_travels() -> None:
    environ = {"NCCL_DEBUG": "WARN", "NCCL_IB_HCA": "mlx5", "HOME": "/home/me", "MY_NCCL_": "no", "PATH": "/bin"}
    assert passed(section(env_pass=["NCCL_*"]), environ=environ) == {"NCCL_DEBUG": "WARN", "NCCL_IB_HCA": "mlx5"}
    assert passed(section(), environ=environ) == {} == worker_env(None, submitted={}, node_rank=0)


def test_a_pattern_may_match_nothing_but_a_name_must_be_set() -> None:
    assert passed(section(env_pass=["NCCL_*"]), environ={}) == {}
    with pytest.raises(ClusterError, match="names WANDB_API_KEY, which is not set in this shell; export WANDB_API_KEY"):
        passed(section(env_pass=["WANDB_API_KEY"]), environ={})


@pytest.mark.parametrize("name", NODE_OWN)
@pytest.mark.parametrize("where", ["env", "env_pass", "node_env", "pattern"])
def test_a_nodes_own_variables_are_refused_by_name(where: str, name: str) -> None:
    fields: dict[str, Any] = {
        "env": {"env": {name: "/x"}},
        "env_pass": {"env_pass": [name]},
        "node_env": {"node_env": {1: {name: "/x"}}},
        "pattern": {"env_pass": [f"{name[:-1]}*"]},
    }[where]
    with pytest.raises(ClusterError, match=f"contains {name}, which must differ between nodes"):
        job_env(section(**fields), environ={name: "/x"}, token=TOKEN)


@pytest.mark.parametrize("name", ["RANK", "MASTER_ADDR", "RAY_ADDRESS", "ROLLCALL_TOKEN", "RAY_AUTH_TOKEN"])
def test_what_rollcall_sets_is_not_for_the_run_file(name: str) -> None:
    with pytest.raises(ClusterError, match=f"{name}, which Rollcall sets"):
        job_env(section(env={name: "1"}), environ={}, token=TOKEN)


def test_a_secret_of_one_node_alone_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"node_env\.1\.A_KEY is a secret") as refused:
        job_env(section(node_env={1: {"A_KEY": SECRET}}), environ={}, token=TOKEN)
    assert SECRET not in str(refused.value)


def test_a_jobs_variables_hold_secrets_only_sealed() -> None:
    cluster = section(env={"MODE": "fast", "A_KEY": SECRET}, env_pass=["B_TOKEN", "NCCL_*"])
    environ = {"B_TOKEN": "another-secret", "NCCL_DEBUG": "WARN"}
    variables = job_env(cluster, environ=environ, token=TOKEN)
    assert (variables["MODE"], variables["NCCL_DEBUG"]) == ("fast", "WARN")
    assert variables.keys() == {"MODE", "NCCL_DEBUG", SEALED, SUBMITTED}
    assert not any(secret in value for value in variables.values() for secret in (SECRET, "another-secret"))
    assert sealed_values(variables, token=TOKEN) == {"A_KEY": SECRET, "B_TOKEN": "another-secret"}


def test_the_driver_gives_workers_what_the_submitter_declared() -> None:
    """Through the run file that travels, where secrets are redacted, and the variables of the job."""
    cluster = section(
        env={"MODE": "fast", "A_KEY": SECRET}, env_pass=["B_TOKEN", "NCCL_*"], node_env={1: {"MODE": "slow"}}
    )
    variables = job_env(cluster, environ={"B_TOKEN": "another-secret", "NCCL_DEBUG": "WARN"}, token=TOKEN)
    travelled = cluster.model_copy(update={"env": {"MODE": "fast", "A_KEY": REDACTED}})
    driver = {**variables, **sealed_values(variables, token=TOKEN), "NCCL_OF_THE_HEAD": "1"}
    with environment(driver):
        submitted = submitted_env(travelled)
    expected = {"MODE": "fast", "A_KEY": SECRET, "B_TOKEN": "another-secret", "NCCL_DEBUG": "WARN"}
    assert worker_env(travelled, submitted=submitted, node_rank=0) == expected
    assert worker_env(travelled, submitted=submitted, node_rank=1) == {**expected, "MODE": "slow"}


def test_a_job_that_passes_nothing_takes_nothing_from_the_head() -> None:
    cluster = section(env_pass=["NCCL_*"])
    driver = {**job_env(cluster, environ={}, token=TOKEN), "NCCL_OF_THE_HEAD": "1"}
    with environment(driver):
        assert submitted_env(cluster) == {}


def test_what_a_reward_function_names_reaches_the_driver_and_is_not_declared_for_workers() -> None:
    environ = {"OPENAI_API_KEY": SECRET, "SERVICE": "http://judge", "HF_TOKEN": "other-secret-value"}
    for cluster in (None, section()):
        job = job_env(cluster, environ=environ, token=TOKEN, named={"environment.env": ["OPENAI_API_KEY", "SERVICE"]})
        assert job["SERVICE"] == "http://judge" and SECRET not in str(job)
        assert sealed_values(job, token=TOKEN) == {"OPENAI_API_KEY": SECRET}
        assert job.get(SUBMITTED, "") == ""
    assert (
        job_env(section(env={"SERVICE": "run"}), environ={}, token=TOKEN, named={"environment.env": ["SERVICE"]})[
            "SERVICE"
        ]
        == "run"
    )
    with pytest.raises(ClusterError, match="names NOT_SET, which is not set in this shell"):
        job_env(section(), environ=environ, token=TOKEN, named={"environment.env": ["NOT_SET"]})


def test_a_redacted_value_is_not_taken_for_a_value() -> None:
    with pytest.raises(ClusterError, match=r"cluster\.env\.A_KEY was redacted"):
        job_env(section(env={"A_KEY": REDACTED}), environ={}, token=TOKEN)


def test_secrets_are_not_given_to_ray_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert for_ray({"MODE": "fast"}) == {"MODE": "fast"}
    with pytest.raises(ClusterError, match="A_KEY must not appear in Ray's logs") as refused:
        for_ray({"A_KEY": SECRET})
    assert SECRET not in str(refused.value)


@mock.patch("rollcall.nodes.declared._ROUNDS", 10)  # making a key from a token takes long on purpose
@settings(max_examples=20, deadline=None)
@given(
    st.dictionaries(st.text(min_size=1, max_size=8), st.text(max_size=40), max_size=4), st.text(min_size=1, max_size=20)
)
def test_what_is_sealed_opens_with_its_token_and_with_no_other(values: dict[str, str], token: str) -> None:
    envelope = seal(values, token)
    assert unseal(envelope, token) == values
    with pytest.raises(ClusterError):
        unseal(envelope, token + "x")


def test_an_envelope_that_was_changed_anywhere_does_not_open() -> None:
    envelope = seal({"A": "value"}, TOKEN)
    for place in range(0, len(envelope) - 4, 3):
        other = "A" if envelope[place] != "A" else "B"
        with pytest.raises(ClusterError):
            unseal(envelope[:place] + other + envelope[place + 1 :], TOKEN)


def test_two_envelopes_of_the_same_secret_differ() -> None:
    assert seal({"A": "value"}, TOKEN) != seal({"A": "value"}, TOKEN)


def test_a_nodes_workers_keep_where_things_are_and_how_the_machine_is_used_and_nothing_else() -> None:
    kept = {
        "PATH": "/bin",
        "HOME": "/root",
        "CUDA_VISIBLE_DEVICES": "0",
        "NCCL_DEBUG": "WARN",
        "RAY_worker_niceness": "0",
    }
    others = {
        "HF_TOKEN": SECRET,
        "HF_HOME": "/cache",
        "WANDB_PROJECT": "p",
        "SLURM_JOB_ID": "7",
        "https_proxy": "http://x",
    }
    secret = {"RAY_REDIS_PASSWORD": SECRET, "NCCL_API_KEY": SECRET}
    assert nodes_own({**kept, **others, **secret}) == kept
    assert missed({**kept, **others}, given={"WANDB_PROJECT"}) == ["HF_HOME", "HF_TOKEN", "https_proxy"]
    assert SECRET not in hint(missed(others)) and "HF_TOKEN" in hint(missed(others))


def test_where_a_workers_variables_come_from_is_read_at_its_raylet() -> None:
    script = "import time; print('up', flush=True); time.sleep(60)"
    environ = {"PATH": os.environ["PATH"], "MY_OWN": "1", "ROLLCALL_NODE_DIR": "/x"}
    with subprocess.Popen([sys.executable, "-c", script], env=environ, stdout=subprocess.PIPE) as raylet:
        assert raylet.stdout is not None and raylet.stdout.readline() == b"up\n"
        found = origins({**environ, "RAY_RAYLET_PID": str(raylet.pid), "OMP_NUM_THREADS": "1"})
        raylet.kill()
    assert found == {
        "PATH": "the node's own", "MY_OWN": UNDECLARED, "ROLLCALL_NODE_DIR": "rollcall", "RAY_RAYLET_PID": "Ray",
        "OMP_NUM_THREADS": "Ray",
    }  # fmt: skip


def test_the_token_is_the_one_that_ray_uses(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert process_token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}) == TOKEN
    assert process_token({"RAY_AUTH_TOKEN": "given", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}) == "given"
    assert process_token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "gone")}) is None
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("of-the-home")
    home = {"HOME": str(tmp_path)}
    assert process_token({**home, "RAY_AUTH_MODE": "token"}) == "of-the-home" and process_token(home) is None
    assert process_token({"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "unused"}) is None


def test_secrets_that_no_token_can_seal_are_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ClusterError, match="WANDB_API_KEY must not appear in Ray's logs.*RAY_AUTH_MODE=token"):
        for_ray({"WANDB_API_KEY": "abcdefgh12345678"})


def test_a_run_file_names_a_node_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="node_env names node 2"):
        parse_config({"cluster": {"num_nodes": 2, "node_env": {2: {"A": "b"}}}})
