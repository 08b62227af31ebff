"""Simulates runs in virtual time. Controller, scheduler and hub make the same decisions as in a live run. Engines,
trainer, scorers and links only take time."""
