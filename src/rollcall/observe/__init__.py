"""The output and the records of a run: metrics, sinks, console, learning curve, samples, summary."""
