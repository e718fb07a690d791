"""`rollcall plan`: memory by arithmetic, the map as text and picture, and what cannot work."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from commands import rollcall
from rich.console import Console
from tiny import ARCHITECTURES, SHAPE, make_model, save_model
from transformers import LlamaConfig, LlamaForCausalLM

from rollcall.base.errors import SizesUnknown
from rollcall.config import OptimizerSection, load_config, parse_config
from rollcall.learner.optimizer import Optimizer
from rollcall.model.files import MODEL_DIR
from rollcall.plan.activations import Recompute
from rollcall.plan.draw import draw_text, node_runs
from rollcall.plan.judge import RunPlan, plan_run
from rollcall.plan.memory import GIB, READ_AT_ONCE, VLLM_PARTS, ModelSizes, RoleMemory, SlotMemory, read_sizes
from rollcall.plan.placement import Role, roles_together, shrink

ROOT = Path(__file__).parents[1]
QWEN: dict[str, Any] = dict(
    model_type="qwen2", hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
    num_key_value_heads=2, vocab_size=151936, max_position_embeddings=1024, tie_word_embeddings=True,
)  # fmt: skip


def write_sizes(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**QWEN, **changes}))
    return path


def make_run(
    folder: Path,
    placement: dict[str, str | int],
    *,
    nodes: list[int] | None = None,
    card_gib: float | None = None,
    sizes: dict[str, Any] | None = None,
    cluster: dict[str, Any] | None = None,
    **sections: Any,
) -> RunPlan:
    """A plan of a Qwen2.5-0.5B-like model."""
    where = {"nodes": [{"gpus": size} for size in nodes or [8]], "component_placement": placement, **(cluster or {})}
    config = parse_config({"cluster": where, **sections})
    return plan_run(config, card_gib=card_gib, model_config=write_sizes(folder, **(sizes or {})))


def memory_of(run: RunPlan, role: str) -> RoleMemory:
    (found,) = [entry for group in run.memory for entry in group.roles if entry.role == role]
    return found


def as_text(run: RunPlan, *, width: int = 120) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(draw_text(run))
    return capture.get()


def test_a_plan_says_what_little_room_for_kv_and_micro_batches_costs(tmp_path: Path) -> None:
    seven_b = dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
                   vocab_size=152064, tie_word_embeddings=False)  # fmt: skip

    def notes(**sections: Any) -> str:
        data, rollout = (
            {"prompts_per_step": 32, "max_prompt_tokens": 128},
            {"samples_per_prompt": 8, "max_response_tokens": 512},
        )
        run = make_run(
            tmp_path,
            {"actor,rollout": "all"},
            nodes=[1],
            card_gib=140,
            sizes=seven_b,
            data=data,
            rollout=rollout,
            **sections,
        )
        return " ".join(run.notes)

    assert "micro-batch has room for 640 tokens, so an update of 256 completions takes up to 256 passes" in notes()
    assert "room for only 1 of them" in notes() and "set actor.optimizer.state=bfloat16" in notes()
    for sections in ({"actor": {"optimizer": {"state": "bfloat16"}}}, {"model": {"lora": {"rank": 16}}}):
        assert "has room for" not in notes(**sections)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_parameters_are_counted_from_config_json_as_they_are_in_the_model(tmp_path: Path, name: str) -> None:
    model = make_model(name)
    model.config.save_pretrained(tmp_path)
    assert read_sizes(str(tmp_path)).num_parameters == sum(tensor.numel() for tensor in model.parameters())


def test_the_embedded_models_sizes_are_known() -> None:
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(MODEL_DIR))
    assert read_sizes("builtin:arithmetic").num_parameters == sum(tensor.numel() for tensor in model.parameters())


def test_a_model_in_the_hub_cache_needs_no_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--some--model"
    (repository / "snapshots/abc").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc")
    write_sizes(repository / "snapshots/abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    assert read_sizes("some/model").layers == 24


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ('{"model_type": "mamba"}', "describes a model of type mamba, whose memory cannot be estimated"),
        ('{"model_type": "llama"}', "does not contain a model's sizes: KeyError 'hidden_size'"),
        ("{", "cannot be read: Expecting"),
        ("[]", "is not a model's config.json"),
    ],
)
def test_sizes_that_cannot_be_read_are_said_so(tmp_path: Path, fields: str, words: str) -> None:
    (tmp_path / "config.json").write_text(fields)
    with pytest.raises(SizesUnknown) as caught:
        read_sizes(str(tmp_path))
    assert words in str(caught.value)


def test_the_learners_state_is_what_the_optimizer_really_holds() -> None:
    model = make_model().to(torch.bfloat16)
    sizes = ModelSizes.of({"model_type": "qwen2", "tie_word_embeddings": True, **SHAPE}, where="tiny")
    section = OptimizerSection()
    optimizer = Optimizer(dict(model.named_parameters()), section, total_updates=1)
    optimizer.accumulate([torch.ones_like(parameter) for parameter in optimizer.named.values()])
    optimizer.step()
    state = [value for entry in optimizer.adamw.state.values() for value in entry.values() if value.ndim]
    held = sum(tensor.numel() * tensor.element_size() for tensor in [*state, *optimizer.targets.values()])
    assert held == sizes.num_parameters * 12


def test_a_measured_step_is_estimated_to_a_tenth(tmp_path: Path) -> None:
    """docs/log.md: this step on one H200 had a peak of 46.96 GiB in torch's allocator."""
    run = make_run(
        tmp_path, {"actor,rollout": "all"}, nodes=[1], card_gib=139,
        actor={"tokens_per_microbatch": 32768}, data={"max_prompt_tokens": 128},
        rollout={"max_running": 256, "max_response_tokens": 512, "kv_tokens": 256 * 1024},
    )  # fmt: skip
    (entry,) = run.memory
    assert (entry.total - entry.runtime) / GIB == pytest.approx(46.96, rel=0.1)


