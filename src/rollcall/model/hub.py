"""Finds out within seconds whether a hub name can be loaded: from the hub, from the local cache, or not at all.

transformers keeps trying the hub for a minute before it gives up, for every single file. So we first send one request with
a short timeout. If it fails, only the cache is used, and a name that is not in the cache is refused.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

LIMIT_S = 5.0  # time limit for the response; twice as long including the DNS lookup


class HubError(ValueError):
    """A hub name cannot be loaded; the message says why and what to do."""


def cached_folder(name: str) -> Path | None:
    """Return a model's folder in the hub cache, or None if it is not cached or ``name`` is not a model name."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def first_line(error: Exception) -> str:
    """Shorten an error from transformers or the hub client, which may have a long message.

    >>> first_line(ValueError("no such file\\nlook elsewhere"))
    'ValueError: no such file'
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


@lru_cache(maxsize=64)
def hub_options(path: str, *, key: str = "model.path") -> dict[str, Any]:
    """Return extra ``from_pretrained`` arguments for this path. Each process asks the hub once per name."""
    if Path(path).exists() or path.count("/") > 1:
        return {}
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(path)
    except HFValidationError:
        raise HubError(f"{key}={path} is neither a directory nor a hub name; use one or the other") from None
    if constants.HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE is set"
    elif (fault := hub_fault(path)) is not None:
        why = f"{constants.ENDPOINT} cannot be reached ({fault})"
    else:
        return {}
    if cached_folder(path) is not None:
        return {"local_files_only": True}
    raise HubError(
        f"{key}={path} is not a directory on this machine and not in the hub's cache ({constants.HF_HUB_CACHE}), and {why}; use a "
        "model directory, check the network, or set HF_ENDPOINT to a mirror"
    )


def hub_fault(repository: str, *, file: str = "config.json", kind: str = "model") -> str | None:
    """Return why the hub cannot be reached, or None if it responds, even if it says that the model or dataset does not exist."""
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
        except Exception as error:  # noqa: BLE001 - the client lets errors of its HTTP library and the OS through
            found[0] = first_line(error)

    # DNS lookups have no timeout.
    thread = threading.Thread(target=ask, name="hub", daemon=True)
    thread.start()
    thread.join(2 * LIMIT_S)
    return found[0]
