"""Engines behind the `Engine` protocol. Import them lazily: planning and simulating need no torch."""