def test_more_slots_mean_less_state_on_each(tmp_path: Path) -> None:
    one = make_run(tmp_path, {"actor,rollout": "all"}, nodes=[1])
    many = make_run(tmp_path, {"actor,rollout": "all"}, nodes=[8, 8], actor={"sharding": "fsdp"})
    per_node = make_run(tmp_path, {"actor,rollout": "all"}, nodes=[8, 8], actor={"sharding": "hsdp"})
    copies = make_run(tmp_path, {"actor,rollout": "all"}, nodes=[8, 8])
    offloaded = make_run(tmp_path, {"actor,rollout": "all"}, actor={"sharding": "fsdp", "cpu_offload": True})
    assert one.sizes is not None
    assert memory_of(one, "actor").optimizer == 12 * one.sizes.num_parameters
    assert memory_of(many, "actor").optimizer == 12 * one.sizes.num_parameters // 16
    assert memory_of(per_node, "actor").optimizer == 12 * one.sizes.num_parameters // 8
    assert memory_of(copies, "actor").optimizer == memory_of(one, "actor").optimizer
    assert memory_of(offloaded, "actor").optimizer == 0
    half = make_run(tmp_path, {"actor,rollout": "all"}, nodes=[1], actor={"optimizer": {"state": "bfloat16"}})
    assert memory_of(half, "actor").optimizer == 8 * one.sizes.num_parameters
    assert memory_of(many, "actor").weights < memory_of(one, "actor").weights
    assert memory_of(many, "actor").activations == memory_of(one, "actor").activations


def test_rollout_has_weights_of_its_own_only_away_from_the_actor(tmp_path: Path) -> None:
    together = make_run(tmp_path, {"actor,rollout": "all"})
    apart = make_run(tmp_path, {"actor": "0-3", "rollout": "4-7"})
    assert apart.sizes is not None
    sharded = make_run(tmp_path, {"actor,rollout": "all"}, actor={"sharding": "fsdp"})
    assert memory_of(together, "rollout").weights == 0
    assert memory_of(sharded, "rollout").weights == memory_of(apart, "rollout").weights
    assert memory_of(apart, "rollout").weights == 2 * apart.sizes.num_parameters


def test_vllm_has_the_only_copy_of_its_process_unless_the_transport_needs_one(tmp_path: Path) -> None:
    engine: dict[str, Any] = {"engine": "vllm", "vllm": {"tensor_parallel_size": 2}}
    apart = make_run(tmp_path, {"actor": "0-3", "rollout": "4-7:0-1"}, rollout=engine)
    assert apart.sizes is not None and apart.problems == ()
    whole = 2 * apart.sizes.num_parameters
    assert memory_of(apart, "rollout").weights == whole // 2
    beside = make_run(tmp_path, {"actor,rollout": "all"}, rollout={"engine": "vllm"}, actor={"sharding": "fsdp"})
    assert memory_of(beside, "rollout").weights == whole, "vLLM's own, beside the actor's part"
    changes = make_run(tmp_path, {"actor": "0-3", "rollout": "4-7:0-1"}, rollout={**engine, "weights": "delta"})
    assert memory_of(changes, "rollout").weights == whole + whole // 2
    awake = make_run(tmp_path, {"actor,rollout": "all"}, rollout={"engine": "vllm"})
    asleep = make_run(tmp_path, {"actor,rollout": "all"}, rollout={"engine": "vllm", "vllm": {"sleep": True}})
    assert memory_of(awake, "rollout").weights == memory_of(asleep, "rollout").weights == whole
    assert memory_of(asleep, "rollout").held == 0, "it gives all of it back while the actor works"
    lent = min(
        memory_of(awake, "actor").working, memory_of(asleep, "rollout").working - memory_of(awake, "rollout").working
    )
    assert awake.memory[0].total - asleep.memory[0].total == lent > 0


