"""Every transport against the contract, as threads and as processes; then what each does in its own way."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from commands import fork_context
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.multiprocessing import reductions

pytest.register_assert_rewrite("weights_contract")
from weights_contract import *  # noqa: F403
from weights_contract import TIMEOUT_S, Ends, Meeting, Tensors, WeightKind, bits, blank_like, change, make_tensors

from rollcall.base.errors import MissingPeerError
from rollcall.base.wait import Wait
from rollcall.config import parse_config
from rollcall.engine.weights import delta, transports
from rollcall.engine.weights.layout import Layout, Views
from rollcall.engine.weights.line import Desk, Line, call, decline
from rollcall.engine.weights.protocol import BucketSize, RefusedUpdateError
from rollcall.engine.weights.shared_memory import _IpcInlet, _IpcOutlet
from rollcall.engine.weights.transports import carrying_for, open_receiver, open_sender
from rollcall.model import checksum as checksums
from rollcall.model.checksum import PIECE_BYTES, _fold_on_device, checksum, copy_summed
from rollcall.nodes import door
from rollcall.plan.judge import role_problems
from rollcall.plan.placement import Role, plan_for
from rollcall.run.weight_sync import WeightSync

SENDER = "actor 0"


def streaming(name: str, transport: Any, *, on_host: bool) -> WeightKind:
    def make(tensors: Tensors, held: Mapping[str, Tensors], folder: Path, timeout_s: float) -> Ends:
        with mock.patch.object(transports, "TIMEOUT_S", timeout_s):
            sender = open_sender(
                transport,
                receivers=dict.fromkeys(held, on_host),
                name=SENDER,
                host="127.0.0.1",
                on_gpu=False,
                folder=folder,
            )
        receivers = {
            name: open_receiver(sender.invitations[name], name=name, tensors=mine) for name, mine in held.items()
        }
        return Ends(sender=sender, receivers=receivers)

    return WeightKind(name=name, make=make)


KINDS = {
    "shared_memory": streaming("shared_memory", "shared_memory", on_host=True),
    "broadcast": streaming("broadcast", "broadcast", on_host=False),
    "delta_on_a_host": streaming("delta_on_a_host", "delta", on_host=True),
    "delta_across_hosts": streaming("delta_across_hosts", "delta", on_host=False),
}
FILE = streaming("file", "file", on_host=False)


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> WeightKind:
    return KINDS[request.param]


# As processes


def receive(name: str, pipe: Any) -> None:
    """Does what it is told until the other end is closed: opens a receiver, or receives and says what it then has."""
    receiver: Any = None
    held: dict[str, torch.Tensor] = {}
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return
        if "invitation" in order:
            held = blank_like(make_tensors(0, getattr(torch, order["dtype"])))
            held = {key: tensor.to(order["device"]) for key, tensor in held.items()}
            receiver = open_receiver(order["invitation"], name=name, tensors=held)
            continue
        receiver.receive(version=order["version"])
        pipe.send({key: int(bits(tensor).long().sum()) for key, tensor in held.items()})


class Receivers:
    """Two processes that receive what this one sends, over one transport after the other."""

    def __init__(self) -> None:
        context = fork_context()
        self.processes: dict[str, Any] = {}
        self._pipes: dict[str, Any] = {}
        for name in ("rollout 0", "rollout 1"):
            self._pipes[name], there = context.Pipe()
            self.processes[name] = context.Process(target=receive, args=(name, there))
            self.processes[name].start()
            there.close()

    def tell(self, name: str, order: dict[str, Any]) -> None:
        self._pipes[name].send(order)

    def hear(self, name: str) -> dict[str, int]:
        return self._pipes[name].recv()

    def end(self) -> None:
        for name, process in self.processes.items():
            process.kill()
            process.join(30)
            self._pipes[name].close()


def invite(transport: Any, receivers: Receivers, folder: Path, *, on_host: bool, device: str = "cpu") -> Any:
    sender = open_sender(
        transport,
        receivers=dict.fromkeys(receivers.processes, on_host),
        name=SENDER,
        host="127.0.0.1",
        on_gpu=False,
        folder=folder,
    )
    for name, invitation in sender.invitations.items():
        receivers.tell(name, {"invitation": invitation, "dtype": "bfloat16", "device": device})
    return sender


def test_weights_arrive_in_other_processes_and_a_killed_one_is_named(tmp_path: Path) -> None:
    receivers = Receivers()
    try:
        for transport, on_host in (("delta", True), ("file", False), ("delta", False)):
            tensors = make_tensors(0, torch.bfloat16)
            sender = invite(transport, receivers, tmp_path, on_host=on_host)
            for version in (0, 1):
                for name in receivers.processes:
                    receivers.tell(name, {"version": version})
                sender.send(tensors, version=version)
                total = {key: int(bits(tensor).long().sum()) for key, tensor in tensors.items()}
                assert all(receivers.hear(name) == total for name in receivers.processes), (transport, version)
                change(tensors, seed=version)
            if transport == "delta" and not on_host:
                receivers.tell("rollout 0", {"version": 2})
                receivers.processes["rollout 1"].kill()
                with pytest.raises(MissingPeerError, match="rollout 1 disconnected"):
                    sender.send(tensors, version=2)
            sender.close()
    finally:
        receivers.end()


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_weights_on_a_gpu_reach_other_processes_by_handle(device: str, tmp_path: Path) -> None:
    receivers = Receivers()
    tensors = {key: tensor.cuda() for key, tensor in make_tensors(0, torch.bfloat16).items()}
    try:
        sender = invite("shared_memory", receivers, tmp_path, on_host=True, device=device)
        for version in (0, 1, 2):
            for name in receivers.processes:
                receivers.tell(name, {"version": version})
            sender.send(tensors, version=version)
            total = {key: int(bits(tensor).long().sum()) for key, tensor in tensors.items()}
            assert all(receivers.hear(name) == total for name in receivers.processes), version
            change(tensors, seed=version)
        assert type(sender._senders[0]._outlet).__name__ == "_IpcOutlet"
        sender.close()
    finally:
        receivers.end()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [KINDS["broadcast"], FILE, KINDS["delta_across_hosts"]], ids=lambda kind: kind.name)
def test_weights_on_a_gpu_reach_the_memory_of_a_host(kind: WeightKind, tmp_path: Path) -> None:
    meeting = Meeting(kind, make_tensors(0, torch.bfloat16), tmp_path)
    meeting.tensors = {key: tensor.cuda() for key, tensor in meeting.tensors.items()}
    for version in (0, 1):
        meeting.update(version)
        assert not meeting.failures
        for held in meeting.held.values():
            assert all(torch.equal(bits(held[key]), bits(tensor).cpu()) for key, tensor in meeting.tensors.items())
        change(meeting.tensors, seed=version)
    meeting.close()


def test_handles_of_gpu_tensors_travel_once_and_open_on_the_receivers_own_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What of CUDA IPC can be seen on a host: tensors stand for handles."""

    def rebuild(tensor: torch.Tensor, storage_device: int) -> torch.Tensor:
        assert storage_device == 3
        return tensor

    monkeypatch.setattr(reductions, "reduce_tensor", lambda tensor: (rebuild, (tensor.clone(), 0)))
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild)
    here, there = socket.socketpair()
    near, far, deadline = Line(here, peer="rollout 0"), Line(there, peer=SENDER), Wait(TIMEOUT_S)
    told: list[Any] = []
    monkeypatch.setattr(
        near, "tell", lambda message, deadline: (told.append(message), Line.tell(near, message, deadline))
    )
    outlet, inlet = _IpcOutlet({"rollout 0": near}), _IpcInlet(far, 3)
    source, target = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    found: list[list[int]] = []
    for _ in range(2):
        thread = threading.Thread(
            target=lambda: found.append(list(inlet.each([[target[:60]], [target[60:]]], deadline)))
        )
        thread.start()
        assert outlet.put([[source[:60]], [source[60:]]], deadline) == [
            checksum([source[:60]]),
            checksum([source[60:]]),
        ]
        thread.join(TIMEOUT_S)
    assert torch.equal(target, source) and found[0] == found[1] == [checksum([source[:60]]), checksum([source[60:]])]
    assert [message["handles"] is None for message in told] == [False, True]
    near.close()
    far.close()


