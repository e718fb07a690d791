"""The parts of a checkpoint: what a process copies, writes and finds again, on a shared folder or on its node's own disk."""

from __future__ import annotations

import errno
import json
import logging
import pickle
import shutil
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from learners import critic_of, learner_of, step
from safetensors import safe_open
from saved import commit, save

from rollcall.base.errors import CheckpointError, ConfigError, WorkerError
from rollcall.checkpoint import local
from rollcall.checkpoint.parts import File, HostMemory, PartTensor, PartWriter, write_image
from rollcall.checkpoint.saving import Saving, Trained, saving_of
from rollcall.checkpoint.store import CheckpointStore, Written
from rollcall.checkpoint.training import read_critic, read_learner
from rollcall.config import Config
from rollcall.learner.gang import Gang


def block(name: str, values: torch.Tensor, *, row: int = 0, rows: int | None = None) -> PartTensor:
    whole = (rows or len(values), *values.shape[1:])
    start = (row, *[0] * (values.ndim - 1))
    return PartTensor(name=name, start=start, whole=whole, dtype=values.dtype, values=values)


def written_by(writer: PartWriter) -> Written:
    while (written := writer.written()) is None:
        time.sleep(0.005)
    return written


def test_a_part_is_plain_safetensors_that_says_which_blocks_it_holds(tmp_path: Path) -> None:
    odd = torch.arange(3).to(torch.bfloat16)
    wide, more = torch.arange(6.0).reshape(3, 2), torch.arange(2.0).reshape(1, 2)
    tensors = [block("odd", odd), block("wide", wide, row=1, rows=9), block("wide", more, row=7, rows=9)]
    writer = PartWriter()
    writer.copy([File(name="model/part.safetensors", kind="weights", content=tensors)], facts={"mesh": 1})
    wide.zero_()  # what is trained on meanwhile does not change the copy
    writer.start(tmp_path)
    written = written_by(writer)
    facts = written.files["model/part.safetensors"]
    path = tmp_path / "model" / "part.safetensors"
    assert facts["size"] == path.stat().st_size and facts["kind"] == "weights" and facts["host"] and facts["node"]
    assert written.facts == {"mesh": 1}
    with safe_open(path, "pt") as file:
        parts = json.loads(file.metadata()["parts"])
        assert parts["wide"] == {"name": "wide", "start": [1, 0], "shape": [9, 2]}
        assert parts["wide#1"] == {"name": "wide", "start": [7, 0], "shape": [9, 2]}
        assert torch.equal(file.get_tensor("wide"), torch.arange(6.0).reshape(3, 2))
        assert torch.equal(file.get_tensor("odd"), odd)


def test_a_write_that_failed_is_told_and_can_begin_again_from_the_same_copy(tmp_path: Path) -> None:
    writer = PartWriter()
    writer.copy([File(name="model/part", kind="weights", content=[block("a", torch.ones(4))])], facts={})
    (tmp_path / "file").write_text("")
    writer.start(tmp_path / "file")
    with pytest.raises(OSError, match="file"):
        written_by(writer)
    writer.start(tmp_path / "folder")
    assert list(written_by(writer).files) == ["model/part"]


def test_a_disk_that_is_full_fails_the_write_and_not_the_next_one(tmp_path: Path) -> None:
    """The kernel's own answer, when the bytes leave the process."""
    writer, values = PartWriter(), torch.arange(50_000.0)
    name = "model/model.safetensors"
    writer.copy([File(name=name, kind="weights", content=[block("w", values)])], facts={})
    (tmp_path / "model").mkdir()
    (tmp_path / name).symlink_to("/dev/full")
    writer.start(tmp_path)
    with pytest.raises(OSError, match="No space left on device") as refused:
        written_by(writer)
    assert refused.value.errno == errno.ENOSPC
    (tmp_path / name).unlink()
    writer.start(tmp_path)
    assert written_by(writer).files[name]["size"] == (tmp_path / name).stat().st_size
    with safe_open(tmp_path / name, "pt") as file:
        assert torch.equal(file.get_tensor("w"), values)


@pytest.mark.gpu
def test_blocks_on_an_accelerator_are_copied_to_memory_that_is_kept(tmp_path: Path) -> None:
    writer, values = PartWriter(), torch.randn(300, 7, device="cuda")
    for turn in range(2):
        tensor = PartTensor(name="a", start=(0, 0), whole=(300, 7), dtype=torch.bfloat16, values=values)
        writer.copy([File(name=f"part-{turn}", kind="weights", content=[tensor])], facts={})
        expected = values.bfloat16().cpu()
        values.zero_()
        writer.start(tmp_path)
        written_by(writer)
        with safe_open(tmp_path / f"part-{turn}", "pt") as file:
            assert torch.equal(file.get_tensor("a"), expected)
        values.normal_()