def saved_bytes(run: RunPlan) -> int:
    """Of a checkpoint: weights in bfloat16, and masters and two moments in float32."""
    assert run.sizes is not None
    return 14 * run.sizes.num_parameters


def test_host_memory_is_that_of_parts_and_of_the_copy_of_a_checkpoint(tmp_path: Path) -> None:
    whole = make_run(tmp_path, {"actor": "0-3", "rollout": "4-7"})
    assert whole.sizes is not None and whole.host == {0: 8 * READ_AT_ONCE + saved_bytes(whole)}, "the first actor saves"
    parts = make_run(
        tmp_path, {"actor": "0-3", "rollout": "4-7"}, actor={"sharding": "fsdp"}, rollout={"engine": "vllm"}
    )
    saved, embeddings = saved_bytes(whole), 2 * whole.sizes.vocab * whole.sizes.hidden
    (found,) = parts.host.values()
    assert found == pytest.approx(4 * (READ_AT_ONCE + VLLM_PARTS + embeddings) + saved, abs=100)
    offloaded = make_run(tmp_path, {"actor,rollout": "0-7"}, actor={"sharding": "fsdp", "cpu_offload": True})
    assert sum(offloaded.host.values()) == pytest.approx(
        16 * READ_AT_ONCE + saved + 12 * whole.sizes.num_parameters, abs=100
    )
    assert parts.as_json()["host_bytes"] == {"0": found}


def test_roles_of_one_process_take_turns_in_working_memory() -> None:
    actor = RoleMemory(role=Role.ACTOR, weights=10, optimizer=20, gradients=5, activations=7)
    rollout = RoleMemory(role=Role.ROLLOUT, kv=100, activations=3)
    assert SlotMemory(slots="0", roles=(actor, rollout), runtime=1).total == 1 + 10 + 20 + 100 + (5 + 7)


@pytest.mark.parametrize(
    ("rollout", "expected"),
    [
        ({"kv_tokens": 1000}, 1000 * 12288),
        ({"max_running": 100_000, "kv_memory_fraction": 0.25}, 20 * GIB),
        ({"max_running": 4, "kv_memory_fraction": 0.3}, 4 * 1024 * 12288),
        ({"max_running": 4}, 4 * (512 + 64) * 12288),
    ],
)
def test_the_kv_cache_is_what_the_engine_will_take(tmp_path: Path, rollout: dict[str, Any], expected: int) -> None:
    run = make_run(tmp_path, {"actor,rollout": "all"}, rollout=rollout)
    assert memory_of(run, "rollout").kv == expected


def test_checkpointing_saves_activations(tmp_path: Path) -> None:
    plain = make_run(tmp_path, {"actor,rollout": "all"}, actor={"tokens_per_microbatch": 16384})
    saving = make_run(
        tmp_path, {"actor,rollout": "all"}, actor={"activation_checkpointing": True, "tokens_per_microbatch": 16384}
    )
    assert memory_of(saving, "actor").activations < memory_of(plain, "actor").activations / 2


def test_logical_slots_have_no_card_to_fit_unless_one_is_given(tmp_path: Path) -> None:
    cpu = {"accelerator": "cpu"}
    free = make_run(tmp_path, {"actor,rollout": "all"}, cluster=cpu, actor={"tokens_per_microbatch": 10**7})
    assert free.card is None and free.problems == () and "a card of" not in " ".join(free.notes)
    assumed = make_run(tmp_path, {"actor,rollout": "all"})
    assert "memory is compared with a card of 80.0 GiB" in " ".join(assumed.notes)
    bound = make_run(tmp_path, {"actor,rollout": "all"}, cluster=cpu, card_gib=2)
    assert bound.problems and bound.memory[0].runtime == 0


