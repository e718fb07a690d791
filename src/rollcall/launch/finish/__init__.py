"""After a run: brings its model to one place (``gather``), verifies it, and puts it on the hub (``upload``)."""
