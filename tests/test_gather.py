"""Parts from the nodes' own disks: what arrives is what was written, and nothing else is read or removed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_ssh import make_hosts
from gathered import RUN, Disk
from own_path import own_path
from typer.testing import CliRunner

from rollcall.cli.main import app
from rollcall.launch.finish import gather as module
from rollcall.launch.finish import nodes_of
from rollcall.launch.finish.gather import FOLDER, GatherError, gather
from rollcall.launch.finish.node_files import NodeFiles
from rollcall.launch.finish.nodes_of import Asked, Node, NodeError, RayNodeFiles, SshNode
from rollcall.launch.ssh.shell import Login

SIZE = 70_000


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITS_S", (0.0,) * 3)
    monkeypatch.setattr("rollcall.launch.finish.nodes_of.CHUNK_BYTES", 10_000)


def make_checkpoint(tmp_path: Path, *, num_nodes: int = 2, size: int = SIZE) -> tuple[Path, list[Disk]]:
    """A checkpoint with a weights part and an optimizer part on each of several disks."""
    checkpoint = tmp_path / "run/checkpoints/step-000002"
    (checkpoint / "model").mkdir(parents=True)
    (checkpoint.parent / "node-folder").write_text(RUN)
    files: dict[str, Any] = {}
    disks: list[Disk] = []
    for rank in range(num_nodes):
        root = tmp_path / f"disk-{rank}"
        disks.append(Disk(root, f"node {rank}"))
        for kind, folder in (("weights", "model"), ("optimizer", "actor")):
            name = f"{folder}/part-{rank:05}-of-{num_nodes:05}.safetensors"
            place = root / f"rollcall-{os.getuid()}" / "parts" / RUN / "step-000002-abcd1234" / name
            place.parent.mkdir(parents=True, exist_ok=True)
            data = hashlib.shake_256(name.encode()).digest(size + rank)
            place.write_bytes(data)
            digest = hashlib.blake2b(data, digest_size=16).hexdigest()
            files[name] = {
                "size": len(data), "blake2b": digest, "node": str(rank), "host": f"host-{rank}", "place": str(place), "kind": kind
            }  # fmt: skip
    write_manifest(checkpoint, files)
    return checkpoint, disks


def write_manifest(checkpoint: Path, files: dict[str, Any]) -> None:
    (checkpoint / "manifest.json").write_text(json.dumps({"step": 2, "score": None, "files": files}))


def files_of(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "manifest.json").read_text())["files"]


def places(checkpoint: Path) -> list[Path]:
    return [Path(facts["place"]) for facts in files_of(checkpoint).values()]


def assert_gathered(checkpoint: Path) -> None:
    for name, facts in files_of(checkpoint).items():
        data = (checkpoint / name).read_bytes()
        assert hashlib.blake2b(data, digest_size=16).hexdigest() == facts["blake2b"], name
    assert not (checkpoint / FOLDER).exists()


def test_parts_of_all_nodes_arrive_and_stay_where_they_were(tmp_path: Path) -> None:
    checkpoint, disks = make_checkpoint(tmp_path, num_nodes=3)
    seen: list[tuple[int, int]] = []
    done = gather(checkpoint, lambda: disks, progress=lambda here, total: seen.append((here, total)))
    assert_gathered(checkpoint)
    assert len(done.parts) == 6 and done.num_bytes == seen[-1][0] == seen[-1][1] and done.removed == []
    assert all(place.is_file() for place in places(checkpoint))

    def nobody() -> list[Node]:
        raise AssertionError("nodes were asked although everything is here")

    assert gather(checkpoint, nobody).parts == []


def test_only_the_kinds_that_are_needed_come(tmp_path: Path) -> None:
    checkpoint, disks = make_checkpoint(tmp_path)
    gather(checkpoint, lambda: disks, kinds=("weights",))
    assert (checkpoint / "model/part-00001-of-00002.safetensors").is_file() and not (checkpoint / "actor").exists()


def test_parts_are_removed_from_the_nodes_on_request_and_only_when_all_are_here(tmp_path: Path) -> None:
    checkpoint, disks = make_checkpoint(tmp_path)
    lost = places(checkpoint)[-1]
    kept = lost.rename(lost.with_name("kept"))
    with pytest.raises(
        GatherError,
        match=r"1 part cannot be gathered:\n  no node has a complete copy of actor/part-00001-of-00002.*of node 1 \(host-1",
    ):
        gather(checkpoint, lambda: disks, delete=True)
    assert sum(place.exists() for place in places(checkpoint)) == 3
    kept.rename(lost)
    gather(checkpoint, lambda: disks)
    first = checkpoint / "model/part-00000-of-00002.safetensors"
    whole = first.read_bytes()
    first.write_bytes(b"x" + whole[1:])
    with pytest.raises(GatherError, match="does not match the manifest, so no part was removed"):
        gather(checkpoint, lambda: disks, delete=True)
    first.write_bytes(whole)
    done = gather(checkpoint, lambda: disks, delete=True)
    assert len(done.removed) == 4 and not any(place.exists() for place in places(checkpoint))
    assert not list(tmp_path.glob(f"disk-*/*/parts/{RUN}/*"))
    assert_gathered(checkpoint)


def test_a_broken_transfer_goes_on_where_it_stopped(tmp_path: Path) -> None:
    checkpoint, disks = make_checkpoint(tmp_path)
    disks[0].breaks = [3, 2]
    gather(checkpoint, lambda: disks)
    assert_gathered(checkpoint)
    assert disks[0].sent == disks[1].sent - 2, "bytes were sent twice"


def test_a_node_that_stays_away_costs_only_its_own_parts_and_the_next_call_goes_on(tmp_path: Path) -> None:
    checkpoint, disks = make_checkpoint(tmp_path)
    disks[0].breaks = [2, 0, 0, 0, *[0] * 4]
    with pytest.raises(GatherError, match=r"2 parts could not be gathered:\n  model/part-00000.*ended early"):
        gather(checkpoint, lambda: disks)
    assert (checkpoint / "model/part-00001-of-00002.safetensors").is_file()
    assert not (checkpoint / "model/part-00000-of-00002.safetensors").exists()
    before = disks[0].sent
    gather(checkpoint, lambda: disks)
    assert_gathered(checkpoint)
    assert before == 20_000 and disks[0].sent == 2 * SIZE


def test_what_changed_on_its_way_is_not_taken(tmp_path: Path) -> None:
    checkpoint, disks = make_checkpoint(tmp_path)
    disks[0].flips = 2
    with pytest.raises(GatherError, match="part-00000.*its size or checksum differs"):
        gather(checkpoint, lambda: disks)
    assert not (checkpoint / "model/part-00000-of-00002.safetensors").exists()
    begun = checkpoint / FOLDER / "model/part-00000-of-00002.safetensors"
    begun.parent.mkdir(parents=True, exist_ok=True)
    begun.write_bytes(b"left by a crash")
    gather(checkpoint, lambda: disks)
    assert_gathered(checkpoint)


@pytest.mark.parametrize(
    "name", ["../../stolen", "/etc/passwd", "model/../../part-0-of-1.safetensors", "state.json", "model/part-0-of-1.safetensors\n"]
)  # fmt: skip
def test_names_that_leave_the_checkpoint_are_refused(tmp_path: Path, name: str) -> None:
    checkpoint, disks = make_checkpoint(tmp_path)
    files = files_of(checkpoint)
    write_manifest(checkpoint, {**files, name: next(iter(files.values()))})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="not the name of a part|not in the checkpoint"):
        gather(checkpoint, lambda: disks)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_node_reads_and_removes_nothing_but_parts_of_that_run(tmp_path: Path) -> None:
    checkpoint, _ = make_checkpoint(tmp_path)
    name, facts = next(iter(files_of(checkpoint).items()))
    good = {"name": name, "place": facts["place"], "run": RUN, "size": facts["size"]}
    folder = Path(facts["place"]).parents[1]
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * facts["size"])
    (folder / "linked").mkdir()
    (folder / "linked/model").symlink_to(tmp_path)
    link = folder / "link/model" / Path(name).name
    link.parent.mkdir(parents=True)
    link.symlink_to(secret)
    elsewhere = tmp_path / "elsewhere" / name
    elsewhere.parent.mkdir(parents=True)
    elsewhere.write_bytes(b"s" * facts["size"])
    other_run = Path(facts["place"].replace(RUN, "other-run"))
    other_run.parent.mkdir(parents=True)
    other_run.write_bytes(b"s" * facts["size"])
    climbing = str(folder / "x/../../../../../../secret")
    files = NodeFiles()
    assert files.present([good]) == [name] and files.read(good, 0, 5) == Path(facts["place"]).read_bytes()[:5]
    for change in (
        {"place": str(secret)}, {"place": str(elsewhere)}, {"place": str(other_run)}, {"place": str(link)}, {"place": climbing},
        {"place": str(folder / "linked" / name)}, {"name": "secret", "place": str(secret)}, {"run": ""}, {"run": ".."},
        {"name": "../secret"}, {"place": f"/proc/self/root{secret}"},
    ):  # fmt: skip
        wrong = {**good, **change}
        assert files.present([wrong]) == [], wrong
        with pytest.raises((OSError, ValueError)):
            files.read(wrong, 0, 5)
        with pytest.raises((OSError, ValueError)):
            files.remove([wrong])
    assert secret.exists() and elsewhere.exists() and other_run.exists()


def test_a_wrong_or_missing_folder_name_is_refused(tmp_path: Path) -> None:
    checkpoint, disks = make_checkpoint(tmp_path)
    for name in ("../other", ".", ""):
        (checkpoint.parent / "node-folder").write_text(name)
        with pytest.raises(ValueError, match="which is not a valid folder name"):
            gather(checkpoint, lambda: disks)
    (checkpoint.parent / "node-folder").unlink()
    with pytest.raises(GatherError, match="node-folder cannot be read"):
        gather(checkpoint, lambda: disks)


def test_parts_that_a_copied_run_came_with_are_gathered_too(tmp_path: Path) -> None:
    checkpoint, disks = make_checkpoint(tmp_path)
    (checkpoint.parent / "node-folder").write_text(f"copy-1 123\n{RUN}")
    gather(checkpoint, lambda: disks)
    assert_gathered(checkpoint)


@pytest.mark.parametrize("names", [f"copy-1 INODE\n{RUN}", f"{RUN} 123"], ids=["it saved since", "it did not"])
def test_parts_of_the_run_that_a_run_was_copied_from_are_not_removed(tmp_path: Path, names: str) -> None:
    checkpoint, disks = make_checkpoint(tmp_path)
    path = checkpoint.parent / "node-folder"
    path.write_text(names.replace("INODE", str(path.stat().st_ino)))
    with pytest.raises(GatherError, match="is a copy of another run, and 4 parts on the nodes.*nothing was removed"):
        gather(checkpoint, lambda: disks, delete=True)
    gather(checkpoint, lambda: disks)
    assert_gathered(checkpoint)


def test_a_full_disk_is_known_before_anything_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, disks = make_checkpoint(tmp_path)
    monkeypatch.setattr(module, "free_bytes", lambda path: 1000)
    with pytest.raises(GatherError, match="4 parts need .* free some space"):
        gather(checkpoint, lambda: disks)
    assert disks[0].sent == disks[1].sent == 0


def test_two_do_not_gather_the_same_checkpoint_at_once(tmp_path: Path) -> None:
    checkpoint, disks = make_checkpoint(tmp_path)

    def meanwhile() -> list[Disk]:
        with pytest.raises(GatherError, match="is being gathered by another process"):
            gather(checkpoint, lambda: disks)
        return disks

    gather(checkpoint, meanwhile)
    assert_gathered(checkpoint)


# Over ssh, with a stand-in for the program


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = make_hosts(tmp_path / "bin", ["one", "two"], version="1", dashboard=1)
    monkeypatch.setenv("PATH", own_path(folder.parent))
    return folder


def test_parts_come_over_ssh_and_are_removed_there(tmp_path: Path, hosts: Path) -> None:
    checkpoint, _ = make_checkpoint(tmp_path)
    done = CliRunner().invoke(app, ["gather", str(tmp_path / "run"), "--hosts", "one, two", "--json"])
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)["parts"]) == 4
    assert_gathered(checkpoint)
    nodes = [SshNode(host="one", login=Login())]
    assert len(gather(checkpoint, lambda: nodes, delete=True).removed) == 4
    assert not any(place.exists() for place in places(checkpoint))


def test_a_host_that_cannot_be_reached_or_prints_more_is_named(tmp_path: Path, hosts: Path) -> None:
    checkpoint, _ = make_checkpoint(tmp_path)
    part = {"name": next(iter(files_of(checkpoint))), "place": "/etc/passwd", "run": RUN, "size": 5}
    node = SshNode(host="one", login=Login())
    with pytest.raises(NodeError, match=r"one: /etc/passwd is not in the folder of this user's run"):
        list(node.chunks(part, offset=0))
    (hosts / "one/unreachable").write_text("ssh: connect to host one port 22: No route to host")
    with pytest.raises(
        NodeError, match="one: ssh ended early with status 255: ssh: connect to host one port 22: No route to host"
    ):
        node.present([part])
    with pytest.raises(GatherError, match=r"No route to host\nbring these nodes back") as refused:
        gather(checkpoint, lambda: [node])
    assert "no node has a complete copy of model/part-00000-of-00002.safetensors of node 0 (host-0" in str(
        refused.value
    )


def test_a_host_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", own_path(tmp_path))
    monkeypatch.setattr(nodes_of, "ANSWER_S", 0.2)
    part: Asked = {"name": "x" * 300_000, "place": "", "run": "", "size": 0}
    with pytest.raises(NodeError, match="one: no data arrived for 0.2 s"):
        SshNode(host="one", login=Login()).present([part])


# Over Ray, with a stand-in for the process on the node


class FakePinned:
    """Calls run here, at once; how many answers were not taken yet is counted."""

    waiting = most = 0

    def __init__(self, node_id: str, target: type, by_value: Sequence[Any]) -> None:
        self.there = target()

    def call(self, method: str, *args: Any) -> Any:
        FakePinned.waiting += 1
        FakePinned.most = max(FakePinned.most, FakePinned.waiting)

        def answer() -> Any:
            FakePinned.waiting -= 1
            return getattr(self.there, method)(*args)

        return answer


def test_over_the_cluster_few_chunks_are_on_their_way_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollcall.launch.finish.nodes_of.Pinned", FakePinned)
    monkeypatch.setattr("rollcall.launch.finish.nodes_of.answer_of", lambda call, timeout_s: call())
    checkpoint, _ = make_checkpoint(tmp_path, num_nodes=1)
    node = RayNodeFiles("id", where="node 0 (10.0.0.1)")
    done = gather(checkpoint, lambda: [node], delete=True)
    assert_gathered(checkpoint)
    assert len(done.removed) == 2 and done.num_bytes == 2 * SIZE
    assert FakePinned.waiting == 0 and FakePinned.most == 2
    part = {"name": "model/part-0-of-1.safetensors", "place": "/etc/passwd", "run": RUN, "size": 5}
    with pytest.raises(NodeError, match=r"node 0 \(10.0.0.1\): /etc/passwd is not in the folder of this user's run"):
        list(node.chunks(part, offset=0))