def test_a_line_to_another_host_asks_its_kernel_whether_it_is_there() -> None:
    """A host without power closes no connection: without this the line would wait until the update's deadline."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        for end in (near, far):
            Line(end, peer="rollout 0")
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            idle, every, count, most_ms = (
                end.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
            )
            assert idle <= door.SILENT_S and every * count == door.SILENT_S
            assert most_ms == door.SILENT_S * 1000  # the same while bytes are under way
        far.close()


# Checksums and layouts


def test_a_second_thread_makes_the_same_copy_and_the_same_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    source = torch.randint(256, (5 * PIECE_BYTES + 3,), dtype=torch.uint8)
    made = []
    for cores in (1, 1_000_000):
        monkeypatch.setattr(checksums, "CORES", cores)
        checksums._helper.cache_clear()
        assert (checksums._helper() is None) == (cores > 1)
        target = torch.zeros_like(source)
        made.append(copy_summed([target], [source], total_of=[source]))
        assert torch.equal(target, source) and checksum([target]) == made[-1]
    checksums._helper.cache_clear()
    assert made[0] == made[1]


@given(st.binary(min_size=1, max_size=400), st.data())
def test_one_changed_bit_changes_the_checksum(data: bytes, draw: st.DataObject) -> None:
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    before = checksum([flat])
    place = draw.draw(st.integers(0, len(data) - 1))
    flat[place] ^= 1 << draw.draw(st.integers(0, 7))
    assert checksum([flat]) != before


def test_the_checksum_sees_the_order_of_pieces_and_where_a_span_ends() -> None:
    one, other = torch.zeros(PIECE_BYTES, dtype=torch.uint8), torch.ones(PIECE_BYTES, dtype=torch.uint8)
    assert checksum([torch.cat((one, other))]) != checksum([torch.cat((other, one))])
    assert checksum([one]) != checksum([one, one[:8]])


@pytest.mark.parametrize("size", [3, 8, PIECE_BYTES - 1, PIECE_BYTES, 3 * PIECE_BYTES + 5])
def test_the_checksum_is_the_same_while_copying_and_by_the_sums_of_a_gpu(size: int) -> None:
    source = torch.randint(256, (size,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    total = checksum([source])
    assert copy_summed([target], [source], total_of=[target]) == total
    assert torch.equal(target, source)
    assert _fold_on_device(0, source) == total
    assert _fold_on_device(0, torch.cat((source[:1], source))[1:]) == total, "where words are not aligned"


@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=12),
    num_bytes=st.integers(1, 40),
    alone_from=st.integers(0, 45),
)
def test_buckets_hold_every_byte_once_and_stay_in_their_size(sizes: list[int], num_bytes: int, alone_from: int) -> None:
    tensors = {str(index): torch.zeros(size, dtype=torch.uint8) for index, size in enumerate(sizes)}
    views = Views(tensors, Layout.of(tensors))
    buckets = views.buckets(BucketSize(num_bytes=num_bytes, alone_from=alone_from))
    for bucket in buckets:
        assert 0 < sum(map(len, bucket)) <= num_bytes
        for span in bucket:
            span += 1
            assert len(bucket) == 1 or len(span) < alone_from
    assert all(bool((tensor == 1).all()) for tensor in tensors.values())


def test_a_matrix_by_columns_travels_as_it_lies_and_only_gaps_need_a_copy() -> None:
    tensors = make_tensors(0)
    assert not Views({"by_columns": tensors["by_columns"]}, Layout.of({"by_columns": tensors["by_columns"]})).has_copies
    assert Views({"with_gaps": tensors["with_gaps"]}, Layout.of({"with_gaps": tensors["with_gaps"]})).has_copies


# Delta


@settings(max_examples=60)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    size=st.sampled_from([1, 100, delta.BLOCK, 2 * delta.BLOCK + 17]),
    share=st.sampled_from([0.0, 1e-4, 0.1, 0.9, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_changes_turn_the_base_into_the_new_version(dtype: torch.dtype, size: int, share: float, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    base = torch.randn(size, generator=draw).to(dtype)
    new = torch.where(torch.rand(size, generator=draw) < share, base + 1, base)
    layout = Layout.of({"w": new})
    held = bits(base).clone()
    found = delta.encode(layout, new=[bits(new)], base=[held])
    assert len(found.payload) == delta.total_bytes(layout, found.counts) <= layout.num_bytes
    delta.apply(layout, found, flat=[held])
    assert torch.equal(held, bits(new))


def test_only_changes_are_sent_and_all_to_a_receiver_that_has_another_version(tmp_path: Path) -> None:
    meeting = Meeting(KINDS["delta_on_a_host"], make_tensors(0, torch.bfloat16), tmp_path)
    meeting.update(0)
    outlet = meeting.sender._senders[0]._outlet  # type: ignore[union-attr]
    put, moved = outlet.put, list[int]()  # type: ignore[union-attr]

    def count(buckets: Any, deadline: Any) -> list[int]:
        moved.append(sum(len(span) for bucket in buckets for span in bucket))
        return put(buckets, deadline)

    outlet.put = count  # type: ignore[union-attr, method-assign]
    meeting.tensors["embed"][3, ::10] += 1
    meeting.update(1)
    meeting.check()
    assert moved == [4 * 23 + 101 * (2 + 2)], "23 blocks and 101 changes"
    behind: Any = meeting.receivers["rollout 1"]
    behind._held = None  # as after an update that broke off
    meeting.held["rollout 1"]["embed"].zero_()
    meeting.update(2)
    meeting.check()
    assert moved[1] == sum(tensor.nbytes for tensor in meeting.tensors.values())
    meeting.close()


def test_a_base_that_is_not_what_it_was_taken_for_is_found_out(tmp_path: Path) -> None:
    meeting = Meeting(KINDS["delta_across_hosts"], make_tensors(0), tmp_path)
    meeting.update(0)
    meeting.held["rollout 1"]["embed"][7, 7] += 1  # someone wrote over it
    change(meeting.tensors, seed=3)
    meeting.update(1)
    meeting.check()
    meeting.close()


@pytest.mark.parametrize("spoil", [lambda p: p[:4].fill_(255), lambda p: p[4:6].fill_(255)], ids=["counts", "places"])
def test_changes_that_make_no_sense_are_refused_before_they_are_written(spoil: Any) -> None:
    base = torch.zeros(100)
    new = base.clone()
    new[3] = 1
    layout = Layout.of({"w": new})
    found = delta.encode(layout, new=[bits(new)], base=[bits(base)])
    spoil(found.payload)
    with pytest.raises(RefusedUpdateError, match="'w'"):
        delta.apply(layout, found, flat=[bits(base)])
    assert not base.any()


# Files


@pytest.fixture(params=[1 << 30, 1000], ids=["one file", "several"])
def part_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("rollcall.engine.weights.folder.PART_BYTES", request.param)
    return request.param


def test_files_of_weights_arrive_open_with_safetensors_and_are_gone_at_the_end(tmp_path: Path, part_bytes: int) -> None:
    (tmp_path / ".tmp-weights-00000009.safetensors").write_bytes(b"left by a sender that was killed")
    meeting = Meeting(FILE, make_tensors(0, torch.bfloat16), tmp_path, num_receivers=1)
    for version in (2, 3):
        meeting.update(version)
        meeting.check()
        change(meeting.tensors, seed=version)
    files = sorted(tmp_path.iterdir())
    secret = meeting.sender.invitations["rollout 0"].secret
    assert [path.name for path in files] == [
        f"weights-{secret}-00000003-{n:02d}.safetensors" for n in range(len(files))
    ]
    assert (len(files) > 1) == (part_bytes == 1000)
    tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert tensors.keys() == meeting.tensors.keys()
    assert torch.equal(tensors["by_columns"].t(), meeting.held["rollout 0"]["by_columns"])
    meeting.close()
    assert not list(tmp_path.iterdir())


def test_tensors_in_a_file_that_do_not_fit_are_refused_by_name(tmp_path: Path, part_bytes: int) -> None:
    meeting = Meeting(FILE, make_tensors(0), tmp_path, num_receivers=1)
    meeting.tensors.update(norm=torch.zeros(8))
    meeting.update(0)
    assert "'norm' is [8] float32 in the update and [7] float32" in str(meeting.failures["rollout 0"])
    meeting.close()


@pytest.mark.parametrize(
    ("spoilt", "reason"),
    [(lambda data: data[:-100], "not fully covered"), (lambda data: b"{}", "is not a weight file")],
    ids=["short", "other"],
)
def test_a_file_that_is_not_whole_is_read_again_and_then_refused(
    spoilt: Any, reason: str, tmp_path: Path, part_bytes: int
) -> None:
    meeting = Meeting(FILE, make_tensors(0), tmp_path, num_receivers=1)
    receiver: Any = meeting.receivers["rollout 0"]
    find, left = receiver._find, [1]

    def spoil(*where: Any) -> Path:
        path = find(*where)
        if not left[0]:
            return path
        left[0] -= 1
        other = tmp_path / "spoilt"
        other.write_bytes(spoilt(path.read_bytes()))
        return other

    receiver._find = spoil
    meeting.update(0)
    meeting.check()
    left[0] = 2
    meeting.update(1)
    assert "rollout 0 refused version 1 twice" in str(meeting.failures["rollout 0"])
    assert reason in str(meeting.failures["rollout 0"])
    meeting.close()


# Who gets what


def test_auto_takes_shared_memory_on_the_host_and_broadcast_to_others_and_between_gpus() -> None:
    def chosen(transport: Any, *, on_host: bool, on_gpu: bool = False) -> str:
        return carrying_for(transport, on_host=on_host, on_gpu=on_gpu)

    assert chosen("auto", on_host=True) == chosen("delta", on_host=True) == "shared_memory"
    assert chosen("auto", on_host=False) == chosen("delta", on_host=False) == "broadcast"
    assert chosen("auto", on_host=True, on_gpu=True) == chosen("broadcast", on_host=True) == "broadcast"
    assert chosen("shared_memory", on_host=True, on_gpu=True) == "shared_memory"


def test_receivers_on_this_host_and_on_others_are_served_by_one_send(tmp_path: Path) -> None:
    tensors = make_tensors(0)
    names = {"near": True, "far": False}
    sender = open_sender("auto", receivers=names, name=SENDER, host="127.0.0.1", on_gpu=False, folder=tmp_path)
    held = {name: {key: torch.zeros_like(tensor) for key, tensor in tensors.items()} for name in names}
    receivers = [open_receiver(sender.invitations[name], name=name, tensors=held[name]) for name in names]
    waiting = [threading.Thread(target=receiver.receive, kwargs={"version": 4}) for receiver in receivers]
    for thread in waiting:
        thread.start()
    sender.send(tensors, version=4)
    for thread in waiting:
        thread.join(TIMEOUT_S)
    assert all(torch.equal(held[name]["embed"], tensors["embed"]) for name in names)
    sender.close()


def test_all_receivers_that_did_not_come_are_named_whatever_carries_their_weights(tmp_path: Path) -> None:
    with mock.patch.object(transports, "TIMEOUT_S", 0.2):
        names = {"near": True, "far": False}
        sender = open_sender("auto", receivers=names, name=SENDER, host="127.0.0.1", on_gpu=False, folder=tmp_path)
    with pytest.raises(MissingPeerError, match=r"within 0\.2 s: near; .* within 0\.2 s: far"):
        sender.send(make_tensors(0), version=0)


HOSTILE = {
    "silent": b"",
    "a guess": json.dumps({"name": "rollout 0", "secret": "guess"}).encode(),
    "deep JSON": (200_000).to_bytes(4, "little") + b"[" * 200_000,
    "a long message": (1 << 31).to_bytes(4, "little") + b"x" * 100_000,
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "half a proof": b"x" * 40,
}


def test_strangers_learn_nothing_and_hold_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are all connected, and stay so, while the update goes through; none of them costs the sender a wait."""
    monkeypatch.setattr(door, "PROOF_S", 1e6)
    meeting = Meeting(KINDS["broadcast"], make_tensors(0), tmp_path, num_receivers=1)
    port = meeting.sender.invitations["rollout 0"].port
    strangers = [(socket.create_connection(("127.0.0.1", port)), words) for words in [*HOSTILE.values()] * 5]
    for stranger, words in strangers:
        with suppress(ConnectionError):  # hung up on before it had said all
            stranger.sendall(words)
    meeting.update(0)
    meeting.check()
    meeting.close()
    for stranger, _ in strangers:
        stranger.settimeout(TIMEOUT_S)
        heard = b""
        with suppress(ConnectionError):
            while data := stranger.recv(1 << 16):
                heard += data
        assert len(heard) <= door.CHALLENGE
        stranger.close()


