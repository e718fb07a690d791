"""Serves the page until it is told to stop: for a person at a terminal, or beside a run."""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Callable

from rollcall.view.places import Places
from rollcall.view.server import PageServer


def serve(places: Places, *, port: int, open_browser: bool, tell: Callable[[str], None]) -> None:
    """For a person: prints an address, and another one when it was used."""
    server = PageServer(places, port=port)
    count = len(places.all())
    tell(f"showing {count} run{'' if count == 1 else 's'}; Ctrl-C ends the page")
    address = server.new_address()
    print(address, flush=True)
    server.on_open = lambda: tell(f"opened; for another browser: {server.new_address()}")
    if open_browser and not webbrowser.open(address):
        tell("no browser was found; open the address yourself")
    server.run()
    sys.stdout.flush()
