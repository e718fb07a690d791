"""`rollcall merge`: a checkpoint, whoever wrote it, into one directory that ``transformers`` and ``vllm`` open."""
