"""The policy, shared by trainer and engine: a Hugging Face causal LM, its tokenizer, and token log-probabilities."""
