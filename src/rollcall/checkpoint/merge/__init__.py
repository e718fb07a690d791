"""`rollcall merge`: a checkpoint of any writer, into one directory that ``transformers`` and ``vllm`` open."""
