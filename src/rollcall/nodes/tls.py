"""TLS between the nodes of a cluster: every node that has the token can create its certificates.

The token determines the private key of a certificate authority, so the key is the same on every node. The key is computed when
needed and never stored. Each node signs its certificate with this key, and trusts certificates that this key has signed. Ray then uses
gRPC only over TLS, and both sides present a certificate, so someone without the token cannot even send a first request.

The key is derived from the token with PBKDF2: a stranger can check a guessed token against a certificate, and PBKDF2 makes each check slow.
"""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import socket
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rollcall.base.atomic import write_atomic

ROUNDS = 200_000
AUTHORITY = "rollcall cluster"


def write_certificates(folder: Path, *, token: str, addresses: Sequence[str]) -> None:
    """Write this node's certificate and key, and the authority's certificate, under the file names in ``tls_env``."""

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def unsigned(subject: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        made = x509.CertificateBuilder().subject_name(subject).issuer_name(name(AUTHORITY)).public_key(public)
        made = made.serial_number(x509.random_serial_number())
        made = made.not_valid_before(now - timedelta(days=2))  # the clocks of the nodes may differ
        return made.not_valid_after(now + timedelta(days=3650))

    authority = ec.derive_private_key(_number(token), ec.SECP256R1())
    is_authority = x509.BasicConstraints(ca=True, path_length=0)
    root = unsigned(name(AUTHORITY), authority.public_key()).add_extension(is_authority, critical=True)
    own = ec.generate_private_key(ec.SECP256R1())
    names = [x509.IPAddress(ipaddress.ip_address(host)) for host in dict.fromkeys([*addresses, "127.0.0.1", "::1"])]
    others = [x509.DNSName(host) for host in dict.fromkeys([socket.gethostname(), "localhost"]) if host.isascii()]
    uses = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    leaf = unsigned(name("rollcall node"), own.public_key()).add_extension(uses, critical=False)
    leaf = leaf.add_extension(x509.SubjectAlternativeName([*names, *others]), critical=False)
    pem = serialization.Encoding.PEM
    key = own.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    folder.mkdir(mode=0o700, exist_ok=True)
    write_atomic(folder / "authority.pem", root.sign(authority, hashes.SHA256()).public_bytes(pem), private=True)
    write_atomic(folder / "node.pem", leaf.sign(authority, hashes.SHA256()).public_bytes(pem), private=True)
    write_atomic(folder / "node.key", key, private=True)


@functools.cache
def _number(token: str) -> int:
    """Derive a private key for the curve from the token."""
    order = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of SECP256R1
    digest = hashlib.pbkdf2_hmac("sha256", token.encode(), b"rollcall certificate authority", ROUNDS, dklen=48)
    return int.from_bytes(digest, "big") % (order - 1) + 1
