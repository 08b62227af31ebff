"""What a simulated run leaves behind, step by step; `result.py` makes sense of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from baton.rollout.ledger import Ledger, StepCounts
from baton.simulator.rows import Busy


@dataclass(slots=True)
class Step:
    """One train step."""

    wanted_s: float
    """When its batch was wanted …"""
    begin_s: float
    """… and when it was there."""
    end_s: float = 0.0
    is_trained: bool = False
    """Not so for one that a restart of the controller broke off."""
    train_s: float = 0.0
    tokens: int = 0
    """Prompts and responses of the batch."""
    generated: int = 0
    """Tokens that came in since the batch before."""
    masked: int = 0
    carried_groups: int = 0
    carry_age: float = 0.0
    """Mean over groups of the versions made between opening and batch."""
    resumed: int = 0
    reprefilled: int = 0
    busy_slot_s: float = 0.0
    slot_s: float = 0.0
    staleness: dict[int, int] = field(default_factory=dict)
    """Versions behind the trainer → tokens."""


@dataclass(slots=True)
class Record:
    """One run."""

    steps: list[Step] = field(default_factory=list)
    seconds: float = 0.0
    engines: dict[str, tuple[int, int, Busy]] = field(default_factory=dict)
    """Name → (slots, GPUs, where its time went)."""
    judge_s: float = 0.0
    generated: int = 0
    trained: int = 0
    masked: int = 0
    filtered: int = 0
    dropped: int = 0
    carried: int = 0
    """At the end."""
    lost: Counter[str] = field(default_factory=Counter)
    """By cause: tokens that were reported and are part of nothing."""
    unreported: int = 0
    """Tokens that were made and died with their worker."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Faults and what was done about them, by name."""

    def batch(
        self,
        now_s: float,
        wanted_s: float,
        tokens: int,
        made: dict[int, int],
        version: int,
        counts: StepCounts,
    ) -> None:
        """A batch is there."""
        ages = counts.ages
        self.steps.append(
            Step(
                wanted_s,
                now_s,
                tokens=tokens,
                generated=counts.generated_tokens,
                masked=counts.masked_tokens,
                carried_groups=counts.carried_groups,
                carry_age=sum(ages) / max(1, len(ages)),
                resumed=counts.resumed,
                reprefilled=counts.reprefilled_tokens,
                busy_slot_s=counts.busy_slot_s,
                slot_s=counts.slot_s,
                staleness={version - of: num for of, num in sorted(made.items(), reverse=True)},
            )
        )

    def trained_step(self, now_s: float, train_s: float) -> None:
        """It is trained."""
        step = self.steps[-1]
        step.end_s, step.train_s, step.is_trained = now_s, train_s, True

    def restarted(self, now_s: float, ledger: Ledger) -> None:
        """The controller has died: what its ledger settled stays settled."""
        if self.steps and not self.steps[-1].is_trained:
            self.steps[-1].end_s = now_s
        self._add(ledger)
        self.outcomes["controller restarted"] += 1

    def forget(self, num_tokens: int) -> None:
        """Tokens that are generated again after a restart."""
        self.lost["restart"] += num_tokens

    def close(self, ledger: Ledger, carried: int) -> None:
        """The run is over."""
        self._add(ledger)
        self.carried = carried
        self.generated = self.trained + self.masked + self.filtered + self.dropped + self.lost.total() + carried

    def _add(self, ledger: Ledger) -> None:
        self.trained += ledger.trained
        self.masked += ledger.masked
        self.filtered += ledger.filtered
        self.dropped += ledger.dropped
        self.lost += ledger.lost
