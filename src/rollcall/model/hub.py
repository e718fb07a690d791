"""Whether a hub name can be loaded: from the hub, from the local cache, or not at all; known within seconds.

transformers asks the hub for a minute before it gives up, and does so for each file. So one request with a short limit
comes first. If it fails, only the cache is used, and a name that is not in the cache is refused.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

LIMIT_S = 5.0  # for the answer; with names that must be looked up first, twice that


class HubError(ValueError):
    """A hub name cannot be loaded; the message says why and what to do."""


def cached_folder(name: str) -> Path | None:
    """The folder of a model in the hub's cache; None if it is not there, or ``name`` is not the name of a model."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def first_line(error: Exception) -> str:
    """An error of transformers or of the hub's client, whose messages may be long.

    >>> first_line(ValueError("no such file\\nlook elsewhere"))
    'ValueError: no such file'
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


@lru_cache(maxsize=64)
def hub_options(path: str, *, key: str = "model.path") -> dict[str, Any]:
    """The other arguments of ``from_pretrained`` for this path. Asks the hub once for each name in the life of this process."""
    if Path(path).exists() or path.count("/") > 1:
        return {}
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(path)
    except HFValidationError:
        raise HubError(f"{key}={path} is neither a directory nor a hub name; give one of them") from None
    if constants.HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE is set"
    elif (fault := hub_fault(path)) is not None:
        why = f"{constants.ENDPOINT} cannot be reached ({fault})"
    else:
        return {}
    if cached_folder(path) is not None:
        return {"local_files_only": True}
    raise HubError(
        f"{key}={path} is not a directory here and not in the hub's cache ({constants.HF_HUB_CACHE}), and {why}; give a model "
        "directory, check the network, or name a mirror in HF_ENDPOINT"
    )


def hub_fault(repository: str, *, file: str = "config.json", kind: str = "model") -> str | None:
    """Why the hub cannot be asked for a model or dataset, or None if it answers, even that it has no such model or dataset."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    found: list[str | None] = [f"no answer within {2 * LIMIT_S:g} s"]

    def ask() -> None:
        try:
            get_hf_file_metadata(hf_hub_url(repository, file, repo_type=kind), timeout=LIMIT_S)
            found[0] = None
        except HfHubHTTPError as error:
            status = getattr(error.response, "status_code", 0)
            found[0] = f"status {status}" if status >= 500 else None
        except Exception as error:  # noqa: BLE001 - the client raises its HTTP library's errors and the system's
            found[0] = first_line(error)

    # Looking up a host name has no time limit.
    thread = threading.Thread(target=ask, name="hub", daemon=True)
    thread.start()
    thread.join(2 * LIMIT_S)
    return found[0]
