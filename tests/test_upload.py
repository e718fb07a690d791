"""Uploads with the real client of the hub, to a hub on this machine that fails in many ways."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from hub_server import CUT, REPO, TOKEN, Fault, Hub, hub
from learners import learner_of, step
from safetensors.torch import load_file, save_file
from tiny import make_tokenizer, save_model
from typer.testing import CliRunner

from rollcall.checkpoint.training import export_learner
from rollcall.checkpoint.verify import VERIFIED, VerifyError, verify
from rollcall.cli.main import app
from rollcall.launch.finish import upload as module
from rollcall.launch.finish.upload import UploadError, upload
from rollcall.learner.gang import Gang
from rollcall.model.stored.find import PROBE

assert hub  # a fixture of these tests too


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    learner = learner_of(Gang.alone())
    step(learner, 1)
    export_learner(learner, make_tokenizer(), folder / "model")
    verify(folder / "model")
    return folder / "model"


@pytest.fixture
def model(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "model"))


def contents(model: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in model.iterdir() if path.name not in (PROBE, VERIFIED)}


def test_a_verified_model_is_on_the_hub_whole(hub: Hub, model: Path) -> None:
    done = upload(model, REPO)
    assert hub.files(REPO) == contents(model) == hub.files(REPO, done.commit)
    assert done.num_files == len(contents(model)) and not hub.repos[REPO].private
    sent = [line for line in hub.requests if line.startswith("PUT")]
    again = upload(model, REPO)
    assert hub.files(REPO, again.commit) == contents(model)
    assert [line for line in hub.requests if line.startswith("PUT")] == sent, "what is there was sent again"


def test_weights_of_an_earlier_model_are_removed_and_other_files_stay(hub: Hub, model: Path) -> None:
    upload(model, REPO)
    found = hub.repos[REPO]
    held = found.commits[found.branches["main"]]
    for name in ("model-00002-of-00002.safetensors", "model.safetensors.index.json", "notes.txt"):
        held[name] = held["config.json"]
    upload(model, REPO)
    assert hub.files(REPO).keys() == contents(model).keys() | {"notes.txt"}


def test_a_branch_is_made_and_the_main_one_is_left_alone(hub: Hub, model: Path) -> None:
    done = upload(model, REPO, revision="step/200")
    assert done.revision == "step/200"
    assert hub.files(REPO, "step/200") == contents(model) and hub.files(REPO) == {}
    upload(model, REPO, revision="step/200")


def test_private_is_private_or_refused(hub: Hub, model: Path) -> None:
    upload(model, REPO, private=True)
    assert hub.repos[REPO].private
    hub.repos[REPO].private = False
    before = dict(hub.repos[REPO].commits)
    with pytest.raises(UploadError, match="exists and is public, but --private was given"):
        upload(model, REPO, private=True)
    assert hub.repos[REPO].commits == before


def test_a_wrong_model_never_leaves_this_machine(hub: Hub, model: Path, tmp_path: Path) -> None:
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"].zero_()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(VerifyError, match="is not the model that was trained"):
        upload(model, REPO)
    with pytest.raises(UploadError, match=r"has no probe.json.*rollcall merge CHECKPOINT --out DIR --verify"):
        upload(save_model(tmp_path / "base"), REPO)
    with pytest.raises(UploadError, match="is not a model directory"):
        upload(tmp_path, REPO)
    with pytest.raises(ValueError, match="'gsm8k' is not a repository name; write OWNER/NAME"):
        upload(model, "gsm8k")
    assert hub.repos == {} and hub.requests == []


def test_a_model_that_was_not_verified_yet_is_verified_first(hub: Hub, model: Path) -> None:
    (model / VERIFIED).unlink()
    (model / "LICENSE").write_text("free")
    upload(model, REPO)
    assert hub.files(REPO)["LICENSE"] == b"free" and (model / VERIFIED).exists()


@pytest.mark.parametrize(
    "fault",
    [
        Fault("POST", "/api/repos/create", 500, count=2),
        Fault("POST", "/preupload/", 503, count=2),
        Fault("POST", "/objects/batch", 500, count=2),
        Fault("PUT", "/objects/", 500, count=2),
        Fault("PUT", "/objects/", CUT, count=2),
        Fault("POST", "/commit/", 500, count=2),
        Fault("POST", "/commit/", CUT),
        Fault("POST", "/commit/", CUT, after=True),
        Fault("POST", "/commit/", 409, message="another commit"),
        Fault("POST", "/commit/", 429),
        Fault("POST", "/paths-info/", 502),
    ],
    ids=lambda fault: f"{fault.path}-{fault.status}{'-after' if fault.after else ''}",
)
def test_faults_that_pass_are_waited_for(hub: Hub, model: Path, fault: Fault) -> None:
    hub.faults = [fault]
    upload(model, REPO)
    assert fault.count == 0 and hub.files(REPO) == contents(model)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault("POST", "/api/repos/create", 401, count=9), "the token is wrong or has expired"),
        (Fault("POST", "/commit/", 403, message="you may only read", count=9), "status 403: .*you may only read.*needs write access"),
        (Fault("POST", "/objects/batch", 413, message="quota of 100 GB", count=9), "quota of 100 GB.*does not have enough storage"),
        (Fault("PUT", "/objects/", 403, message="storage limit", count=9), "storage limit.*the account needs storage"),
        (Fault("POST", "/commit/", 500, count=99), "status 500.*Run the same command again"),
        (Fault("POST", "/commit/", CUT, count=99), "Run the same command again"),
    ],
    ids=lambda value: f"{value.path}-{value.status}" if isinstance(value, Fault) else "",
)  # fmt: skip
def test_faults_that_stay_are_said_in_words_and_nothing_is_committed(
    hub: Hub, model: Path, fault: Fault, message: str
) -> None:
    hub.faults = [fault]
    with pytest.raises(UploadError, match=message) as refused:
        upload(model, REPO)
    assert TOKEN not in str(refused.value)
    assert REPO not in hub.repos or hub.files(REPO) == {}
    hub.faults = []
    upload(model, REPO)
    assert hub.files(REPO) == contents(model)


@pytest.mark.parametrize(
    ("said", "tries", "advice"),
    [
        (
            "HTTP status client error (404 Not Found), domain: http://hub/xet-write-token/main",
            1,
            "HF_HUB_DISABLE_XET=1",
        ),
        ("HTTP status client error (403 Forbidden), domain: http://cas", 1, "the token needs write access"),
        ("HTTP status server error (503 Service Unavailable), domain: http://cas", 4, "Run the same command again"),
    ],
)
def test_the_storage_client_has_its_status_in_words(
    monkeypatch: pytest.MonkeyPatch, said: str, tries: int, advice: str
) -> None:
    monkeypatch.setattr(module, "WAITS_S", (0.0,) * 3)
    asked: list[int] = []

    def call() -> None:
        asked.append(1)
        raise RuntimeError(f"Network error: Request error: {said}")

    with pytest.raises(UploadError, match=advice):
        module._patiently("uploading", call)
    assert len(asked) == tries


def test_what_the_hub_holds_is_compared_with_what_was_sent(hub: Hub, model: Path) -> None:
    hub.drops_half = True
    with pytest.raises(UploadError, match=r"for model.safetensors, but the local file has .* bytes"):
        upload(model, REPO)
    hub.drops_half, hub.ignored = False, {"config.json"}
    with pytest.raises(UploadError, match=r"has nothing for config.json.*\.gitignore"):
        upload(model, "someone/other")


def test_without_a_token_or_with_a_wrong_name_nothing_is_asked(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="is not a repository name"):
        upload(model, "../../etc")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    with pytest.raises(UploadError, match="set HF_TOKEN, or log in with `hf auth login`"):
        upload(model, REPO)
    assert hub.requests == []
    monkeypatch.setenv("HF_TOKEN", "hf_wrongwrongwrong")
    with pytest.raises(UploadError, match="the token is wrong or has expired") as refused:
        upload(model, REPO)
    assert "wrongwrong" not in str(refused.value)


def test_the_command_says_where_the_model_is(hub: Hub, model: Path) -> None:
    done = CliRunner().invoke(app, ["upload", str(model), REPO, "--private", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["url"].startswith(hub.url) and found["revision"] == "main" and hub.repos[REPO].private
    assert TOKEN not in done.output


@pytest.mark.parametrize("name", [".env", "notes.txt", "thesis.docx"])
def test_what_is_not_of_the_model_is_not_uploaded(hub: Hub, model: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "key").write_text("a secret")
    if name == "notes.txt":
        (model / name).symlink_to(tmp_path / "key")
    else:
        (model / name).write_text("a secret")
    with pytest.raises(UploadError, match=f"{name} is not a model file"):
        upload(model, REPO)
    assert not hub.requests
