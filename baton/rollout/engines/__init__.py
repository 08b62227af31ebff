"""Engines that implement the `Engine` protocol. Import these modules lazily, because planner and simulator must not
import torch."""