def test_a_sender_listens_on_the_address_it_is_invited_to_and_no_other(tmp_path: Path) -> None:
    sender = open_sender(
        "broadcast",
        receivers={"far": False},
        name=SENDER,
        host="127.0.0.2",
        on_gpu=False,
        folder=tmp_path,
    )
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", sender.invitations["far"].port))
    assert "secret" not in repr(sender.invitations)
    sender.close()


class FakeGroup:
    """Records what a team's processes are asked; an actor's invitations are its receivers' names."""

    def __init__(self, nodes: list[int]) -> None:
        self.worker_metadata = [{"node_rank": node, "address": f"10.0.0.{node}"} for node in nodes]
        self.calls: list[tuple[int, str, tuple[Any, ...]]] = []
        self.fails = False

    def run_single_worker_single_data(self, method: str, worker: int, *args: Any) -> Any:
        self.calls.append((worker, method, args))
        return {name: f"ticket of {name}" for name in args[0]} if method == "invite" else None

    def run_some_workers_single_data(self, method: str, workers: list[int], *args: Any) -> list[Any]:
        return [self.run_single_worker_single_data(method, worker, *args) for worker in workers]

    def get_all_worker_results(self, futures: list[Any]) -> list[Any]:
        if self.fails:
            raise RuntimeError("a worker died")
        return futures


