"""Named axes of ranks; rows split over them; who is called and whose answer counts."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import ray
import torch
from hypothesis import given
from hypothesis import strategies as st
from learners import make_sample

from rollcall.process.groups.dispatch import NamedSharding, leaders, routes, split_arguments, split_rows
from rollcall.process.ray.carrier import INLINE_BYTES, is_small


def grid(*shape: int, names: str = "batch model") -> NamedSharding:
    return NamedSharding(np.arange(np.prod(shape)).reshape(shape), names=names.split())


def called(sharding: NamedSharding, *, sharded: str = "batch", replicated: str = "", output: str = ""):
    return routes(
        sharding,
        in_sharded_axes=tuple(sharded.split()),
        replicate_on_axes=tuple(replicated.split()),
        output_is_replicated=tuple(output.split()),
    )


def test_a_rank_has_coordinates():
    sharding = grid(2, 3, 2, names="pipeline batch model")
    assert sharding.shape == {"pipeline": 2, "batch": 3, "model": 2}
    assert sharding.get_worker_coords(7) == {"pipeline": 1, "batch": 0, "model": 1}


def test_a_layout_may_order_ranks_as_it_likes():
    sharding = NamedSharding([[3, 1], [2, 0]], names=["model", "batch"])
    assert sharding.get_worker_coords(2) == {"model": 1, "batch": 0}
    assert sharding.get_axis_size("batch") == 2


@pytest.mark.parametrize(
    ("layout", "names", "said"),
    [
        ([0, 1], ["a", "b"], "1 axes, but the names are"),
        ([[0, 1]], ["a", "a"], "give each axis one unique name"),
        ([0, 1, 1], ["a"], "rank 1 is in the layout 2 times"),
        ([0.5], ["a"], "integers"),
        ([], ["a"], "integers"),
        (np.zeros((0, 2), dtype=int), ["a", "b"], "at least one rank"),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(layout, names, said):
    with pytest.raises(ValueError, match=said):
        NamedSharding(layout, names=names)


def test_unknown_axes_and_places_outside_are_refused_with_what_exists():
    with pytest.raises(ValueError, match="'rows' is not one of 'batch', 'model'"):
        grid(2, 2).get_axis_size("rows")
    with pytest.raises(ValueError, match="rank 4 is not in the layout"):
        grid(2, 2).get_worker_coords(4)


@given(st.lists(st.integers(), max_size=40), st.integers(1, 12))
def test_splitting_keeps_every_row_in_order_and_sizes_within_one(rows, num_parts):
    parts = split_rows(rows, num_parts=num_parts)
    assert [row for part in parts for row in part] == rows
    sizes = [len(part) for part in parts]
    assert len(parts) == num_parts and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_all_kinds_of_rows_are_split_along_their_first_dimension():
    table = np.arange(10).reshape(5, 2)
    assert [part.tolist() for part in split_rows(table, num_parts=2)] == [table[:3].tolist(), table[3:].tolist()]
    tensors = split_rows(torch.arange(5), num_parts=2)
    assert [part.tolist() for part in tensors] == [[0, 1, 2], [3, 4]]
    assert split_rows((1, 2, 3), num_parts=2) == [(1, 2), (3,)]
    assert split_rows(range(3), num_parts=2) == [range(2), range(2, 3)]
    assert split_rows(deque([1, 2, 3]), num_parts=2) == [[1, 2], [3]]
    fields = split_rows({"ids": table, "nested": {"text": list("abcde")}}, num_parts=2)
    assert fields[1]["ids"].tolist() == table[3:].tolist() and fields[1]["nested"] == {"text": ["d", "e"]}
    samples = [make_sample(draw) for draw in range(3)]
    assert split_rows(samples, num_parts=2) == [samples[:2], samples[2:]]


def test_a_tensors_part_does_not_drag_the_whole_tensor_along():
    part = split_rows(torch.zeros(1000), num_parts=10)[3]
    assert part.untyped_storage().nbytes() == part.nbytes


def test_what_has_no_rows_is_refused_by_name():
    for value in (3, "text", b"bytes", np.float32(1), torch.tensor(1.0), lambda: None):
        with pytest.raises(ValueError, match="loss_fn is a .* cannot be split into rows.*common_kwargs"):
            split_arguments([], {"loss_fn": value}, num_parts=2)
    with pytest.raises(ValueError, match=r"data\['scale'\] is a float"):
        split_arguments([], {"data": {"ids": [1, 2], "scale": 0.5}}, num_parts=2)


def test_arguments_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="argument 0 has 3, weights has 2 rows"):
        split_arguments([[1, 2, 3]], {"weights": [1, 2]}, num_parts=2)
    with pytest.raises(ValueError, match=r"fields of data have different numbers of rows \('a': 1, 'b': 2\)"):
        split_arguments([], {"data": {"a": [1], "b": [1, 2]}}, num_parts=2)


def test_arguments_are_split_side_by_side():
    parts = split_arguments([[1, 2, 3]], {"weights": np.array([4, 5, 6])}, num_parts=2)
    assert [(part, {name: value.tolist() for name, value in named.items()}) for part, named in parts] == [
        ([[1, 2]], {"weights": [4, 5]}),
        ([[3]], {"weights": [6]}),
    ]


def test_replicated_axes_get_the_same_shard_and_free_axes_are_left_out():
    sharding = grid(2, 2)
    assert [(route.rank, route.shard) for route in called(sharding, replicated="model")] == [
        (0, 0),
        (1, 0),
        (2, 1),
        (3, 1),
    ]
    assert [(route.rank, route.shard) for route in called(sharding)] == [(0, 0), (2, 1)]
    assert [route.shard for route in called(sharding, sharded="model batch")] == [0, 2, 1, 3]


def test_replicated_outputs_come_from_the_first_place_of_an_axis():
    answers = [route.drop is not None for route in called(grid(2, 2), replicated="model", output="model")]
    assert answers == [True, False, True, False]


def test_replicated_fields_come_from_the_first_worker_that_answers():
    drops = [route.drop for route in called(grid(2, 2), replicated="model", output="model loss")]
    assert drops == [(), None, ("loss",), None]


def test_axes_that_are_unknown_or_named_twice_are_refused():
    with pytest.raises(ValueError, match="in_sharded_axes: 'data' is not one of 'batch', 'model'"):
        called(grid(2, 2), sharded="data")
    with pytest.raises(ValueError, match="replicate_on_axes: 'tensor' is not one of"):
        called(grid(2, 2), replicated="tensor")
    with pytest.raises(ValueError, match="'batch' is in in_sharded_axes and in replicate_on_axes"):
        called(grid(2, 2), replicated="batch")


def test_rank_0_only_axes_name_axes_or_setup():
    assert leaders(grid(2, 2), []) == [0, 1, 2, 3]
    assert leaders(grid(2, 2), ["model"]) == [0, 2]
    assert leaders(grid(2, 2), ["model", "batch"]) == [0]
    assert leaders(grid(2, 2), ["setup"]) == [0]
    with pytest.raises(ValueError, match="'set_up' is not one of 'batch', 'model', 'setup'"):
        leaders(grid(2, 2), ["set_up"])


def test_small_arguments_are_told_from_large_ones():
    many = INLINE_BYTES + 1
    ring: list[Any] = []
    ring.append(ring)
    for value in (
        np.zeros(many, dtype=np.uint8), torch.zeros(many, dtype=torch.uint8), bytes(many), "x" * many, [0.5] * many,
        {"a": [np.zeros(many, dtype=np.uint8)]}, [make_sample(1)], ring, {1}, lambda data: data,
    ):  # fmt: skip
        assert not is_small(value), type(value)
    for value in (None, 3, "x", [1, 2], np.zeros(8), {"a": (1.5, [b"x", True])}, ray.ObjectRef.from_random()):
        assert is_small(value), value
