"""The embedded engine: continuous batching on any Hugging Face causal LM."""
