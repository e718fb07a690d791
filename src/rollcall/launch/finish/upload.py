"""Uploads a verified model directory to a repository on the hub with huggingface_hub.

The token comes from the environment or from the library's own login. One commit contains all files, so the repository has either
the old model or the new one. After the upload, the sizes of the hub's files are checked. Transient errors (no answer, status 429
or 5xx) are retried, and files that were uploaded before an error are not sent again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rollcall.base.redact import redact, remember
from rollcall.base.wait import say
from rollcall.base.words import visible
from rollcall.checkpoint.merge.card import not_of_a_model
from rollcall.checkpoint.verify import mark_of, verify, why_not_verified
from rollcall.config.launch import check_repo
from rollcall.model.stored.find import PROBE

WAITS_S = (2.0, 5.0, 15.0, 30.0, 60.0)  # between attempts
_PASSES = frozenset({408, 409, 412, 425, 429, 500, 502, 503, 504})  # 409, 412: a simultaneous commit
_ADVICE = {
    401: "the token is wrong or has expired: set HF_TOKEN, or log in with `hf auth login`",
    403: "the token needs write access to this repository (see the hub's settings, Access Tokens), and the account needs storage for it",
    404: "check that the owner's name is right and that HF_ENDPOINT names the right hub",
    413: "the account does not have enough storage: free some, or choose another owner",
}
_WEIGHTS = ["*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json"]
_STATUS = re.compile(r"HTTP status (?:client|server) error \((\d{3})")
T = TypeVar("T")


class UploadError(RuntimeError, ValueError):
    """A model was not uploaded; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uploaded:
    repo: str
    revision: str
    commit: str  # the commit's id
    url: str  # the commit's page
    num_files: int


def upload(model_dir: Path, repo: str, *, private: bool = False, revision: str | None = None) -> Uploaded:
    """Upload ``model_dir`` to the model repository ``repo``, which is created if it does not exist.

    ``private``: refuse a repository that others can read. ``revision``: the branch; None means main. Only verified files are
    uploaded.
    """
    check_repo(repo)
    names = verified_files(model_dir)
    api = _client()
    branch = revision or "main"
    _patiently(f"creating {repo}", lambda: api.create_repo(repo, private=private or None, exist_ok=True))
    if private and not _patiently(f"looking up {repo}", lambda: api.model_info(repo)).private:
        raise UploadError(
            f"{repo} exists and is public, but --private was given; make it private on its settings page, or choose "
            "another name"
        )
    if branch != "main":
        _patiently(f"creating branch {branch}", lambda: api.create_branch(repo, branch=branch, exist_ok=True))
    say(f"uploading {len(names)} files to {repo} ({branch})")
    commit = _patiently(
        f"uploading to {repo}",
        lambda: api.upload_folder(
            repo_id=repo,
            folder_path=model_dir,
            allow_patterns=names,
            delete_patterns=_WEIGHTS,
            commit_message="Upload a model trained with Rollcall",
            revision=branch,
        ),
    )
    held = _patiently(f"listing the files of {repo}", lambda: api.get_paths_info(repo, names, revision=commit.oid))
    sizes = {info.path: f"{info.size:,} bytes" for info in held}
    for name in names:
        here = f"{(model_dir / name).stat().st_size:,} bytes"
        if sizes.get(name) != here:
            raise UploadError(
                f"{repo} has {sizes.get(name, 'nothing')} for {name}, but the local file has {here}; upload it again, and check "
                "whether the repository's .gitignore lists it"
            )
    return Uploaded(repo=repo, revision=branch, commit=commit.oid, url=commit.commit_url, num_files=len(names))


def verified_files(model_dir: Path) -> list[str]:
    """Return a verified directory's files. A directory that has a probe but is not verified yet is verified first."""
    if not (model_dir / "config.json").is_file():
        raise UploadError(
            f"{model_dir} is not a model directory: it has no config.json; choose one that `rollcall merge` wrote"
        )
    if (other := not_of_a_model(model_dir)) is not None:
        raise UploadError(
            f"{other} is not a model file (it is hidden, a link, or of an unknown type), so nothing was uploaded; remove it"
        )
    if why := why_not_verified(model_dir):
        if not (model_dir / PROBE).is_file():
            raise UploadError(
                f"{model_dir} has no {PROBE}, so it cannot be compared with the trained model, and only verified models are uploaded; "
                "merge its checkpoint with `rollcall merge CHECKPOINT --out DIR --verify`. If Rollcall did not train this model, "
                "upload it with `hf upload`"
            )
        say(f"{model_dir}: {why}; verifying it")
        mark = mark_of(model_dir)
        say(verify(model_dir, dtype=None if mark is None else mark["dtype"]).words)
    mark = mark_of(model_dir)
    assert mark is not None
    return sorted(mark["files"])


def _client() -> Any:
    from huggingface_hub import HfApi, constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise UploadError("HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it")
    token = get_token()
    if token is None:
        raise UploadError("the hub needs a token to write: set HF_TOKEN, or log in with `hf auth login`")
    remember([token])
    return HfApi()


def _patiently(what: str, call: Callable[[], T]) -> T:
    """Call the hub and return its answer; retry after transient errors."""
    for wait_s in (*WAITS_S, None):
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - the client raises its own errors and those of two HTTP libraries
            status = _status(error)
            # An error without a status is a network fault, unless the client itself refuses its arguments.
            passes = status in _PASSES if status is not None else not isinstance(error, ValueError | TypeError)
            reason = _reason(error, status)
            if not passes or wait_s is None:
                raise UploadError(f"{what} failed: {reason}{_advice(status, reason)}") from error
            say(f"{what}: {reason}; trying again in {wait_s:.0f} s")
        time.sleep(wait_s)
    raise AssertionError("unreachable")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _status(error: BaseException) -> int | None:
    """Return an error's HTTP status, or None if there was no response. The storage client gives the status only in the message."""
    for each in _chain(error):
        code = getattr(getattr(each, "response", None), "status_code", None)
        if isinstance(code, int):
            return code
        if found := _STATUS.search(str(each)):
            return int(found[1])
    return None


def _reason(error: BaseException, status: int | None) -> str:
    """Return the message from the hub or the network in one line."""
    texts = [getattr(each, "server_message", None) for each in _chain(error)]
    texts += [str(each).strip() for each in _chain(error)]
    shown = " ".join(redact(visible(next(filter(None, texts), type(error).__name__))).split())[:300]
    return f"status {status}: {shown}" if status is not None and str(status) not in shown else shown


def _advice(status: int | None, reason: str) -> str:
    if status == 404 and "xet" in reason:
        return "; this hub has no Xet storage; set HF_HUB_DISABLE_XET=1 to upload without it"
    if status in _ADVICE:
        return f"; {_ADVICE[status]}"
    return ". Run the same command again when the hub answers (HF_ENDPOINT chooses a different hub); uploaded files are not sent again"
