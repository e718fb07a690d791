"""Checkpoints of other systems: verl's FSDP shards and PyTorch's distributed checkpoints, and what is refused of them."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from saved import save_dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from verl_shards import write_verl

from rollcall.model.stored.open import open_stored
from rollcall.model.stored.tensors import StoredError
from rollcall.model.stored.torch_file import Stub, unpickle

WHOLE = {
    "embed.weight": torch.randn(13, 6, generator=torch.Generator().manual_seed(0)),
    "proj.weight": torch.randn(8, 10, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "norm.weight": torch.randn(5, generator=torch.Generator().manual_seed(2)),
    "inv_freq": torch.randn(3, generator=torch.Generator().manual_seed(3)),
}
PLAIN = ("inv_freq",)


def assert_whole(path: Path) -> Any:
    stored = open_stored(path)
    assert stored.tensors.keys() == WHOLE.keys()
    for name, tensor in WHOLE.items():
        assert torch.equal(stored.read(name), tensor), name
        rows = tensor.shape[0]
        block = stored.read(name, start=(1, *(0 for _ in tensor.shape[1:])), shape=(rows - 2, *tensor.shape[1:]))
        assert torch.equal(block, tensor[1:-1])
    return stored


@pytest.mark.parametrize(
    ("mesh", "names", "dims"),
    [
        ((1,), ("fsdp",), {}),
        ((2,), ("fsdp",), {}),
        ((8,), ("fsdp",), {}),  # more processes than some tensors have rows
        ((2, 3), ("ddp", "fsdp"), {}),
        ((2, 2), ("fsdp", "tp"), {"embed.weight": 0, "proj.weight": 1}),
        ((3, 2), ("fsdp", "tp"), {"proj.weight": 0}),
        ((2, 2, 2), ("ddp", "fsdp", "tp"), {"embed.weight": 1, "proj.weight": 0}),
    ],
)
def test_shards_of_verl_make_the_whole_tensors_on_every_mesh(
    tmp_path: Path, mesh: tuple[int, ...], names: tuple[str, ...], dims: dict[str, int]
) -> None:
    write_verl(tmp_path / "actor", WHOLE, mesh=mesh, names=names, plain=PLAIN, dims=dims)
    assert_whole(tmp_path / "actor")


def test_shards_of_verl_are_found_from_the_folders_above_them(tmp_path: Path) -> None:
    folder = write_verl(tmp_path / "global_step_20" / "actor", WHOLE, mesh=(2,), plain=PLAIN)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    for path in (folder, folder.parent, tmp_path):
        assert assert_whole(path).facts["step"] == 20


def test_shards_that_are_plain_tensors_are_whole_in_each_process(tmp_path: Path) -> None:
    write_verl(tmp_path, WHOLE, mesh=(3,), plain=tuple(WHOLE))
    assert_whole(tmp_path)


def test_a_mesh_as_older_versions_of_torch_wrote_it_is_read(tmp_path: Path) -> None:
    """They pickled the ranks as a tensor, and no layout."""
    from torch.distributed.device_mesh import DeviceMesh

    def old(self: Any) -> dict[str, Any]:
        return {
            "device_type": "cuda",
            "mesh": self.mesh,
            "mesh_dim_names": self.mesh_dim_names,
            "_flatten_mesh_list": (),
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceMesh, "__getstate__", old, raising=False)
        write_verl(tmp_path, WHOLE, mesh=(2, 2), names=("ddp", "fsdp"), plain=PLAIN)
    assert_whole(tmp_path)


def _damage(folder: Path, how: str) -> str:
    """Damage a set of four shards; what the message must name."""
    third = folder / "model_world_size_4_rank_2.pt"
    if how == "missing":
        third.unlink()
    elif how == "cut off":
        third.write_bytes(third.read_bytes()[:-30])
    elif how == "empty":
        third.write_bytes(b"")
    elif how == "not of torch":
        third.write_bytes(b"x" * 1000)
    elif how == "pickle changed":
        data = bytearray(third.read_bytes())
        at = data.index(b"embed.weight")
        data[at : at + 5] = b"EMBED"
        third.write_bytes(data)
    elif how == "other sizes":
        write_verl(folder / "other", {**WHOLE, "embed.weight": torch.zeros(9, 6)}, mesh=(4,), plain=PLAIN)
        shutil.copy(folder / "other" / third.name, third)
    elif how == "other tensors":
        write_verl(folder / "other", {k: v for k, v in WHOLE.items() if k != "norm.weight"}, mesh=(4,), plain=PLAIN)
        shutil.copy(folder / "other" / third.name, third)
    elif how == "another run":
        write_verl(folder / "other", {**WHOLE, "inv_freq": torch.zeros(3)}, mesh=(4,), plain=PLAIN)
        shutil.copy(folder / "other" / third.name, third)
    elif how == "another rank":  # whose block is as large
        shutil.copy(folder / "model_world_size_4_rank_1.pt", third)
    elif how == "two world sizes":
        shutil.copy(third, folder / "model_world_size_8_rank_2.pt")
        return "4 and 8 processes"
    return third.name


@pytest.mark.parametrize(
    "how",
    ["missing", "cut off", "empty", "not of torch", "pickle changed", "other sizes", "other tensors",
     "another run", "another rank", "two world sizes"],
)  # fmt: skip
def test_a_wrong_set_of_shards_is_refused_by_the_name_of_the_file(tmp_path: Path, how: str) -> None:
    folder = write_verl(tmp_path / "a", WHOLE, mesh=(4,), plain=PLAIN)
    named = _damage(folder, how)
    with pytest.raises(StoredError, match=named):
        open_stored(folder)


class Harm:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("harm-was-done",)


def test_a_pickle_that_wants_more_than_tensors_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "a"
    folder.mkdir()
    file = folder / "model_world_size_1_rank_0.pt"
    torch.save({"w": torch.zeros(2), "x": Harm()}, file)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(file, weights_only=True)
    with pytest.raises(StoredError, match="rank_0.pt refers to posix.mkdir.*No code was run"):
        open_stored(folder)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / ".metadata").write_bytes(pickle.dumps(Harm()))
    with pytest.raises(StoredError, match="metadata refers to posix.mkdir.*No code was run"):
        open_stored(tmp_path / "b")
    assert not (tmp_path / "harm-was-done").exists()


@pytest.mark.parametrize("key", [None, "model", "state_dict"])
def test_a_distributed_checkpoint_gives_the_tensors_of_its_model(tmp_path: Path, key: str | None) -> None:
    optimizer = {
        "optimizer": {"state": {"embed.weight": {"exp_avg": torch.zeros(13, 6)}}},
        "step": torch.tensor(3),
        "epoch": 5,
    }
    save_dcp(WHOLE if key is None else {key: WHOLE, **optimizer}, tmp_path / "c")
    assert_whole(tmp_path / "c")


def test_a_distributed_checkpoint_whose_files_do_not_fit_is_refused(tmp_path: Path) -> None:
    save_dcp({"model": WHOLE}, tmp_path / "c")
    (file,) = (tmp_path / "c").glob("*.distcp")
    data = file.read_bytes()
    file.write_bytes(data[:-40])
    with pytest.raises(StoredError, match="distcp has .* bytes, too few"):
        open_stored(tmp_path / "c")
    file.unlink()
    with pytest.raises(StoredError, match="distcp.* No such file"):
        open_stored(tmp_path / "c")
    save_dcp({"model": {name: tensor.double() for name, tensor in WHOLE.items()}}, tmp_path / "d")
    shutil.copy(next((tmp_path / "d").glob("*.distcp")), file)
    with pytest.raises(StoredError, match="distcp"):
        open_stored(tmp_path / "c")
    save_dcp({"actor": WHOLE, "critic": WHOLE}, tmp_path / "e")
    with pytest.raises(
        StoredError, match="not clear which tensors belong to the model; the checkpoint contains actor, critic"
    ):
        open_stored(tmp_path / "e")
    (tmp_path / "c" / ".metadata").write_bytes(b"garbage")
    with pytest.raises(StoredError, match="metadata"):
        open_stored(tmp_path / "c")


def test_what_is_not_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({}))
    with pytest.raises(StoredError, match="has no weights that Rollcall can read; use"):
        open_stored(tmp_path)


HOSTILE = {
    "an array that is longer than the file": b"\x80\x05\x96\0\0\0\0\x40\0\0\0.",
    "a state for one of our functions": b"\x80\x02ctorch\nSize\nN}X\x01\0\0\0a)s\x86b.",
    "a state for a shared class": b"\x80\x02ctorch.storage\nUntypedStorage\n]X\x01\0\0\0kaNab.",
    "a set of the same size again and again": b"\x80\x02ctorch\nSize\n](" + b"K\x01" * 2000 + b"e\x85R.",
    "text that is longer than the file": b"\x80\x02X\xff\xff\xff\x7fabc.",
    "a protocol of the future": b"\x80\x09N.",
    "items for what is no dict": b"\x80\x02]K\x01K\x02s.",
    "a value for what is no list": b"\x80\x02}K\x01a.",
    "a call of what cannot be called": b"\x80\x02K\x01)R.",
    "nothing": b"",
    "no end": b"\x80\x02N",
    "a code of the registry of extensions": b"\x80\x02\x82\x01.",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_pickle_that_is_not_one_of_tensors_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(StoredError, match=r"/\.metadata (cannot be read|is not the metadata of a checkpoint) \("):
        open_stored(tmp_path)


def rewrite_pickle(path: Path, change: Callable[[bytes], bytes]) -> None:
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in records.items():
            archive.writestr(name, change(data) if name.endswith("data.pkl") else data)


def test_names_of_shards_are_not_believed(tmp_path: Path) -> None:
    (tmp_path / "model_world_size_99999999999_rank_0.pt").touch()
    with pytest.raises(StoredError, match="it has 1 of the 99999999999 shards"):
        open_stored(tmp_path)
    (tmp_path / "model_world_size_99999999999_rank_0.pt").rename(tmp_path / "model_world_size_a_rank_b.pt")
    with pytest.raises(StoredError, match="named model_world_size_W_rank_R"):
        open_stored(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        '{"w":{"dtype":"F32","shape":[1e999],"data_offsets":[0,16]}}',
        '{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"v":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
        '{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"w":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}',
    ],
    ids=["infinite", "the same bytes twice", "the same name twice"],
)
def test_a_header_that_safetensors_would_refuse_is_refused(tmp_path: Path, header: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(16))
    with pytest.raises(StoredError, match="not a complete safetensors file"):
        open_stored(tmp_path)


def test_a_record_behind_the_end_of_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model_world_size_1_rank_0.pt"
    torch.save({"w": torch.zeros(4)}, path)
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\x01\x02")
    data[at + 42 : at + 46] = b"\xf0\xff\xff\xff"
    path.write_bytes(data)
    with pytest.raises(StoredError, match="not a complete torch.save file"):
        open_stored(tmp_path)


def test_an_infinite_number_in_a_manifest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"step": 1e999, "files": {}}')
    with pytest.raises(StoredError, match="cannot be read"):
        open_stored(tmp_path)


class Attribute:
    """Pickled as Python 3.11.0 to 3.11.3 writes the member of an enum: getattr(owner, name)."""

    def __init__(self, owner: Any, name: Any) -> None:
        self.given = owner, name

    def __reduce__(self) -> Any:
        return getattr, self.given


@pytest.mark.parametrize(
    "owner", [_MEM_FORMAT_ENCODING, set, torch.Size, {"a": 1}, "text"], ids=["enum", "set", "Size", "dict", "text"]
)
def test_an_attribute_is_kept_by_its_name_and_never_looked_up(owner: Any) -> None:
    found = unpickle(pickle.dumps(Attribute(owner, "__class__")), what="a.pt")
    assert isinstance(found, Stub) and type(found).__name__ == "getattr" and found.args[1] == "__class__"


def test_a_checkpoint_whose_enums_are_written_as_attributes_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_attribute(self: Any, _: int) -> Any:
        return getattr, (type(self), self.name)

    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", as_attribute)
    save_dcp({"model": WHOLE}, tmp_path / "c")
    assert b"getattr" in (tmp_path / "c" / ".metadata").read_bytes()
    assert_whole(tmp_path / "c")


@pytest.mark.parametrize("aligned", [True, False])
def test_records_are_found_wherever_a_writer_put_them(tmp_path: Path, aligned: bool) -> None:
    """At torch's places, and in an archive that another program packed again without them."""
    path = tmp_path / "model_world_size_1_rank_0.pt"
    torch.save(WHOLE, path)
    if not aligned:
        rewrite_pickle(path, lambda data: data)
    assert_whole(tmp_path)
