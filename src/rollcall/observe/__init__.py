"""A run's output and records: metrics, sinks, console, learning curve, samples, summary."""
