"""Workloads: moments of lengths, and the staleness gate against a simulation of itself."""

from __future__ import annotations

import heapq
import random

import pytest
from pydantic import ValidationError

from baton.errors import UserError
from baton.specs.workload import Workload, WorkloadSettings, constant, lognormal, measured


def work(**changes: object) -> Workload:
    base = {"groups": 8, "group_size": 4, "prompt_tokens": {"mean": 10}, "output_tokens": {"mean": 100}}
    return WorkloadSettings.model_validate({**base, **changes}).build()


def test_moments_of_measured_lengths() -> None:
    lengths = measured([2, 4, 6])
    assert lengths.mean == 4
    assert lengths.moment(2) == (4 + 16 + 36) / 3
    assert lengths.longest_of(1) == 4
    # of two: 2 with 1/9, 4 with 3/9, 6 with 5/9
    assert lengths.longest_of(2) == pytest.approx((2 + 3 * 4 + 5 * 6) / 9)
    assert lengths.survival([1, 2, 5, 6]) == pytest.approx([1, 2 / 3, 1 / 3, 0])


def test_a_lognormal_has_the_mean_it_was_asked_for_after_the_cut() -> None:
    lengths = lognormal(8000, 0.8, 27648)
    assert lengths.mean == pytest.approx(8000, rel=1e-6)
    assert lengths.longest == 27648
    uncut = lognormal(100, 0.5, 1e9)
    assert uncut.moment(2) / uncut.mean**2 - 1 == pytest.approx(0.25, rel=0.02)


def test_a_running_trajectory_is_longer_than_half_the_mean() -> None:
    """Half the tokens are of length 10, half of 30: seen at a random time (100 + 900) / 2 / (2·20) = 12.5 tokens in."""
    mixed = work(output_tokens={"kind": "measured", "values": [10, 30]})
    assert mixed.live_context_tokens == 10 + 12.5
    assert mixed.live_context_squared == pytest.approx(100 + 2 * 10 * 12.5 + (1000 + 27000) / 2 / (3 * 20))


def test_tokens_of_a_step() -> None:
    assert (work().output_tokens, work().trained_tokens) == (3200, 3520)


def simulated_throughput(slots: int, max_staleness: int, *, groups: int = 64, steps: int = 400) -> float:
    """Groups per unit of time of the gate itself: running + finished + in training ≤ (η + 1)·B; training takes no time
    of its own here, so that generation sets the pace (one trajectory per group, lognormal durations)."""
    draw = random.Random(0)
    now, version, finished, done = 0.0, 0, 0, []
    running: list[float] = []
    while len(done) < steps:
        while len(running) < slots and finished + len(running) < (max_staleness + 1) * groups:
            heapq.heappush(running, now + draw.lognormvariate(0, 0.8))
        now = heapq.heappop(running)
        finished += 1
        if finished >= groups:
            finished -= groups
            version += 1
            done.append(now)
    half = steps // 2
    return groups * half / (done[-1] - done[half - 1])


def test_slots_beyond_the_gate_bring_nothing() -> None:
    """With the trainer at leisure the gate is (η + 1)·B − buffered, (η + ½)·B on average; a busy one holds B back."""
    free = simulated_throughput(slots=96, max_staleness=100)
    assert simulated_throughput(slots=96, max_staleness=2) == pytest.approx(free, rel=0.02)
    mean_field = simulated_throughput(slots=10_000, max_staleness=1) / free * 96
    assert mean_field == pytest.approx(1.5 * 64, rel=0.1)


def test_the_gate_counts_a_group_until_its_longest_member_ends() -> None:
    plain = work(max_staleness=2, group_size=2, output_tokens={"kind": "measured", "values": [10, 30]})
    assert plain.max_running == pytest.approx(1.5 * 16 * 20 / 25)
    assert work(max_staleness=0).max_running == 32
    assert constant(5).longest_of(16) == 5


def test_what_is_wrong_is_said() -> None:
    for changes, sentence in (
        ({"groups": 0}, "greater than or equal to 1"),
        ({"output_tokens": {"kind": "lognormal", "mean": 100}}, "max: got None"),
        ({"output_tokens": {"kind": "lognormal", "mean": 100, "max": 50}}, "above mean = 100"),
        ({"output_tokens": {"kind": "measured"}}, "token counts of at least 1"),
        ({"output_tokens": {}}, "mean is missing"),
        ({"lengths": 3}, "Extra inputs"),
    ):
        with pytest.raises(ValidationError, match=sentence):
            work(**changes)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="minibatches: got 9"):
        work(algorithm={"minibatches": 9})
