"""This machine's network interfaces and their addresses.

The doctor sends this file to the nodes as code, so it uses only the standard library and psutil, which comes with Ray.
"""

from __future__ import annotations

import ipaddress
import socket

import psutil


def interface_addresses(name: str) -> list[str]:
    """Return the interface's addresses, IPv4 first. Link-local IPv6 addresses are left out, because they need the interface's name."""
    held = psutil.net_if_addrs().get(name, [])
    found = [one.address for one in held if one.family == socket.AF_INET]
    return found + [one.address for one in held if one.family == socket.AF_INET6 and "%" not in one.address]


def interface_of(address: str) -> str | None:
    """Return the interface that has the address; every address in 127.0.0.0/8 belongs to loopback."""
    is_local = ipaddress.ip_address(address).is_loopback
    for _, name in socket.if_nameindex():
        held = interface_addresses(name)
        if address in held or (is_local and any(ipaddress.ip_address(one).is_loopback for one in held)):
            return name
    return None