class FakeTeam:
    def __init__(self, group: FakeGroup, members: dict[Role, list[int]]) -> None:
        self.group = group
        self.members = members

    def call(self, workers: list[int], method: str, *args: Any) -> list[Any]:
        return self.group.run_some_workers_single_data(method, workers, *args)


def test_all_actors_send_and_the_others_are_invited_once_until_one_fails_or_another_comes() -> None:
    group = FakeGroup(nodes=[0, 0, 1, 1])
    team: Any = FakeTeam(group, {Role.ACTOR: [2, 3], Role.ROLLOUT: [0, 3], Role.INFERENCE: [1]})
    sync = WeightSync(team)
    sync.push(7)
    near = {"rollout rank 0 on node 0": False, "inference rank 0 on node 0": False}
    assert group.calls == [
        (2, "invite", (near, "10.0.0.1")),
        (3, "invite", (near, "10.0.0.1")),
        (2, "send_weights", (7,)),
        (3, "send_weights", (7,)),
        (0, "use_weights", (7, "rollout rank 0 on node 0", ["ticket of rollout rank 0 on node 0"] * 2)),
        (1, "use_weights", (7, "inference rank 0 on node 0", ["ticket of inference rank 0 on node 0"] * 2)),
    ]

    def invites_at(version: int) -> int:
        group.calls.clear()
        sync.push(version)
        return sum(method == "invite" for _, method, _ in group.calls)

    assert invites_at(8) == 0
    group.fails = True
    with pytest.raises(RuntimeError, match="a worker died"):
        sync.push(9)
    group.fails = False
    assert invites_at(9) == 2, "one from each actor"
    with pytest.raises(RuntimeError, match="a worker died"), mock.patch.object(group, "fails", True):
        sync.push(10, has_new=True)
    assert invites_at(10) == 2, "the invitations of before the failure are void"
    assert invites_at(11) == 0
    team.members[Role.ROLLOUT] = [3]
    assert invites_at(12) == 2


