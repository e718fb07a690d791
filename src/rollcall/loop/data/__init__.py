"""Tasks in: reading prompts, the order they are drawn in, and making task files."""
