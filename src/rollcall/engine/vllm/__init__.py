"""The vLLM engine: vLLM samples in a separate process, whose packages never meet ours."""
