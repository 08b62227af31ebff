"""Computes rewards of responses: scorers, answer formats, reward functions in killable processes, scorers behind
HTTP."""
