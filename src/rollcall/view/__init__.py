"""`rollcall view`: one local page that shows runs while they train and afterwards.

``server.py`` answers a browser on the loopback interface. It reads run directories and nothing else, and writes into none of them:
what it has to remember (the index of a journal) is in the user's cache folder. ``page/`` is the page itself, which asks
``api.py`` for JSON. Neither torch nor ray is imported here.
"""
