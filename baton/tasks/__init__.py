"""Prompts in, judgement out: where problems come from, how they are split, and how a response is scored."""
