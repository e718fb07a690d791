"""Finishes a run: gathers its model in one place (``gather``), verifies it and uploads it to the hub (``upload``)."""