def test_what_does_not_fit_is_refused_with_the_sum_and_the_lever(tmp_path: Path) -> None:
    fixed = {"sharding": "fsdp", "tokens_per_microbatch": 16384, "activation_checkpointing": False}
    run = make_run(tmp_path, {"actor,rollout": "all"}, card_gib=16, actor=fixed)
    (problem,) = run.problems
    over = run.memory[0].total / GIB - 16
    assert problem.startswith(
        f"slots 0-7 (actor, rollout): the roles need {16 + over:.1f} GiB, {over:.1f} GiB more than the card's 16.0 GiB"
    )
    assert "actor.tokens_per_microbatch" in problem
    lower = {"sharding": "fsdp", "tokens_per_microbatch": 2048}
    lowered = make_run(tmp_path, {"actor,rollout": "all"}, card_gib=16, actor=lower)
    assert lowered.problems == ()


def test_completions_longer_than_the_model_reads_cannot_work(tmp_path: Path) -> None:
    run = make_run(tmp_path, {"actor,rollout": "all"}, nodes=[1], rollout={"max_response_tokens": 10**6})
    assert "rollout.max_response_tokens=1000000 leaves no room for a prompt, because the model has" in "".join(
        run.problems
    )


def test_on_one_card_that_is_too_small_the_lever_is_an_adapter(tmp_path: Path) -> None:
    (problem,) = make_run(tmp_path, {"actor,rollout": "all"}, nodes=[1], card_gib=8).problems
    assert problem.endswith("give actor more slots, or train an adapter (model.lora.rank=16)")


def test_an_adapter_that_is_not_here_is_said_so(tmp_path: Path) -> None:
    def notes_of(path: Path) -> str:
        return "\n".join(plan_run(parse_config({"model": {"lora": {"rank": 4, "path": str(path)}}})).notes)

    (tmp_path / "adapter_config.json").write_text("{}")
    assert "is not an adapter on this machine" in notes_of(tmp_path / "elsewhere")
    assert "model.lora.path" not in notes_of(tmp_path)


def test_auto_fits_the_card_and_gives_kv_what_is_left(tmp_path: Path) -> None:
    large = make_run(tmp_path, {"actor,rollout": "all"}, nodes=[1], card_gib=80)
    assert (memory_of(large, "actor").tokens, memory_of(large, "actor").recompute) == (32768, False)
    for card in (12, 16, 24, 48):
        run = make_run(
            tmp_path, {"actor,rollout": "all"}, nodes=[1], card_gib=card, rollout={"max_response_tokens": 512}
        )
        assert run.problems == () and run.memory[0].total <= card * GIB
        actor, kv = memory_of(run, "actor"), memory_of(run, "rollout").kv
        assert 1024 <= actor.tokens <= 32768 and 1024 * 12288 <= kv <= 512 * 1024 * 12288
        assert any(f"actor: {actor.tokens} tokens in a micro-batch" in note for note in run.notes)
    assert memory_of(large, "rollout").kv == 512 * 576 * 12288
    tight = make_run(tmp_path, {"actor,rollout": "all"}, nodes=[1], card_gib=16, rollout={"max_response_tokens": 512})
    assert memory_of(tight, "actor").recompute, "layers run again before micro-batches become small"
    assert tight.host == {0: 2 * READ_AT_ONCE + saved_bytes(tight)}
    given = make_run(tmp_path, {"actor,rollout": "all"}, nodes=[1], card_gib=16, actor={"tokens_per_microbatch": 4096})
    assert memory_of(given, "actor").tokens == 4096
    nowhere = make_run(tmp_path, {"actor,rollout": "all"}, nodes=[1], card_gib=8)
    assert nowhere.problems


def test_a_row_that_fits_no_other_way_waits_in_host_memory(tmp_path: Path) -> None:
    long: dict[str, Any] = {
        "data": {"max_prompt_tokens": 512},
        "rollout": {"max_response_tokens": 32256},
        "sizes": {"max_position_embeddings": 32768},
    }
    card = next(
        card
        for card in range(40, 8, -1)
        if memory_of(make_run(tmp_path, {"actor,rollout": "all"}, nodes=[1], card_gib=card, **long), "actor").recompute
        is Recompute.ON_HOST
    )
    run = make_run(tmp_path, {"actor,rollout": "all"}, nodes=[1], card_gib=card, **long)
    actor = memory_of(run, "actor")
    assert run.problems == () and actor.tokens >= 32768
    assert run.sizes is not None and actor.parked >= actor.tokens * run.sizes.layers * run.sizes.hidden * 2
    assert run.host == {0: 2 * READ_AT_ONCE + actor.parked + saved_bytes(run)}
    assert any("from inputs in host memory (auto, estimated)" in note for note in run.notes)
    on_card = make_run(
        tmp_path, {"actor,rollout": "all"}, nodes=[1], card_gib=card, actor={"activation_checkpointing": True}, **long
    )
    assert memory_of(on_card, "actor").parked == 0 and on_card.memory[0].total > run.memory[0].total
    roomier = make_run(tmp_path, {"actor,rollout": "all"}, nodes=[1], card_gib=card + 1, **long)
    assert memory_of(roomier, "actor").recompute is Recompute.YES, "only where there is no other way"


