"""One random generator per concern. Additional draws for one concern therefore leave the draws of all others
unchanged."""

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
"""Subject of the draws. The text is part of the seed and must never change."""


def generator(seed: int, concern: Concern, *place: int) -> Generator:
    """Return the numpy generator of a concern and of an index (`place`) within the concern."""
    return Generator(PCG64(SeedSequence([seed, zlib.crc32(concern.encode()), *place])))


def choices(seed: int, concern: Concern) -> Random:
    """Return the `random.Random` of a concern, which is faster than numpy for single draws."""
    return Random(f"{seed}/{concern}")  # no cryptographic use
