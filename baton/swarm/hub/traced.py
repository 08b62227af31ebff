"""Records the hub's events in the trace: leases, transfers of versions to workers, and checks of trajectories."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from baton.clock import Clock
from baton.records.lease_trace import LeaseTrace
from baton.records.trace import ASIDE, Tracer
from baton.rollout.rescoring import Claim, Rescored
from baton.swarm import lease_events as ev
from baton.swarm.lease_broker import BrokerCommand, LeaseBroker, ReportCheck
from baton.swarm.leases import LeaseTable
from baton.swarm.verification.service import LogprobScorer
from baton.types import Lease, Report, Retry, Trajectory


class TracedLeaseBroker(LeaseBroker):
    """A `LeaseBroker` that traces the start and end of leases, and the arrival of versions at workers."""

    def __init__(self, table: LeaseTable, check: ReportCheck, clock: Clock, trace: LeaseTrace) -> None:
        def check_and_trace(lease: Lease, report: Report, *, grown: Trajectory, newest_version: int) -> str | None:
            complaint = check(lease, report, grown=grown, newest_version=newest_version)
            if complaint is None:
                trace.on_report(report)
            return complaint

        super().__init__(table, check_and_trace, clock)
        self._trace = trace
        self._names: dict[int, str] = {}
        self._served: dict[int, tuple[int | None, float]] = {}
        """Worker → (version that it serves, time since which it serves this version)."""

    def join(
        self,
        worker: int,
        slots: int,
        weight: float = 1.0,
        kind: str | None = "",
        owner: str | None = None,
        name: str = "",
    ) -> list[BrokerCommand]:
        self._names[worker] = name
        self._served[worker] = (None, self.clock())
        return super().join(worker, slots, weight, kind, owner, name)

    def heartbeat(self, worker: int, version: int | None, decoded_tokens: int) -> list[BrokerCommand]:
        before, since_s = self._served.get(worker, (version, 0.0))
        if version is not None and version != before:
            now_s = self.clock()
            begin_s = max(since_s, self.pace.announced.get(version, since_s))
            self._trace.tracer.span("fetch", self._names[worker], ASIDE, min(begin_s, now_s), now_s, version=version)
            self._served[worker] = (version, now_s)
        return super().heartbeat(worker, version, decoded_tokens)

    def leave(self, worker: int, cause: str) -> list[BrokerCommand]:
        self._end_all(worker)
        return super().leave(worker, cause)

    def held(self, worker: int, leases: Iterable[int]) -> list[BrokerCommand]:
        claimed = set(leases)
        known = self.table.workers[worker].leases if worker in self.table.workers else set()
        for lease in known - claimed:
            self._trace.ended(lease, "lost")
        return super().held(worker, claimed)

    def refuse(self, worker: int, retry: Retry) -> list[BrokerCommand]:
        if self.table.knows(retry.lease_id):
            self._trace.on_report(retry)
        return super().refuse(worker, retry)

    def apply(self, command: ev.Command) -> BrokerCommand | None:
        match command:
            case ev.DropLease(lease=lease):
                self._trace.ended(lease, "dropped")
            case ev.DisconnectWorker(worker=worker):
                self._end_all(worker)
            case _:
                pass
        found = super().apply(command)
        if isinstance(command, ev.GrantLease):
            slots = self.table.workers[command.worker].slots
            self._trace.on_lease(self._progress[command.lease].lease, self._names[command.worker], slots)
        return found

    def _end_all(self, worker: int) -> None:
        self._served.pop(worker, None)
        name = self._names.pop(worker, None)
        if name is not None:
            self._trace.left(name)


class TracedLogprobScorer(LogprobScorer):
    """A scorer that traces its computing time."""

    def __init__(self, scorer: LogprobScorer, tracer: Tracer) -> None:
        self._scorer, self._tracer = scorer, tracer
        self._version = 0

    def load(self, tensors: Mapping[str, Any], version: int) -> None:
        self._version = version
        self._scorer.load(tensors, version)

    def score(self, claims: Sequence[Claim]) -> list[Rescored]:
        begin_s = time.monotonic()
        found = self._scorer.score(claims)
        end_s = time.monotonic()
        self._tracer.span("check", "examiner", 0, begin_s, end_s, trajectories=len(claims), version=self._version)
        return found
