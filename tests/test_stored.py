"""Where tensors are stored: model directories, whole and sharded checkpoints, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from saved import write_manifest
from tiny import ARCHITECTURES, SHAPE

from rollcall.checkpoint.store import CheckpointStore
from rollcall.model.stored.find import newest_checkpoint
from rollcall.model.stored.open import open_stored
from rollcall.model.stored.outline import known_outline, outline_of
from rollcall.model.stored.safetensors import open_parts
from rollcall.model.stored.tensors import DTYPES, Piece, StoredError, StoredFile, StoredTensor, refuse_gaps

WHOLE = {
    "embed.weight": torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6),
    "proj.weight": torch.arange(8 * 10, dtype=torch.bfloat16).reshape(8, 10),
    "norm.weight": torch.arange(5, dtype=torch.float32),
    "scale": torch.tensor(3.5),
}


def a_model(folder: Path, *, files: int = 1) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    if files == 1:
        save_file(WHOLE, folder / "model.safetensors")
        return folder
    names = list(WHOLE)
    weight_map = {}
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        own = names[number::files]
        save_file({name: WHOLE[name] for name in own}, folder / file)
        weight_map |= dict.fromkeys(own, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def a_part(path: Path, blocks: list[tuple[str, tuple[int, ...], tuple[int, ...]]]) -> None:
    """``blocks``: name, start and shape of each."""
    tensors, parts = {}, {}
    for number, (name, start, shape) in enumerate(blocks):
        where = tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))
        tensors[f"{number}"] = WHOLE[name][where].clone()
        parts[f"{number}"] = {"name": name, "start": list(start), "shape": list(WHOLE[name].shape)}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={"parts": json.dumps(parts)})


def a_sharded_checkpoint(folder: Path, *, step: int = 3) -> Path:
    """Three ways: rows of one tensor, a two-dimensional cut of another, the small ones on the first."""
    parts = [
        [("embed.weight", (0, 0), (3, 6)), ("proj.weight", (0, 0), (4, 5)), ("norm.weight", (0,), (5,)), ("scale", (), ())],
        [("embed.weight", (3, 0), (3, 6)), ("proj.weight", (0, 5), (4, 5)), ("proj.weight", (4, 0), (4, 2))],
        [("embed.weight", (6, 0), (1, 6)), ("proj.weight", (4, 2), (4, 8))],
    ]  # fmt: skip
    for rank, blocks in enumerate(parts):
        a_part(folder / "model" / f"part-{rank:05d}-of-00003.safetensors", blocks)
    (folder / "model" / "config.json").write_text("{}")
    (folder / "state.json").write_text("{}")
    write_manifest(folder, step=step)
    return folder


@pytest.mark.parametrize("files", [1, 3])
def test_a_model_directory_is_read_whole_and_in_blocks(tmp_path: Path, files: int) -> None:
    stored = open_stored(a_model(tmp_path / "m", files=files))
    assert stored.tensors.keys() == WHOLE.keys() and stored.folder == tmp_path / "m"
    for name, tensor in WHOLE.items():
        assert torch.equal(stored.read(name), tensor) and stored.read(name).dtype == tensor.dtype
    assert torch.equal(stored.read("proj.weight", start=(2, 3), shape=(5, 4)), WHOLE["proj.weight"][2:7, 3:7])
    assert torch.equal(stored.read("embed.weight", start=(4, 0), shape=(0, 6)), WHOLE["embed.weight"][4:4])


def test_every_block_of_a_sharded_tensor_is_read_from_the_parts_that_hold_it(tmp_path: Path) -> None:
    stored = open_stored(a_sharded_checkpoint(tmp_path / "step-000003"))
    for name, tensor in WHOLE.items():
        assert torch.equal(stored.read(name), tensor)
    whole = WHOLE["proj.weight"]
    for top in range(8):
        for left in range(10):
            for rows, columns in ((1, 1), (8 - top, 10 - left), (min(3, 8 - top), min(4, 10 - left))):
                block = stored.read("proj.weight", start=(top, left), shape=(rows, columns))
                assert torch.equal(block, whole[top : top + rows, left : left + columns])
    assert stored.facts["step"] == 3 and {file.node for file in stored.files.values()} == {"node-1"}


def test_a_run_directory_gives_its_newest_whole_checkpoint(tmp_path: Path) -> None:
    a_sharded_checkpoint(tmp_path / "run" / "checkpoints" / "step-000003")
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep_last=3, keep_best=0)

    def write(folder: Path) -> None:
        a_model(folder / "model")
        (folder / "actor.pt").write_bytes(b"state")

    newest = store.save(12, write=write, state={}, score=None)
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints", newest):
        stored = open_stored(path)
        assert stored.origin == str(newest) and stored.facts["step"] == 12
        assert torch.equal(stored.read("embed.weight"), WHOLE["embed.weight"])
    (newest / "actor.pt").unlink()
    assert open_stored(tmp_path / "run").facts["step"] == 3
    assert newest_checkpoint(tmp_path / "nothing") is None


def test_files_that_stayed_on_another_node_are_named_with_it_and_read_once_they_are_here(tmp_path: Path) -> None:
    run = tmp_path / "run" / "checkpoints"
    step = a_sharded_checkpoint(run / "step-000003")
    part = "model/part-00001-of-00003.safetensors"
    away = tmp_path / "disk" / "part-1"
    write_manifest(step, step=3, **{part: {"place": str(away), "node": "node-7"}})
    away.parent.mkdir()
    (step / part).rename(away)
    assert torch.equal(open_stored(step).read("proj.weight"), WHOLE["proj.weight"])
    away.rename(tmp_path / "elsewhere")
    with pytest.raises(StoredError, match=r"part-1 \(written on node node-7\) does not exist on this machine"):
        open_stored(tmp_path / "run")
    (tmp_path / "elsewhere").rename(step / part)
    assert torch.equal(open_stored(step).read("proj.weight"), WHOLE["proj.weight"])


def _break(step: Path, how: str) -> str:
    """Damage a sharded checkpoint; the name that a message must have."""
    first, second = (step / "model" / f"part-0000{n}-of-00003.safetensors" for n in (0, 1))
    if how == "missing":
        second.unlink()
        return second.name
    if how == "cut off":
        second.write_bytes(second.read_bytes()[:-1])
        return second.name
    if how == "header damaged":
        data = bytearray(second.read_bytes())
        data[8:12] = b"oops"
        second.write_bytes(data)
        return second.name
    if how == "a part twice":
        second.write_bytes(first.read_bytes())
        write_manifest(step, step=3)
        return second.name
    if how == "a part of another cut":
        a_part(
            second, [("embed.weight", (3, 0), (2, 6)), ("proj.weight", (0, 5), (4, 5)), ("proj.weight", (4, 0), (4, 2))]
        )
        write_manifest(step, step=3)
        return "embed.weight"
    (step / "manifest.json").write_text(how)
    return "manifest.json"


@pytest.mark.parametrize(
    "how", ["missing", "cut off", "header damaged", "a part twice", "a part of another cut", "[]", "{", '{"files": {"../x": {}}}']
)  # fmt: skip
def test_a_damaged_sharded_checkpoint_is_refused_by_the_name_of_what_is_wrong(tmp_path: Path, how: str) -> None:
    step = a_sharded_checkpoint(tmp_path / "step-000003")
    named = _break(step, how)
    with pytest.raises(StoredError, match=named):
        open_stored(step)


def test_parts_that_disagree_about_a_tensor_are_refused(tmp_path: Path) -> None:
    for number, dtype in enumerate((torch.float32, torch.bfloat16)):
        about = {"x": {"name": "x", "start": [number, 0], "shape": [2, 4]}}
        save_file({"x": torch.zeros(1, 4, dtype=dtype)}, tmp_path / f"{number}", metadata={"parts": json.dumps(about)})
    files = [StoredFile(path=tmp_path / name, size=(tmp_path / name).stat().st_size) for name in ("0", "1")]
    with pytest.raises(StoredError, match="do not belong to the same checkpoint"):
        open_parts(files, origin="test")


@pytest.mark.parametrize(
    "how", ["no file", "a file of the index", "an extra copy", "cut off", "a pipe", "no index", "outside"]
)
def test_a_damaged_model_directory_is_refused(tmp_path: Path, how: str) -> None:
    folder = a_model(tmp_path / "m", files=3)
    second, index = folder / "model-00002-of-00003.safetensors", folder / "model.safetensors.index.json"
    if how == "no file":
        for path in folder.glob("*.safetensors*"):
            path.unlink()
    elif how == "a file of the index":
        second.unlink()
    elif how == "an extra copy":
        index.unlink()
        save_file(load_file(second), folder / "other.safetensors")
    elif how == "cut off":
        second.write_bytes(second.read_bytes()[:-1])
    elif how == "a pipe":
        second.rename(folder / "elsewhere")
        index.unlink()
        os.mkfifo(second)
    elif how == "no index":
        index.unlink()
        second.unlink()
    else:
        index.write_text(json.dumps({"weight_map": {"x": "../x.safetensors"}}))
    with pytest.raises(StoredError):
        open_stored(folder)
    with pytest.raises(StoredError, match="not a directory"):
        open_stored(tmp_path / "absent")


def test_blocks_must_cover_a_tensor_exactly_once() -> None:
    def tensor(*blocks: tuple[tuple[int, int], tuple[int, int]]) -> StoredTensor:
        pieces = tuple(Piece(file=Path(f"f{n}"), offset=0, start=a, shape=s) for n, (a, s) in enumerate(blocks))
        return StoredTensor(name="x", dtype=DTYPES["float32"], shape=(4, 4), pieces=pieces)

    refuse_gaps(tensor(((0, 0), (4, 4))), origin="o")
    refuse_gaps(tensor(((0, 0), (2, 4)), ((2, 0), (2, 1)), ((2, 1), (2, 3)), ((4, 0), (0, 4))), origin="o")
    for wrong in (
        tensor(),
        tensor(((0, 0), (3, 4))),
        tensor(((0, 0), (4, 4)), ((0, 0), (4, 4))),
        tensor(((0, 0), (3, 4)), ((2, 0), (2, 4))),
        tensor(((0, 0), (2, 4)), ((2, 0), (2, 3)), ((1, 1), (2, 1))),  # as many elements as the tensor has
        tensor(((0, 0), (4, 5))),
    ):
        with pytest.raises(StoredError):
            refuse_gaps(wrong, origin="o")


def test_every_type_that_is_stored_is_that_of_torch() -> None:
    for name, dtype in DTYPES.items():
        assert str(dtype) == str(dtype.torch) and dtype.torch.itemsize == dtype.itemsize, name
        assert dtype.torch.is_floating_point == dtype.is_floating_point, name


@pytest.mark.parametrize("name", [*ARCHITECTURES])
def test_the_known_models_have_the_tensors_that_transformers_gives_them(tmp_path: Path, name: str) -> None:
    config_class, _, extra = ARCHITECTURES[name]
    config = config_class(**{**SHAPE, **extra})
    config.architectures = [ARCHITECTURES[name][1].__name__]
    config.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    outline = known_outline(fields)
    assert outline is not None and outline == outline_of(tmp_path)


@pytest.mark.parametrize(
    "change",
    [{"model_type": "gpt2"}, {"architectures": ["LlamaForSequenceClassification"]}, {"tie_word_embeddings": None}, {"head_dim": None},
     {"quantization_config": {}}, {"auto_map": {}},
     {"attention_bias": "no"}],
)  # fmt: skip
def test_of_any_other_model_transformers_is_asked(change: dict[str, Any]) -> None:
    fields = {
        **SHAPE, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, "hidden_act": "silu",
        "attention_bias": False, "mlp_bias": False, "rope_theta": 10000.0,
    }  # fmt: skip
    assert known_outline(fields) is not None
    assert known_outline({**fields, **change}) is None
