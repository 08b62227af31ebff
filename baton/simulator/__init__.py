"""Runs in virtual time: the decisions of a live run, with engines, trainer, scorers and links that only take time."""
