"""What a stranger gets from ports, without token or certificate: run as a script on a host that is part of nothing.

Arguments: HOST:PORT each. One JSON object on stdout: by port, what the best of all tries got. It sends nothing that is known
to end the server it is sent to, unless the first argument is ``--start-sync``: then it sends that to all ports, and no more.
"""

from __future__ import annotations

import http.client
import json
import os
import pickle
import socket
import ssl
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

LOOK_S = 1.0
CALL_S = 3.0
STORE_S = 8.0
# One call of each service that Ray has; a server knows its own alone.
CALLS = (
    "CoreWorkerService/PushTask", "NodeManagerService/GetNodeStats", "ObjectManagerService/Pull",
    "NodeInfoGcsService/GetAllNodeInfo", "RayletDriver/Init", "ReporterService/ReportOCMetrics",
)  # fmt: skip
DOOR = 32  # bytes that a door says before it knows who calls


class Bomb:
    """A pickle that leaves a file where it is read."""

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, ("/tmp/stranger-was-here", "w")


def listen(address: tuple[str, int], words: bytes) -> tuple[bytes, bool]:
    """What is said to these words, and whether the other side hung up."""
    heard = b""
    with socket.create_connection(address, timeout=CALL_S) as connection:
        connection.settimeout(LOOK_S)
        try:
            connection.sendall(words)
            while data := connection.recv(1 << 16):
                heard += data
        except TimeoutError:
            return heard, False
        except ConnectionError:
            return heard, True
    return heard, True


def speaks_tls(address: tuple[str, int]) -> str | None:
    """What a TLS client without a certificate gets; None: it is no TLS server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection(address, timeout=CALL_S) as plain, context.wrap_socket(plain) as secured:
            secured.settimeout(CALL_S)
            secured.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
            return "TLS open to anyone" if secured.recv(100) else "TLS refused: no certificate"
    except ssl.SSLError as error:
        wanted = "CERTIFICATE_REQUIRED" in str(error) or "certificate required" in str(error)
        return "TLS refused: no certificate" if wanted else None
    except OSError:
        return None


def ask_http(address: tuple[str, int]) -> str | None:
    connection = http.client.HTTPConnection(*address, timeout=CALL_S)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        body = answer.read(1000)
    except (http.client.HTTPException, OSError):
        return None
    finally:
        connection.close()
    if answer.status in (401, 403):
        return f"HTTP {answer.status}: no token"
    return "HTTP: metrics" if body.startswith(b"# HELP") else f"HTTP {answer.status}: open"


def ask_grpc(address: tuple[str, int]) -> str | None:
    import grpc

    codes: set[str] = set()
    with grpc.insecure_channel("{}:{}".format(*address)) as channel:
        for call in CALLS:
            try:
                channel.unary_unary(f"/ray.rpc.{call}")(b"", timeout=CALL_S)
                return f"gRPC open: {call}"
            except grpc.RpcError as error:
                codes.add(error.code().name)
            if codes <= {"UNAVAILABLE", "DEADLINE_EXCEEDED"}:  # no gRPC there
                return None
    return "gRPC refused: no token" if "UNAUTHENTICATED" in codes else f"gRPC {sorted(codes)}"


def write_to_store(address: tuple[str, int]) -> str | None:
    """torch's own client, which waits for ever for an answer where no store of torch is."""
    import torch.distributed as dist

    found: list[str] = []

    def write() -> None:
        try:
            store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=2), wait_for_workers=False)
            store.set("default_pg/0//cpu//0/0", "forged")
            found.extend(["torch's store: written"] if store.get("default_pg/0//cpu//0/0") == b"forged" else [])
        except (RuntimeError, ValueError):
            return

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(STORE_S)
    return found[0] if found else None


def knock(address: tuple[str, int]) -> str:
    try:
        heard, hung_up = listen(address, b"")
    except OSError as error:
        return f"no connection ({error.strerror or error})"
    if len(heard) == DOOR:
        bomb = pickle.dumps(Bomb())
        for words in (b"[" * 100_000, struct.pack("<q", len(bomb)) + bomb, bytes(2 * DOOR)):
            answer, _ = listen(address, words)
            if len(answer) > DOOR:
                return f"the door says {len(answer)} bytes"
        return write_to_store(address) or "door: 32 random bytes, then hung up"
    found = speaks_tls(address) or ask_http(address) or ask_grpc(address) or write_to_store(address)
    if found:
        return found
    # gloo: whoever connects says which connection it is meant to be; all of them are taken.
    for number in range(3):
        bomb = pickle.dumps(Bomb())
        answer, hung_up = listen(address, struct.pack("<q", number) + bomb)
        if answer:
            return f"says {len(answer)} bytes"
    return "accepted and ignored" if not hung_up else "hung up without a word"


def start_sync(address: tuple[str, int]) -> str:
    """The call that ends Ray's servers (2.60) where it comes through."""
    import grpc

    with grpc.insecure_channel("{}:{}".format(*address)) as channel:
        call = channel.stream_stream("/ray.rpc.syncer.RaySyncer/StartSync")(iter([b""]), timeout=CALL_S)
        try:
            return f"answers {next(call)!r}"
        except StopIteration:
            return "ended"
        except grpc.RpcError as error:
            time.sleep(0.5)
            return error.code().name


def main() -> None:
    first, *rest = sys.argv[1:]
    what, addresses = (start_sync, rest) if first == "--start-sync" else (knock, [first, *rest])
    split = [text.rpartition(":") for text in addresses]
    with ThreadPoolExecutor(max_workers=24) as pool:
        found = pool.map(what, [(host, int(port)) for host, _, port in split])
    print(json.dumps(dict(zip(addresses, found, strict=True))), flush=True)
    os._exit(0)  # threads may still wait in torch's client


if __name__ == "__main__":
    main()
