"""The state of the scheduler: token counts of groups and trajectories, the token ledger, and the counters of a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

QUANTILES = 4
"""Trajectories are sorted by length and divided into this number of equal parts. Each part has a metric
`staleness/length_q…`."""


class TrajectoryState(Enum):
    """The state of a trajectory."""

    PENDING = 0
    """Waiting for a lease: not started, or aborted."""
    LEASED = 1
    SCORING = 2
    """Finished and submitted for scoring."""
    SCORED = 3
    ACTING = 4
    """A turn has ended, and the environment has not answered yet. Not leased."""


@dataclass(slots=True)
class TrackedTrajectory:
    """The scheduler's view of one trajectory."""

    group_id: int
    sample_index: int
    state: TrajectoryState = TrajectoryState.PENDING
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of (version, number of tokens that this version sampled), with ascending versions."""
    num_tokens: int = 0
    """Tokens that the policy wrote."""
    reward: float | None = None
    begins_turn: bool = False
    """True if the trajectory waits for its next turn, so that its next lease does not count as a resume."""

    @property
    def name(self) -> str:
        """Name in error messages: `group/sample`."""
        return f"{self.group_id}/{self.sample_index}"

    @property
    def is_finished(self) -> bool:
        return self.state in (TrajectoryState.SCORING, TrajectoryState.SCORED)

    def grow(self, version: int, num_tokens: int) -> None:
        """Add tokens of a version that is not older than the trajectory's last version."""
        last, count = self.versions[-1] if self.versions else (-1, 0)
        assert num_tokens > 0, f"trajectory {self.name} grew by {num_tokens} tokens"
        assert version >= last, f"trajectory {self.name}: version {version} after {last}"
        if version == last:
            self.versions[-1] = (version, count + num_tokens)
        else:
            self.versions.append((version, num_tokens))
        self.num_tokens += num_tokens

    def forget(self) -> int:
        """Remove all tokens and the reward; return the number of removed tokens."""
        forgotten, self.num_tokens, self.reward = self.num_tokens, 0, None
        self.begins_turn = False
        self.versions.clear()
        return forgotten


@dataclass(slots=True)
class TrackedGroup:
    """The scheduler's view of one group."""

    group_id: int
    members: list[TrackedTrajectory]
    """[group_size] Members by sample index."""
    num_unscored: int
    """Number of members without a reward."""
    opened_at: int
    """Version of the trainer when the group was opened."""
    attempts: int = 0
    """Number of earlier attempts at the same prompt."""

    @classmethod
    def new(cls, group_id: int, group_size: int, *, opened_at: int, attempts: int = 0) -> TrackedGroup:
        """Return a group of pending trajectories without tokens."""
        members = [TrackedTrajectory(group_id, index) for index in range(group_size)]
        return cls(group_id, members, group_size, opened_at, attempts)

    @property
    def num_tokens(self) -> int:
        return sum(t.num_tokens for t in self.members)

    @property
    def has_equal_rewards(self) -> bool:
        """Whether every advantage is zero: all rewards are equal, or fewer than two members have a reward."""
        rewards = [t.reward for t in self.members if t.reward is not None]
        return len(rewards) < 2 or min(rewards) == max(rewards)

    def oldest_version(self, *, default: int) -> int:
        """Return the oldest version among the group's tokens, or `default` if it has no tokens."""
        return min((t.versions[0][0] for t in self.members if t.versions), default=default)

    def num_tokens_before(self, version: int) -> int:
        """Return the number of tokens whose version is older than `version`."""
        return sum(count for t in self.members for v, count in t.versions if v < version)


ACCOUNTS = ("generated", "trained", "masked", "filtered", "dropped")
"""Names of the accounts of a `Ledger` that consist of one number. The account `lost` has one number per cause
instead."""


@dataclass(slots=True)
class Ledger:
    """Accounts of policy tokens: generated = trained + masked + filtered + dropped + lost + carried. Carried tokens are
    the tokens of open groups. The ledger does not store the number of carried tokens."""

    generated: int = 0
    trained: int = 0
    masked: int = 0
    """Delivered tokens that are too old to be trained."""
    filtered: int = 0
    dropped: int = 0
    lost: Counter[str] = field(default_factory=Counter)

    @property
    def settled(self) -> int:
        """Number of generated tokens that are not carried."""
        return self.trained + self.masked + self.filtered + self.dropped + self.lost.total()


@dataclass(slots=True)
class StepCounts:
    """Counters of the scheduler between two batches."""

    generated_tokens: int = 0
    reprefilled_tokens: int = 0
    """Number of response tokens that were prefilled again because a trajectory was resumed."""
    resumed: int = 0
    finished: int = 0
    turns: int = 0
    """Number of turns, in multi-turn episodes, that ended with an action."""
    carried_groups: int = 0
    """Number of groups that were still open when the batch was delivered."""
    filtered_groups: int = 0
    failure: str = ""
    """Reason why the last trajectory without a reward could not be scored."""
    requeued_groups: int = 0
    dropped_groups: int = 0
    masked_tokens: int = 0
    consumed_tokens: int = 0
    lost_tokens: int = 0
    busy_slot_s: float = 0.0
    """Slot-seconds of occupied slots: min(leased trajectories, slots), integrated over time."""
    slot_s: float = 0.0
    """Number of slots, busy or free, integrated over the time in which at least one trajectory was leased and not
    paused."""
    ages: list[int] = field(default_factory=list)
    """[consumed groups] Number of versions trained between the opening of the group and its delivery."""
    spans: list[int] = field(default_factory=list)
    """[consumed trajectories] Version of the last token minus version of the first token, plus one."""
    lengths_and_staleness: list[tuple[int, int]] = field(default_factory=list)
    """[consumed trajectories] Number of tokens, and staleness of the oldest token."""

    def consume(self, group: TrackedGroup, masked_tokens: int, version: int) -> None:
        """Count a delivered group. `version`: the trainer's version at delivery."""
        self.consumed_tokens += group.num_tokens
        self.masked_tokens += masked_tokens
        self.ages.append(version - group.opened_at)
        for member in group.members:
            if member.versions:
                oldest, latest = member.versions[0][0], member.versions[-1][0]
                self.spans.append(latest - oldest + 1)
                self.lengths_and_staleness.append((member.num_tokens, version - oldest))

    def metrics(self) -> dict[str, float]:
        """Return metric values by name, as docs/metrics.md defines them."""
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
        if self.turns:
            found["env/turns"] = self.turns
        if self.slot_s:
            found["perf/slot_occupancy"] = self.busy_slot_s / self.slot_s
            found["perf/slot_seconds"] = self.busy_slot_s
        return {name: float(value) for name, value in (found | self._by_length()).items()}

    def _by_length(self) -> dict[str, float]:
        """Divide the trajectories into quartiles by length. Return the mean staleness of each quartile, where a
        trajectory's staleness is that of its oldest token."""
        ranked = sorted(self.lengths_and_staleness)
        if not any(staleness for _, staleness in ranked):
            return {}
        cuts = [len(ranked) * i // QUANTILES for i in range(QUANTILES + 1)]
        return {
            f"staleness/length_q{i + 1}": _mean([s for _, s in ranked[cuts[i] : cuts[i + 1]]]) for i in range(QUANTILES)
        }


def _mean(values: list[int]) -> float:
    return sum(values) / len(values) if values else 0.0
