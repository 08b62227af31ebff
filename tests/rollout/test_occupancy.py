"""The scheduler fills the slots of the engine while environments work, in virtual time (occupancy_cases.py)."""

from __future__ import annotations

from functools import cache

import pytest
from occupancy_cases import Load, simulate

SMALL = {"slots": 16, "step_s": 0.1}
RAMP_S, END_S = 100.0, 400.0


@cache
def occupancy(**values: object) -> float:
    run, _ = simulate(Load(**{**SMALL, **values}), END_S)  # type: ignore[arg-type]
    return run.transport.occupancy(RAMP_S, END_S)


@pytest.mark.parametrize("latency", ["lognormal", "constant"])
@pytest.mark.parametrize(("turn_tokens", "open_per_slot"), [(16, 8), (32, 4)])
def test_slow_environments_leave_no_slot_empty(turn_tokens: int, open_per_slot: int, latency: str) -> None:
    """Turns of 1.6 s and 3.2 s, calls of 2 s with a tail of 60 s: at least 95 % of the occupancy without tools."""
    shape = {"turn_tokens": turn_tokens, "open_per_slot": open_per_slot}
    without = occupancy(latency="none", **shape)
    assert without > 0.9
    assert occupancy(latency=latency, **shape) >= 0.95 * without


def test_as_many_episodes_as_slots_do_not_suffice() -> None:
    """The measure finds empty slots: 1.6 of each 3.6 s are generated."""
    assert occupancy(latency="constant", turn_tokens=16, open_per_slot=1) < 0.6


def test_a_bound_on_concurrent_calls_is_a_queue_and_no_loss() -> None:
    """4 calls of 2 s at once serve 2 turns per second, and the engine makes 10: episodes wait, and all are played."""
    run, environments = simulate(Load(**SMALL, turn_tokens=16, max_concurrent=4, latency="constant"), 200.0)  # type: ignore[arg-type]
    scheduler = run.controller.scheduler
    assert environments.num_running <= 4
    assert max(environments.queue_s) > 10.0
    assert scheduler.ledger.lost.total() == 0
    assert scheduler.ledger.generated == scheduler.ledger.settled + scheduler.num_carried_tokens
    assert run.version > 2
