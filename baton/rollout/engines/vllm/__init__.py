"""vLLM as the engine."""
