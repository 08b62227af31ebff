"""One batch in, one policy version out."""
