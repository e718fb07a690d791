"""The network interfaces of this machine and their addresses.

The doctor sends this file to the nodes as code, so it uses only the standard library and psutil, which Ray brings along.
"""

from __future__ import annotations

import ipaddress
import socket

import psutil


def interface_addresses(name: str) -> list[str]:
    """IPv4 first; link-local IPv6 is left out, since it means nothing without the interface's name."""
    held = psutil.net_if_addrs().get(name, [])
    found = [one.address for one in held if one.family == socket.AF_INET]
    return found + [one.address for one in held if one.family == socket.AF_INET6 and "%" not in one.address]


def interface_of(address: str) -> str | None:
    """Which interface has the address; every address of 127.0.0.0/8 is on the loopback one."""
    is_local = ipaddress.ip_address(address).is_loopback
    for _, name in socket.if_nameindex():
        held = interface_addresses(name)
        if address in held or (is_local and any(ipaddress.ip_address(one).is_loopback for one in held)):
            return name
    return None
