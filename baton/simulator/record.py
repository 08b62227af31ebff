"""What a simulated run leaves behind, step by step; `result.py` makes sense of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from baton.rollout.ledger import Ledger, StepCounts
from baton.simulator.rows import EngineTime


@dataclass(slots=True)
class SimulatedStep:
    """One train step."""

    wanted_s: float
    """When its batch was wanted …"""
    begin_s: float
    """… and when it was there."""
    tokens: int
    """Prompts and responses of the batch."""
    counts: StepCounts
    """Since the batch before."""
    staleness: dict[int, int]
    """Versions behind the trainer → tokens."""
    end_s: float = 0.0
    is_trained: bool = False
    """Not so for one that a restart of the controller broke off."""
    train_s: float = 0.0


@dataclass(slots=True)
class RunRecord(Ledger):
    """One run, and the ledger of all incarnations of its controller."""

    steps: list[SimulatedStep] = field(default_factory=list)
    seconds: float = 0.0
    engines: dict[str, tuple[int, int, EngineTime]] = field(default_factory=dict)
    """Name → (slots, GPUs, where its time went)."""
    judge_s: float = 0.0
    carried: int = 0
    """At the end."""
    unreported: int = 0
    """Tokens that were made and died with their worker."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Faults and what was done about them, by name."""

    def trained_step(self, now_s: float, train_s: float) -> None:
        step = self.steps[-1]
        step.end_s, step.train_s, step.is_trained = now_s, train_s, True

    def restarted(self, now_s: float, ledger: Ledger) -> None:
        """The controller has died: what its ledger settled stays settled."""
        if self.steps and not self.steps[-1].is_trained:
            self.steps[-1].end_s = now_s
        self._add(ledger)
        self.outcomes["controller restarted"] += 1

    def close(self, ledger: Ledger, carried: int) -> None:
        self._add(ledger)
        self.carried = carried
        self.generated = self.settled + carried

    def _add(self, ledger: Ledger) -> None:
        self.trained += ledger.trained
        self.masked += ledger.masked
        self.filtered += ledger.filtered
        self.dropped += ledger.dropped
        self.lost += ledger.lost
