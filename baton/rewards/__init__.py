"""Computes rewards of responses: scorers, answer formats, reward functions in killable processes, remote scorers."""
