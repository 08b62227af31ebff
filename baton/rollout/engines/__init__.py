"""Engines that implement the `Engine` protocol. Import them lazily: planner and simulator must not need torch."""