@pytest.mark.parametrize("transport", ["auto", "delta", "shared_memory"])
def test_shared_memory_to_another_node_is_refused_before_anything_starts(transport: str) -> None:
    def problems(placement: dict[str, Any]) -> list[str]:
        section = {"num_nodes": 2, "num_gpus_per_node": 2, "accelerator": "cpu", "component_placement": placement}
        config = parse_config({"cluster": section, "rollout": {"weights": transport}})
        assert config.cluster is not None
        return role_problems(config, config.cluster, plan_for(config, config.cluster))

    assert problems({"rollout": "0-3", "actor": "0-3"}) == problems({"rollout": "1", "actor": "0,2-3"}) == []
    found = problems({"rollout": "0-2", "actor": "3"})
    if transport != "shared_memory":
        assert found == []
        return
    (problem,) = found
    assert "only processes on the actor's node (node 1), but rollout rank 0 is on node 0" in problem


def test_a_run_where_all_share_the_actors_processes_invites_nobody() -> None:
    group = FakeGroup(nodes=[0, 0])
    team: Any = FakeTeam(group, {Role.ACTOR: [0, 1], Role.ROLLOUT: [0, 1]})
    WeightSync(team).push(0)
    assert [(worker, method) for worker, method, _ in group.calls] == [(0, "send_weights"), (1, "send_weights")]


