"""Simulates runs in virtual time. The decisions are those of a live run, but engines, trainer, scorers and links only
take time."""
