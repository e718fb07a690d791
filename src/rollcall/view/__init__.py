"""Reads run directories: ``reader.py`` for everything that shows a run; recover, audit and compare; and `rollcall view`'s page.

The page: ``server.py`` answers a browser on the loopback interface and never writes to run directories. ``page/`` is
the page itself, which asks ``api.py`` for JSON. Neither torch nor ray is imported here.
"""