def test_without_a_card_auto_is_what_it_always_was(tmp_path: Path) -> None:
    run = make_run(tmp_path, {"actor,rollout": "all"}, cluster={"accelerator": "cpu"})
    assert (memory_of(run, "actor").tokens, memory_of(run, "actor").recompute) == (16384, False)


def test_the_lever_is_that_of_the_largest_part() -> None:
    assert "kv_memory_fraction" in RoleMemory(role=Role.ROLLOUT, kv=2, weights=1).lever
    assert "critic.activation_checkpointing" in RoleMemory(role=Role.CRITIC, activations=2, weights=1).lever
    saving = RoleMemory(role=Role.CRITIC, activations=2, weights=1, recompute=Recompute.YES)
    assert saving.lever == "lower critic.tokens_per_microbatch"
    row = replace(saving, tokens=9, longest=9).lever
    assert row.startswith("set critic.activation_checkpointing=offload, split the longest rows with critic.context")
    least = replace(saving, tokens=9, longest=9, recompute=Recompute.ON_HOST).lever
    assert least.startswith("split the longest rows with critic.context_parallel_size")
    assert "has a copy of the whole model" in RoleMemory(role=Role.ROLLOUT, weights=2, kv=1).lever
    assert RoleMemory(role=Role.ACTOR, optimizer=2).lever == "give actor more slots"
    assert RoleMemory(role=Role.ACTOR, optimizer=2, copied=True).lever == "set actor.sharding=fsdp"


def test_heads_that_do_not_split_over_a_process_are_refused(tmp_path: Path) -> None:
    vllm = {"engine": "vllm", "vllm": {"tensor_parallel_size": 4}}
    run = make_run(tmp_path, {"actor": "0-3", "rollout": "4-7:0"}, rollout=vllm)
    assert run.problems == (
        "rollout splits the model over 4 slots, but the model has 14 attention heads: 14 = 4 x 3 + 2; use a number of slots per process (or a "
        "tensor_parallel_size) that divides 14",
    )


def test_learners_that_cannot_be_divided_as_asked_are_refused(tmp_path: Path) -> None:
    wide = make_run(tmp_path, {"actor": "0-3:0-1", "rollout": "4-7"})
    assert any("a learner uses one slot per process" in problem for problem in wide.problems)
    uneven = make_run(tmp_path, {"actor": "0-2", "rollout": "3"}, nodes=[2, 2], actor={"sharding": "hsdp"})
    assert any("the nodes have 1 and 2 processes of actor" in problem for problem in uneven.problems)
    odd = make_run(tmp_path, {"actor,rollout": "all"}, actor={"tensor_parallel_size": 8})
    assert any("14 attention heads" in problem for problem in odd.problems)
    two = make_run(tmp_path, {"actor,rollout": "all"}, actor={"tensor_parallel_size": 2})
    assert two.problems == () and two.plan.meshes[Role.ACTOR].tensor == 2


def test_a_context_size_shows_in_the_mesh_and_divides_long_rows(tmp_path: Path) -> None:
    long: dict[str, Any] = {
        "data": {"max_prompt_tokens": 24_000},
        "rollout": {"max_response_tokens": 8_768, "max_running": 4},
    }
    few = {"tokens_per_microbatch": 4096, "activation_checkpointing": False}
    one = make_run(tmp_path, {"actor,rollout": "all"}, **long, sizes={"max_position_embeddings": 32_768}, actor=few)
    two = make_run(
        tmp_path, {"actor,rollout": "all"}, **long, sizes={"max_position_embeddings": 32_768},
        actor={"context_parallel_size": 2, **few},
    )  # fmt: skip
    assert (
        "mesh (data x context x tensor)" in as_text(two)
        and "4 x 2 x 1" in as_text(two)
        and "context" not in as_text(one)
    )
    assert two.problems == () and two.as_json()["meshes"]["actor"] == {"data": 4, "tensor": 1, "context": 2}
    assert memory_of(one, "actor").activations > 1.8 * memory_of(two, "actor").activations
    assert memory_of(one, "actor").weights == memory_of(two, "actor").weights
    sharded = make_run(tmp_path, {"actor,rollout": "all"}, actor={"context_parallel_size": 2, "sharding": "fsdp"})
    assert memory_of(sharded, "actor").optimizer == memory_of(one, "actor").optimizer // 8


