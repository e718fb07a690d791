"""Secrets in an envelope that only those who have the cluster's token can open.

Ray writes a job's environment variables to its logs and shows them to anyone who asks its API (2.60:
``runtime_env_agent.log``, ``ray job list``). Sealed, they can travel that way: one variable holds the envelope, and each
process of the job opens it with the token that its node has.

The envelope is a salt and a Fernet message, whose key is PBKDF2 of the token and the salt. The salt is new each time.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from collections.abc import Mapping

from cryptography.fernet import Fernet, InvalidToken

_SALT = 16  # bytes
_ROUNDS = 20_000  # a token that Rollcall made needs none, one that a person chose does


class SealError(ValueError):
    """The envelope was sealed with another token, or is damaged."""


def seal(values: Mapping[str, str], token: str) -> str:
    salt = secrets.token_hex(_SALT)
    return f"{salt}.{_cipher(token, salt).encrypt(json.dumps(dict(values)).encode()).decode()}"


def unseal(envelope: str, token: str) -> dict[str, str]:
    salt, _, message = envelope.partition(".")
    try:
        return json.loads(_cipher(token, salt).decrypt(message))
    except (InvalidToken, ValueError):
        raise SealError("it was sealed with another token, or is damaged") from None


def _cipher(token: str, salt: str) -> Fernet:
    key = hashlib.pbkdf2_hmac("sha256", token.encode(), salt.encode(), _ROUNDS, dklen=32)
    return Fernet(base64.urlsafe_b64encode(key))
