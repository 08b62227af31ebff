"""Where every token went, and what one batch took."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from baton.rollout.overprovision import BatchMeasurement
from baton.rollout.tracked import TrackedGroup

QUANTILES = 4


@dataclass(slots=True)
class Ledger:
    """Policy tokens since the scheduler began: generated = trained + masked + filtered + dropped + lost + carried."""

    generated: int = 0
    trained: int = 0
    masked: int = 0
    """In a batch, but too old to be trained."""
    filtered: int = 0
    dropped: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    """By cause."""

    def lose(self, cause: str, num_tokens: int) -> None:
        """Tokens are gone, and will be generated again."""
        self.lost[cause] += num_tokens

    @property
    def settled(self) -> int:
        """Tokens whose end is known; the rest is carried."""
        return self.trained + self.masked + self.filtered + self.dropped + self.lost.total()


@dataclass(slots=True)
class StepCounts:
    """What the scheduler counts between two batches."""

    generated_tokens: int = 0
    reprefilled_tokens: int = 0
    """Tokens after the prompt that were prefilled again because their trajectory had been put down."""
    resumed: int = 0
    """Trajectories that were taken up again."""
    finished: int = 0
    """Trajectories."""
    carried_groups: int = 0
    """Groups in no batch when this one was delivered."""
    filtered_groups: int = 0
    requeued_groups: int = 0
    dropped_groups: int = 0
    masked_tokens: int = 0
    consumed_tokens: int = 0
    lost_tokens: int = 0
    busy_slot_s: float = 0.0
    """Slot time in which a trajectory ran."""
    slot_s: float = 0.0
    """Slot time while anything ran."""
    ages: list[int] = field(default_factory=list)
    """Of each consumed group: versions made between its opening and its batch."""
    spans: list[int] = field(default_factory=list)
    """Of each consumed trajectory: versions from its first token to its last, plus one."""
    lengths_and_staleness: list[tuple[int, int]] = field(default_factory=list)
    """Of each consumed trajectory: tokens, and staleness of its oldest."""

    def pass_time(self, elapsed_s: float, num_leased: int, slots: int) -> None:
        """Count slot time."""
        if num_leased:
            self.busy_slot_s += elapsed_s * min(num_leased, slots)
            self.slot_s += elapsed_s * slots

    def consume(self, group: TrackedGroup, masked_tokens: int, version: int) -> None:
        """Count a group that is in the batch of the trainer at `version`."""
        self.consumed_tokens += group.num_tokens
        self.masked_tokens += masked_tokens
        self.ages.append(version - group.opened_at)
        for member in group.members:
            if member.versions:
                oldest, latest = member.versions[0][0], member.versions[-1][0]
                self.spans.append(latest - oldest + 1)
                self.lengths_and_staleness.append((member.num_tokens, version - oldest))

    def measured(self) -> BatchMeasurement:
        """What the choice of over-provision goes by."""
        return BatchMeasurement(
            occupancy=self.busy_slot_s / self.slot_s if self.slot_s else 1.0,
            masked_frac=self.masked_tokens / max(1, self.consumed_tokens),
            reprefilled_frac=self.reprefilled_tokens / max(1, self.generated_tokens),
        )

    def metrics(self) -> dict[str, float]:
        """Metric names and values; docs/metrics.md says what they mean."""
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
        """Mean staleness of the oldest token, by quarter of length: long trajectories are the stale ones."""
        ranked = sorted(self.lengths_and_staleness)
        if not any(staleness for _, staleness in ranked):
            return {}
        cuts = [len(ranked) * i // QUANTILES for i in range(QUANTILES + 1)]
        return {
            f"staleness/length_q{i + 1}": _mean([s for _, s in ranked[cuts[i] : cuts[i + 1]]]) for i in range(QUANTILES)
        }


def _mean(values: list[int]) -> float:
    return sum(values) / len(values) if values else 0.0
