"""The vLLM engine: vLLM samples in a separate process that has its own packages."""
