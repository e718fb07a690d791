"""Downloads a model from the hub into this machine's cache before a run needs it.

The hub client has a timeout per piece but not for the whole download, and it cannot be interrupted. So it runs in a separate
process, which is killed if no new bytes arrive.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rollcall.base.wait import Wait, say
from rollcall.model.files import resolve_model
from rollcall.model.hub import HubError, cached_folder, first_line, hub_options
from rollcall.process.here import spawn
from rollcall.process.worker import Lost

STANDSTILL_S = 180.0  # without any new bytes
LOOK_EVERY_S = 2.0
# Copies of the weights in other formats. If there are safetensors, transformers reads nothing else.
OTHER_WEIGHTS = ["*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.ckpt", "*.gguf", "onnx/*", "original/*"]


def fetch_model(path: str, *, key: str = "model.path") -> Path:
    """Return the model's folder on this machine. Download the model if needed. Built-in models and directories are already local."""
    if path.startswith("builtin:"):
        folder = Path(resolve_model(path))
        say(f"{key}={path} comes with Rollcall; nothing to fetch")
        return folder
    if (local := Path(path).expanduser()).is_dir():
        say(f"{key}={path} is a directory; nothing to fetch")
        return local
    if local.exists() or path.startswith(("/", "./", "../", "~")) or path.count("/") > 1:
        raise HubError(f"{key}={path} is not a directory on this machine; use a model directory or a hub name")
    if hub_options(path, key=key):
        folder = cached_folder(path)
        assert folder is not None, "hub_options has seen it there"
        if not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
            raise HubError(
                f"{key}={path}: the hub cannot be reached, and the hub cache in {folder} has no weights for this model; check the "
                "network, or set HF_ENDPOINT to a mirror"
            )
        say(f"{key}={path}: the hub cannot be reached; using the cached copy in {folder}")
        return folder
    say(f"fetching {path}")
    folder = _download(path, key=key)
    say(f"{path} is in {folder}")
    return folder


def _download(name: str, *, key: str) -> Path:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    size, still = -1, Wait(STANDSTILL_S)

    def look(_: float) -> None:
        nonlocal size, still
        if (now := _bytes_in(cache)) != size:
            size, still = now, Wait(STANDSTILL_S)
        elif still.is_over:
            raise HubError(
                f"{key}={name}: the download has made no progress for {STANDSTILL_S:g} s, at {size / 2**20:.0f} MiB; check the "
                "network, then run the same command again: it continues where it stopped"
            )

    answers = {"fetch": json.loads}
    # It writes to file descriptor 2, so its progress bars are shown too.
    worker = spawn("rollcall.model.fetch:Downloader", name=f"the download of {name}", answers=answers, output=2)
    try:
        call = worker.begin("fetch", name, deadline_s=math.inf)
        answer: dict[str, str] = worker.wait(call, meanwhile=look, every_s=LOOK_EVERY_S)
    except Lost as lost:
        answer = {"error": lost.why}
    finally:
        worker.close()
    if "folder" in answer:
        return Path(answer["folder"])
    if "refused" in answer:
        raise HubError(f"{key}={name} {answer['refused']}")
    raise HubError(
        f"{key}={name} could not be downloaded ({answer['error']}); run the same command again: it continues where it stopped"
    )


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.glob("blobs/*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # the download finished and the file was renamed
            continue
    return total


class Downloader:
    """Runs in the separate process."""

    def fetch(self, name: str) -> dict[str, str]:
        """Return the folder, or why the download failed."""
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

        try:
            files = [each.rfilename for each in HfApi().model_info(name, timeout=30).siblings or []]
            has_safetensors = any(file.endswith(".safetensors") for file in files)
            options: dict[str, Any] = {"ignore_patterns": OTHER_WEIGHTS} if has_safetensors else {}
            return {"folder": str(snapshot_download(name, **options))}
        except GatedRepoError:
            return {"refused": "is gated; request access on the hub, and set HF_TOKEN"}
        except RepositoryNotFoundError:
            return {
                "refused": "does not exist on the hub, or is private; check the name, and set HF_TOKEN for a private model"
            }
        except Exception as error:  # noqa: BLE001 - the client lets errors of its HTTP library and the OS through
            return {"error": first_line(error)}
