"""A run in virtual time: the live run's own decisions, with engines, trainer, judges and links that only take time."""
