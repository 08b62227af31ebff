"""Randomness by concern: a change of one leaves the others as they were."""

from __future__ import annotations

import zlib
from random import Random
from typing import Literal

from numpy.random import PCG64, Generator, SeedSequence

Concern = Literal[
    "day",
    "faults",
    "judges",
    "length of groups",
    "length of trajectories",
    "messages",
    "prompts",
    "rewards",
    "victims",
]
"""What is drawn. Part of the seed: another text gives other draws, so none of these ever changes."""


def generator(seed: int, concern: Concern, *place: int) -> Generator:
    """Return numpy's generator for a concern, and a place within it."""
    return Generator(PCG64(SeedSequence([seed, zlib.crc32(concern.encode()), *place])))


def choices(seed: int, concern: Concern) -> Random:
    """Return Python's generator for a concern: for a few draws at a time."""
    return Random(f"{seed}/{concern}")  # nothing is secret here
