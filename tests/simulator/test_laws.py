"""The harness finds what it is for: a bug is planted for each law, and it is found, small and with its seed."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from simulator_cases import bad_day, rules, setting, swarm

from baton.rollout import events as ro
from baton.rollout.scheduler import RolloutScheduler
from baton.simulator.faults import FaultSettings
from baton.simulator.find import broken_law
from baton.simulator.run import Options, simulate
from baton.swarm import lease_events as ev
from baton.swarm.leases import LeaseTable


class ForgetsTokens(RolloutScheduler):
    """Counts a token less than it was told, now and then."""

    def handle(self, event: ro.Event) -> list[ro.Command]:
        if isinstance(event, ro.Grew) and event.group_id == 5 and event.num_tokens > 1:
            event = msgspec.structs.replace(event, num_tokens=event.num_tokens - 1)
        return super().handle(event)


class OpensTooMany(RolloutScheduler):
    """Lets one more batch be open than the bound allows."""

    def _may_open(self) -> bool:
        return len(self._buffer) < (self.rules.max_staleness + 3) * self.rules.batch_groups


class TrainsStaleTokens(RolloutScheduler):
    """Goes by another bound than its rules."""

    def __init__(self, rules, **options) -> None:
        super().__init__(rules, **options)
        self._kept = rules
        self.rules = replace(rules, max_staleness=rules.max_staleness + 2)


class LoadsUnderWay(RolloutScheduler):
    """Exchanges weights while trajectories run."""

    def _load_when_free(self, commands: list[ro.Command]) -> None:
        if self._is_changing and not self._is_loading:
            self._is_loading = True
            commands.append(ro.Load(self._published))


class NeverResumes(RolloutScheduler):
    """Loses what was put down."""

    def _put_back(self, trajectory) -> None:
        super()._put_back(trajectory)
        self._pending = [item for item in self._pending if item[1:] != (trajectory.group_id, trajectory.sample_index)]


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

    def _commit(self, task, lease, commands) -> None:
        before = task.committed
        super()._commit(task, lease, commands)
        if task.number % 7 == 3 and before != task.committed:
            commands.append(ev.Commit(task.number, lease.number, lease.length))


class BelievesForEver(LeaseTable):
    """Never gives a silent worker up."""

    def _expel(self, worker, cause, commands) -> None:
        return


class HidesWaste(LeaseTable):
    """Does not say what was made for nothing."""

    def _waste(self, cause, num_tokens, commands) -> None:
        return


class GrantsLate(LeaseTable):
    """Gives nothing to who has room until the next tick."""

    def handle(self, event: ev.Event) -> list[ev.Command]:
        if isinstance(event, ev.LeaseFinished):
            self._is_slack = True
        return super().handle(event)

    def _grant_all(self, at_s, commands) -> None:
        if not getattr(self, "_is_slack", False):
            super()._grant_all(at_s, commands)
        self._is_slack = False


class GrantsTheAborted(LeaseTable):
    """Leases what was to be put down."""

    def _end(self, lease, commands) -> None:
        task = self._tasks[lease.task]
        aborting, task.is_aborting = task.is_aborting, False
        super()._end(lease, commands)
        task.is_aborting = aborting and lease.task in self._tasks


def found(mode: str, *, scheduler: type = RolloutScheduler, table: type = LeaseTable, faults: bool = False):
    """The violation on the first of a few days on which there is one."""
    of = swarm(mode) if table is not LeaseTable or faults else setting(mode)
    for seed in range(12):
        day = bad_day(seed, 4) if faults else ()
        options = Options(seed, day, make_scheduler=scheduler, make_table=table)
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
        ("leases", "async", {"table": GrantsLate}),
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
    violation = broken_law(of, Options(0, make_scheduler=TrainsStaleTokens))
    assert violation is not None
    assert violation.law == "conservation"


def test_what_is_shown_is_no_more_than_is_needed() -> None:
    """A bug that a crash alone shows is shown with that crash alone."""
    faults = [FaultSettings(kind="slow", at_s=1.0 + i, factor=2.0, for_s=1.0) for i in range(6)]
    faults.insert(3, FaultSettings(kind="crash", at_s=4.0, worker="w1", for_s=5.0))
    violation = broken_law(swarm("async"), Options(0, faults, make_table=BelievesForEver))
    assert violation is not None
    assert [fault.kind for fault in violation.faults] == ["crash"]
    assert violation.law == "leases"


def test_without_a_bug_nothing_is_found() -> None:
    assert broken_law(swarm("async"), Options(0, bad_day(0))) is None


def test_sync_makes_the_same_batches_whatever_happens() -> None:
    """Law 5: noise is keyed by place, so a trajectory that is made again is the same, and so is every batch."""

    def batches(faults: list[FaultSettings]) -> list[tuple[int, ...]]:
        delivered: dict[int, tuple[int, ...]] = {}

        class Watches(RolloutScheduler):
            def handle(self, event: ro.Event) -> list[ro.Command]:
                commands = super().handle(event)
                delivered.update({c.step: c.group_ids for c in commands if isinstance(c, ro.Deliver)})
                return commands

        simulate(swarm("sync"), Options(3, faults, make_scheduler=Watches))
        return [delivered[step] for step in sorted(delivered)]

    quiet = batches([])
    assert len(quiet) == 8
    for seed in range(5):
        assert batches(bad_day(seed)) == quiet
