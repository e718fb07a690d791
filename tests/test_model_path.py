"""``model.path`` may be a checkpoint: a run starts from another run's, from verl's or from PyTorch's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from runs import make_run
from saved import our_checkpoint, save_dcp
from tiny import make_model, save_model
from verl_shards import write_verl

from rollcall.base.errors import ModelFilesError
from rollcall.model.files import resolve_model
from rollcall.model.load import load_causal_lm, load_tokenizer, outline_causal_lm
from rollcall.plan.memory import read_sizes
from rollcall.run.evaluation import plan_evaluation
from rollcall.run.training import train

CPU = torch.device("cpu")


def saved(folder: Path, kind: str) -> Path:
    """The same model in another form."""
    state = make_model("qwen2-untied").state_dict()
    if kind.startswith("ours"):
        step = our_checkpoint(folder)
        return {"ours": step, "ours, its model": step / "model", "ours, the run": folder / "run"}[kind]
    config = save_model(folder / "config", "qwen2-untied")
    if kind == "verl":
        return write_verl(folder / "global_step_3" / "actor", state, mesh=(2, 2), names=("ddp", "fsdp"), config=config)
    save_dcp({"model": state}, folder / "dcp")
    for path in config.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder / "dcp" / path.name)
    return folder / "dcp"


@pytest.mark.parametrize("kind", ["ours", "ours, its model", "ours, the run", "verl", "dcp"])
def test_a_checkpoint_is_loaded_as_its_model_directory_would_be(tmp_path: Path, kind: str) -> None:
    path = saved(tmp_path, kind)
    make_model("qwen2-untied").save_pretrained(tmp_path / "same")
    one = load_causal_lm(resolve_model(str(path)), device=CPU, dtype=torch.float32)
    other = load_causal_lm(str(tmp_path / "same"), device=CPU, dtype=torch.float32)
    assert one.state_dict().keys() == other.state_dict().keys() and type(one) is type(other)
    assert all(torch.equal(one.state_dict()[name], tensor) for name, tensor in other.state_dict().items())
    buffers = dict(one.named_buffers())
    assert all(torch.equal(buffers[name], tensor) for name, tensor in other.named_buffers())
    assert one.generation_config.eos_token_id == other.generation_config.eos_token_id
    assert len(load_tokenizer(str(path), chat_template=None)) == 40
    assert outline_causal_lm(str(path), dtype=torch.float32).device.type == "meta"
    assert read_sizes(str(path)).num_parameters == sum(tensor.numel() for tensor in other.parameters())
    assert load_causal_lm(str(path), device=CPU, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_folder_of_verl_is_read_from_the_step_that_it_names(tmp_path: Path) -> None:
    """All processes load the same one, and it can be said which, while that run goes on."""
    for step in (20, 40):
        (tmp_path / f"global_step_{step}" / "actor").mkdir(parents=True)
        (tmp_path / f"global_step_{step}" / "actor" / "model_world_size_1_rank_0.pt").touch()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("40")
    assert resolve_model(str(tmp_path)) == str(tmp_path / "global_step_40" / "actor")
    assert resolve_model(str(tmp_path / "global_step_20")) == str(tmp_path / "global_step_20" / "actor")
    actor = str(tmp_path / "global_step_20" / "actor")
    assert resolve_model(actor) == actor


def test_a_wrong_checkpoint_is_refused_by_its_file(tmp_path: Path) -> None:
    folder = saved(tmp_path, "verl")
    (folder / "model_world_size_4_rank_3.pt").unlink()
    with pytest.raises(ModelFilesError, match=r"model.path=.*lacks model_world_size_4_rank_3.pt"):
        load_causal_lm(str(folder), device=CPU, dtype=torch.float32)
    shutil.rmtree(folder / "huggingface")
    with pytest.raises(ModelFilesError, match="no config.json"):
        load_causal_lm(str(folder), device=CPU, dtype=torch.float32)
    other = {name: tensor for name, tensor in make_model("qwen2-untied").state_dict().items() if "mlp" not in name}
    write_verl(tmp_path / "less", other, mesh=(2,), config=tmp_path / "config")
    with pytest.raises(ModelFilesError, match="6 tensors are missing"):
        load_causal_lm(str(tmp_path / "less"), device=CPU, dtype=torch.float32)


@pytest.mark.slow
def test_a_run_starts_from_another_runs_checkpoint_and_its_evaluation_reads_one(tmp_path: Path) -> None:
    first = make_run(tmp_path, "trainer.steps=1", name="first")
    train(first)
    second = make_run(tmp_path, "trainer.steps=1", "actor.lr=1e-30", name="second", model=first.run.dir)
    train(second)
    weights = [
        load_causal_lm(str(path), device=CPU, dtype=torch.float32).state_dict()
        for path in (first.run.dir / "model", second.run.dir / "model", first.run.dir)
    ]
    assert all(torch.equal(weights[0][name], one[name]) for one in weights for name in weights[0])
    (step,) = (first.run.dir / "checkpoints").iterdir()
    plan = plan_evaluation(
        step, overrides=[], data=str(tmp_path / "train.jsonl"), samples=None, temperature=None, max_prompts=None
    )
    assert plan.model_path == str(step)
