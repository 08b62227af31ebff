"""The harness finds what it is for: a bug is planted for each law, and it is found, small and with its seed."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from typing import Any

import msgspec
import pytest
from simulator_cases import random_case, rules, setting, swarm

from baton.rollout import events as ro
from baton.rollout.scheduler import RolloutScheduler
from baton.rollout.settings import Rules
from baton.simulator import engine
from baton.simulator.counted_tokens import counted_segment
from baton.simulator.faults import FaultSettings
from baton.simulator.run import simulate
from baton.simulator.simulation import RunOptions
from baton.swarm import lease_events as ev
from baton.swarm.leases import LeaseRules, LeaseTable
from tests.simulator.violations import broken_law, simulate_checked


class ForgetsTokens(RolloutScheduler):
    """Counts a token less than it was told, now and then."""

    def handle(self, event: ro.Event) -> list[ro.Command]:
        if isinstance(event, ro.TokensReceived) and event.group_id == 5 and event.num_tokens > 1:
            event = msgspec.structs.replace(event, num_tokens=event.num_tokens - 1)
        return super().handle(event)


class LaxRules(Rules):
    """Bounds that are higher than what was asked for."""

    def __init__(self, rules: Rules) -> None:
        given = {field.name: getattr(rules, field.name) for field in fields(rules)}
        super().__init__(**given | {"max_staleness": rules.max_staleness + 2})

    def max_outstanding(self, overprovision: float) -> float:
        return super().max_outstanding(overprovision) + self.batch_groups


class OpensTooMany(RolloutScheduler):
    """Lets more groups be open than the bound allows."""

    def __init__(self, rules: Rules, **options: Any) -> None:
        super().__init__(LaxRules(rules), **options)


class TrainsStaleTokens(RolloutScheduler):
    """Goes by another bound than its rules."""

    def __init__(self, rules: Rules, **options: Any) -> None:
        super().__init__(rules, **options)
        self.rules = replace(rules, max_staleness=rules.max_staleness + 2)


class LoadsUnderWay(RolloutScheduler):
    """Exchanges weights while trajectories run."""

    def handle(self, event: ro.Event) -> list[ro.Command]:
        found = super().handle(event)
        if isinstance(event, ro.VersionTrained) and self.num_leased:
            found.append(ro.Load(event.version))
        return found


class NeverResumes(RolloutScheduler):
    """Takes the places for lost, and not for free, once something was put down."""

    has_lost_places = False

    def handle(self, event: ro.Event) -> list[ro.Command]:
        if isinstance(event, ro.LeaseEnded):
            self.has_lost_places = True
            super().handle(ro.Capacity(event.at_s, 0))
        if isinstance(event, ro.Capacity) and self.has_lost_places:
            event = msgspec.structs.replace(event, slots=0, queue=0)
        return super().handle(event)


class AsksForNewer(RolloutScheduler):
    """Asks for a version that nobody serves."""

    def handle(self, event: ro.Event) -> list[ro.Command]:
        found = super().handle(event)
        return [
            msgspec.structs.replace(c, version=c.version + 1) if isinstance(c, ro.Assign) and c.group_id == 6 else c
            for c in found
        ]


class CommitsTwice(LeaseTable):
    """Commits what it has committed before."""

    def handle(self, event: ev.Event) -> list[ev.Command]:
        found = super().handle(event)
        again = [c for c in found if isinstance(c, ev.CommitTokens) and c.task % 7 == 3]
        return [c for one in found for c in ((one, one) if one in again else (one,))]


class BelievesForEver(LeaseTable):
    """Takes all time for a delay of its own, and so never gives a silent worker up."""

    def handle(self, event: ev.Event) -> list[ev.Command]:
        if isinstance(event, ev.LeaseTick):
            event = msgspec.structs.replace(event, delay_s=event.at_s)
        return super().handle(event)


class HidesWaste(LeaseTable):
    """Does not say what was made for nothing."""

    def handle(self, event: ev.Event) -> list[ev.Command]:
        found = super().handle(event)
        self.wasted.clear()
        return [c for c in found if not isinstance(c, ev.DiscardTokens)]


class GrantsTooFew(LeaseTable):
    """Leaves places free that its rules want filled."""

    def __init__(self, rules: LeaseRules) -> None:
        super().__init__(replace(rules, prefetch=0.0))
        self.rules = rules


class GrantsTheAborted(LeaseTable):
    """Leases what was to be put down: it recalls it, and knows nothing of it when it comes back."""

    def __init__(self, rules: LeaseRules) -> None:
        super().__init__(rules)
        self.holder: dict[int, int] = {}

    def handle(self, event: ev.Event) -> list[ev.Command]:
        if isinstance(event, ev.TaskAborted):
            leases = [lease.number for lease in self.tasks[event.task].leases] if event.task in self.tasks else []
            return [ev.RecallLease(self.holder[lease], lease) for lease in leases]
        found = super().handle(event)
        self.holder |= {c.lease: c.worker for c in found if isinstance(c, ev.GrantLease)}
        return found


def found(mode: str, *, scheduler: type = RolloutScheduler, table: type = LeaseTable, faults: bool = False):
    """The violation on the first of a few days on which there is one."""
    of = swarm(mode) if table is not LeaseTable or faults else setting(mode)
    for seed in range(12):
        day = random_case(seed, 4) if faults else ()
        options = RunOptions(seed, day, make_scheduler=scheduler, make_table=table)
        violation = broken_law(of, options)
        if violation is not None:
            return violation
    return None


@pytest.mark.parametrize(
    ("law", "mode", "planted"),
    [
        ("conservation", "sync", {"scheduler": ForgetsTokens}),
        ("staleness", "async", {"scheduler": OpensTooMany}),
        ("staleness", "partial", {"scheduler": OpensTooMany}),
        ("version", "async", {"scheduler": LoadsUnderWay}),
        ("version", "sync", {"scheduler": AsksForNewer}),
        ("progress", "partial", {"scheduler": NeverResumes}),
        ("append only", "async", {"table": CommitsTwice, "faults": True}),
        ("leases", "async", {"table": BelievesForEver, "faults": True}),
        ("conservation", "sync", {"table": HidesWaste, "faults": True}),
        ("leases", "async", {"table": GrantsTooFew}),
        ("leases", "partial", {"table": GrantsTheAborted}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value.values())).__name__,
)
def test_a_planted_bug_is_found(law: str, mode: str, planted: dict[str, object]) -> None:
    violation = found(mode, **planted)
    assert violation is not None, "nothing was found"
    assert violation.law == law
    said = violation.sentence()
    assert f"seed {violation.seed}" in said
    assert violation.log, "the events that led to it are shown"


def test_the_bound_of_staleness_is_seen_by_who_counts_for_himself() -> None:
    """The scheduler masks by another bound than the run's: its books add up, and are wrong."""
    of = replace(setting("partial", steps=20), rules=rules("partial", max_staleness=0, overprovision=4.0))
    violation = broken_law(of, RunOptions(0, make_scheduler=TrainsStaleTokens))
    assert violation is not None
    assert violation.law == "conservation"


