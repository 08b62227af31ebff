"""Bad days, drawn from seeds: whatever goes wrong, every law holds at every event, and the run comes to its end.

CI draws a few hundred; `make chaos` ten thousand, `BATON_SCHEDULES=10000` as many of each of these tests.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import chaos
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_cases import MODES, random_case, rules, swarm

from baton.rollout import events as ro
from baton.rollout.scheduler import RolloutScheduler
from baton.simulator.clock import NoProgress
from baton.simulator.faults import FaultSettings, RandomSettings, draw_faults
from baton.simulator.inputs import Setting
from baton.simulator.seeds import choices
from baton.simulator.simulation import RunOptions
from tests.simulator.violations import broken_law, simulate_checked

SCHEDULES = int(os.environ.get("BATON_SCHEDULES", "60"))


def survive(of, options: RunOptions) -> Counter[str]:
    """Simulate with all laws on; on a violation, fail with the smallest log that shows it."""
    try:
        return simulate_checked(of, options).outcomes
    except (AssertionError, NoProgress):
        violation = broken_law(of, options)
        raise AssertionError(violation.sentence() if violation is not None else "it went away") from None


@pytest.mark.parametrize("mode", MODES)
def test_every_law_holds_on_bad_days(mode: str) -> None:
    happened: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        happened += survive(swarm(mode), RunOptions(seed, random_case(seed, 3 + seed % 10)))
    for kind in ("crash", "hang", "slow", "join", "leave", "restart", "partition", "storm"):
        assert happened[f"fault: {kind}"], f"no {kind} in {SCHEDULES} days"
    assert happened["worker expelled"]
    assert happened["controller restarted"]


@given(
    mode=st.sampled_from(MODES),
    seed=st.integers(0, 2**31),
    stale=st.sampled_from(["mask", "drop"]),
    bound=st.integers(1, 4),
    faults=st.integers(0, 10),
    judging=st.sampled_from([0.0, 0.3]),
    dynamic=st.booleans(),
    exchange=st.sampled_from(["resume", "keep"]),
    every=st.integers(1, 3),
)
@settings(max_examples=SCHEDULES, deadline=None)
def test_every_law_holds_under_every_setting(
    mode: str, seed: int, stale: str, bound: int, faults: int, judging: float, dynamic: bool, exchange: str, every: int
) -> None:
    changes: dict[str, object] = {"dynamic_sampling": dynamic}
    if mode != "sync":
        changes |= {"stale": stale, "max_staleness": bound, "max_requeues": 1}
        if mode == "partial":
            changes["overprovision"] = 1.5
        else:
            changes["on_new_version"] = exchange
    of = swarm(mode, steps=5)
    own = rules(mode, **changes)
    if mode == "async":
        every = min(every, bound)
        own = replace(own, is_swarm=True, max_lag=bound - every + 1 if bound >= 2 * every - 1 else 0)
        of = replace(of, publish_every=every)
    of = replace(of, rules=own, work=replace(of.work, trained_share=0.8))
    of = replace(of, judges=replace(of.judges, latency_s=judging))
    day = draw_faults(choices(seed, "faults"), RandomSettings(faults=faults, until_s=30.0))
    survive(of, RunOptions(seed, [*day, FaultSettings(kind="join", at_s=100.0)]))


def test_a_fixed_sample_of_what_make_chaos_draws() -> None:
    found = chaos.survey(90)
    assert not found.violations
    assert found.days == {"sync": 30, "partial": 30, "async": 30}
    said = list(chaos.sentences(found, 1.0))
    assert said[0].startswith("90 random cases (30 sync, 30 partial, 30 async)")
    assert said[-1] == "cases with a violated invariant: 0"


class _LosesCount(RolloutScheduler):
    def handle(self, event: ro.Event) -> list[ro.Command]:
        if isinstance(event, ro.TokensReceived):
            self.ledger.generated -= 1
        return super().handle(event)


def test_make_chaos_ends_with_the_day_that_breaks_a_law(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    days = chaos.random_case

    def planted(number: int) -> tuple[Setting, RunOptions]:
        of, options = days(number)
        return of, replace(options, make_scheduler=_LosesCount) if number == 4 else options

    monkeypatch.setattr(chaos, "random_case", planted)
    monkeypatch.setattr(chaos.os, "cpu_count", lambda: 1)
    assert chaos.main(["3", "3"]) == 1
    said = capsys.readouterr().out
    assert "case 4: invariant violated: conservation" in said
    assert said.endswith("cases with a violated invariant: 1\n")


def test_no_honest_worker_is_taken_for_a_liar() -> None:
    """Slow workers load a version late: they report tokens of version v after tokens of v + 1, which counts as a
    fault."""
    late = [
        FaultSettings(kind="slow", at_s=1.473, for_s=1.584, factor=2.0),
        FaultSettings(kind="slow", at_s=3.038, for_s=1.252, factor=20.0),
    ]
    assert broken_law(swarm("async"), RunOptions(62, late)) is None
