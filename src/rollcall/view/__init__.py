"""Run directories, read: ``reader.py`` for all that show a run; recover, audit and compare; and the page of `rollcall view`.

The page: ``server.py`` answers a browser on the loopback interface and writes into no run directory. ``page/`` is
the page itself, which asks ``api.py`` for JSON. Neither torch nor ray is imported here.
"""
