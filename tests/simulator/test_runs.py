"""Whole runs: the same to the byte, never faster than the work, and as theory has them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from simulator_cases import MODES, random_case, rules, setting, swarm

from baton.rollout import events as ro
from baton.rollout.scheduler import RolloutScheduler
from baton.simulator.inputs import EngineSpec, ScoringSpec, Setting
from baton.simulator.result import summarise
from baton.simulator.run import EventLog, Spans, simulate
from baton.simulator.scripted_trajectories import Script, TrajectoryWork
from baton.simulator.simulation import RunOptions
from baton.simulator.timing import FlatSpeed, TrainSpeed
from baton.specs.workload import constant, lognormal
from baton.swarm.provisioning import Provisioning
from tests.simulator.violations import simulate_checked


@pytest.mark.parametrize("mode", MODES)
def test_the_same_seed_gives_the_same_events_to_the_byte(mode: str) -> None:
    def events(seed: int) -> list[bytes]:
        log = EventLog()
        simulate(swarm(mode), RunOptions(seed, random_case(seed), log=log))
        return list(log.lines)

    first = events(3)
    assert len(first) > 500
    assert events(3) == first
    assert events(4) != first


def test_the_first_worker_of_a_swarm_is_noticed_at_once() -> None:
    """The controller waits for no message longer than 20 ms while it has no slots."""
    seen: list[tuple[float, bool]] = []

    class Watch(RolloutScheduler):
        def handle(self, event: ro.Event) -> list[ro.Command]:
            commands = super().handle(event)
            seen.append((event.at_s, any(isinstance(command, ro.Assign) for command in commands)))
            return commands

    of = swarm("sync")
    simulate(of, RunOptions(0, make_scheduler=Watch))
    assert of.swarm is not None
    first_s = next(at_s for at_s, is_leased in seen if is_leased)
    assert first_s <= 3 * of.swarm.link_s + 0.02, "the handshake, and one wait"


def test_a_change_of_one_concern_leaves_the_others_as_they_were() -> None:
    work = TrajectoryWork(constant(16), lognormal(60, 1.0, 400), 0.5)
    one, other = Script(work, 5, 4, 2), Script(replace(work, prompt=lognormal(30, 1.0, 90)), 5, 4, 2)
    drawn = [one.length(group, index) for group in range(600) for index in range(2)]
    assert drawn == [other.length(group, index) for group in range(600) for index in range(2)]
    assert one.prompt(3) != other.prompt(3)
    assert sum(drawn) / len(drawn) == pytest.approx(60, rel=0.1)


def test_members_of_a_group_are_as_alike_as_was_asked_for() -> None:
    def spread_within(correlation: float) -> float:
        script = Script(TrajectoryWork(constant(1), lognormal(60, 1.0, 400), correlation), 0, 4, 2)
        return sum(abs(script.length(g, 0) - script.length(g, 1)) for g in range(400)) / 400

    assert spread_within(1.0) == 0
    assert 0 < spread_within(0.8) < 0.7 * spread_within(0.0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [setting, swarm])
def test_every_law_holds_on_a_good_day(mode: str, make) -> None:
    of = make(mode)
    record = simulate_checked(of, RunOptions(1))
    assert len(record.steps) == of.num_steps
    assert record.generated == sum(
        (record.trained, record.masked, record.filtered, record.dropped, record.lost.total(), record.carried)
    )
    assert record.unreported == 0


@pytest.mark.parametrize("mode", MODES)
def test_no_run_is_faster_than_its_work(mode: str) -> None:
    """Every engine at full width all the time, without prefill: no more tokens than that."""
    of = setting(mode, steps=20)
    result, speed = summarise(of, simulate(of, RunOptions(2))), of.engines[0].speed
    most = sum(engine.slots / speed.step_s(engine.slots, 0.0) for engine in of.engines)
    assert result.generated_tokens_per_s <= most
    assert result.tokens["generated"] / result.seconds <= most
    assert result.step_s >= result.train_s
    for engine in result.engines:
        assert 0 <= engine.idle < 1
        assert engine.decode + engine.prefill + engine.load + engine.idle == pytest.approx(1)


def test_sync_takes_its_turns() -> None:
    """Equal lengths, room for all: a step is the longest prefill, 50 decode steps, training, publication."""
    of = Setting(
        rules(),
        (EngineSpec("e", 8, FlatSpeed(0.1, token_s=0.001)),),
        TrajectoryWork(constant(20), constant(50)),
        TrainSpeed(2.0, 0.0, 0.0),
        ScoringSpec(0.5),
        publish_s=0.25,
        num_steps=5,
    )
    result = summarise(of, simulate(of))
    assert result.step_s == pytest.approx(4 * 20 * 0.001 + 50 * 0.1 + 0.5 + 2.0 + 0.25)
    assert result.staleness == {0: 1.0}
    assert result.wait_s == pytest.approx(0.08 + 5.0 + 0.5)


def test_littles_law_of_what_is_carried() -> None:
    """Groups carried over a batch = groups per version × versions from opening to batch, to the group."""
    of = replace(setting("partial", slots=16, steps=60), rules=rules("partial", overprovision=3.0, max_staleness=50))
    steps = simulate(of, RunOptions(0)).steps
    carried = sum(step.counts.carried_groups for step in steps)
    ages = sum(sum(step.counts.ages) for step in steps)
    assert carried > 200
    assert steps[-1].counts.carried_groups == 0, "nothing is begun that the last step does not need"
    assert ages == pytest.approx(carried)


def test_more_staleness_keeps_the_trainer_busier_and_never_exceeds_its_bound() -> None:
    busy, mean = [], []
    for bound in (0, 1, 2, 4):
        of = replace(setting("async", slots=16, steps=40), rules=rules("async", max_staleness=bound, stale="drop"))
        result = summarise(of, simulate(of, RunOptions(0)))
        assert max(result.staleness) <= bound
        assert result.masked_share == 0
        busy.append(result.trainer_busy)
        mean.append(result.mean_staleness)
    assert busy[0] < busy[1]
    assert busy[1:] == sorted(busy[1:])
    assert mean == sorted(mean)


@pytest.mark.parametrize(("workers", "every"), [(2, 1), (4, 1), (4, 2), (8, 2)])
def test_the_provisioning_rule_says_how_long_the_trainer_waits(workers: int, every: int) -> None:
    """Σμ ≥ κ·R / (κ·T_train − T_broadcast): workers of known speed, at a staleness that leaves them room."""
    of = swarm("async", engines=workers, steps=60)
    of = replace(
        of,
        rules=replace(rules("async", max_staleness=12), is_swarm=True, max_lag=every),
        work=TrajectoryWork(constant(16), constant(50)),
        train=TrainSpeed(2.0, 0.0, 0.0),
        judges=ScoringSpec(),
        publish_every=every,
    )
    result = summarise(of, simulate(of, RunOptions(0)))
    per_worker = of.engines[0].slots / (50 * of.engines[0].speed.step_s(4, 41.0))
    rule = Provisioning(every, 2.0, 0.0, 8, workers * per_worker)
    assert rule.idle_share is not None
    assert 1 - result.trainer_busy == pytest.approx(rule.idle_share, abs=0.07)


@pytest.mark.parametrize("mode", MODES)
def test_spans_of_generation_hold_every_token_and_do_not_overlap_in_a_slot(mode: str) -> None:
    spans = Spans()
    record = simulate(setting(mode), RunOptions(0, tracer=spans))
    made = [span for span in spans.spans if span.name == "generate"]
    assert sum(span.facts["tokens"] for span in made) == record.generated
    by_slot: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for span in spans.spans:
        by_slot.setdefault((span.actor, span.lane), []).append((span.begin_s, span.end_s))
    for slot in by_slot.values():
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(sorted(slot)))
    assert {span.name for span in spans.spans} >= {"generate", "prefill", "train", "publish", "judge", "wait_for_batch"}
    assert {span.facts["ended"] for span in made} == ({"finish"} if mode == "sync" else {"finish", "abort"})
