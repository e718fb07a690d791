"""`finish:` of a run file: what `rollcall finish` makes of the run's last checkpoint."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from rollcall.config.base import Section, field
from rollcall.words import parse_size

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_BRANCH = re.compile(r"[A-Za-z0-9][\w./-]*")


def _check_repo(name: str) -> str:
    if not _REPO.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is not the name of a repository; write OWNER/NAME")
    return name


def check_branch(name: str) -> str:
    if not _BRANCH.fullmatch(name) or ".." in name:
        raise ValueError(f"{name[:80]!r} is not the name of a branch; use letters, digits and . _ - /")
    return name


def _check_size(text: str) -> str:
    parse_size(text)
    return text


class UploadSection(Section):
    repo: Annotated[str, AfterValidator(_check_repo)] = Field(
        description="Model repository on the hub, `OWNER/NAME`; made if it does not exist."
    )
    private: bool = field(False, "Make it private, and refuse a repository that everyone can read.")
    revision: Annotated[str, AfterValidator(check_branch)] | None = field(
        None, "Branch to upload to; `null`: the main one."
    )


class FinishSection(Section):
    dtype: Literal["keep", "bf16", "fp16", "fp32"] = field(
        "keep", "Precision of the merged model; `keep`: as it was trained."
    )
    max_shard_size: Annotated[str, AfterValidator(_check_size)] = field(
        "5GB", "Largest weight file, such as `5GB` or `512MiB`."
    )
    upload: UploadSection | None = field(
        None, "Where the model goes when it is verified. The token is `HF_TOKEN`, or that of `hf auth login`."
    )
