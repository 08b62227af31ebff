"""Simulates runs in virtual time. Controller, scheduler and hub make the same decisions as in a live run. Of
engines, trainer, scorers and links, only the time that they take is simulated."""
