"""Random generators by concern, so that a change of one leaves the draws of the others unchanged."""

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
"""What is drawn. The text is part of the seed, so none of these may change."""


def generator(seed: int, concern: Concern, *place: int) -> Generator:
    """Return numpy's generator for a concern and an index within it."""
    return Generator(PCG64(SeedSequence([seed, zlib.crc32(concern.encode()), *place])))


def choices(seed: int, concern: Concern) -> Random:
    """Return Python's generator for a concern, for a small number of draws."""
    return Random(f"{seed}/{concern}")  # no cryptographic use
