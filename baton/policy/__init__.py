"""The policy, as trainer and engine use it: a Hugging Face causal LM, its tokenizer, and log-probabilities of
tokens."""
