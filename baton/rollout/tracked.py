"""The scheduler's view of a group: states and token counts by version, no token ids."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class TrajectoryState(Enum):
    """The state of a trajectory."""

    PENDING = 0
    """Not leased: not started, or aborted."""
    LEASED = 1
    JUDGING = 2
    """Finished, and submitted for scoring."""
    JUDGED = 3
    """Scored."""


@dataclass(slots=True)
class TrackedTrajectory:
    """The scheduler's view of one trajectory."""

    group_id: int
    sample_index: int
    state: TrajectoryState = TrajectoryState.PENDING
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(version, number of tokens), versions ascending."""
    num_tokens: int = 0
    reward: float | None = None

    @property
    def name(self) -> str:
        """`group/sample`, for error messages."""
        return f"{self.group_id}/{self.sample_index}"

    def grow(self, version: int, num_tokens: int) -> None:
        """Add tokens of a version, which must not be older than the last."""
        last, count = self.versions[-1] if self.versions else (-1, 0)
        assert num_tokens > 0, f"trajectory {self.name} grew by {num_tokens} tokens"
        assert version >= last, f"trajectory {self.name}: version {version} after {last}"
        if version == last:
            self.versions[-1] = (version, count + num_tokens)
        else:
            self.versions.append((version, num_tokens))
        self.num_tokens += num_tokens

    def forget(self) -> int:
        """Reset to no tokens and no reward; return the number of tokens discarded."""
        forgotten, self.num_tokens, self.reward = self.num_tokens, 0, None
        self.versions.clear()
        return forgotten


@dataclass(slots=True)
class TrackedGroup:
    """The scheduler's view of one group."""

    group_id: int
    members: list[TrackedTrajectory]
    """[group_size]"""
    num_unjudged: int
    opened_at: int
    """The trainer's version when the group was opened."""
    attempts: int = 0
    """Earlier attempts at its prompt."""

    @classmethod
    def new(cls, group_id: int, group_size: int, *, opened_at: int, attempts: int = 0) -> TrackedGroup:
        """Return a group without tokens."""
        members = [TrackedTrajectory(group_id, index) for index in range(group_size)]
        return cls(group_id, members, group_size, opened_at, attempts)

    @property
    def num_tokens(self) -> int:
        """Tokens of all members."""
        return sum(t.num_tokens for t in self.members)

    @property
    def has_equal_rewards(self) -> bool:
        """Whether all rewards are equal, or fewer than two exist, so that every advantage is zero."""
        rewards = [t.reward for t in self.members if t.reward is not None]
        return len(rewards) < 2 or min(rewards) == max(rewards)

    def oldest_version(self, *, default: int) -> int:
        """Return the oldest version among its tokens, or `default` without tokens."""
        return min((t.versions[0][0] for t in self.members if t.versions), default=default)

    def num_tokens_before(self, version: int) -> int:
        """Return the number of tokens of versions older than this."""
        return sum(count for t in self.members for v, count in t.versions if v < version)
