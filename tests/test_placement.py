"""Placement: a refusal that says the sum, or a plan in which every rule holds."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rollcall.base.errors import ConfigError, PlacementError
from rollcall.base.words import ranges
from rollcall.config import ClusterSection, dump_config, parse_config
from rollcall.plan.placement import Mesh, Plan, Role, needed_roles, plan_placement

EIGHT = [8]
FOUR_BY_EIGHT = [8, 8, 8, 8]


def make_cluster(nodes: list[int], placement: dict[str, str | int]) -> ClusterSection:
    raw = {"nodes": [{"gpus": size} for size in nodes], "component_placement": placement}
    return ClusterSection.model_validate(raw)


def make_plan(nodes: list[int], placement: dict[str, str | int], **needs: Any) -> Plan:
    return plan_placement(make_cluster(nodes, placement), **needs)


def needs(*roles: str, **tensor_parallel: int) -> dict[str, Any]:
    sizes = {Role(role): size for role, size in tensor_parallel.items()}
    return {"needed": frozenset(Role(role) for role in roles), "tensor_parallel": sizes}


def refusal(nodes: list[int], placement: dict[str, str | int], **needs: Any) -> str:
    with pytest.raises(PlacementError) as caught:
        make_plan(nodes, placement, **needs)
    return str(caught.value)


def slots_of(plan: Plan, role: str) -> list[tuple[int, ...]]:
    return [process.slots for process in plan.processes[Role(role)]]


def test_collocated_roles_share_one_process_per_slot() -> None:
    plan = make_plan(FOUR_BY_EIGHT, {"actor,rollout": "all"})
    assert slots_of(plan, "actor") == slots_of(plan, "rollout") == [(slot,) for slot in range(32)]
    (group,) = plan.groups
    assert group.roles == ("actor", "rollout") and len(group.processes) == 32
    assert all(process.ranks == {"actor": place, "rollout": place} for place, process in enumerate(group.processes))


def test_slots_are_numbered_node_by_node() -> None:
    plan = make_plan(FOUR_BY_EIGHT, {"actor,rollout": "all"})
    assert (plan.slots[9].node_rank, plan.slots[9].local) == (1, 1)
    uneven = make_plan([3, 1, 4], {"actor": "all"})
    assert [(slot.node_rank, slot.local) for slot in uneven.slots] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1), (2, 2), (2, 3)
    ]  # fmt: skip
    assert [slot.index for slot in uneven.node_slots(2)] == [4, 5, 6, 7]


def test_disaggregated_roles_count_their_ranks_from_zero() -> None:
    plan = make_plan(FOUR_BY_EIGHT, {"rollout": "0-19", "inference": "20-23", "actor": "24-31"})
    assert [plan.world_size(role) for role in ("rollout", "inference", "actor", "critic")] == [20, 4, 8, 0]
    last = plan.processes[Role.ROLLOUT][-1]
    assert (last.ranks, last.slots, last.node_rank) == ({Role.ROLLOUT: 19}, (19,), 2)
    first = plan.processes[Role.INFERENCE][0]
    assert (first.ranks, first.slots, first.node_rank) == ({Role.INFERENCE: 0}, (20,), 2)
    assert [group.roles for group in plan.groups] == [("rollout",), ("inference",), ("actor",)]


def test_overlapping_roles_share_processes_where_they_overlap() -> None:
    plan = make_plan(EIGHT, {"rollout": "all", "actor": "4-7"})
    assert [(group.roles, len(group.processes)) for group in plan.groups] == [
        (("rollout",), 4),
        (("actor", "rollout"), 4),
    ]
    assert plan.groups[1].processes[0].ranks == {"actor": 0, "rollout": 4}
    assert plan.processes[Role.ACTOR][0] is plan.processes[Role.ROLLOUT][4]


def test_process_ranks_spread_slots_over_processes() -> None:
    plan = make_plan(EIGHT, {"actor,rollout": "0-7:0-3"})
    assert slots_of(plan, "rollout") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert plan.meshes[Role.ROLLOUT] == Mesh(data=4, tensor=2)
    assert slots_of(make_plan(EIGHT, {"rollout": "all:0"}), "rollout") == [tuple(range(8))]


def test_lists_numbers_and_spaces_are_read() -> None:
    plan = make_plan(EIGHT, {"actor": "0-2, 7", " rollout , inference": "3-6"})
    assert slots_of(plan, "actor") == [(0,), (1,), (2,), (7,)]
    assert slots_of(plan, "inference") == [(3,), (4,), (5,), (6,)]
    assert slots_of(make_plan([2], {"actor": 0, "rollout": 1}), "rollout") == [(1,)]


def test_parts_may_come_in_any_order_and_ranks_follow_the_slots() -> None:
    plan = make_plan(EIGHT, {"rollout": "4-7:2-3,0-3:0-1"})
    assert slots_of(plan, "rollout") == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_a_tensor_size_makes_the_mesh() -> None:
    plan = make_plan(EIGHT, {"actor,rollout": "all"}, **needs("actor", "rollout", actor=4))
    assert plan.meshes == {"actor": Mesh(data=2, tensor=4), "rollout": Mesh(data=8, tensor=1)}
    assert plan.notes == ()


def test_context_groups_are_made_of_tensor_groups() -> None:
    sizes = {Role.ACTOR: 2, Role.REFERENCE: 2, Role.INFERENCE: 2}
    placement: dict[str, str | int] = {"actor,reference": "0-3", "inference": "4-7", "rollout": "0-7"}
    plan = make_plan(EIGHT, placement, tensor_parallel={Role.ACTOR: 2}, context_parallel=sizes)
    assert plan.meshes[Role.ACTOR] == plan.meshes[Role.REFERENCE] == Mesh(data=1, context=2, tensor=2)
    assert plan.meshes[Role.INFERENCE] == Mesh(data=2, context=2, tensor=1)
    assert plan.meshes[Role.ROLLOUT] == Mesh(data=8, tensor=1) and plan.notes == ()
    over = make_plan([3, 3], {"actor": "all"}, context_parallel={Role.ACTOR: 2})
    assert any("1 of 3 context groups of actor (the first is number 1) span two nodes" in note for note in over.notes)


def test_a_product_of_sizes_that_does_not_divide_is_refused_with_the_sum() -> None:
    message = refusal(EIGHT, {"actor": "all"}, tensor_parallel={Role.ACTOR: 2}, context_parallel={Role.ACTOR: 3})
    words = "actor.tensor_parallel_size=2 x actor.context_parallel_size=3 = 6 does not divide the 8 slots of actor: 8 = 6 x 1 + 2"
    assert words in message and "use 1, 2, 4 or 8" in message
    placement: dict[str, str | int] = {"actor": "0-1", "inference": "2-4", "rollout": "5-7"}
    message = refusal(EIGHT, placement, context_parallel={Role.ACTOR: 2, Role.INFERENCE: 2})
    assert "actor.context_parallel_size=2 does not divide the 3 slots of inference: 3 = 2 x 1 + 1" in message


def test_roles_that_divide_sequences_share_all_processes_or_none() -> None:
    placement: dict[str, str | int] = {"actor": "0-3", "inference": "2-5", "rollout": "all"}
    message = refusal(EIGHT, placement, context_parallel={Role.ACTOR: 2, Role.INFERENCE: 2})
    assert (
        "gives 4 processes to actor and 4 to inference, but they share only 2; give both the same slots, or separate"
        in message
    )
    assert make_plan(EIGHT, placement).meshes[Role.INFERENCE].data == 4


def test_a_tensor_group_on_two_nodes_is_noted() -> None:
    plan = make_plan([6, 6], {"actor,rollout": "all"}, **needs("actor", "rollout", actor=4))
    assert any("1 of 3 tensor groups of actor (the first is number 1) span two nodes" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        ({"actor": "0-3"}, ("slots 4-7 without a role", "1 node x 8 = 8 slots", "8 - 4 = 4 left over")),
        ({"actor": "0-8"}, ("asks for slot 8", "1 node x 8 = 8 slots", "numbered 0 to 7")),
        ({"actor": 9007199254740992}, ("asks for slot 9007199254740992",)),
        ({"actor": "0-7:0-2"}, ("8 = 3 x 2 + 2", "use 1, 2, 4 or 8 processes, such as 0-7:0-1")),
        ({"actor": "0-7:0-8"}, ("8 = 9 x 0 + 8", "such as 0-7:0-7")),
        ({"actor": "0-3:0-1,4-7:0-1"}, ("lower slots have 2 processes of the role already", "write 4-7:2-3")),
        ({"actor": "0-7:1-4"}, ("starts at process rank 1", "write 0-7:0-3")),
        ({"actor": "7-0"}, ("7-0 runs backwards; write 0-7",)),
        ({"actor": "0-7:3-0"}, ("process ranks 3-0 run backwards; write 0-3",)),
        ({"actor": "0-4,3-7"}, ("slot 3 twice, in 0-4 and in 3-7",)),
        ({"actor": "0-7", "rollout": "0-7:0-3"}, ("on slot 0", "has slot 0 and", "has slots 0-1", "now 1 and 2")),
        ({"actor": "0-3,4-7:4-5"}, ("processes of 1 and 2 slots",)),
        ({"actor,rollout": "all", "rollout": "0"}, ("places rollout twice (the second time in 'rollout')",)),
        ({"actor,actor": "all"}, ("places actor twice (the second time in 'actor,actor')",)),
        ({"actr": "all"}, ("'actr' in 'actr' is not a role; did you mean actor?",)),
        ({"actor,": "all"}, ("'' in 'actor,' is not a role", "actor, critic, reference, rollout, inference, reward")),
        ({"actor": "0..7"}, ("'0..7' is not a set of slots; write all, a slot (5)",)),
        ({"actor": "0-3,,4-7"}, ("one part is empty",)),
        ({"actor": "-1"}, ("'-1' is not a set of slots",)),
        ({}, ("slots 0-7 without a role",)),
    ],
)  # fmt: skip
def test_a_refusal_says_the_sum_and_what_to_write(placement: dict[str, Any], words: tuple[str, ...]) -> None:
    message = refusal(EIGHT, placement)
    for part in ("cluster.component_placement", *words):
        assert part in message


def test_a_process_on_two_nodes_is_refused_with_both_named() -> None:
    message = refusal([3, 5], {"rollout": "all:0-3"})
    assert "process 1 would have slots 2-3, which are on node 0 (slots 0-2) and node 1 (slots 3-7)" in message


def test_uneven_nodes_are_added_up_in_refusals() -> None:
    assert "2 x 8 + 4 = 20 slots on 3 nodes" in refusal([8, 8, 4], {"actor": "0-20"})


@pytest.mark.parametrize(
    ("size", "words"),
    [(3, "8 = 3 x 2 + 2; use 1, 2, 4 or 8"), (16, "8 = 16 x 0 + 8")],
)
def test_a_tensor_size_that_does_not_divide_is_refused(size: int, words: str) -> None:
    message = refusal(EIGHT, {"actor,rollout": "all"}, **needs("actor", "rollout", actor=size))
    assert f"actor.tensor_parallel_size={size} does not divide the 8 slots of actor" in message and words in message


def test_a_tensor_size_that_splits_processes_is_refused() -> None:
    message = refusal(EIGHT, {"actor,rollout": "0-7:0-1"}, **needs("actor", "rollout", rollout=2))
    assert "rollout.tensor_parallel_size=2" in message and "the 4 slots of each rollout process" in message


def test_roles_that_a_run_needs_and_does_not_place_join_the_actor() -> None:
    plan = make_plan(EIGHT, {"rollout": "0-5", "actor": "6-7"}, **needs("actor", "rollout", "reference"))
    assert slots_of(plan, "reference") == [(6,), (7,)]
    assert any(note.startswith("reference is not placed, so it runs in the actor's processes") for note in plan.notes)


def test_a_critic_that_a_run_needs_and_does_not_place_is_refused() -> None:
    message = refusal(EIGHT, {"rollout": "0-5", "actor": "6-7"}, **needs("actor", "rollout", "critic"))
    assert "places rollout and actor, but algorithm.name=ppo also needs a critic" in message
    assert "'actor,critic'" in message


@pytest.mark.parametrize("missing", ["actor", "rollout"])
def test_no_run_goes_without_actor_and_rollout(missing: str) -> None:
    placed = "rollout" if missing == "actor" else "actor"
    message = refusal(EIGHT, {placed: "all"}, **needs("actor", "rollout"))
    assert f"places {placed}, but every run needs {missing}; write for example 'actor,rollout: all'" in message


def test_a_role_the_run_does_not_have_is_left_out_with_a_note() -> None:
    plan = make_plan(EIGHT, {"actor,rollout,critic": "all"}, **needs("actor", "rollout"))
    assert plan.world_size("critic") == 0
    assert "critic is placed, but this run does not use it (algorithm.name=ppo would)" in plan.notes[0]


def test_slots_that_only_such_a_role_has_are_refused_and_say_so() -> None:
    message = refusal(EIGHT, {"actor,rollout": "0-3", "critic": "4-7"}, **needs("actor", "rollout"))
    assert "leaves slots 4-7 without a role" in message and "critic is placed, but this run does not use it" in message


@pytest.mark.parametrize(
    ("run", "roles"),
    [
        ({}, {"actor", "rollout"}),
        ({"algorithm": {"name": "ppo"}}, {"actor", "rollout", "critic"}),
        ({"algorithm": {"name": "grpo", "kl_coef": 0.1}}, {"actor", "rollout", "reference"}),
        ({"reward": [{"type": "model", "path": "judge"}]}, {"actor", "rollout", "reward"}),
    ],
)
def test_a_run_file_says_which_roles_it_needs(run: dict[str, Any], roles: set[str]) -> None:
    assert needed_roles(parse_config(run)) == roles


def test_nodes_and_the_two_numbers_must_agree() -> None:
    nodes = [{"gpus": 8}, {"gpus": 4}]
    config = parse_config({"cluster": {"nodes": nodes}})
    assert config.cluster is not None
    assert (config.cluster.num_nodes, config.cluster.slots_per_node) == (2, [8, 4])
    assert parse_config({"cluster": {"nodes": nodes, "num_nodes": 2}}) == config
    for key in ("num_nodes", "num_gpus_per_node"):
        with pytest.raises(ConfigError, match=f"{key}=3 contradicts nodes, which lists 2 nodes with \\[8, 4\\] slots"):
            parse_config({"cluster": {"nodes": nodes, key: 3}})
    with pytest.raises(ConfigError, match="cluster.nodes"):
        parse_config({"cluster": {"nodes": []}})


def test_a_resolved_run_file_with_uneven_nodes_reads_back(tmp_path: Any) -> None:
    import yaml

    config = parse_config({"cluster": {"nodes": [{"gpus": 8}, {"gpus": 4}]}})
    assert parse_config(yaml.safe_load(dump_config(config))) == config


def test_the_environment_of_a_node_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="node_env names node 2, but the cluster's nodes are 0 to 1"):
        parse_config({"cluster": {"num_nodes": 2, "node_env": {2: {"A": "1"}}}})


# Random clusters and placements against the rules, written down a second time.


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    first: int
    last: int
    ranks: tuple[int, int] | None

    def __str__(self) -> str:
        slots = f"{self.first}-{self.last}" if self.last > self.first else str(self.first)
        return slots if self.ranks is None else f"{slots}:{self.ranks[0]}-{self.ranks[1]}"


@st.composite
def drawn_parts(draw: st.DrawFn, num_slots: int) -> list[Part]:
    """Mostly consecutive parts whose ranks count on; now and then any numbers at all."""
    parts: list[Part] = []
    start = draw(st.integers(0, num_slots - 1))
    rank = 0
    for _ in range(draw(st.integers(1, 3))):
        if start >= num_slots + 1:
            break
        size = draw(st.integers(1, num_slots + 1 - min(start, num_slots)))
        ranks = None
        processes = size
        if draw(st.booleans()):
            processes = draw(
                st.sampled_from([n for n in range(1, size + 1) if size % n == 0]) | st.integers(1, size + 1)
            )
            first = draw(st.sampled_from([rank, rank, rank, 0]))
            ranks = (first, first + processes - 1)
        parts.append(Part(first=start, last=start + size - 1, ranks=ranks))
        rank += processes
        start += size + draw(st.sampled_from([0, 0, 0, 1, -1]))
        start = max(start, 0)
    return parts


@st.composite
def placements(draw: st.DrawFn) -> tuple[list[int], dict[str, list[Part]]]:
    nodes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=4) | st.integers(1, 4).map(lambda n: [4] * n))
    num_slots = sum(nodes)
    everything = [Part(first=0, last=num_slots - 1, ranks=None)]
    roles = draw(st.lists(st.sampled_from([role.value for role in Role]), min_size=1, max_size=4, unique=True))
    anything = drawn_parts(num_slots)
    if draw(st.booleans()):
        return nodes, {role: draw(st.just(everything) | anything) for role in roles}
    cuts = sorted(draw(st.sets(st.integers(1, num_slots), max_size=len(roles) - 1)) | {0, num_slots})
    shares = [[Part(first=low, last=high - 1, ranks=None)] for low, high in pairwise(cuts)]
    return nodes, dict(zip(roles, shares, strict=False))


def expected_spans(nodes: list[int], parts: list[Part]) -> list[tuple[int, ...]] | None:
    """The slots of each process of a role, or None if a rule about one role alone is broken."""
    node_of = [node for node, size in enumerate(nodes) for _ in range(size)]
    spans: list[tuple[int, ...]] = []
    for part in sorted(parts, key=lambda part: part.first):
        slots = list(range(part.first, part.last + 1))
        if slots[-1] >= len(node_of):
            return None
        ranks = (
            list(range(part.ranks[0], part.ranks[1] + 1)) if part.ranks else [len(spans) + i for i in range(len(slots))]
        )
        if len(slots) % len(ranks) or ranks[0] != len(spans):
            return None
        width = len(slots) // len(ranks)
        spans += [tuple(slots[i * width : (i + 1) * width]) for i in range(len(ranks))]
    flat = [slot for span in spans for slot in span]
    if len(set(flat)) < len(flat) or len({len(span) for span in spans}) > 1:
        return None
    return spans if all(node_of[span[0]] == node_of[span[-1]] for span in spans) else None


def expected_environments(nodes: list[int], parts: list[Part]) -> list[tuple[int, ...]] | None:
    """Its slots by node: it has a process on each node of its slots."""
    spans = expected_spans(nodes, parts)
    if spans is None or any(part.ranks for part in parts):
        return None
    starts = [sum(nodes[:node]) for node in range(len(nodes) + 1)]
    found = [tuple(slot for (slot,) in spans if low <= slot < high) for low, high in pairwise(starts)]
    return [slots for slots in found if slots]


def can_work(nodes: list[int], spans: dict[str, list[tuple[int, ...]] | None]) -> bool:
    if any(value is None for value in spans.values()):
        return False
    actor, critic = (set(spans.get(role) or ()) for role in ("actor", "critic"))
    if actor & critic and actor != critic:
        return False
    every = {span for role, value in spans.items() if value is not None and role != "environment" for span in value}
    flat = [slot for span in every for slot in span]
    beside = {slot for span in spans.get("environment") or () for slot in span}
    # Each slot in exactly one process, or with environments alone; none left over.
    return len(flat) == len(set(flat)) and {*flat, *beside} == set(range(sum(nodes)))


@settings(deadline=None)
@given(placements())
@example(([4, 4], {"rollout": [Part(first=0, last=7, ranks=(0, 3))], "actor": [Part(first=4, last=7, ranks=(0, 1))]}))
def test_random_placements_are_planned_exactly_when_every_rule_holds(
    case: tuple[list[int], dict[str, list[Part]]],
) -> None:
    nodes, placement = case
    texts: dict[str, str | int] = {role: ",".join(map(str, parts)) for role, parts in placement.items()}
    spans = {
        role: expected_environments(nodes, parts) if role == "environment" else expected_spans(nodes, parts)
        for role, parts in placement.items()
    }
    if not can_work(nodes, spans):
        message = refusal(nodes, texts)
        assert message.startswith("cluster.component_placement") and ";" in message
        assert any(character.isdigit() for character in message), "a refusal says the sum"
        return
    plan = make_plan(nodes, texts)
    assert {role: slots_of(plan, role) for role in plan.roles} == spans
    assert_holds(plan, nodes)


def assert_holds(plan: Plan, nodes: list[int]) -> None:
    """What whoever starts processes from a plan relies on."""
    node_of = [node for node, size in enumerate(nodes) for _ in range(size)]
    assert [slot.index for slot in plan.slots] == list(range(sum(nodes)))
    assert [slot.node_rank for slot in plan.slots] == node_of
    for role, processes in plan.processes.items():
        assert [process.ranks[role] for process in processes] == list(range(plan.world_size(role)))
        assert {slot for process in processes for slot in process.slots} == {
            slot.index for slot in plan.slots if role in slot.roles
        }
        assert all({node_of[slot] for slot in process.slots} == {process.node_rank} for process in processes)
        if role is not Role.ENVIRONMENT:
            mesh = plan.meshes[role]
            assert mesh.data * mesh.tensor == sum(len(process.slots) for process in processes)
    shared = [process for group in plan.groups for process in group.processes]
    with_models = [slot.index for slot in plan.slots if set(slot.roles) != {Role.ENVIRONMENT}]
    assert sorted(slot for process in shared for slot in process.slots) == with_models
    nodes_of_environments = [process.node_rank for process in plan.environments]
    assert len(nodes_of_environments) == len(set(nodes_of_environments))
    for group in plan.groups:
        for process in group.processes:
            assert set(process.ranks) == set(group.roles)
            assert all(plan.processes[role][rank].slots == process.slots for role, rank in process.ranks.items())


@given(st.dictionaries(st.text(max_size=12), st.text(max_size=12) | st.integers(-5, 50), max_size=3))
@settings(max_examples=200, deadline=None)
def test_any_text_at_all_is_a_plan_or_a_refusal(placement: dict[str, str | int]) -> None:
    try:
        plan = make_plan([4, 4], placement)
    except (PlacementError, ValidationError) as error:
        assert "component_placement" in str(error)
    else:
        assert_holds(plan, [4, 4])


def test_a_thousand_nodes_are_planned() -> None:
    plan = make_plan([8] * 1000, {"rollout": "0-3999", "actor,critic": "4000-7999"})
    assert (plan.num_nodes, plan.world_size("actor"), len(plan.slots)) == (1000, 4000, 8000)
    assert plan.processes[Role.ACTOR][-1].node_rank == 999


def test_slots_are_written_as_people_write_them() -> None:
    assert [ranges(slots) for slots in ([], [3], [0, 1, 2, 3, 8], [1, 3, 4])] == ["", "3", "0-3,8", "1,3-4"]