def test_what_a_context_size_cannot_divide_is_refused(tmp_path: Path) -> None:
    heads = make_run(tmp_path, {"actor,rollout": "all"}, actor={"context_parallel_size": 4})
    assert heads.problems == (
        "actor.context_parallel_size=4 does not divide the model's 14 attention heads: 14 = 4 x 3 + 2; use 1 or 2",
    )
    fsdp = {"sharding": "fsdp"}
    apart = make_run(tmp_path, {"actor": "0-3", "inference": "2-5", "rollout": "all"}, actor=fsdp)
    assert any("inference has slots 2-5 and the actor has slots 0-3" in problem for problem in apart.problems)
    same = make_run(tmp_path, {"actor,inference": "0-3", "rollout": "all"}, actor=fsdp)
    assert same.problems == () and Role.INFERENCE in roles_together(same.config, same.plan)


@pytest.mark.parametrize(
    ("placement", "rollout", "words"),
    [
        ({"actor": "0-3", "rollout": "4-7"}, {"engine": "vllm", "vllm": {"tensor_parallel_size": 2}}, "0-7:0-3"),
        ({"actor": "0-3", "rollout": "4-7:0-1"}, {"engine": "vllm"}, "tensor_parallel_size=1 splits an engine across 1 slot;"),
        ({"actor": "0-3", "rollout": "4-7:0-1"}, {}, "rollout.engine=vllm and rollout.vllm.tensor_parallel_size=2"),
        ({"actor": "0-3", "rollout": "4-5", "inference": "6-7:0"}, {}, "inference has 2 slots per process, but it uses one"),
    ],
)  # fmt: skip
def test_slots_that_an_engine_would_miss_or_leave_idle_are_refused(
    tmp_path: Path, placement: dict[str, str | int], rollout: dict[str, Any], words: str
) -> None:
    (problem,) = make_run(tmp_path, placement, rollout=rollout).problems
    assert words in problem
    assert make_run(tmp_path, placement, rollout=rollout, cluster={"accelerator": "cpu"}).problems == ()


def test_weights_that_leave_rollout_without_work_are_refused(tmp_path: Path) -> None:
    apart: dict[str, str | int] = {"rollout": "0-1", "actor": "2-3"}
    idle = make_run(tmp_path, apart, nodes=[2, 2], cluster={"node_weights": [0, 1]})
    assert idle.problems == (
        "cluster.node_weights=[0.0, 1.0] gives a weight of 0 to every node with a rollout process (node 0); give one of them a weight above "
        "0",
    )
    assert make_run(tmp_path, apart, nodes=[2, 2], cluster={"node_weights": [1, 0]}).problems == ()


def test_actor_ranks_without_a_completion_are_noted(tmp_path: Path) -> None:
    run = make_run(tmp_path, {"actor,rollout": "all"}, data={"prompts_per_step": 2}, rollout={"samples_per_prompt": 3})
    assert any("2 have nothing to do" in note for note in run.notes)


def test_slots_that_wait_for_each_other_are_noted(tmp_path: Path) -> None:
    together: dict[str, str | int] = {"actor,rollout": "all"}
    apart: dict[str, str | int] = {"actor": "0-3", "rollout": "4-7"}
    ahead = {"staleness": 1}

    def words(placement: dict[str, str | int], **sections: Any) -> str:
        return " ".join(make_run(tmp_path, placement, **sections).notes)

    assert "staleness=1 lets both work at the same time" in words(apart)
    assert "every rollout process also trains" in words(together, trainer=ahead)
    assert "staleness" not in words(apart, trainer=ahead) + words(together)
    assert "staleness" not in words({"actor": "0-3", "rollout": "all"}) + words(
        {"actor": "0-3", "rollout": "all"}, trainer=ahead
    )


