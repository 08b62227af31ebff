"""The seam between a source of problems and the stream that deals them out."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
from blake3 import blake3

from baton.rewards.scorer_protocol import ScoredTask
from baton.types import Message

HELD_OUT_PERCENT = 10
"""Share of all distinct problems that nobody trains on: neither RL nor the warm start, in any recipe, ever."""


class Problem(msgspec.Struct, frozen=True):
    """One problem as its source states it, before it becomes a prompt."""

    question: str
    canonical: str
    """The same for two wordings of the same problem; the split hashes it."""
    answer: str | None
    metadata: dict[str, Any]
    """Plain JSON values: what `score` needs to find the problem again, and a file's other columns."""
    messages: tuple[Message, ...] | None = None
    """The prompt as it is, where the source gives a conversation; else `question` is worded as the recipe says."""

    @property
    def problem_id(self) -> str:
        """Digest of the canonical problem."""
        return blake3(self.canonical.encode()).hexdigest(length=12)

    @property
    def is_held_out(self) -> bool:
        """Whether the problem belongs to the held-out split: a function of the canonical problem alone."""
        return int.from_bytes(blake3(b"split:" + self.canonical.encode()).digest(length=4), "big") % 100 < (
            HELD_OUT_PERCENT
        )


class Task(ScoredTask, Protocol):
    """A source of problems with a scorer."""

    def draw(self, seed: int, index: int) -> Problem:
        """Return draw `index` of stream `seed`: the same one each time; draws may repeat a problem."""
