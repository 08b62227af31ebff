"""The engine of kind `vllm`: vLLM in its own processes."""
