"""The embedded engine: continuous batching on Hugging Face causal LMs with attention layers."""
