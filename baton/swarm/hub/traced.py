"""The hub's side in the trace: leases, versions on their way to workers, checks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.records.trace import ASIDE, LeaseTrace, Tracer
from baton.rollout.rescored import Claim, Rescored
from baton.swarm import lease_events as ev
from baton.swarm.lease_broker import BrokerCallbacks, Check, LeaseBroker
from baton.swarm.leases import LeaseTable
from baton.swarm.verification.service import LogprobScorer
from baton.types import Lease, Report, Retry, Trajectory


@dataclass(frozen=True, slots=True)
class BrokerTrace:
    """What a desk traces by."""

    leases: LeaseTrace
    name: Callable[[int], str]
    """A worker that is connected → what it is called."""
    handed_over: Mapping[int, float]
    """Version → when the trainer handed it over, while some worker lacks it."""


class TracedLeaseBroker(LeaseBroker):
    """A `LeaseBroker` that says when workers get leases, what becomes of these, and when a version has reached a
    worker.
    """

    def __init__(
        self, table: LeaseTable, outside: BrokerCallbacks, check: Check, clock: Callable[[], float], trace: BrokerTrace
    ) -> None:
        def check_and_trace(lease: Lease, grown: Trajectory, report: Report) -> str | None:
            complaint = check(lease, grown, report)
            if complaint is None:
                trace.leases.heard(report)
            return complaint

        super().__init__(table, outside, check_and_trace, clock)
        self._trace = trace
        self._names: dict[int, str] = {}
        self._served: dict[int, tuple[int | None, float]] = {}
        """Worker → (version that it serves, since when)."""

    def join(
        self, worker: int, slots: int, weight: float = 1.0, kind: str | None = "", owner: str | None = None
    ) -> None:
        self._names[worker] = self._trace.name(worker)
        self._served[worker] = (None, self._clock())
        super().join(worker, slots, weight, kind, owner)

    def hear(self, worker: int, version: int | None, decoded_tokens: int) -> None:
        before, since_s = self._served.get(worker, (version, 0.0))
        if version is not None and version != before:
            now_s = self._clock()
            begin_s = max(since_s, self._trace.handed_over.get(version, since_s))
            tracer = self._trace.leases.tracer
            tracer.span("fetch", self._names[worker], ASIDE, min(begin_s, now_s), now_s, version=version)
            self._served[worker] = (version, now_s)
        super().hear(worker, version, decoded_tokens)

    def leave(self, worker: int, cause: str) -> None:
        self._end_all(worker)
        super().leave(worker, cause)

    def held(self, worker: int, leases: Iterable[int]) -> None:
        claimed = set(leases)
        known = self.table.workers[worker].leases if worker in self.table.workers else set()
        for lease in known - claimed:
            self._trace.leases.ended(lease, "lost")
        super().held(worker, claimed)

    def refuse(self, worker: int, retry: Retry) -> None:
        if self.table.knows(retry.lease_id):
            self._trace.leases.heard(retry)
        super().refuse(worker, retry)

    def _obey(self, command: ev.Command) -> None:
        match command:
            case ev.DropLease(lease=lease):
                self._trace.leases.ended(lease, "dropped")
            case ev.DisconnectWorker(worker=worker):
                self._end_all(worker)
            case _:
                pass
        super()._obey(command)
        # else it has been hung up on meanwhile
        if isinstance(command, ev.GrantLease) and command.worker in self._names:
            slots = self.table.workers[command.worker].slots
            self._trace.leases.given(self._branches[command.lease].lease, self._names[command.worker], slots)

    def _end_all(self, worker: int) -> None:
        self._served.pop(worker, None)
        name = self._names.pop(worker, None)
        if name is not None:
            self._trace.leases.left(name)


class TracedLogprobScorer(LogprobScorer):
    """A scorer whose time is in the trace."""

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
