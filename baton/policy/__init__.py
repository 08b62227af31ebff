"""The policy of trainer and engine: a Hugging Face causal LM, its tokenizer, and log-probabilities of tokens."""
