"""The trainer: turns a batch into the next policy version."""
