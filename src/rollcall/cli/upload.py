"""`rollcall upload`: a verified model directory to the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollcall.cli import Json, answer, calm_libraries


def upload(
    model_dir: Annotated[Path, typer.Argument(metavar="DIR", help="Model directory, such as one that merge made.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="OWNER/NAME on the hub; made if it does not exist.")],
    private: Annotated[
        bool, typer.Option("--private", help="Make it private; refuse one that everyone can read.")
    ] = False,
    revision: Annotated[str | None, typer.Option("--revision", help="Branch to upload to.")] = None,
    as_json: Json = False,
) -> None:
    """Upload a model directory to the hub, after verify: only the model that was trained goes there.

    The token is HF_TOKEN's, or that of `hf auth login`. HF_ENDPOINT names another hub.

    \b
    Examples:
      rollcall upload runs/gsm8k/model me/gsm8k-model --private
      rollcall upload runs/gsm8k/merged me/gsm8k-model --revision step-200
    """
    calm_libraries()
    from rollcall.finish.upload import upload as send

    done = send(model_dir, repo, private=private, revision=revision)
    answer(done, lambda _: print(f"uploaded {done.num_files} files: {done.url}"), as_json=as_json)
