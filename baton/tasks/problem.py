"""A problem as its source states it, and the train/held-out split."""

from __future__ import annotations

from typing import Any

import msgspec
from blake3 import blake3

from baton.types import Message

HELD_OUT_PERCENT = 10
"""Percentage of distinct problems that are held out. RL does not train on held-out problems unless `held_out = "none"`;
a warm start generates no demonstrations for held-out problems."""


class Problem(msgspec.Struct, frozen=True):
    """A problem as its source states it. `TaskMixture.prompt` makes a prompt from a problem."""

    question: str
    canonical: str
    """Canonical form, equal for all wordings of a problem. The train/held-out split uses a hash of this form."""
    answer: str | None
    metadata: dict[str, Any]
    """Data that `score` needs and, for a problem from a file, the other columns of its row. Plain JSON values."""
    messages: tuple[Message, ...] | None = None
    """Messages of a conversation, used unchanged as the prompt; None if the prompt is made from `question`."""

    @property
    def problem_id(self) -> str:
        """Digest of the problem's canonical form."""
        return blake3(self.canonical.encode()).hexdigest(length=12)

    @property
    def is_held_out(self) -> bool:
        """True if the problem belongs to the held-out split, which depends only on the canonical form."""
        digest = blake3(b"split:" + self.canonical.encode()).digest(length=4)
        return int.from_bytes(digest, "big") % 100 < HELD_OUT_PERCENT
