"""The policy, which trainer and engine share: a Hugging Face causal LM, its tokenizer, and log-probabilities of
tokens."""
