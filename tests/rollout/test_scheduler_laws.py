"""The scheduler under random schedules and in simulated runs, checked by the simulator's invariants.

A random schedule runs the live controller with its scheduler, buffer and journal. Its engines report, refuse, lose and
revoke tokens in any order, and slots come and go. `BATON_SCHEDULES=20000 pytest tests/rollout/test_scheduler_laws.py`
draws 20,000 schedules.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.errors import UserError
from baton.rollout import events as ev
from baton.rollout.settings import RolloutSettings
from baton.simulator.counted_tokens import counted_segment
from baton.simulator.faults import FaultSettings
from baton.simulator.inputs import EngineSpec, ScoringSpec, Setting
from baton.simulator.result import RunRecord
from baton.simulator.run import build
from baton.simulator.scripted_trajectories import Script, TrajectoryWork
from baton.simulator.simulation import EventObserver, RunOptions, Simulation
from baton.simulator.timing import FlatSpeed, TrainSpeed
from baton.simulator.transport import ControllerStopped, EngineTime, SimulatedTransport
from baton.specs.workload import constant, lognormal
from baton.types import (
    Abort,
    FinishReason,
    FromHub,
    FromPort,
    Group,
    Lease,
    PolicyVersion,
    Report,
    Retry,
    WorkLost,
    WorkRevoked,
)
from tests.simulator.invariants import InvariantChecker

SCHEDULES = int(os.environ.get("BATON_SCHEDULES", "300"))


class RandomEngines(SimulatedTransport):
    """Engines whose messages are random. The random part ends with batch `num_wild`, so that the run ends."""

    name = "random engines"
    slots = 0

    def __init__(self, world: Simulation, seed: int, num_wild: int, *, has_restarts: bool) -> None:
        self.world, self.choose, self.num_wild = world, random.Random(seed).randrange, num_wild
        self.has_restarts = has_restarts
        self.version = 0
        self.leases: dict[int, Lease] = {}
        self.lengths: dict[int, int] = {}
        self.aborted: set[int] = set()

    def begin(self) -> None:
        self.slots = self.choose(10)

    def restart(self) -> None:
        self.leases.clear()

    def busy(self) -> Sequence[tuple[EngineSpec, EngineTime]]:
        return ()

    def send(self, message: FromHub) -> None:
        if isinstance(message, Lease):
            self.leases[message.lease_id] = self.world.script.limited(message)
            self.lengths[message.lease_id] = message.trajectory.num_tokens
        elif isinstance(message, Abort):
            self.aborted.add(message.lease_id)

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        self.version = version.number

    def receive(self, timeout_s: float) -> Sequence[FromPort]:
        is_wild = self.world.version < self.num_wild
        self.world.clock.wait((0.0, 0.01, 0.1, 1.0)[self.choose(4)])
        messages: list[FromPort] = [self.some_report(is_wild) for _ in range(1 + self.choose(3)) if self.leases]
        if not self.slots or (is_wild and not self.choose(8)):
            self.slots = self.choose(10)
        if is_wild and not self.choose(8):
            messages += self.some_fault()
        return messages

    def flush(self) -> Sequence[FromPort]:
        """Report tokens of some leases that run."""
        reports = []
        for number, lease in self.leases.items():
            length = self.lengths[number]
            count = min(self.choose(3), lease.sampling.max_new_tokens - length - 1)
            if count > 0 and lease.version <= self.version and number not in self.aborted:
                self.lengths[number] = length + count
                reports.append(Report(number, length, (counted_segment(length, count, self.version),)))
        return reports

    def some_report(self, is_wild: bool) -> FromPort:
        number = sorted(self.leases)[self.choose(len(self.leases))]
        lease, length = self.leases[number], self.lengths[number]
        if lease.version > self.version or (is_wild and not self.choose(32)):
            del self.leases[number]
            return Retry(number, self.version)
        is_aborted = number in self.aborted and bool(self.choose(2))
        count = min(self.choose(9), lease.sampling.max_new_tokens - length)
        self.lengths[number] = length + count
        is_finished = length + count == lease.sampling.max_new_tokens
        if is_finished or is_aborted:
            del self.leases[number]
        segments = (counted_segment(length, count, self.version),) if count else ()
        reason = FinishReason.LENGTH if is_finished else None
        return Report(number, length, segments, reason, is_aborted and not is_finished)

    def some_fault(self) -> list[FromPort]:
        kind, groups = self.choose(3), [*self.world.scheduler.groups()]
        if not kind and self.has_restarts and self.world.record.outcomes["controller restarted"] < 3:
            raise ControllerStopped(1.0)
        if kind == 1 or not groups:
            return [WorkLost("overtaken", 1 + self.choose(9))]
        group = groups[self.choose(len(groups))]
        return [WorkRevoked(0, group.group_id, self.choose(len(group.members)), "quarantined")]


class Log(EventObserver):
    """Keeps events, commands and batches."""

    def __init__(self) -> None:
        self.messages: list[object] = []
        self.batches: list[Sequence[Group]] = []

    def on_event(self, event: object) -> None:
        self.messages.append(event)

    def on_command(self, command: object) -> None:
        self.messages.append(command)

    def on_batch(self, groups: Sequence[Group]) -> None:
        self.batches.append(groups)

    @property
    def ids(self) -> list[list[int]]:
        return [[group.group_id for group in groups] for groups in self.batches]


class Pauses(Log):
    """Aborts all rollouts after some of the batches, as an evaluation does."""

    def __init__(self, world: Simulation, seed: int) -> None:
        super().__init__()
        self.world, self.choose = world, random.Random(seed).randrange

    def on_batch(self, groups: Sequence[Group]) -> None:
        if not self.choose(3):
            with self.world.controller.paused():
                self.world.clock.wait(1.0)


@st.composite
def recipes(draw: st.DrawFn) -> RolloutSettings:
    mode = draw(st.sampled_from(["sync", "partial", "async"]))
    values: dict[str, object] = {
        "mode": mode,
        "batch_groups": draw(st.integers(1, 4)),
        "group_size": (size := draw(st.integers(1, 3))),
        "dynamic_sampling": draw(st.booleans()) and size > 1,
        "max_concurrency": draw(st.sampled_from([None, 1, 3, 9])),
    }
    if mode != "sync":
        values["max_staleness"] = draw(st.integers(0, 3))
        values["stale"] = draw(st.sampled_from(["mask", "drop"]))
        values["consume"] = draw(st.sampled_from(["completion", "submission", "stalest"]))
        values["max_requeues"] = draw(st.integers(0, 2))
        values["on_new_version"] = draw(st.sampled_from(["resume", "keep"]))
    if mode == "partial":
        values["overprovision"] = draw(st.sampled_from([1.0, 1.25, 2.0, 3.0, "auto", None]))
    try:
        return RolloutSettings.model_validate(values)
    except ValueError:  # refused together: let one of the two go
        return RolloutSettings.model_validate({**values, "stale": "mask"})


def random_run(
    recipe: RolloutSettings,
    seed: int,
    num_wild: int,
    *,
    has_restarts: bool,
    may_pause: bool = False,
    watches: Sequence[EventObserver] = (),
) -> None:
    """Run `num_wild` batches with random faults, and three more without."""
    setting = Setting(
        replace(recipe.rules(), may_pause=may_pause),
        (EngineSpec("any", 1, FlatSpeed()),),
        TrajectoryWork(constant(4), lognormal(6, 1.0, 12), 0.5, trained_share=0.7),
        TrainSpeed(0.5, 0.0, 0.0),
        ScoringSpec((0.0, 0.3, 3.0)[seed % 3], 1.0, (4, 1)[seed % 2]),
        num_steps=num_wild + 3,
        checkpoint_every=2,
    )
    restart = FaultSettings(kind="restart", at_s=0.0)  # no transport injects it: `RandomEngines` draws the restarts
    world = Simulation(setting, RunOptions(seed, [restart] if has_restarts else ()))
    world.port = RandomEngines(world, seed, num_wild, has_restarts=has_restarts)
    world.watches += [InvariantChecker(world, None), Pauses(world, seed), *watches]
    with suppress(*[UserError] * recipe.dynamic_sampling):  # all rewards equal, for too long
        world.run()


RESTORES_MORE = RolloutSettings(
    mode="partial", batch_groups=2, group_size=1, max_staleness=0, max_requeues=0, overprovision="auto"
)
"""With seed 94, a restart restores more groups than the scheduler would open at its first level of overprovision."""


@settings(max_examples=SCHEDULES, deadline=None)
@given(recipes(), st.integers(0, 2**32 - 1), st.integers(0, 8), st.booleans(), st.booleans())
@example(RESTORES_MORE, 94, 5, True, False)
@example(RESTORES_MORE, 94, 5, True, True)
def test_every_invariant_holds_after_every_event(recipe, seed, num_wild, has_restarts, may_pause):
    """Conservation to the token, exact batches, bounded staleness, no double training, the order, no hang."""
    random_run(recipe, seed, num_wild, has_restarts=has_restarts, may_pause=may_pause)


def test_random_schedules_reach_every_event_and_command_of_single_turns() -> None:
    log = Log()
    for seed in range(40):
        values = {"mode": ("async", "partial")[seed % 2], "batch_groups": 2, "group_size": 2, "max_staleness": 1}
        recipe = RolloutSettings.model_validate(values | {"stale": "drop", "dynamic_sampling": True})
        random_run(recipe, seed, 6, has_restarts=True, watches=[log])
    of_turns = {"TurnEnded", "Observed", "EnvironmentFailed"}
    known = {kind.__name__ for kind in (*get_args(ev.Event), *get_args(ev.Command))}
    assert {type(message).__name__ for message in log.messages} == known - of_turns


# ---- simulated runs --------------------------------------------------------------------------------------------------


def plain(
    mode: str = "partial", *, steps: int, seed: int = 0, work: TrajectoryWork | None = None, **values: object
) -> tuple[RunRecord, Log]:
    """Simulate a run with four engines of 16 slots, whose lengths differ much, without faults."""
    recipe = RolloutSettings.model_validate({"mode": mode, "batch_groups": 8, "group_size": 2, **values})
    setting = Setting(
        recipe.rules(),
        tuple(EngineSpec(f"e{index}", 16, FlatSpeed(0.01)) for index in range(4)),
        work or TrajectoryWork(constant(4), lognormal(9, 1.0, 60)),
        TrainSpeed(0.1, 0.0, 0.0),
        num_steps=steps,
    )
    log = Log()
    return build(setting, RunOptions(seed, log=log)).run(), log


@pytest.mark.parametrize("overprovision", [1.0, 1.5, 2.0, 3.0])
def test_little_mean_carry_age_is_overprovision_minus_one(overprovision):
    """Little's law: (overprovision − 1) × batch_groups wait, batch_groups leave each step."""
    record, _ = plain(overprovision=overprovision, max_staleness=99, steps=340)
    ages = [age for step in record.steps[20:-10] for age in step.counts.ages]
    assert sum(ages) / len(ages) == pytest.approx(overprovision - 1, rel=0.05, abs=0.01)


