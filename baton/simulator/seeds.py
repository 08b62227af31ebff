"""Random numbers for different purposes come from different generators. An additional draw for one purpose, such as
faults, therefore does not change the draws for another, such as rewards."""

from __future__ import annotations

import zlib
from random import Random
from typing import Literal

from numpy.random import PCG64, Generator, SeedSequence

Concern = Literal[
    "day", "faults", "judges", "length of groups", "length of trajectories", "messages", "prompts", "rewards", "victims"
]
"""Subject of random draws. The text is part of the seed and must never change."""


def generator(seed: int, concern: Concern, *place: int) -> Generator:
    """Return the numpy generator for a subject and, if given, for an index (`place`) within the subject."""
    return Generator(PCG64(SeedSequence([seed, zlib.crc32(concern.encode()), *place])))


def choices(seed: int, concern: Concern) -> Random:
    """Return the `random.Random` for a subject, which is faster than numpy for single draws."""
    return Random(f"{seed}/{concern}")  # not used for cryptography
