"""What every transport of weights must do, as tests. A test module imports all of it and gives a fixture, ``kind``: each
transport in turn.

    pytest.register_assert_rewrite("weights_contract")
    from weights_contract import *

Sender and receivers are threads of the test here; tests/test_weights.py runs them as processes too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollcall.base.errors import MissingPeerError, WeightUpdateError
from rollcall.engine.weights.protocol import RefusedUpdateError
from rollcall.engine.weights.transports import FanOut
from rollcall.model.checksum import checksum

Tensors = dict[str, Tensor]
TIMEOUT_S = 60.0  # of updates that succeed, on a busy machine
SHORT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    sender: FanOut
    receivers: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightKind:
    """One transport. ``make`` gives its ends, for receivers by name and the tensors that each has."""

    name: str
    make: Callable[..., Ends]  # (sent tensors, received tensors by name, folder, timeout_s) -> Ends


def make_tensors(seed: int, dtype: torch.dtype = torch.float32) -> Tensors:
    """Sizes that fill several buckets and none, rows and columns first, gaps, odd counts."""
    draw = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(dtype)

    return {
        "embed": numbers(1500, 1001),
        "by_columns": numbers(96, 160).t(),
        "with_gaps": numbers(64, 50)[:, :31],
        "norm": numbers(7),
        "scalar": numbers(1)[0],
        "empty": numbers(0, 4),
        "cube": numbers(3, 5, 7).permute(1, 2, 0),
    }


def blank_like(tensors: Mapping[str, Tensor]) -> Tensors:
    """Zeros of the same shapes that lie in memory otherwise: as rows, but for one."""
    blank = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    return {**blank, "by_columns": torch.zeros_like(tensors["by_columns"])}


def change(tensors: Mapping[str, Tensor], *, seed: int) -> None:
    """What an update does: a few elements get other values, in place."""
    draw = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        if tensor.numel():
            rows = tensor.view(-1) if tensor.ndim == 0 else tensor
            rows[int(torch.randint(len(rows), (1,), generator=draw))] += 1


class Meeting:
    """A sender and its receivers, and what they do together."""

    def __init__(
        self, kind: WeightKind, tensors: Tensors, folder: Path, *, num_receivers: int = 2, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.tensors = tensors
        self.held = {f"rollout {rank}": blank_like(tensors) for rank in range(num_receivers)}
        ends = kind.make(tensors, self.held, folder, timeout_s)
        self.sender, self.receivers = ends.sender, ends.receivers
        self.failures: dict[str, Exception] = {}

    def update(self, version: int, *, due: int | None = None, absent: Sequence[str] = ()) -> None:
        """Send to all; receivers wait for version ``due``. What they raise is in ``failures``."""
        self.failures = {}
        waiting = [
            threading.Thread(target=self._receive, args=(name, version if due is None else due), daemon=True)
            for name in self.receivers
            if name not in absent
        ]
        for thread in waiting:
            thread.start()
        try:
            self.sender.send(self.tensors, version=version)
        finally:
            for thread in waiting:
                thread.join(TIMEOUT_S)

    def _receive(self, name: str, version: int) -> None:
        try:
            self.receivers[name].receive(version=version)
        except Exception as error:
            self.failures[name] = error

    def check(self) -> None:
        """All hold, bit for bit, what the sender has."""
        assert not self.failures
        for name, held in self.held.items():
            for key, tensor in self.tensors.items():
                assert torch.equal(bits(held[key]), bits(tensor)), f"{key} of {name}"

    def close(self) -> None:
        for receiver in self.receivers.values():
            receiver.close()
        self.sender.close()


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def damage(receiver: Any, *, times: int) -> None:
    """Flip a bit of what arrives, so many times."""
    ((_, inlet),) = receiver._ends
    each, left = inlet.each, [times]

    def damaged(buckets: Any, deadline: Any) -> list[int]:
        sums = list(each(buckets, deadline))
        if not left[0]:
            return sums
        left[0] -= 1
        buckets[-1][-1][-1] ^= 1
        return [checksum(bucket) for bucket in buckets]

    inlet.each = damaged


# All transports


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_arrive_bit_for_bit_update_after_update(kind: WeightKind, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = make_tensors(0, dtype)
    tensors["norm"][0] = float("nan")  # bits, not numbers
    meeting = Meeting(kind, tensors, tmp_path)
    for version in (0, 1, 5):
        meeting.update(version)
        meeting.check()
        change(tensors, seed=version)
    meeting.close()


def test_tensors_of_receivers_keep_their_addresses(kind: WeightKind, tmp_path: Path) -> None:
    meeting = Meeting(kind, make_tensors(0), tmp_path)
    before = {name: {key: tensor.data_ptr() for key, tensor in held.items()} for name, held in meeting.held.items()}
    meeting.update(0)
    change(meeting.tensors, seed=1)
    meeting.update(1)
    after = {name: {key: tensor.data_ptr() for key, tensor in held.items()} for name, held in meeting.held.items()}
    meeting.close()
    assert after == before


def test_a_version_that_is_not_newer_is_refused_and_the_receiver_named(kind: WeightKind, tmp_path: Path) -> None:
    meeting = Meeting(kind, make_tensors(0), tmp_path, num_receivers=1)
    meeting.update(3)
    held = {key: bits(tensor).clone() for key, tensor in meeting.held["rollout 0"].items()}
    change(meeting.tensors, seed=1)
    with pytest.raises(RefusedUpdateError, match="rollout 0.*version 3 is not newer than version 3"):
        meeting.update(3)
    assert all(torch.equal(bits(tensor), held[key]) for key, tensor in meeting.held["rollout 0"].items())
    meeting.close()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda tensors: tensors.pop("norm"), "'norm' is missing"),
        (lambda tensors: tensors.update(norm=torch.zeros(8)), "'norm' is .8. float32 in the update and .7. float32"),
        (
            lambda tensors: tensors.update(norm=torch.zeros(7, dtype=torch.float16)),
            "'norm' is .7. float16 in the update",
        ),
        (lambda tensors: tensors.update(more=torch.zeros(2)), "'more' that this receiver does not have"),
    ],
    ids=["missing", "shape", "dtype", "extra"],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    kind: WeightKind, spoil: Callable[[Tensors], object], reason: str, tmp_path: Path
) -> None:
    meeting = Meeting(kind, make_tensors(0), tmp_path, num_receivers=1)
    spoil(meeting.tensors)
    with pytest.raises(RefusedUpdateError, match=f"rollout 0: .*{reason}"):
        meeting.update(0)
    assert "rollout 0" in meeting.failures
    meeting.close()


# Those that move bytes


def test_an_update_that_is_not_the_one_that_is_due_is_refused(kind: WeightKind, tmp_path: Path) -> None:
    meeting = Meeting(kind, make_tensors(0), tmp_path, num_receivers=1)
    meeting.update(1)
    with pytest.raises(RefusedUpdateError, match="rollout 0: got version 2, but expected version 3"):
        meeting.update(2, due=3)
    meeting.close()


def test_a_damaged_update_is_refused_and_sent_again_in_full(kind: WeightKind, tmp_path: Path) -> None:
    meeting = Meeting(kind, make_tensors(0), tmp_path)
    meeting.update(0)
    change(meeting.tensors, seed=1)
    damage(meeting.receivers["rollout 1"], times=1)
    for version in (1, 2):
        meeting.update(version)
        meeting.check()
        change(meeting.tensors, seed=version + 1)
    meeting.close()


def test_an_update_damaged_twice_is_an_error_that_names_the_receiver(kind: WeightKind, tmp_path: Path) -> None:
    meeting = Meeting(kind, make_tensors(0), tmp_path)
    meeting.update(0)
    change(meeting.tensors, seed=1)
    damage(meeting.receivers["rollout 1"], times=2)
    with pytest.raises(RefusedUpdateError, match="again when sent in full: rollout 1: .*checksums differ"):
        meeting.update(1)
    assert list(meeting.failures) == ["rollout 1"] and isinstance(meeting.failures["rollout 1"], RefusedUpdateError)
    meeting.close()


def test_a_receiver_that_does_not_come_is_named_at_the_deadline(kind: WeightKind, tmp_path: Path) -> None:
    meeting = Meeting(kind, make_tensors(0), tmp_path, timeout_s=SHORT_S)
    with pytest.raises(MissingPeerError, match="did not connect within 1 s: rollout 1$"):
        meeting.update(0, absent=["rollout 1"])
    assert isinstance(meeting.failures["rollout 0"], WeightUpdateError), "who came does not wait for ever"
    meeting.close()


def test_a_receiver_that_stays_away_later_is_named_at_the_deadline(kind: WeightKind, tmp_path: Path) -> None:
    meeting = Meeting(kind, make_tensors(0), tmp_path)
    meeting.update(0)
    sender: Any = meeting.sender
    sender._senders[0]._timeout_s = SHORT_S
    with pytest.raises(MissingPeerError, match="from rollout 0 within 1 s$"):
        meeting.update(1, absent=["rollout 0"])
    assert "actor 0" in str(meeting.failures["rollout 1"])
    meeting.close()


def test_a_receiver_that_goes_away_is_named_at_once_and_the_rest_meets_anew(kind: WeightKind, tmp_path: Path) -> None:
    meeting = Meeting(kind, make_tensors(0), tmp_path)
    meeting.update(0)

    def leave(*args: Any, **kwargs: Any) -> list[int]:
        raise KeyError("a failure of its own")

    gone: Any = meeting.receivers["rollout 1"]
    gone._ends[0][1].each = leave
    with pytest.raises(MissingPeerError, match="rollout 1 disconnected"):
        meeting.update(1)
    with pytest.raises(WeightUpdateError, match="closed"):
        meeting.sender.send(meeting.tensors, version=2)
    again = Meeting(kind, meeting.tensors, tmp_path / "again", num_receivers=1)
    again.update(1)
    again.check()
    again.close()


def test_a_sender_that_goes_away_is_named(kind: WeightKind, tmp_path: Path) -> None:
    meeting = Meeting(kind, make_tensors(0), tmp_path, num_receivers=1)
    meeting.update(0)
    meeting.sender.close()
    with pytest.raises(MissingPeerError, match="actor 0"):
        meeting.receivers["rollout 0"].receive(version=1)
