"""The vLLM engine: vLLM samples in a process of its own, whose packages never meet ours."""