def test_a_sender_does_not_wait_for_a_receiver_that_is_said_to_be_lost() -> None:
    desk = Desk(sender="actor rank 0", receivers=["one", "two"], carrying="broadcast", host="127.0.0.1", timeout_s=60)
    ends: list[str] = []

    def come() -> None:
        line = call(desk.invitation, name="one", deadline=Wait(60), about={})
        decline(desk.invitation, name="two", timeout_s=60)
        with pytest.raises(MissingPeerError, match="actor rank 0 disconnected"):
            line.hear(Wait(60))
        ends.append("told")

    receivers = threading.Thread(target=come)
    receivers.start()
    with pytest.raises(MissingPeerError, match="two was lost"):
        desk.welcome(Wait(60))
    desk.close()
    receivers.join(60)
    assert ends == ["told"]


def test_a_receiver_does_not_take_weights_from_someone_in_its_senders_place() -> None:
    desk = Desk(sender="actor rank 0", receivers=["one"], carrying="broadcast", host="127.0.0.1", timeout_s=60)
    other = Desk(sender="actor rank 0", receivers=["one"], carrying="broadcast", host="127.0.0.1", timeout_s=1)
    fooled = replace(desk.invitation, port=other.invitation.port)
    waiting = threading.Thread(target=lambda: pytest.raises(MissingPeerError, other.welcome, Wait(1)))
    waiting.start()
    with pytest.raises(MissingPeerError, match="actor rank 0 disconnected"):
        call(fooled, name="one", deadline=Wait(60), about={})
    waiting.join(60)
    other.close()
    with socket.create_server(("127.0.0.1", 0)) as forger:
        answers = threading.Thread(target=lambda: forger.accept()[0].sendall(bytes(2 * door.CHALLENGE)))
        answers.start()
        with pytest.raises(MissingPeerError, match="at the address of actor rank 0 does not know"):
            call(replace(desk.invitation, port=forger.getsockname()[1]), name="one", deadline=Wait(60), about={})
        answers.join(60)
    desk.close()