@pytest.mark.parametrize("mode", ["partial", "async"])
def test_carrying_leaves_no_lasting_length_bias(mode):
    """After the first batches, what is consumed is as long as what the source gives (±2 %)."""
    work, steps = TrajectoryWork(constant(4), lognormal(9, 1.0, 60)), 420
    _, log = plain(mode, **({"overprovision": 2.0} if mode == "partial" else {}), steps=steps, work=work)
    consumed = [m.trajectory.num_tokens for groups in log.batches[20:] for g in groups for m in g.members]
    script = Script(work, 0, 8, 2)
    source = [script.length(g, s) for g in range(8 * steps) for s in range(2)]
    assert sum(consumed) / len(consumed) == pytest.approx(sum(source) / len(source), rel=0.02)


def test_partial_without_overprovision_is_sync():
    """α = 1 and no filter: the same batches, and nothing is ever put down."""
    partial, log = plain(overprovision=1.0, consume="submission", steps=12)
    _, sync = plain("sync", steps=12)
    assert [sorted(ids) for ids in log.ids] == [list(range(8 * i, 8 * i + 8)) for i in range(12)]
    assert [sorted(ids) for ids in sync.ids] == [sorted(ids) for ids in log.ids]
    assert not any(step.counts.resumed for step in partial.steps)


