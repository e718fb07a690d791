"""Runs Ray on the loopback address. As a script, this is `ray start` for a node that listens on loopback only.

Ray (2.60) treats a loopback address as a mistake: when a node starts or a driver connects, it replaces the address with one that
other hosts can reach. ``keep_loopback`` prevents that, so Ray's servers listen on loopback only.
"""

from __future__ import annotations


def keep_loopback() -> None:
    """Stop Ray in this process from replacing loopback addresses."""
    from ray._private import services

    assert callable(services.resolve_ip_for_localhost)  # if Ray has renamed it, find out what replaces the address
    services.resolve_ip_for_localhost = lambda host: host


if __name__ == "__main__":
    from ray.scripts.scripts import main

    keep_loopback()
    main()