def test_what_is_shown_is_no_more_than_is_needed() -> None:
    """A bug that a crash alone shows is shown with that crash alone."""
    faults = [FaultSettings(kind="slow", at_s=1.0 + i, factor=2.0, for_s=1.0) for i in range(6)]
    faults.insert(3, FaultSettings(kind="crash", at_s=4.0, worker="w1", for_s=5.0))
    violation = broken_law(swarm("async"), RunOptions(0, faults, make_table=BelievesForEver))
    assert violation is not None
    assert [fault.kind for fault in violation.faults] == ["crash"]
    assert violation.law == "leases"


def test_the_quarantine_of_a_correct_worker_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's check refuses tokens of a version that it has not published."""
    late = lambda start, num, version, origin: counted_segment(start, num, version + 9, origin)  # noqa: E731
    monkeypatch.setattr(engine, "counted_segment", late)
    violation = broken_law(swarm("async"), RunOptions(0, random_case(0)))
    assert violation is not None
    assert violation.law == "workers"
    assert "newest" in violation.sentence()


WRONG = [FaultSettings(kind="wrong", at_s=0.0, worker="w0"), FaultSettings(kind="crash", at_s=5.0, worker="w0")]


def test_tokens_that_contradict_each_other_are_generated_again() -> None:
    """A worker generates other tokens than its class, and crashes; who takes over generates correct ones."""
    record = simulate_checked(swarm("sync"), RunOptions(0, WRONG))
    assert record.lost["contradicted"] > 0


def test_a_hub_that_does_not_compare_tokens_mixes_them_and_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeaseTable, "is_comparable", lambda self, lease: False)
    violation = broken_law(swarm("sync"), RunOptions(0, WRONG))
    assert violation is not None
    assert violation.law == "append only"
    assert "mixes tokens of two leases" in violation.sentence()


def test_an_engine_with_noise_of_its_own_replaces_what_another_began() -> None:
    of = swarm("sync")
    own = tuple(replace(spec, kind=kind) for spec, kind in zip(of.engines, ("vllm", "embedded", "vllm"), strict=True))
    lost = Counter()
    for seed in range(4):
        lost += simulate_checked(replace(of, engines=own), RunOptions(seed, random_case(seed))).lost
    assert lost["overtaken"] > 0


def test_without_a_bug_nothing_is_found() -> None:
    assert broken_law(swarm("async"), RunOptions(0, random_case(0))) is None


def test_sync_makes_the_same_batches_whatever_happens() -> None:
    """Law 5: noise is keyed by place, so a trajectory that is made again is the same, and so is every batch."""

    def batches(faults: list[FaultSettings]) -> list[tuple[int, ...]]:
        delivered: dict[int, tuple[int, ...]] = {}

        class Watches(RolloutScheduler):
            def handle(self, event: ro.Event) -> list[ro.Command]:
                commands = super().handle(event)
                delivered.update({c.step: c.group_ids for c in commands if isinstance(c, ro.Deliver)})
                return commands

        simulate(swarm("sync"), RunOptions(3, faults, make_scheduler=Watches))
        return [delivered[step] for step in sorted(delivered)]

    quiet = batches([])
    assert len(quiet) == 8
    for seed in range(5):
        assert batches(random_case(seed)) == quiet