def test_leases_that_pause_generate_the_same_tokens_in_the_same_time_as_aborted_ones():
    """One engine whose prefill takes no time: nothing is generated in a pause, and nothing is delayed by it."""
    values = {"mode": "partial", "batch_groups": 8, "group_size": 2, "on_new_version": "keep"}
    rules = RolloutSettings.model_validate(values).rules()
    work, train = TrajectoryWork(constant(4), lognormal(9, 1.0, 60)), TrainSpeed(5.0, 0.0, 0.0)
    setting = Setting(rules, (EngineSpec("e", 24, FlatSpeed(0.01)),), work, train, num_steps=30)
    found = []
    for may_pause in (False, True):
        log = Log()
        options = RunOptions(0, log=log)
        record = build(replace(setting, rules=replace(rules, may_pause=may_pause)), options).run()
        times = [(step.wait_s, step.begin_s, step.staleness) for step in record.steps]
        found.append((log.ids, times, [step.counts.slot_s for step in record.steps]))
        aborted = sum(isinstance(message, ev.AbortTrajectory) for message in log.messages)
        assert bool(aborted) != may_pause
    assert found[0] == found[1]


def test_consume_in_submission_order_is_the_order_of_the_prompts():
    _, log = plain("async", consume="submission", max_staleness=2, steps=30)
    prompts = [int(group.prompt.prompt_id) for groups in log.batches for group in groups]
    assert prompts == list(range(240))


