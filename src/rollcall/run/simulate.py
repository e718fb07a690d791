"""Rehearses a cluster run on this machine, and returns a verdict. Nodes, slots, placement, algorithm and loop are those of the run; the
model is tiny, and there are two steps.

The nodes are started as ``rollcall node`` starts them, each with its own state folder, and are always stopped at the end. The slots are
logical, so no GPU is needed.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rollcall.base.errors import ClusterError, ConfigError
from rollcall.base.wait import in_silence, say, speaking
from rollcall.config import Config, parse_config
from rollcall.nodes.bootstrap import start_node, stop_node
from rollcall.nodes.declared import environment
from rollcall.nodes.ray_start import NodeRequest
from rollcall.nodes.state import CLUSTER, STATE_DIR
from rollcall.plan.judge import workable_plan
from rollcall.plan.placement import Plan
from rollcall.process.ray.connect import disconnect

STEPS, PROMPTS = 2, 16
NAME = "rehearsal"
# Eight heads and eight KV heads: every usual tensor-parallel size divides them.
SHAPE = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8,
    max_position_embeddings=64, tie_word_embeddings=False, rms_norm_eps=1e-6,
)  # fmt: skip
PROCESS_GIB, NODE_GIB = 0.4, 0.3  # measured: a worker with torch and the tiny model, and a node's own processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    ok: bool
    why: str | None  # why the run would fail
    num_nodes: int
    num_slots: int
    num_processes: int
    roles: dict[str, int]  # role -> number of processes
    steps: int
    seconds: float
    logprob_mismatch: float | None


def simulate(config: Config) -> Verdict:
    """Start the nodes, run on them, and stop them. Raises if the run file or the placement is wrong; any other error becomes the
    verdict."""
    if config.cluster is None:
        raise ConfigError(
            "the run file has no cluster section, so there is no placement to rehearse; `rollcall train` runs it"
        )
    plan = workable_plan(config, config.cluster)
    num_processes = len(plan.all_processes)
    needed = num_processes * PROCESS_GIB + plan.num_nodes * NODE_GIB
    available = psutil.virtual_memory().available / 2**30
    if needed > available:
        raise ClusterError(
            f"{plan.num_nodes} nodes with {num_processes} processes need about {needed:.0f} GiB on one machine, but only "
            f"{available:.0f} GiB are free; rehearse fewer nodes (cluster.num_nodes=..., with a matching placement), and check the full "
            "run with `rollcall plan`"
        )
    if config.rollout.engine == "vllm":
        say("rollout.engine=vllm is replaced by the native engine in the rehearsal")
    started = time.monotonic()
    summary: dict[str, Any] | None = None
    why = None
    with tempfile.TemporaryDirectory(prefix="rc-sim-", dir="/tmp") as folder:  # short, because socket paths are limited
        root = Path(folder)
        with _nodes(plan, root):
            say(f"running {STEPS} steps of {config.algorithm.name} with a tiny model")
            try:
                summary = _run(config, root)
            except Exception as error:  # any error becomes the verdict
                why = str(error) or type(error).__name__
    return Verdict(
        ok=summary is not None and summary["steps"] == STEPS,
        why=why,
        num_nodes=plan.num_nodes,
        num_slots=len(plan.slots),
        num_processes=num_processes,
        roles={str(role): plan.world_size(role) for role in plan.roles},
        steps=summary["steps"] if summary else 0,
        seconds=time.monotonic() - started,
        logprob_mismatch=summary["logprob_mismatch"] if summary else None,
    )


def rehearsed(config: Config, root: Path, *, model: Path, reward_model: Path | None) -> Config:
    """Return a config with a small model, small data and few steps, but the same placement."""
    # The number of minibatches must divide the number of prompts.
    unit = math.lcm(config.actor.minibatches, config.critic.minibatches)
    document = config.model_dump(mode="json")
    document["run"] |= {"name": NAME, "dir": str(root / "run")}
    document["cluster"] |= {"accelerator": "cpu", "ray_address": None}  # the rehearsal has its own nodes
    lora = document["model"]["lora"]
    document["model"] = {"path": str(model), "dtype": "float32", "device": "cpu"}
    if lora is not None:
        document["model"]["lora"] = lora | {"path": None}  # an existing adapter belongs to another model
    document["data"] = {
        "train": "builtin:arithmetic",
        "val": None,
        "prompts_per_step": min(config.data.prompts_per_step, unit * max(1, PROMPTS // unit)),
        "max_prompt_tokens": 32,
    }
    document["rollout"] |= {
        "samples_per_prompt": min(config.rollout.samples_per_prompt, 4), "max_response_tokens": 8, "stop": [], "kv_tokens": None,
        "engine": "native", "compile": False,
    }  # fmt: skip
    for trained in ("actor", "critic"):
        document[trained] |= {"compile": False}
    # A random policy never answers correctly, so use a reward that varies between completions. Otherwise updates would change nothing.
    document["reward"] = [{"type": "regex", "pattern": "[0-4]"}] + (
        [{"type": "model", "path": str(reward_model)}] if reward_model else []
    )
    if config.environment is not None:
        document["environment"] = {"type": "step", "path": "rollcall.environments.packages:Echo", "max_turns": 2}
        document["reward"].append({"type": "environment"})
    document["trainer"] |= {"steps": STEPS, "eval_every": 0, "save_every": STEPS, "loggers": [], "num_threads": 1}
    return parse_config(document)


def _run(config: Config, root: Path) -> dict[str, Any]:
    from rollcall.run.training import train

    model, reward_model = make_tiny_model(root / "model"), None
    if any(reward.type == "model" for reward in config.reward):
        reward_model = make_tiny_model(root / "reward-model", is_reward=True)
    small = rehearsed(config, root, model=model, reward_model=reward_model)
    try:
        return train(small, quiet=True)
    finally:
        disconnect()  # before the nodes stop


@contextmanager
def _nodes(plan: Plan, root: Path) -> Iterator[None]:
    """Start the nodes one after the other; in parallel, Ray would not start any faster on two cores."""
    up: list[int] = []
    with environment({CLUSTER: NAME, STATE_DIR: str(root / "node0")}):
        try:
            for rank, slots in enumerate(plan.slots_per_node):
                say(f"starting node {rank} of {plan.num_nodes} with {slots} slots")
                request = NodeRequest(
                    cluster=NAME,
                    rank=rank,
                    num_nodes=plan.num_nodes,
                    rendezvous=root / "rendezvous",
                    slots=slots,
                    object_store_gib=0.25,
                )
                up.append(rank)
                with environment({STATE_DIR: str(root / f"node{rank}")}), speaking(in_silence):
                    start_node(request)
            yield
        finally:
            say("stopping the nodes")
            for rank in reversed(up):
                with environment({STATE_DIR: str(root / f"node{rank}")}):
                    stop_node(NAME)


def make_tiny_model(directory: Path, *, is_reward: bool = False) -> Path:
    """Build a Llama with random weights and a character tokenizer. A reward model outputs one number."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    from rollcall.model.tokenizers import ALPHABET, char_tokenizer

    tokenizer = char_tokenizer(ALPHABET)
    ids: dict[str, Any] = dict(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None, num_labels=1
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=len(tokenizer), **SHAPE, **ids)
        model = LlamaForSequenceClassification(config) if is_reward else LlamaForCausalLM(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
