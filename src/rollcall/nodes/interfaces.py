"""The network interfaces of this machine and their addresses. Linux.

The doctor sends this file to the nodes as code, so it uses only the standard library.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from contextlib import suppress
from pathlib import Path

_SIOCGIFADDR = 0x8915


def interface_addresses(name: str) -> list[str]:
    """IPv4 first; link-local IPv6 is left out, since it means nothing without the interface's name."""
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):  # it has no IPv4 address
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        found.append(socket.inet_ntoa(answer[20:24]))
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        digits, _, _, _, _, interface = line.split()
        address = ipaddress.IPv6Address(int(digits, 16))
        if interface == name and not address.is_link_local:
            found.append(str(address))
    return found


def interface_of(address: str) -> str | None:
    """Which interface has the address; every address of 127.0.0.0/8 is on the loopback one."""
    is_local = ipaddress.ip_address(address).is_loopback
    for _, name in socket.if_nameindex():
        held = interface_addresses(name)
        if address in held or (is_local and any(ipaddress.ip_address(one).is_loopback for one in held)):
            return name
    return None
