"""What a run shows and leaves behind: metrics, sinks, console, learning curve, samples, summary."""