def saved_parts(folder: Path) -> Path:
    """A checkpoint of one process."""
    learner, critic = learner_of(Gang.alone()), critic_of(Gang.alone())
    step(learner, 1)
    step(critic, 1)
    save(Gang.alone(), folder, learner=learner, critic=critic)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_parts(tmp_path_factory.mktemp("saved"))


def test_host_memory_that_goes_away_is_no_longer_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = set[int]()

    class Runtime:
        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
            pinned.add(address)
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            pinned.remove(address)
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda status: None)
    memory = HostMemory()
    small = memory.take(1 << 20, pinned=True)
    assert pinned == {small.data_ptr()}
    large = memory.take(1 << 21, pinned=True)
    assert pinned == {large.data_ptr()}, "memory that grows is another block"
    del memory
    assert not pinned


def test_what_parts_hold_comes_back(saved: Path) -> None:
    learner, critic = learner_of(Gang.alone()), critic_of(Gang.alone())
    again, critic_again = learner_of(Gang.alone()), critic_of(Gang.alone())
    for one in (learner, critic):
        step(one, 1)
    read_learner(again, saved)
    read_critic(critic_again, saved)
    for one, other in ((learner, again), (critic, critic_again)):
        for seed in (None, 2):  # the moments too: the next step is the same
            if seed is not None:
                step(one, seed)
                step(other, seed)
            assert all(torch.equal(tensor, other.body.named[name]) for name, tensor in one.body.named.items())
        assert one.optimizer.num_updates == other.optimizer.num_updates == 2


def test_an_optimizer_without_all_its_parts_is_refused(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "saved")
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"]["actor/part-00000-of-00001.safetensors"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="saved/actor lacks .* so this checkpoint is incomplete; move it away"):
        read_learner(learner_of(Gang.alone()), folder)


def test_a_manifest_tells_of_mesh_model_and_files(saved: Path, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2, keep_best=0)
    manifest = json.loads((commit(store, 4, saved) / "manifest.json").read_text())
    assert manifest["step"] == manifest["weight_version"] == 4
    assert manifest["mesh"] == {"processes": 1, "replicate": 1, "shard": 1, "tensor": 1}
    assert manifest["model"]["model_type"] == "qwen2" and manifest["model"]["tie_word_embeddings"] is True
    kinds = {name: facts["kind"] for name, facts in manifest["files"].items()}
    assert kinds["model/model.safetensors"] == "weights" and kinds["model/config.json"] == "model"
    assert kinds["actor/part-00000-of-00001.safetensors"] == kinds["critic/optimizer.pt"] == "optimizer"
    assert kinds["state.json"] == "state" and kinds["model/probe.json"] == "model"


PART = "model/model.safetensors"


@pytest.mark.parametrize("damage", ["missing", "cut off", "changed", "another save's"])
def test_a_damaged_part_is_named_with_its_node_and_the_checkpoint_before_is_used(
    saved: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, keep_last=9, keep_best=0)
    commit(store, 2, saved)
    part = commit(store, 4, saved) / PART
    data = part.read_bytes()
    if damage == "missing":
        part.unlink()
    elif damage == "cut off":
        part.write_bytes(data[:-1])
    else:
        part.write_bytes(data[:-4] + (b"\1\2\3\4" if damage == "changed" else data[-8:-4]))
    with caplog.at_level(logging.WARNING):
        found = store.latest()
    assert found is not None and found.step == 2
    assert f"{PART}" in caplog.text and "written on node" in caplog.text
    assert [bool(entry.reason) for entry in store.inspect()] == [False, True]


def test_parts_without_a_manifest_are_no_checkpoint_and_are_removed(saved: Path, tmp_path: Path) -> None:
    """The processes have written all parts, and the controller was killed before the manifest."""
    store = CheckpointStore(tmp_path, keep_last=9, keep_best=0)
    commit(store, 2, saved)
    left = tmp_path / ".tmp-step-000004-0a1b2c3d"
    saved_parts(left)
    found = store.latest()
    assert found is not None and found.step == 2
    commit(store, 6, saved)
    assert not left.exists() and [entry.step for entry in store.inspect()] == [2, 6]


def test_a_part_that_is_not_in_the_shared_folder_is_refused_at_the_save(saved: Path, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=9, keep_best=0)
    facts = {"size": 3, "blake2b": "", "kind": "weights", "node": "1", "host": "far"}
    with pytest.raises(
        CheckpointError, match=r"a process on node 1 \(far\) wrote .*part.*put run.dir on a folder that all"
    ):
        store.save(2, write=lambda folder: Written(files={PART: facts}), state={}, score=None)


