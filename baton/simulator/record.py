"""The raw record of a simulated run, by train step; `result.py` summarises it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from baton.rollout.scheduler_state import Ledger, StepCounts
from baton.simulator.rows import EngineTime


@dataclass(slots=True)
class SimulatedStep:
    """One train step."""

    wanted_s: float
    """Time at which the batch was requested."""
    begin_s: float
    """Time at which training began."""
    tokens: int
    """Prompt and response tokens of the batch."""
    counts: StepCounts
    """Counts of the scheduler since the previous batch."""
    staleness: dict[int, int]
    """Number of tokens by staleness."""
    end_s: float = 0.0
    is_trained: bool = False
    """False if a restart of the controller interrupted the step."""
    train_s: float = 0.0


@dataclass(slots=True)
class RunRecord(Ledger):
    """Record of one run. Its token counts are summed over all incarnations of the controller."""

    steps: list[SimulatedStep] = field(default_factory=list)
    seconds: float = 0.0
    engines: dict[str, tuple[int, int, EngineTime]] = field(default_factory=dict)
    """(slots, GPUs, use of time) by engine name."""
    judge_s: float = 0.0
    carried: int = 0
    """Tokens in open groups at the end."""
    unreported: int = 0
    """Tokens that a worker generated but did not report before it ended."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Number of faults and of reactions to them, by name."""

    def trained_step(self, now_s: float, train_s: float) -> None:
        step = self.steps[-1]
        step.end_s, step.train_s, step.is_trained = now_s, train_s, True

    def restarted(self, now_s: float, ledger: Ledger) -> None:
        """Add the ledger of a controller that has stopped."""
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
