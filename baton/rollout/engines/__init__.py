"""Engines (`Engine`). Import these modules lazily, because planner and simulator must not import torch."""
