"""Ray on the loopback address: as a script, `ray start` for a node that listens there and nowhere else.

Ray (2.60) takes a loopback address for a mistake and replaces it by one that other hosts can reach, when a node starts and
when a driver connects. Told to keep it, its servers listen on loopback alone.
"""

from __future__ import annotations


def keep_loopback() -> None:
    """From here on, Ray in this process takes a loopback address as it is given."""
    from ray._private import services

    assert callable(services.resolve_ip_for_localhost), "Ray has another name for it; see what replaces the address"
    services.resolve_ip_for_localhost = lambda host: host


if __name__ == "__main__":
    from ray.scripts.scripts import main

    keep_loopback()
    main()
