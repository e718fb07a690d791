"""Secrets in an envelope that only those who have the cluster's token can open.

Ray writes a job's environment variables to its logs and shows them to whoever asks its API (2.60: ``runtime_env_agent.log``,
``ray job list``). Sealed, they can travel that way: a variable holds the envelope, and each process of the job opens it
with the token that its node has anyway.

The envelope is base64 of ``salt | tag | ciphertext``. PBKDF2 over token and salt gives the keys, SHAKE-256 of one key is the
stream that hides the text, HMAC-SHA256 under the other is the tag; the salt is new each time, so no stream is used twice.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping

_SALT, _TAG = 16, 32  # bytes
_ROUNDS = 20_000  # a token of rollcall's own needs none; one that a person chose does


class SealError(ValueError):
    """The envelope was sealed with another token, or is damaged."""


def seal(values: Mapping[str, str], token: str) -> str:
    salt = secrets.token_bytes(_SALT)
    hide, sign = _keys(token, salt)
    hidden = _hide(json.dumps(dict(values)).encode(), hide)
    return base64.b64encode(salt + _tag(sign, hidden) + hidden).decode()


def unseal(envelope: str, token: str) -> dict[str, str]:
    try:
        data = base64.b64decode(envelope, validate=True)
    except (binascii.Error, ValueError):
        raise SealError("not a sealed environment") from None
    salt, tag, hidden = data[:_SALT], data[_SALT : _SALT + _TAG], data[_SALT + _TAG :]
    hide, sign = _keys(token, salt)
    if not hmac.compare_digest(tag, _tag(sign, hidden)):
        raise SealError("sealed with another token, or damaged")
    return json.loads(_hide(hidden, hide))


def _keys(token: str, salt: bytes) -> tuple[bytes, bytes]:
    both = hashlib.pbkdf2_hmac("sha256", token.encode(), salt, _ROUNDS, dklen=64)
    return both[:32], both[32:]


def _tag(key: bytes, data: bytes) -> bytes:
    return hmac.new(key, data, hashlib.sha256).digest()


def _hide(data: bytes, key: bytes) -> bytes:
    """Its own inverse."""
    return bytes(one ^ other for one, other in zip(data, hashlib.shake_256(key).digest(len(data)), strict=True))
