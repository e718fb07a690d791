"""Task data: reading prompts, the order in which they are drawn, and building task files."""
