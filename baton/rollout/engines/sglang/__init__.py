"""SGLang as the engine."""
