"""The scheduler's state: groups and trajectories as counts by version, token accounts, and counters of one step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from baton.rollout.overprovision import BatchMeasurement

QUANTILES = 4
"""Number of length classes of `staleness/length_q…`."""


class TrajectoryState(Enum):
    """The state of a trajectory."""

    PENDING = 0
    """Not leased: not started, or aborted."""
    LEASED = 1
    SCORING = 2
    """Finished, and submitted for scoring."""
    SCORED = 3
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
    num_unscored: int
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


@dataclass(slots=True)
class Ledger:
    """Policy tokens since the scheduler started: generated = trained + masked + filtered + dropped + lost + carried."""

    generated: int = 0
    trained: int = 0
    masked: int = 0
    """Tokens in a batch that are too old to be trained."""
    filtered: int = 0
    dropped: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    """Tokens by cause."""

    def lose(self, cause: str, num_tokens: int) -> None:
        """Count discarded tokens under a cause."""
        self.lost[cause] += num_tokens

    @property
    def settled(self) -> int:
        """Tokens in a final account; the others are carried: they belong to groups that are in no batch yet."""
        return self.trained + self.masked + self.filtered + self.dropped + self.lost.total()


@dataclass(slots=True)
class StepCounts:
    """Counters of the scheduler between two batches."""

    generated_tokens: int = 0
    reprefilled_tokens: int = 0
    """Response tokens that were prefilled again when an aborted trajectory was resumed."""
    resumed: int = 0
    """Resumed trajectories."""
    finished: int = 0
    """Finished trajectories."""
    carried_groups: int = 0
    """Groups in no batch when this one was delivered."""
    filtered_groups: int = 0
    requeued_groups: int = 0
    dropped_groups: int = 0
    masked_tokens: int = 0
    consumed_tokens: int = 0
    lost_tokens: int = 0
    busy_slot_s: float = 0.0
    """Slot-seconds in which a trajectory was leased, at most `slots` at a time."""
    slot_s: float = 0.0
    """Slot-seconds of all slots while any trajectory was leased."""
    ages: list[int] = field(default_factory=list)
    """Per consumed group: versions made between its opening and its batch."""
    spans: list[int] = field(default_factory=list)
    """Per consumed trajectory: version of its last token minus that of its first, plus one."""
    lengths_and_staleness: list[tuple[int, int]] = field(default_factory=list)
    """Per consumed trajectory: number of tokens, and staleness of the oldest."""

    def pass_time(self, elapsed_s: float, num_leased: int, slots: int) -> None:
        """Add elapsed slot time. Time without any lease does not count."""
        if num_leased:
            self.busy_slot_s += elapsed_s * min(num_leased, slots)
            self.slot_s += elapsed_s * slots

    def consume(self, group: TrackedGroup, masked_tokens: int, version: int) -> None:
        """Count a group of the batch that the trainer receives at `version`."""
        self.consumed_tokens += group.num_tokens
        self.masked_tokens += masked_tokens
        self.ages.append(version - group.opened_at)
        for member in group.members:
            if member.versions:
                oldest, latest = member.versions[0][0], member.versions[-1][0]
                self.spans.append(latest - oldest + 1)
                self.lengths_and_staleness.append((member.num_tokens, version - oldest))

    def measured(self) -> BatchMeasurement:
        """Return the measurements from which the next over-provision is chosen."""
        return BatchMeasurement(
            occupancy=self.busy_slot_s / self.slot_s if self.slot_s else 1.0,
            masked_frac=self.masked_tokens / max(1, self.consumed_tokens),
            reprefilled_frac=self.reprefilled_tokens / max(1, self.generated_tokens),
        )

    def metrics(self) -> dict[str, float]:
        """Return metric values by name; docs/metrics.md defines them."""
        found = {
            "rollout/carried_groups": self.carried_groups,
            "rollout/carry_age": _mean(self.ages),
            "rollout/filtered_groups": self.filtered_groups,
            "rollout/requeued_groups": self.requeued_groups,
            "rollout/dropped_groups": self.dropped_groups,
            "rollout/resumed": self.resumed,
            "rollout/version_span_mean": _mean(self.spans),
            "rollout/version_span_max": max(self.spans, default=0),
            "tokens/reprefilled": self.reprefilled_tokens,
            "tokens/lost": self.lost_tokens,
        }
        if self.slot_s:
            found["perf/slot_occupancy"] = self.busy_slot_s / self.slot_s
        return {name: float(value) for name, value in (found | self._by_length()).items()}

    def _by_length(self) -> dict[str, float]:
        """Return the mean staleness of the oldest token per length quartile; long trajectories are the stalest."""
        ranked = sorted(self.lengths_and_staleness)
        if not any(staleness for _, staleness in ranked):
            return {}
        cuts = [len(ranked) * i // QUANTILES for i in range(QUANTILES + 1)]
        return {
            f"staleness/length_q{i + 1}": _mean([s for _, s in ranked[cuts[i] : cuts[i + 1]]]) for i in range(QUANTILES)
        }


def _mean(values: list[int]) -> float:
    return sum(values) / len(values) if values else 0.0
