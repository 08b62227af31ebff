"""What the scheduler knows of a group: states and counts by version, no tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class TrajectoryState(Enum):
    """Where a trajectory is."""

    PENDING = 0
    """With nobody: not begun, or put down."""
    LEASED = 1
    JUDGING = 2
    JUDGED = 3


@dataclass(slots=True)
class TrackedTrajectory:
    """One trajectory."""

    group_id: int
    sample_index: int
    state: TrajectoryState = TrajectoryState.PENDING
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(version, tokens) in the order in which they came; versions ascend."""
    num_tokens: int = 0
    reward: float | None = None

    @property
    def name(self) -> str:
        """`group/sample`, for messages."""
        return f"{self.group_id}/{self.sample_index}"

    def grow(self, version: int, num_tokens: int) -> None:
        """Count tokens of a version."""
        last, count = self.versions[-1] if self.versions else (-1, 0)
        assert num_tokens > 0, f"trajectory {self.name} grew by {num_tokens} tokens"
        assert version >= last, f"trajectory {self.name}: version {version} after {last}"
        if version == last:
            self.versions[-1] = (version, count + num_tokens)
        else:
            self.versions.append((version, num_tokens))
        self.num_tokens += num_tokens

    def forget(self) -> int:
        """Be as before the first token; return how many there were."""
        forgotten, self.num_tokens, self.reward = self.num_tokens, 0, None
        self.versions.clear()
        return forgotten


@dataclass(slots=True)
class TrackedGroup:
    """One group."""

    group_id: int
    members: list[TrackedTrajectory]
    """[G]"""
    num_unjudged: int
    opened_at: int
    """The trainer's version when it was opened."""
    attempts: int = 0
    """Times that its prompt was tried before."""

    @classmethod
    def new(cls, group_id: int, group_size: int, *, opened_at: int, attempts: int = 0) -> TrackedGroup:
        """Return a group of which nothing is generated yet."""
        members = [TrackedTrajectory(group_id, index) for index in range(group_size)]
        return cls(group_id, members, group_size, opened_at, attempts)

    @property
    def num_tokens(self) -> int:
        """Over all members."""
        return sum(t.num_tokens for t in self.members)

    @property
    def has_equal_rewards(self) -> bool:
        """Whether its members cannot be told apart, so that no advantage is left."""
        rewards = [t.reward for t in self.members if t.reward is not None]
        return len(rewards) < 2 or min(rewards) == max(rewards)

    def oldest_version(self, *, default: int) -> int:
        """The oldest version among its tokens."""
        return min((t.versions[0][0] for t in self.members if t.versions), default=default)

    def num_tokens_before(self, version: int) -> int:
        """Tokens of older versions than this."""
        return sum(count for t in self.members for v, count in t.versions if v < version)
