"""A run's output and records: events, calls, metrics, sinks, console, logs and samples."""