def test_an_optimizer_without_moments_has_none_in_its_parts(tmp_path: Path) -> None:
    sgd: dict[str, Any] = dict(optimizer=dict(name="torch.optim.SGD"))
    learner, again = (learner_of(Gang.alone(), **sgd) for _ in range(2))
    step(learner, 1)
    save(Gang.alone(), tmp_path, learner=learner)
    read_learner(again, tmp_path)
    assert all(torch.equal(tensor, again.body.named[name]) for name, tensor in learner.body.named.items())


# On the nodes' own disks


class Node(Trained):
    """A process on a node with a temporary folder of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, number: int) -> None:
        super().__init__(tokenizer=None, learner=None, critic=None)
        self.folder, self.number, self._patch = folder, number, monkeypatch
        folder.mkdir()
        self.read: list[Path] = []

    def call(self, method: str, *args: Any) -> Any:
        self._patch.setattr("tempfile.tempdir", str(self.folder))
        return getattr(self, method)(*args)

    def copy_parts(self) -> None:
        name = f"model/part-{self.number:05d}-of-00002.safetensors"
        tensors = [block("a", torch.full((2,), float(self.number)), row=2 * self.number, rows=4)]
        self._parts.copy([File(name=name, kind="weights", content=tensors)], facts={})

    def read_checkpoint(self, directory: Path) -> None:
        self.read.append(directory)


def nodes_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Node], Saving]:
    nodes = [Node(tmp_path / f"node-{number}", monkeypatch, number=number) for number in range(2)]

    def call(processes: Sequence[int], method: str, *args: Any) -> list[Any]:
        return [nodes[process].call(method, *args) for process in processes]

    place: Literal["local"] = "local"
    return nodes, Saving(call=call, processes=[0, 1], place=place, run_name="far")


def save_local(saving: Saving, store: CheckpointStore, step: int) -> Path:
    saving.copy()
    path = store.save(step, write=saving.write, state={}, score=None)
    saving.tidy(store.dir, keep=store.places())
    return path


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_parts_on_the_nodes_are_named_by_the_manifest_and_pruned_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, saving = nodes_of(tmp_path, monkeypatch)
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1, keep_best=0)
    for number in (2, 4):
        path = save_local(saving, store, number)
    files = json.loads((path / "manifest.json").read_text())["files"]
    places = [Path(facts["place"]) for facts in files.values() if "place" in facts]
    assert [place.name for place in places] == ["part-00000-of-00002.safetensors", "part-00001-of-00002.safetensors"]
    assert all(place.is_relative_to(node.folder) for place, node in zip(places, nodes, strict=True))
    assert "place" not in files["state.json"] and not (path / "model").exists()
    assert [files_in(node.folder) for node in nodes] == [[places[0].name], [places[1].name]], "of the newest alone"


def test_processes_of_one_node_tidy_it_at_the_same_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = local.folder_of("run")
    with ThreadPoolExecutor(max_workers=8) as pool:
        for number in range(20):
            paths = [folder / f"step-{step}-{number}/{role}/part-{rank}" for step in (1, 2) for role in ("actor", "model")
                     for rank in range(4)]  # fmt: skip
            for path in paths:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
            link = tmp_path / "alias"
            link.unlink(missing_ok=True)
            link.symlink_to(folder)
            keep = str(link / paths[0].relative_to(folder))  # the same file by another name
            start = threading.Barrier(8)

            def tidy(_: int, start: threading.Barrier = start, keep: str = keep) -> None:
                start.wait()
                local.tidy("run", keep=[keep])

            assert list(pool.map(tidy, range(8))) == [None] * 8
            assert [path for path in folder.rglob("*") if path.is_file()] == [paths[0]]


@pytest.mark.parametrize("run", ["team/sums", "../../up", ".hidden", "größe 7", "", "x" * 300])
def test_any_name_of_a_run_gives_the_name_of_one_folder(tmp_path: Path, run: str) -> None:
    name = local.name_of_run(tmp_path, run=run)
    assert name == local.name_of_run(tmp_path, run="another"), "it stays"
    assert "/" not in name and not name.startswith(".") and len(name) < 100 and name.isascii() and " " not in name


def test_a_nodes_full_disk_is_named_with_the_node_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes, saving = nodes_of(tmp_path, monkeypatch)
    monkeypatch.setattr("rollcall.base.patience.RETRY_S", 0.0)
    full = [OSError(errno.ENOSPC, "No space left on device")]  # as a write raises it: without a name

    def write(image: torch.Tensor, path: Path) -> str:
        if full and path.is_relative_to(nodes[1].folder):
            raise full.pop()
        return write_image(image, path)

    def call(processes: Sequence[int], method: str, *args: Any) -> list[Any]:
        try:
            return saving.call(processes, method, *args)
        except OSError as error:  # as it comes from another process
            raise WorkerError("actor rank 1 raised", role="actor", ranks=[1], node_ranks=[1]) from pickle.loads(
                pickle.dumps(error)
            )

    monkeypatch.setattr("rollcall.checkpoint.parts.write_image", write)
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1, keep_best=0)
    with caplog.at_level(logging.WARNING):
        save_local(replace(saving, call=call), store, 2)
    said = next(line for line in caplog.messages if "cannot write" in line)
    assert f"{socket.gethostname()}:{nodes[1].folder}" in said and "No space left on device; retrying" in said
    assert [entry.reason for entry in store.inspect()] == [""]


def test_a_copied_run_and_its_original_keep_their_parts_and_a_moved_run_prunes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, saving = nodes_of(tmp_path, monkeypatch)
    first = CheckpointStore(tmp_path / "first", keep_last=1, keep_best=0)
    save_local(saving, first, 2)
    shutil.copytree(first.dir, tmp_path / "copy")
    copy = CheckpointStore(tmp_path / "copy", keep_last=1, keep_best=0)
    for number in (4, 6):
        save_local(saving, copy, number)
    moved = CheckpointStore(first.dir.rename(tmp_path / "moved"), keep_last=1, keep_best=0)
    assert [(entry.step, entry.reason) for entry in moved.inspect()] == [(2, "")]
    save_local(saving, moved, 8)
    assert [(entry.step, entry.reason) for entry in (*copy.inspect(), *moved.inspect())] == [(6, ""), (8, "")]
    assert len(files_in(nodes[0].folder)) == 2, "of each run the newest"
    assert [len(local.names_of_run(store.dir)[0]) for store in (copy, moved)] == [2, 1]


def test_before_a_resume_each_node_brings_what_another_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, saving = nodes_of(tmp_path, monkeypatch)
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2, keep_best=0)
    path = save_local(saving, store, 2)
    # Both nodes of this test are this host: each sees only its own folder.
    monkeypatch.setattr(Node, "parts_here", lambda self, files: [
        name for name in local.present(files) if Path(files[name]["place"]).is_relative_to(self.folder)
    ])  # fmt: skip
    assert saving.missing(path) == ""
    saving.read(path)
    assert files_in(path / "model") == ["part-00000-of-00002.safetensors", "part-00001-of-00002.safetensors"]
    assert nodes[0].read == [path.resolve()]
    assert local.elsewhere(path) == {}


def test_a_node_that_is_gone_makes_its_checkpoints_incomplete_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes, saving = nodes_of(tmp_path, monkeypatch)
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=3, keep_best=0)
    whole = store.save(1, write=lambda folder: None, state={}, score=None)
    path = save_local(saving, store, 2)
    (lost,) = (file for file in nodes[1].folder.rglob("part-*"))
    lost.unlink()
    assert str(lost) in saving.missing(path) and "does not exist on any node" in saving.missing(path)
    with pytest.raises(CheckpointError, match=f"step-000002 is incomplete: .*{lost.name}"):
        saving.read(path)
    with caplog.at_level(logging.WARNING):
        found = store.latest(missing=saving.missing)
    assert found is not None and found.path == whole and str(lost.name) in caplog.text


def test_a_part_that_changed_on_its_node_is_not_brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, saving = nodes_of(tmp_path, monkeypatch)
    path = save_local(saving, CheckpointStore(tmp_path / "checkpoints", keep_last=2, keep_best=0), 2)
    (part,) = (file for file in nodes[1].folder.rglob("part-*"))
    part.write_bytes(part.read_bytes()[:-4] + b"\1\2\3\4")
    with pytest.raises(CheckpointError, match=f"{part.name} on node .* its checksum differs"):
        saving.read(path)


def test_the_place_of_parts_is_refused_where_there_are_none(tmp_path: Path) -> None:
    config = Config.model_validate({"run": {"dir": str(tmp_path)}, "checkpoint": {"place": "local"}})
    with pytest.raises(ConfigError, match=r"checkpoint\.place=local needs a model that is sharded"):
        saving_of(config, lambda *args: [], processes=[0], in_parts=False)


@pytest.mark.parametrize("name", ["../../mine", "/", "", ".", "a/b", "a\n\n..", "x" * 300])
def test_a_damaged_name_of_the_folder_on_nodes_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "mine").write_text("kept")
    (tmp_path / local.FOLDER_NAME).write_text(name)
    with pytest.raises(CheckpointError, match="not a valid folder name"):
        local.name_of_run(tmp_path, run="any")
    assert (tmp_path / "mine").exists()
