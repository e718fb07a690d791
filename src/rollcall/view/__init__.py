"""Reads run directories. Every command that shows a run uses ``reader.py``. The other modules are the commands recover, audit and
compare, and the page of `rollcall view`.

``server.py`` answers a browser on the loopback interface and never writes to run directories. ``page/`` contains the page, which gets its
data from ``api.py`` as JSON. This package imports neither torch nor ray.
"""
