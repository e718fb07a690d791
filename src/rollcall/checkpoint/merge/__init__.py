"""`rollcall merge`: turns a checkpoint from any tool into a directory that ``transformers`` and ``vllm`` can open."""
