"""What follows a run: its model in one place (``gather``), proved to be the trained one, and on the hub (``upload``)."""
