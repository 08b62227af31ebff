"""What trainer and engine share: a Hugging Face causal LM, its tokenizer, and the probabilities of its tokens."""
