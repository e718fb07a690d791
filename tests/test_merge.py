"""`rollcall merge`: the bytes are those of the model, and nothing that is wrong ever looks right."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from saved import a_state, our_checkpoint
from tiny import make_model, reference_logprobs, save_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM
from typer.testing import CliRunner
from verl_shards import write_verl

from rollcall.checkpoint.merge import plan, staging
from rollcall.checkpoint.merge.merge import merge, select
from rollcall.cli import progress_bar
from rollcall.cli.main import app
from rollcall.model.load import load_causal_lm
from rollcall.model.stored.tensors import Stored, StoredError

MANY_UNITS = 4 << 10


def shards(folder: Path, *, name: str = "qwen2-untied", world_size: int = 4, **options: Any) -> Path:
    config = save_model(folder.parent / f"config-{name}", name)
    return write_verl(folder, a_state(name), mesh=(world_size,), config=config, **options)


def merged_tensors(out: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in out.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("name", ["qwen2-untied", "qwen3-tied"])
def test_merged_shards_are_the_model_and_transformers_computes_the_same_with_them(tmp_path: Path, name: str) -> None:
    live = make_model(name)
    result = merge(shards(tmp_path / "actor", name=name), tmp_path / "out")
    opened: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True, dtype=torch.float32)
    loaded, info = opened
    assert not info["missing_keys"] and not info["unexpected_keys"]
    prompt, response = (torch.arange(5, 15).numpy(), torch.arange(15, 25).numpy())
    assert torch.equal(reference_logprobs(loaded.eval(), prompt, response), reference_logprobs(live, prompt, response))
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 40
    names = merged_tensors(tmp_path / "out").keys()
    assert ("lm_head.weight" in names) is (name == "qwen2-untied") and len(names) == result.num_tensors
    assert (tmp_path / "out" / "generation_config.json").is_file() and not list(tmp_path.glob(".merging-*"))


@pytest.mark.parametrize(
    ("mesh", "names", "dims"),
    [
        ((2, 2), ("ddp", "fsdp"), {}),
        ((2, 2), ("fsdp", "tp"), {"lm_head.weight": 0, "model.layers.0.mlp.down_proj.weight": 1}),
    ],
)
def test_two_dimensional_meshes_give_the_same_bytes(
    tmp_path: Path, mesh: Any, names: Any, dims: dict[str, int]
) -> None:
    config = save_model(tmp_path / "config", "qwen2-untied")
    folder = write_verl(tmp_path / "actor", a_state(), mesh=mesh, names=names, dims=dims, config=config)
    merge(folder, tmp_path / "out")
    merged = merged_tensors(tmp_path / "out")
    assert merged.keys() == a_state().keys()
    assert all(torch.equal(merged[key], tensor) for key, tensor in a_state().items())


def test_config_says_in_which_type_the_weights_are(tmp_path: Path) -> None:
    folder = shards(tmp_path / "actor")
    config = folder / "huggingface" / "config.json"
    fields = {key: value for key, value in json.loads(config.read_text()).items() if key != "dtype"}
    config.write_text(json.dumps({**fields, "torch_dtype": "bfloat16"}))  # of the model that a float32 run began with
    merge(folder, tmp_path / "out")
    opened: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert opened.dtype == torch.float32
    assert all(torch.equal(opened.state_dict()[key], tensor) for key, tensor in a_state().items())


@pytest.mark.parametrize("written", [True, False])
def test_experts_are_merged_under_the_names_of_a_directory_and_of_a_live_model(tmp_path: Path, written: bool) -> None:
    live = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=40, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, num_experts=4, num_experts_per_tok=2,
        )
    )  # fmt: skip
    live.save_pretrained(tmp_path / "model")
    state = load_file(tmp_path / "model" / "model.safetensors") if written else live.state_dict()
    assert ("model.layers.0.mlp.experts.3.up_proj.weight" in state) is written
    merge(write_verl(tmp_path / "actor", state, mesh=(2,), config=tmp_path / "model"), tmp_path / "out")
    opened: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(opened.state_dict()[key], tensor) for key, tensor in live.state_dict().items())
    name = "model.layers.0.mlp.experts.3.up_proj.weight" if written else "model.layers.0.mlp.experts.gate_up_proj"
    fewer = {key: tensor for key, tensor in state.items() if key != name}
    with pytest.raises(StoredError, match="1 tensor is missing"):
        merge(write_verl(tmp_path / "fewer", fewer, mesh=(1,), config=tmp_path / "model"), tmp_path / "out2")


def test_a_known_model_is_merged_without_an_import_that_takes_seconds(tmp_path: Path) -> None:
    folder = shards(tmp_path / "actor")
    code = (
        "import sys; from pathlib import Path; from rollcall.checkpoint.merge.merge import merge; "
        f"merge(Path({str(folder)!r}), Path({str(tmp_path / 'out')!r})); "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
    assert merged_tensors(tmp_path / "out").keys() == a_state().keys()


def test_files_are_no_larger_than_asked_and_the_index_names_them(tmp_path: Path) -> None:
    result = merge(shards(tmp_path / "actor"), tmp_path / "out", max_shard_size="40KB", dtype="bf16")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == result.num_files > 2 and all(path.stat().st_size < 45_000 for path in files)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    merged = merged_tensors(tmp_path / "out")
    assert index["weight_map"].keys() == merged.keys() == a_state().keys()
    assert all(torch.equal(merged[key], tensor.bfloat16()) for key, tensor in a_state().items())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in merged.values())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_our_sharded_checkpoint_is_merged_with_a_card_that_tells_the_run_and_no_paths(tmp_path: Path) -> None:
    our_checkpoint(tmp_path)
    result = merge(tmp_path / "run", tmp_path / "out")
    merged = merged_tensors(tmp_path / "out")
    assert all(torch.equal(merged[key], tensor) for key, tensor in a_state().items())
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| algorithm | grpo |" in card and "| step | 7 |" in card and "| score | 0.5 |" in card
    assert "critic is not part of the model" in card and "rollcall" in card
    assert (
        "secret" not in card
        and "hf_x" not in card
        and str(tmp_path) not in card
        and "/" not in result.facts["base model"]
    )


def test_further_chat_templates_are_kept(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    tokenizer.save_pretrained(folder)
    merge(folder, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer.chat_template


def test_a_plain_model_directory_is_cut_anew(tmp_path: Path) -> None:
    source = save_model(tmp_path / "m", "qwen2-tied")
    result = merge(source, tmp_path / "out", max_shard_size="20KB")
    assert result.num_files > 1 and any("no checksums" in note for note in result.notes)
    before, after = load_file(source / "model.safetensors"), merged_tensors(tmp_path / "out")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_flipped_byte_is_refused_by_the_name_of_its_file(tmp_path: Path) -> None:
    folder = shards(tmp_path / "actor")
    third = folder / "model_world_size_4_rank_2.pt"
    flip(third, third.stat().st_size // 2)
    with pytest.raises(StoredError, match="rank_2.pt: bytes .* have changed since"):
        merge(folder, tmp_path / "out")
    step = our_checkpoint(tmp_path)
    part = step / "model" / "part-00001-of-00003.safetensors"
    flip(part, part.stat().st_size - 3)
    with pytest.raises(
        StoredError,
        match=r"part-00001-of-00003.safetensors \(written on node node-1\): the file has changed since it was written",
    ):
        merge(step, tmp_path / "out")
    flip(part, part.stat().st_size - 3)
    config = step / "model" / "tokenizer.json"
    flip(config, config.stat().st_size // 2)
    with pytest.raises(StoredError, match=r"tokenizer.json .* has changed since it was written"):
        merge(step, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".merging-*"))


@pytest.mark.parametrize("how", ["missing", "cut off", "of another run"])
def test_a_wrong_part_is_refused_by_its_name_and_node(tmp_path: Path, how: str) -> None:
    step = our_checkpoint(tmp_path)
    part = step / "model" / "part-00001-of-00003.safetensors"
    if how == "missing":
        part.unlink()
    elif how == "cut off":
        part.write_bytes(part.read_bytes()[:-8])
    else:  # as large, and readable
        flip(part, part.stat().st_size - 1)
    with pytest.raises(StoredError, match=r"part-00001-of-00003.safetensors \(written on node node-1\)"):
        merge(step, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_a_checkpoint_without_its_tokenizer_or_a_config_is_refused(tmp_path: Path, name: str) -> None:
    step = our_checkpoint(tmp_path)
    (step / "model" / name).unlink()
    with pytest.raises(StoredError, match=f"is not complete: .*{name}"):
        merge(step, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("how", ["missing", "cut off", "a shard of another size"])
def test_a_wrong_set_of_shards_leaves_no_directory(tmp_path: Path, how: str) -> None:
    folder = shards(tmp_path / "actor")
    third = folder / "model_world_size_4_rank_2.pt"
    if how == "missing":
        third.unlink()
    elif how == "cut off":
        third.write_bytes(third.read_bytes()[:-100])
    else:
        write_verl(tmp_path / "other", a_state(intermediate_size=64), mesh=(4,))
        shutil.copy(tmp_path / "other" / third.name, third)
    with pytest.raises(StoredError):
        merge(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".merging-*"))


def test_weights_of_another_model_than_the_config_describes_are_refused(tmp_path: Path) -> None:
    folder = shards(tmp_path / "actor")
    config = json.loads((folder / "huggingface" / "config.json").read_text())
    more = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    (folder / "huggingface" / "config.json").write_text(json.dumps({**config, **more}))
    with pytest.raises(StoredError, match="12 tensors are missing"):
        merge(folder, tmp_path / "out")
    (folder / "huggingface" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(StoredError, match="ties lm_head.weight to .* but their stored values differ"):
        merge(folder, tmp_path / "out")
    shutil.rmtree(folder / "huggingface")
    with pytest.raises(StoredError, match="no config.json.*--base"):
        merge(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    merge(folder, tmp_path / "out", base=tmp_path / "config-qwen2-untied")
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_a_value_head_is_left_out_and_an_adapter_is_refused(tmp_path: Path) -> None:
    config = save_model(tmp_path / "config", "qwen2-untied")
    head = write_verl(tmp_path / "a", {**a_state(), "v_head.weight": torch.zeros(1, 64)}, mesh=(2,), config=config)
    assert any("v_head.weight is a value head" in note for note in merge(head, tmp_path / "out").notes)
    assert "v_head.weight" not in merged_tensors(tmp_path / "out")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    write_verl(tmp_path / "b", {name: torch.zeros(4, 4)}, mesh=(2,), config=config)
    with pytest.raises(StoredError, match="contains an adapter"):
        merge(tmp_path / "b", tmp_path / "out2")


def test_a_buffer_that_the_model_computes_is_left_out(tmp_path: Path) -> None:
    config = save_model(tmp_path / "config", "qwen2-untied")
    rotary = {"model.rotary_emb.inv_freq": torch.ones(8), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    folder = write_verl(tmp_path / "a", {**a_state(), **rotary}, mesh=(2,), config=config, plain=tuple(rotary))
    assert any("rotary_emb.inv_freq was left out" in note for note in merge(folder, tmp_path / "out").notes)
    assert merged_tensors(tmp_path / "out").keys() == a_state().keys()
    loaded = load_causal_lm(str(folder), device=torch.device("cpu"), dtype=torch.float32)
    assert torch.equal(loaded.state_dict()["lm_head.weight"], a_state()["lm_head.weight"])


def test_a_type_that_safetensors_lacks_is_refused_by_the_name_of_the_file(tmp_path: Path) -> None:
    config = save_model(tmp_path / "config", "qwen2-untied")
    state = {**a_state(), "lm_head.weight": torch.ones(40, 64).to(torch.float8_e8m0fnu)}
    folder = write_verl(tmp_path / "a", state, mesh=(1,), config=config, plain=tuple(state))
    with pytest.raises(StoredError, match=r"rank_0.pt: lm_head.weight is of type torch.float8_e8m0fnu.*use --dtype"):
        merge(folder, tmp_path / "out")


def test_numbers_that_do_not_fit_a_precision_are_refused(tmp_path: Path) -> None:
    config = save_model(tmp_path / "config", "qwen2-untied")
    state = a_state()
    state["lm_head.weight"][3, 5] = 1e6
    folder = write_verl(tmp_path / "a", state, mesh=(2,), config=config)
    with pytest.raises(StoredError, match="rank_0.pt: some weights would be infinite in torch.float16"):
        merge(folder, tmp_path / "out", dtype="fp16")
    with pytest.raises(ValueError, match="--dtype int8 is unknown"):
        merge(folder, tmp_path / "out", dtype="int8")
    for text in ("huge", "5"):  # five of what?
        with pytest.raises(ValueError, match=f"--max-shard-size {text!r} is not a size with a unit"):
            merge(folder, tmp_path / "out", max_shard_size=text)


def test_a_target_that_is_no_model_directory_is_refused(tmp_path: Path) -> None:
    folder = shards(tmp_path / "actor")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("mine")
    with pytest.raises(StoredError, match="thesis exists and is not a model directory"):
        merge(folder, tmp_path / "thesis")
    with pytest.raises(StoredError, match="which the merge reads"):
        merge(folder, folder / "huggingface")
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "mine"
    save_model(tmp_path / "old", "qwen2-tied", hidden_size=32)
    (tmp_path / "old" / "left-over.bin").write_bytes(b"x")
    merge(folder, tmp_path / "old")
    assert (
        merged_tensors(tmp_path / "old").keys() == a_state().keys()
        and not (tmp_path / "old" / "left-over.bin").exists()
    )


def after(bytes_done: int, act: Callable[[], None]) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        if done >= bytes_done:
            act()

    return progress


def test_a_merge_that_was_killed_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "UNIT_BYTES", MANY_UNITS)
    folder, out = shards(tmp_path / "actor"), tmp_path / "out"

    def kill() -> None:
        while not (tmp_path / ".merging-out" / staging.PROGRESS).stat().st_size:
            time.sleep(0.01)  # another thread notes what is on the disk
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        merge(folder, out, progress=after(150_000, kill))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL and not out.exists()
    result = merge(folder, out)
    assert 0 < result.continued_bytes < result.num_bytes
    merged = merged_tensors(out)
    assert all(torch.equal(merged[key], tensor) for key, tensor in a_state().items())
    assert not list(tmp_path.glob(".merging-*"))


@pytest.mark.parametrize("change", ["a shard", "the precision", "a written file"])
def test_what_an_interrupted_merge_left_is_not_used_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    monkeypatch.setattr(plan, "UNIT_BYTES", MANY_UNITS)
    folder, out = shards(tmp_path / "actor"), tmp_path / "out"

    def stop() -> None:
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        merge(folder, out, progress=after(150_000, stop))
    state, dtype = a_state(), "keep"
    if change == "a shard":
        state = {name: tensor + 1 for name, tensor in state.items()}
        write_verl(folder, state, mesh=(4,))
    elif change == "the precision":
        dtype, state = "bf16", {name: tensor.bfloat16() for name, tensor in state.items()}
    else:
        (tmp_path / ".merging-out" / "model" / "model.safetensors").write_bytes(b"")
    assert merge(folder, out, dtype=dtype).continued_bytes == 0
    merged = merged_tensors(out)
    assert all(torch.equal(merged[key], tensor) for key, tensor in state.items())


def test_a_disk_that_fills_up_leaves_no_model_and_the_next_start_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "UNIT_BYTES", MANY_UNITS)
    folder, out = shards(tmp_path / "actor"), tmp_path / "out"
    written = 0
    write = plan.write_at

    def full(fd: int, data: memoryview, offset: int) -> None:
        nonlocal written
        written += len(data)
        if written > 150_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(plan, "write_at", full)
        with pytest.raises(StoredError, match="No space left on device; free space"):
            merge(folder, out)
    assert not out.exists()
    with monkeypatch.context() as patch:
        patch.setattr(staging, "free_bytes", lambda path: 1000)
        with pytest.raises(StoredError, match="GB are free, and the merge needs"):
            merge(folder, out)
    assert merge(folder, out).continued_bytes > 0
    merged = merged_tensors(out)
    assert all(torch.equal(merged[key], tensor) for key, tensor in a_state().items())


def test_two_merges_to_one_target_do_not_meet(tmp_path: Path) -> None:
    folder, out = shards(tmp_path / "actor"), tmp_path / "out"

    def second() -> None:
        with pytest.raises(StoredError, match="another merge is writing"):
            merge(folder, out)

    merge(folder, out, progress=lambda done, total: second() if done == 0 else None)
    assert (out / "config.json").is_file()


def test_a_lock_that_ended_with_its_folder_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another merge ends between the moment when its lock is opened here and the moment when it is free."""
    folder, ended = tmp_path / ".merging-out", []
    lock = fcntl.flock

    def late(fd: int, how: int) -> None:
        if not ended:
            ended.append(shutil.rmtree(folder))
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with staging.locked(folder, tmp_path / "out"):
        assert ended and (folder / "lock").is_file()