def test_inference_that_nobody_asks_is_noted(tmp_path: Path) -> None:
    apart: dict[str, str | int] = {"rollout": "0-3", "inference": "4-5", "actor": "6-7"}
    idle = make_run(tmp_path, apart, trainer={"staleness": 1})
    assert any(note.startswith("inference has slots 4-5 but nothing to do") for note in idle.notes)
    asked = make_run(tmp_path, apart, trainer={"staleness": 1}, actor={"minibatches": 2})
    certain = make_run(tmp_path, apart, trainer={"staleness": 1}, reward=[{"type": "self_certainty"}])
    sizes = ("actor: 32768 tokens in a micro-batch (auto, estimated)",)
    assert asked.notes[1:] == certain.notes[1:] == sizes  # the first is of the card


def test_a_node_that_an_elastic_run_cannot_do_without_is_noted(tmp_path: Path) -> None:
    def words(placement: dict[str, str | int], min_nodes: int) -> str:
        run = make_run(tmp_path, placement, nodes=[2, 2], trainer={"elastic": {"min_nodes": min_nodes}, "staleness": 1})
        return " ".join(run.notes)

    stuck = words({"rollout": "0-1", "actor": "2-3"}, 1)
    assert "without node 0, the only node with rollout" in stuck and "without node 1, the only node with actor" in stuck
    assert "elastic" not in words({"rollout": "0,2", "actor": "1,3"}, 1)
    assert "equals the number of nodes" in words({"rollout": "0,2", "actor": "1,3"}, 2)


def test_the_map_shows_every_node_role_and_rank(tmp_path: Path) -> None:
    text = as_text(make_run(tmp_path, {"rollout": "0-5", "actor": "6-11"}, nodes=[8, 4]))
    rows = [line.split() for line in text.splitlines()]
    assert ["0", "0-7", "actor", *"······", "0", "1"] in rows
    assert ["rollout", *"012345", "·", "·"] in rows
    assert ["1", "8-11", "actor", *"2345"] in rows
    assert ["actor", "6-11", "6", "6", "x", "1", "none"] in rows
    assert "this placement can work" in text


