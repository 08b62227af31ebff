"""Simulates runs in virtual time. Controller, scheduler and hub make the same decisions as in a live run. Engines,
trainer, scorers and links are simulated only by the time that they take."""