def test_the_command_answers_people_and_programs(tmp_path: Path) -> None:
    folder, out = shards(tmp_path / "actor"), tmp_path / "out"
    shown = CliRunner().invoke(app, ["merge", str(folder), "--out", str(out)])
    assert shown.exit_code == 0 and "verl checkpoint" in shown.output and "kB in 1 file" in shown.output
    asked = CliRunner().invoke(app, ["merge", str(folder), "--out", str(out), "--json"])
    assert json.loads(asked.stdout)["tensors"] == len(a_state())
    refused = CliRunner().invoke(app, ["merge", str(tmp_path / "nothing"), "--out", str(out)])
    assert refused.exit_code == 1 and "is not a directory; use a checkpoint" in refused.output
    (tmp_path / "checkpoints" / "step-000002").mkdir(parents=True)
    refused = CliRunner().invoke(app, ["merge", str(tmp_path / "checkpoints" / "step-000001"), "--out", str(out)])
    assert refused.exit_code == 1 and "its folder contains step-000002" in " ".join(refused.output.split())


def test_what_cannot_be_verified_is_refused_before_it_is_merged(tmp_path: Path) -> None:
    folder, out = shards(tmp_path / "actor"), tmp_path / "out"
    base = tmp_path / "base"
    shutil.copytree(folder / "huggingface", base)
    (base / "probe.json").write_text("{}")  # of another model
    refused = CliRunner().invoke(app, ["merge", str(folder), "--out", str(out), "--base", str(base), "--verify"])
    assert refused.exit_code == 1 and "--verify has nothing to compare with" in " ".join(refused.output.split())
    assert not out.exists()
    merge(folder, out, base=base)
    assert not (out / "probe.json").exists()


