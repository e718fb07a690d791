"""Certificates that a token yields: who has the same token is trusted, and nobody else."""

from __future__ import annotations

import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest

from rollcall.nodes import tls
from rollcall.nodes.state import auth_env, forget, tls_dir, tls_env
from rollcall.nodes.tls import write_certificates

ONE, OTHER = "0123456789abcdef" * 4, "fedcba9876543210" * 4


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "ROUNDS", 10)


def node(folder: Path, *, token: str, addresses: list[str]) -> Path:
    folder.mkdir()
    write_certificates(folder, token=token, addresses=addresses)
    return folder


def talk(server: Path, client: Path | None, *, server_name: str) -> str:
    """Both sides show a certificate, as Ray's do; what the client hears, or why not."""
    files = tls_env(server)
    inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    inside.load_cert_chain(files["RAY_TLS_SERVER_CERT"], files["RAY_TLS_SERVER_KEY"])
    inside.load_verify_locations(files["RAY_TLS_CA_CERT"])
    inside.verify_mode = ssl.CERT_REQUIRED
    outside = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if client is None:
        outside.check_hostname, outside.verify_mode = False, ssl.CERT_NONE
    else:
        own = tls_env(client)
        outside.load_cert_chain(own["RAY_TLS_SERVER_CERT"], own["RAY_TLS_SERVER_KEY"])
        outside.load_verify_locations(own["RAY_TLS_CA_CERT"])
    near, far = socket.socketpair()

    def serve() -> None:
        try:
            with inside.wrap_socket(far, server_side=True) as secured:
                secured.sendall(b"hello")
        except (ssl.SSLError, OSError):
            far.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with outside.wrap_socket(near, server_hostname=server_name) as secured:
            return secured.recv(5).decode() or "nothing"
    except (ssl.SSLError, OSError) as error:
        return type(error).__name__
    finally:
        near.close()
        thread.join(30)


def test_nodes_of_one_token_trust_each_other_and_no_one_else(tmp_path: Path) -> None:
    first = node(tmp_path / "first", token=ONE, addresses=["10.0.0.1"])
    second = node(tmp_path / "second", token=ONE, addresses=["10.0.0.2"])
    stranger = node(tmp_path / "stranger", token=OTHER, addresses=["10.0.0.1"])
    assert talk(first, second, server_name="10.0.0.1") == "hello"
    assert talk(second, first, server_name="10.0.0.2") == "hello"
    assert talk(second, first, server_name="10.0.0.1") != "hello", "a certificate is of its own node's address"
    assert talk(first, stranger, server_name="10.0.0.1") != "hello"
    assert talk(stranger, first, server_name="10.0.0.1") != "hello"
    assert talk(first, None, server_name="10.0.0.1") != "hello"


def test_the_authoritys_key_is_written_nowhere_and_a_nodes_key_for_its_owner_alone(tmp_path: Path) -> None:
    folder = node(tmp_path / "node", token=ONE, addresses=["fd00::1"])
    assert sorted(path.name for path in folder.iterdir()) == ["authority.pem", "node.key", "node.pem"]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in folder.iterdir())
    assert "PRIVATE" not in (folder / "authority.pem").read_text()


def test_ray_is_told_of_certificates_where_the_cluster_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLCALL_STATE_DIR", str(tmp_path / "state"))
    assert "RAY_USE_TLS" not in auth_env("default")
    write_certificates(tls_dir("default"), token=ONE, addresses=["10.0.0.1"])
    told = auth_env("default")
    assert told["RAY_USE_TLS"] == "1" and Path(told["RAY_TLS_SERVER_KEY"]).exists()
    forget("default")
    assert not tls_dir("default").exists() and "RAY_USE_TLS" not in auth_env("default")
