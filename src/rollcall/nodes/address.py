"""Finds this node's reachable addresses and free ports, and parses addresses.

No packet is sent: when a UDP socket is connected, the kernel only chooses a route and a source address.
"""

from __future__ import annotations

import errno
import ipaddress
import random
import socket
from contextlib import suppress
from itertools import chain, islice

from rollcall.base.errors import ClusterError
from rollcall.nodes.interfaces import interface_addresses

FIRST_PORT = 10_000
LAST_PORT = 32_000  # below the kernel's range for outgoing connections, which could take a port before it is used


def split_address(text: str) -> tuple[str, int]:
    """Parse ``host:port`` or ``[v6]:port``."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or (":" in host and not bracketed):
        raise ClusterError(f"{text!r} is not an address; write HOST:PORT, or [ADDRESS]:PORT for IPv6")
    if not 0 < int(port) < 65536:
        raise ClusterError(f"{text!r}: port {port} is not between 1 and 65535")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(host: str) -> str:
    """Look up a host name; return an IP address unchanged."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror as error:
        raise ClusterError(f"cannot find an address for host {host!r}: {error.strerror}") from None


def is_loopback(host: str) -> bool:
    return host == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback


def is_wildcard(host: str) -> bool:
    return host in ("0.0.0.0", "::", "")


def is_own(address: str) -> bool:
    """Return whether the address belongs to this node."""
    with suppress(OSError), socket.socket(_family(address), socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return True
    return False


def own_address(*, toward: str | None, node_ip: str | None, interface: str | None) -> str:
    """Return an address of this node that the other nodes can reach.

    ``node_ip`` and ``interface`` are the user's options. Without them, return the source address of packets to ``toward``. Without
    ``toward``, return the default route's address, or else the first address of any interface, or else loopback.
    """
    if node_ip is not None:
        try:
            given = str(ipaddress.ip_address(node_ip.strip("[]")))
        except ValueError:
            raise ClusterError(f"--node-ip {node_ip} is not an IP address") from None
        if not is_own(given):
            raise ClusterError(f"--node-ip {node_ip} is not an address of this node (its addresses: {_listed()})")
        return given
    if interface is not None:
        return _of_interface(interface, toward=toward)
    if toward is not None:
        if (found := _by_route(toward)) is None:
            raise ClusterError(f"this node has no route to {toward} (its addresses: {_listed()})")
        return found
    # Documentation addresses (RFC 5737, RFC 3849): no host uses them, so only a default route leads there.
    routed = filter(None, map(_by_route, ("198.51.100.1", "2001:db8::1")))
    held = (address for name in _interface_names() for address in interface_addresses(name))
    return next(chain(routed, held), "127.0.0.1")


def free_ports(count: int) -> list[int]:
    """Return distinct ports that are free on every address."""
    first = random.SystemRandom().randrange(FIRST_PORT, LAST_PORT)
    free = filter(is_free, chain(range(first, LAST_PORT), range(FIRST_PORT, first)))
    taken = list(islice(free, count))
    if len(taken) == count:
        return taken
    raise ClusterError(f"fewer than {count} of the ports {FIRST_PORT} to {LAST_PORT} are free on this node")


def is_free(port: int) -> bool:
    for family, anywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            # Like servers, this sets SO_REUSEADDR, so a recently closed connection does not block its port.
            socket.create_server((anywhere, port), family=family).close()
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):  # a kernel without IPv6
                return False
    return True


def leaves_loopback(host: str) -> bool:
    """Return whether Ray's processes would use a different address, because they replace loopback with the default route's address."""
    return is_loopback(host) and not is_loopback(_by_route("8.8.8.8") or host)


def listens(address: str, *, timeout_s: float) -> bool:
    """Return whether the address accepts connections."""
    with suppress(OSError), socket.create_connection(split_address(address), timeout=timeout_s):
        return True
    return False


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _by_route(host: str) -> str | None:
    address = resolve(host)
    with suppress(OSError), socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])
    return None


def _of_interface(name: str, *, toward: str | None) -> str:
    known = [known for _, known in socket.if_nameindex()]
    if name not in known:
        raise ClusterError(f"--interface {name} does not exist on this node; its interfaces are {', '.join(known)}")
    addresses = interface_addresses(name)
    if toward is not None:  # if the node has IPv4 and IPv6, use the same kind of address as the head
        family = _family(resolve(toward))
        addresses = [address for address in addresses if _family(address) == family]
    if not addresses:
        raise ClusterError(f"--interface {name} has no address{f' that reaches {toward}' if toward else ''}")
    return addresses[0]


def _interface_names() -> list[str]:
    return [name for _, name in socket.if_nameindex() if name != "lo"]


def _listed() -> str:
    found = [f"{address} ({name})" for name in [*_interface_names(), "lo"] for address in interface_addresses(name)]
    return ", ".join(found) or "none"