def test_what_a_checkpoint_calls_things_stays_text_in_the_card_and_on_the_terminal(tmp_path: Path) -> None:
    step = our_checkpoint(tmp_path)
    fields = json.loads((step / "manifest.json").read_text())
    fields["scores"] = {"<img src=x>\n# [a](b)": 1.0, "large": 10**400}
    (step / "manifest.json").write_text(json.dumps(fields))
    merge(step, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| &lt;img src=x> # \\[a](b) | 1 |" in card
    fields["scores"] = [1]
    fields["files"] |= {"model/part-9-of-9.safetensors": {"size": 1, "blake2b": "x", "node": "\x1b[2J"}}
    (step / "manifest.json").write_text(json.dumps(fields))
    said = CliRunner().invoke(app, ["merge", str(step), "--out", str(tmp_path / "other")])
    assert said.exit_code == 1 and "written on node \N{REPLACEMENT CHARACTER}[2J" in said.stderr
    with pytest.raises(ValueError, match="is not a size"):
        merge(step, tmp_path / "other", max_shard_size="9" * 400 + "GB")


def test_a_folder_with_files_of_somebody_is_not_replaced(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "qwen2-untied")
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    (project / "config.json").write_text("{}")
    with pytest.raises(StoredError, match="contains src, which is not part of a model"):
        merge(model, project)
    assert (project / "src").is_dir()


def test_more_layers_than_any_model_has_are_refused_before_they_are_built(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "num_hidden_layers": 10000000}')
    stored = Stored(origin="here", tensors={}, files={}, folder=tmp_path)
    with pytest.raises(StoredError, match="num_hidden_layers=10000000 is not valid"):
        select(stored, tmp_path)


def test_progress_is_told_once_there_is_some(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollcall.cli.SAY_EVERY_S", 0.0)
    with progress_bar("merge") as progress:
        progress(0, 2000)
        progress(1000, 2000)
    assert capsys.readouterr().err == "merge: 1.00 kB of 2.00 kB\n"