def test_a_large_cluster_is_drawn_as_runs_of_like_nodes(tmp_path: Path) -> None:
    run = make_run(tmp_path, {"rollout": "0-3995:0-1997", "actor": "3996-7999"}, nodes=[8] * 1000)
    assert [(one.first, one.last) for one in node_runs(run.plan)] == [(0, 498), (499, 499), (500, 999)]
    rows = [line.split() for line in as_text(run).splitlines()]
    assert ["0-498", "0-3991", "rollout", "0-7", "0-1995", "2"] in rows
    assert ["499", "3992-3999", "actor", "4-7", "0-3", "1"] in rows
    assert ["rollout", "0-3", "1996-1997", "2"] in rows


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("cluster_4x8", {"actor": 32, "rollout": 32}),
        ("cluster_disaggregated", {"rollout": 20, "inference": 4, "actor": 8}),
    ],
)
def test_the_cluster_examples_are_planned_by_the_command(tmp_path: Path, name: str, roles: dict[str, int]) -> None:
    sizes = write_sizes(tmp_path, max_position_embeddings=32_768)
    example = str(ROOT / f"examples/{name}.yaml")
    result = rollcall("plan", example, "--json", "--model-config", str(sizes), cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert found["ok"] and {role: len(processes) for role, processes in found["processes"].items()} == roles
    assert found["processes"]["actor"][1].keys() == {"rank", "slots", "node", "local_rank"}
    assert len(found["slots"]) == 32 and found["slots"][9]["node"] == 1
    assert all(entry["total"] < found["card_bytes"] for entry in found["memory"])


def test_a_model_that_is_not_here_is_planned_without_memory(tmp_path: Path) -> None:
    result = rollcall("plan", str(ROOT / "examples/cluster_4x8.yaml"), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    words = " ".join(result.stdout.split())
    assert "model.path=Qwen/Qwen2.5-0.5B-Instruct is not on this machine" in words
    assert "--model-config FILE" in words and "this placement can work, if it fits into memory" in words


def test_a_model_directory_is_measured_where_it_lies(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    result = rollcall("plan", "model.path=model", "--json", cwd=tmp_path)
    found = json.loads(result.stdout)
    assert found["parameters"] == sum(tensor.numel() for tensor in make_model().parameters())
    assert found["notes"][:1] == ["the run file has no cluster section, so everything runs in one process on one slot"]


def test_what_cannot_work_ends_with_status_1_and_why(tmp_path: Path) -> None:
    example = str(ROOT / "examples/cluster_4x8.yaml")
    bad = "cluster.component_placement={actor: 0-15, rollout: 16-30}"
    result = rollcall("plan", example, bad, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(
        "error: cluster.component_placement leaves slot 31 without a role: 4 nodes x 8 = 32"
    )
    result = rollcall("plan", example, bad, "--json", cwd=tmp_path)
    found = json.loads(result.stdout)
    assert result.returncode == 1 and not found["ok"] and "leaves slot 31" in found["problems"][0]
    sizes = str(write_sizes(tmp_path))
    result = rollcall("plan", example, "--gpu-memory", "8", "--model-config", sizes, cwd=tmp_path)
    assert result.returncode == 1 and "cannot work: slots 0-31 (actor, rollout)" in result.stdout


def test_planning_imports_neither_torch_nor_ray(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom rollcall.cli.main import app\n"
        "app(['plan', 'model.path=x/y'], standalone_mode=False)\n"
        "print([name for name in ('torch', 'ray', 'transformers') if name in sys.modules], file=sys.stderr)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0 and result.stderr.strip().endswith("[]"), result.stderr


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[1].glob("examples/*.yaml")), ids=lambda path: path.stem)
def test_every_example_can_be_planned(path: Path) -> None:
    assert plan_run(load_config(path)).problems == ()


def test_what_cannot_work_is_not_submitted(tmp_path: Path) -> None:
    run = {
        "cluster": {
            "num_nodes": 2,
            "num_gpus_per_node": 4,
            "component_placement": {"rollout": "0-3:0-1", "actor": "4-7"},
        }
    }
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    result = rollcall("submit", "run.yaml", "--address", "http://127.0.0.1:9", cwd=tmp_path)
    assert result.returncode == 1 and result.stderr.startswith("error: rollout has 2 slots per process"), result.stderr


def test_the_arrangements_of_the_modes_page_can_work(tmp_path: Path) -> None:
    example = yaml.safe_load((ROOT / "examples/cluster_4x8.yaml").read_text())
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/modes.md").read_text(), re.DOTALL)
    assert len(blocks) >= 5
    for block in blocks:
        run = dict(example)
        for name, section in yaml.safe_load(block).items():
            run[name] = section if name == "algorithm" else {**run.get(name, {}), **section}
        assert (
            plan_run(parse_config(run), model_config=write_sizes(tmp_path, max_position_embeddings=32_768)).problems
            == ()
        ), block


ENVIRONMENT = {"type": "step", "path": "games:Game"}


def test_environments_run_beside_other_roles_on_the_nodes_of_their_slots(tmp_path: Path) -> None:
    run = make_run(
        tmp_path, {"actor,rollout": "0-7", "environment": "4,8"}, nodes=[8, 1], environment=ENVIRONMENT, card_gib=80
    )
    assert run.problems == () and not any("environment" in note for note in run.notes)
    assert [(one.node_rank, one.slots) for one in run.plan.environments] == [(0, (4,)), (1, (8,))]
    assert run.as_json()["slots"][8]["roles"] == ["environment"]
    assert len(run.plan.all_processes) == 8, "a slot with environments alone has no process of a model"
    assert {process.kind for process in run.plan.environments} == {"environment"}
    assert "none, one process on each node" in as_text(run)
    kept = shrink(run.cluster, run.plan, kept=[0])
    assert kept.component_placement["environment"] == "4"


def test_environments_without_a_place_run_on_the_controllers_node(tmp_path: Path) -> None:
    run = make_run(tmp_path, {"actor,rollout": "all"}, nodes=[8, 8], environment=ENVIRONMENT)
    assert any("environment is not placed, so it runs on the controller's node" in note for note in run.notes)
    alone = make_run(tmp_path, {"actor,rollout": "all"}, environment=ENVIRONMENT)
    assert not any("environment" in note for note in alone.notes)


@pytest.mark.parametrize(
    "environment",
    [
        {"type": "agent", "run": "python my_agent.py"},
        {"type": "verifiers", "config": {"taskset": {"id": "textarena"}}, "python": "python3"},
    ],
)
def test_programs_run_on_the_nodes_of_their_slots_and_ask_the_controllers(
    tmp_path: Path, environment: dict[str, Any]
) -> None:
    run = make_run(tmp_path, {"actor,rollout": "all"}, nodes=[8, 8], environment=environment)
    assert any("environment is not placed, so it runs on the controller's node" in note for note in run.notes)
    placed = make_run(tmp_path, {"actor,rollout": "all", "environment": "8"}, nodes=[8, 8], environment=environment)
    assert placed.problems == ()
    expected = (
        f"the programs of environment.type={environment['type']} run on node 1 and reach the model through an endpoint"
    )
    assert any(expected in note for note in placed.notes)
