"""The vLLM engine: vLLM samples in a separate process, with packages of its own."""