def test_groups_of_the_same_tick_beyond_the_batch_are_carried_and_come_first():
    """All 16 open groups end at the same step: the second batch is the other 8, without a token in between."""
    record, log = plain(overprovision=2.0, steps=3, work=TrajectoryWork(constant(4), constant(20)))
    assert sorted(log.ids[0] + log.ids[1]) == list(range(16))
    assert record.steps[0].counts.carried_groups == 8
    assert record.steps[1].wait_s == 0


def test_filtered_groups_are_replaced_one_by_one():
    """Granular refill: with a batch of 8 and a third of all groups rejected, never more than 8 are open in sync."""
    work = TrajectoryWork(constant(4), lognormal(9, 1.0, 60), trained_share=2 / 3)
    record, log = plain("sync", dynamic_sampling=True, steps=6, work=work)
    filtered = sum(step.counts.filtered_groups for step in record.steps)
    assert filtered >= 8
    assert all(len({m.judgement.reward for m in group.members}) == 2 for groups in log.batches for group in groups)
    open_groups, most = 0, 0
    for message in log.messages:
        open_groups += isinstance(message, ev.Open) - isinstance(message, ev.Discard)
        open_groups -= 8 * isinstance(message, ev.Deliver)
        most = max(most, open_groups)
    assert most == 8
    assert sum(isinstance(message, ev.Open) for message in log.messages) == 6 * 8 + filtered


def test_the_gate_admits_what_the_paper_says():
    """max_staleness 2, batch of 4: 12 groups at version 0, 32 at version 5 (AReaL's own numbers)."""
    work = TrajectoryWork(constant(1), constant(5))
    _, log = plain("async", batch_groups=4, group_size=1, max_staleness=2, steps=12, work=work)
    opened, at_version = 0, dict[int, int]()
    for message in log.messages:
        opened += isinstance(message, ev.Open)
        if isinstance(message, ev.BatchRequested):  # engines are idle long before
            at_version[len(at_version)] = opened
    assert (at_version[0], at_version[5]) == (12, 32)


def test_dynamic_sampling_that_rejects_everything_stops_with_a_sentence():
    work = TrajectoryWork(constant(4), constant(9), trained_share=0.0)
    sentence = r"rollout\.dynamic_sampling filtered 160 groups for one batch of 8, .* all rewards were equal; use tasks"
    with pytest.raises(UserError, match=sentence):
        plain("sync", dynamic_sampling=True, steps=1, work=work)
