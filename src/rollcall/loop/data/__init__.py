"""Task data: reads prompts, decides the order in which they are drawn, and builds task files."""
